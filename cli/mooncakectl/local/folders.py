"""Where a local cluster keeps its things."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mooncakectl.local.errors import LocalRuntimeError

# A ZMQ ipc:// path ends up in sockaddr_un (108 bytes with the NUL); volume and socket need their part of it.
_LONGEST_POD_FOLDER = 62
_LONGEST_RUN_ROOT = 34


def state_root(environ: Mapping[str, str]) -> Path:
    """Below it each cluster has a folder of its name."""
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mooncake"


@dataclass(frozen=True, slots=True)
class Folders:
    """`state` outlives a run (logs, lock, record of processes); `run` holds the volumes and goes with it."""

    cluster: str
    state: Path
    run: Path

    @classmethod
    def of(cls, cluster: str, environ: Mapping[str, str] = os.environ) -> Self:
        """The folders of a cluster of this user: XDG's places, with a short run path for sockets."""
        state = state_root(environ) / cluster
        digest = hashlib.sha256(str(state).encode()).hexdigest()[:8]
        runtime_dir = environ.get("XDG_RUNTIME_DIR")
        if (
            runtime_dir
            and len(runtime_dir) + len("/mooncake") <= _LONGEST_RUN_ROOT
            and Path(runtime_dir).is_dir()
        ):
            root = Path(runtime_dir) / "mooncake"
        else:
            root = Path("/tmp") / f"mooncake-{os.getuid()}"
        return cls(cluster, state, root / digest)

    @property
    def logs(self) -> Path:
        """One folder a Pod, one file a container."""
        return self.state / "logs"

    def log(self, pod: str, container: str) -> Path:
        """The log file of a container."""
        return self.logs / pod / f"{container}.log"

    def pod(self, pod: str) -> Path:
        """The folder of a Pod's volumes, short enough for sockets in it."""
        folder = self.run / pod
        if len(os.fsencode(folder)) > _LONGEST_POD_FOLDER:
            folder = self.run / hashlib.sha256(pod.encode()).hexdigest()[:8]
        return folder

    def make(self) -> None:
        """Create both.

        Raises:
            LocalRuntimeError: they cannot be made, or the run folder belongs to someone else.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.run.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = self.run.parent.lstat()
            # Below /tmp anybody could have made it first.
            if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o022:
                raise LocalRuntimeError(
                    f"{self.run.parent} is not a folder of yours alone: remove it, then try again"
                )
            self.run.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise LocalRuntimeError(f"cannot make {error.filename}: {error.strerror}") from error
