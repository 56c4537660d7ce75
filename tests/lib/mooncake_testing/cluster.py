"""Whole clusters: `mooncakectl up` as its user starts it, every container a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis
import yaml

from mooncake_core.config import SchedulerConfig
from mooncake_core.ledger import ledger_prefix
from mooncake_operator.planning.names import instance_of_pod
from mooncake_testing.index_contents import index_contents
from mooncake_testing.ports import free_port
from mooncake_testing.waiting import eventually
from mooncakectl.local import Folders
from mooncakectl.local.procfs import ProcessIdentity, is_running, running_processes, started_with
from mooncakectl.local.records import RUN_VARIABLE, RecordFile, RunRecord

READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 60.0


class Cluster:
    """A cluster that runs. Blocking calls: run them in a thread beside a load."""

    def __init__(self, manifest: Path, root: Path) -> None:
        """Start `mooncakectl up`; returns when all Pods are ready.

        Args:
            manifest: with one MooncakeCluster.
            root: a short path: sockets lie below it.

        Raises:
            AssertionError: it did not come up; with what it said.
        """
        (document,) = (each for each in yaml.safe_load_all(manifest.read_text()) if each["kind"] == KIND)
        self.name: str = document["metadata"]["name"]
        self.model: str = document["spec"]["model"]["name"]
        self.manifest = manifest
        self.environment = os.environ | {
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_RUNTIME_DIR": str(root / "run"),
        }
        (root / "run").mkdir(exist_ok=True)
        self.folders = Folders.of(self.name, self.environment)
        self._said = root / "up.txt"
        self._http = httpx.Client(timeout=10, trust_env=False)
        self.start()

    def start(self) -> None:
        """Start it, also a second time after its runtime was killed."""
        # -P: the folder operator/ of the checkout must not be found instead of the standard library's module.
        command = [sys.executable, "-P", "-m", "mooncakectl", "up", "-f", str(self.manifest), "--json"]
        self._let_go_of_output()
        with self._said.open("ab") as said:
            self.runtime = subprocess.Popen(
                [*command, "--port", str(free_port())],
                stdout=subprocess.PIPE,
                stderr=said,
                env=self.environment,
            )
        try:
            addresses = self._wait_for_addresses()
            self.endpoint: str = addresses["endpoint"]
            self.admin_urls: list[str] = addresses["admin"]
            self.run_id = self.record().run_id
            self._scheduler_config = SchedulerConfig.model_validate_json(
                (self.folders.pod(f"{self.name}-scheduler-0") / "config" / "scheduler.json").read_text()
            )
            self.engine_urls = {
                instance["id"]: instance["url"]
                for instance in eventually(self._all_instances, "all instances are known to all schedulers")
            }
        except BaseException:
            self.runtime.kill()
            raise

    def _wait_for_addresses(self) -> dict[str, Any]:
        assert self.runtime.stdout is not None
        os.set_blocking(self.runtime.stdout.fileno(), False)
        text = b""

        def complete() -> dict[str, Any] | None:
            nonlocal text
            text += self.runtime.stdout.read() or b""  # type: ignore[union-attr]
            ended = self.runtime.poll() is not None
            assert not ended, f"mooncakectl up ended with {self.runtime.returncode}:\n{self.said()}"
            return msgspec.json.decode(text) if text.endswith(b"}\n") else None

        return eventually(complete, "the cluster is ready", READY_WITHIN_S, told=self.said)

    def _all_instances(self) -> list[dict[str, Any]] | None:
        engines = {pod for pod, container in self.processes() if container == "engine"}
        # Schedulers know an instance by its leader.
        pods = {instance_of_pod(pod) for pod in engines}
        views = [self.instances(admin) for admin in self.admin_urls]
        if all(pods <= {each["id"] for each in view if each["state"] == "ready"} for view in views):
            return [each for each in views[0] if each["id"] in pods]
        return None

    # -- looking

    def said(self) -> str:
        """What `mooncakectl up` has printed, and the ends of the containers' logs."""
        logs = [f"== {log}\n{tail(log)}" for log in sorted(self.folders.logs.glob("*/*.log"))]
        return "\n".join([self._said.read_text(errors="replace"), *logs])

    def record(self) -> RunRecord:
        """What the runtime has written down."""
        record = RecordFile(self.folders).load()
        assert record is not None, f"no record of a run below {self.folders.state}"
        return record

    def processes(self) -> dict[tuple[str, str], ProcessIdentity]:
        """The process of each container by Pod and container; of hooks beside it nothing is told."""
        found: dict[tuple[str, str], ProcessIdentity] = {}
        for process in self.record().processes:
            found.setdefault((process.pod, process.container), process.identity)
        return found

    def get(self, url: str) -> Any:
        """A JSON document."""
        answer = self._http.get(url)
        answer.raise_for_status()
        return answer.json()

    def instances(self, admin_url: str) -> list[dict[str, Any]]:
        """What one scheduler knows of all instances, stores included."""
        instances: list[dict[str, Any]] = self.get(f"{admin_url}/instances")["instances"]
        return instances

    def drain(self, pod: str, *, draining: bool = True) -> None:
        """Mark an instance, or take the mark away; returns when all schedulers know."""
        answer = self._http.request(
            "POST" if draining else "DELETE", f"{self.admin_urls[0]}/instances/{pod}/drain"
        )
        answer.raise_for_status()
        wanted = "draining" if draining else "ready"
        eventually(
            lambda: all(
                {"id": pod, "state": wanted}.items() <= instance.items()
                for admin in self.admin_urls
                for instance in self.instances(admin)
                if instance["id"] == pod
            ),
            f"{pod} is {wanted} for all schedulers",
        )

    def engine_state(self, pod: str) -> dict[str, Any]:
        """What runs in a simulated engine now."""
        state: dict[str, Any] = self.get(f"{self.engine_urls[pod]}/simulator/state")
        return state

    def is_working(self, pod: str) -> bool:
        """Whether an engine has a request in hand."""
        state = self.engine_state(pod)
        return bool(state["running"] or state["waiting"] or state["loading"])

    def engine_blocks(self, pod: str) -> set[int]:
        """Keys of the blocks in an engine's prefix cache."""
        return set(self.get(f"{self.engine_urls[pod]}/simulator/blocks")["keys"])

    def redis(self) -> redis.Redis:
        """A client of the cluster's own Redis; the caller closes it."""
        url = self._scheduler_config.redis_url
        assert url is not None, "this cluster shares no Redis"
        password = self.folders.pod(f"{self.name}-scheduler-0") / "redis" / "password"
        return redis.Redis.from_url(url, password=password.read_text().strip(), socket_timeout=5)

    def indexed_blocks(self) -> dict[str, set[int]]:
        """Keys of the blocks that Redis says an instance holds, in whichever tier, by instance."""
        with self.redis() as client:
            contents = index_contents(client, self._scheduler_config.namespace)
        held: dict[str, set[int]] = defaultdict(set)
        for instance, by_key in contents.items():
            held[instance] = set(by_key)
        return held

    def index_disagrees(self) -> list[str]:
        """How what Redis holds differs from what the engines hold; empty where it is the same."""
        indexed = self.indexed_blocks()
        differences = []
        for pod in self.engine_urls:
            held = self.engine_blocks(pod)
            missing, surplus = held - indexed[pod], indexed[pod] - held
            if missing or surplus:
                differences.append(
                    f"{pod} holds {len(held)}: {len(missing)} not in Redis, {len(surplus)} only there"
                )
        stores = {each["id"] for each in self.instances(self.admin_urls[0]) if each["role"] == "store"}
        foreign = indexed.keys() - self.engine_urls.keys() - stores
        differences += [f"Redis lists blocks of {instance}, which is no engine" for instance in foreign]
        return differences

    def work_in_the_ledger(self) -> list[str]:
        """What is promised to instances, by each scheduler's account and by Redis itself; empty at rest."""
        found = [
            f"{admin}: {instance['id']}: {instance['load']}"
            for admin in self.admin_urls
            for instance in self.instances(admin)
            if any((instance.get("load") or {}).values())
        ]
        prefix = ledger_prefix(self._scheduler_config.namespace)
        with self.redis() as client:
            for key in client.scan_iter(match=f"{prefix}ledger:queue:*"):
                found.append(f"Redis: {key.decode()}: {client.zrange(key, 0, -1)!r}")
            for key in client.scan_iter(match=f"{prefix}ledger:row:*"):
                row = {name: value for name, value in client.hgetall(key).items() if name != b"gen"}
                found += [f"Redis: {key.decode()}: {row!r}"] if row else []
        return found

    def engines_at_work(self) -> list[str]:
        """Engines that have requests, or hold KV for somebody to fetch; empty at rest."""
        states = {pod: self.engine_state(pod) for pod in self.engine_urls}
        return [
            f"{pod}: {state}"
            for pod, state in states.items()
            if any(state[what] for what in ("running", "waiting", "loading", "held"))
        ]

    # -- touching

    def kill(self, pod: str, container: str) -> ProcessIdentity:
        """kill -9 of a container's process; returns which one it was."""
        identity = self.processes()[pod, container]
        os.kill(identity.pid, signal.SIGKILL)
        return identity

    def is_replaced(self, pod: str, container: str, killed: ProcessIdentity) -> bool:
        """Whether a container runs again after `kill`."""
        return self.processes().get((pod, container), killed) != killed

    def is_whole(self) -> bool:
        """Whether every scheduler sees every instance ready, with Redis at hand."""
        try:
            if self._all_instances() is None:
                return False
            return not any(self.get(f"{admin}/instances")["degraded"] for admin in self.admin_urls)
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """Ctrl-C; fails unless it ends well and nothing is left of it."""
        self.runtime.send_signal(signal.SIGINT)
        try:
            status = self.runtime.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not stopped within {STOPPED_WITHIN_S} s:\n{self.said()}") from None
        assert status == 0, f"mooncakectl up ended with {status}:\n{self.said()}"
        assert not self.left_running(), f"still running: {self.left_running()}"
        assert not self.folders.run.exists(), f"left behind: {self.folders.run}"
        assert not (self.folders.state / "state.json").exists(), "left behind: state.json"

    def left_running(self) -> list[int]:
        """Processes of this run, those that they started included."""
        return [
            stat.identity.pid
            for stat in running_processes()
            if started_with(stat.identity.pid, RUN_VARIABLE, self.run_id) and is_running(stat.identity)
        ]

    def close(self) -> None:
        """Whatever was done to it: end it now."""
        self.runtime.kill()
        self.runtime.wait(10)
        self._let_go_of_output()
        self._http.close()

    def _let_go_of_output(self) -> None:
        runtime = getattr(self, "runtime", None)
        if runtime is not None and runtime.stdout is not None:
            runtime.stdout.close()


