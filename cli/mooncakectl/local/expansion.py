"""Kubernetes' `$(NAME)` references, and mount paths that mean a folder of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as the kubelet does.

    `$$` is an escaped `$`, so `$$(NAME)` gives `$(NAME)`; a reference to an unknown name stays
    as it is written (Kubernetes, "Define Dependent Environment Variables").
    """

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "$"
        return variables.get(name, match.group(0))

    return _REFERENCE.sub(replaced, text)


class MountPaths:
    """Rewrites paths below the mount points of one container into the folders that stand for its volumes.

    A path counts where a path can begin: at the start of the text, after a quote, `=`, `:`, `,` or white
    space, or after a scheme (`ipc://`); and only whole path segments match: `/data` leaves `/database` alone.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        """Take mount path → local folder; both absolute. Deeper mounts win over those around them."""
        self._folders = {mount.rstrip("/"): folder.rstrip("/") for mount, folder in folders.items()}
        deepest_first = sorted(self._folders, key=len, reverse=True)
        alternatives = "|".join(re.escape(mount) for mount in deepest_first)
        self._pattern = (
            re.compile(rf"""(?:^|(?<=[\s"'=:,;\[(])|(?<=://))({alternatives})(?![\w.-])""")
            if alternatives
            else None
        )

    def rewrite(self, text: str) -> str:
        """The text with each mount path replaced by its local folder."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._folders[match.group(1)], text)