KIND = "MooncakeCluster"


@contextmanager
def cluster(manifest: str) -> Iterator[Cluster]:
    """A cluster of a manifest's text, with folders of its own; stopped cleanly unless the test has failed.

    Its name becomes unique, so that clusters of several test processes get ports apart.
    """
    documents = list(yaml.safe_load_all(manifest))
    for document in documents:
        if document["kind"] == KIND:
            document["metadata"]["name"] = f"{document['metadata']['name'][:6]}{os.getpid() % 100_000}"
    # Below /tmp and not pytest's folder: paths of Unix sockets are at most 108 bytes long.
    root = Path(tempfile.mkdtemp(prefix="mk-", dir="/tmp"))
    running = None
    try:
        path = root / "cluster.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        running = Cluster(path, root)
        yield running
        if running.runtime.poll() is None:
            running.stop()
    finally:
        if running is not None:
            running.close()
        shutil.rmtree(root, ignore_errors=True)


def until_none(look: Callable[[], list[str]], what: str, timeout_s: float = 30.0) -> float:
    """Look until nothing is found any more; returns after how many wall seconds.

    Raises:
        AssertionError: the time is over; with what is found still.
    """
    began_s = time.monotonic()
    while found := look():
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}; still:\n" + "\n".join(found)
        time.sleep(0.2)
    return time.monotonic() - began_s


def tail(file: Path, most_bytes: int = 2000) -> str:
    """The end of a text file."""
    return file.read_bytes()[-most_bytes:].decode(errors="replace")
