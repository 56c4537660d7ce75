"""Probes as the kubelet understands them: what is declared, and what a run of results means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mooncakectl.local.errors import PodUnsupportedError


@dataclass(frozen=True, slots=True)
class HttpGet:
    """Healthy when the answer's status is 200..399."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """Healthy when the port accepts a connection."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ExecCommand:
    """Healthy when the command exits with 0."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """A lifecycle hook that only waits."""

    seconds: float


Action = HttpGet | TcpSocket | ExecCommand


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One declared probe; durations in seconds, defaults are Kubernetes'."""

    action: Action
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3
    termination_grace_s: float | None = None


class Verdict(Enum):
    """What the results so far mean."""

    UNDECIDED = "undecided"
    PASSING = "passing"
    FAILING = "failing"


@dataclass
class ProbeTracker:
    """Folds single results into a verdict: it changes only after a run of equal results (as the kubelet)."""

    spec: ProbeSpec
    verdict: Verdict = Verdict.UNDECIDED
    _last: bool | None = None
    _run: int = 0

    def observe(self, healthy: bool) -> Verdict:
        """Take one result in and return the verdict that now holds."""
        self._run = self._run + 1 if healthy == self._last else 1
        self._last = healthy
        threshold = self.spec.success_threshold if healthy else self.spec.failure_threshold
        if self._run >= threshold:
            self.verdict = Verdict.PASSING if healthy else Verdict.FAILING
        return self.verdict


def parse_probe(
    declared: Mapping[str, Any] | None,
    *,
    where: str,
    ports: Mapping[str, int],
    command: Callable[[list[str]], tuple[str, ...]],
) -> ProbeSpec | None:
    """Read a container's `startupProbe`, `livenessProbe` or `readinessProbe`.

    Args:
        declared: the probe as in a Pod, or None.
        where: path of the field, for error messages.
        ports: the container's named ports.
        command: turns an exec command into an argv that runs here.

    Raises:
        PodUnsupportedError: the action is unknown to this runtime (gRPC), or a port has no number.
    """
    if declared is None:
        return None
    grace_s = declared.get("terminationGracePeriodSeconds")
    return ProbeSpec(
        action=parse_action(declared, where=where, ports=ports, command=command),
        initial_delay_s=float(declared.get("initialDelaySeconds", 0)),
        period_s=float(declared.get("periodSeconds", 10)),
        timeout_s=float(declared.get("timeoutSeconds", 1)),
        success_threshold=int(declared.get("successThreshold", 1)),
        failure_threshold=int(declared.get("failureThreshold", 3)),
        termination_grace_s=None if grace_s is None else float(grace_s),
    )


def parse_action(
    declared: Mapping[str, Any],
    *,
    where: str,
    ports: Mapping[str, int],
    command: Callable[[list[str]], tuple[str, ...]],
) -> Action:
    """Read the action of a probe or hook; see `parse_probe`."""
    if http := declared.get("httpGet"):
        port = _port(http["port"], where=f"{where}.httpGet.port", ports=ports)
        scheme = http.get("scheme", "HTTP").lower()
        path = http.get("path", "/")
        headers = tuple((h["name"], h["value"]) for h in http.get("httpHeaders", ()))
        url = f"{scheme}://{http.get('host') or '127.0.0.1'}:{port}/{path.lstrip('/')}"
        return HttpGet(url, headers)
    if tcp := declared.get("tcpSocket"):
        port = _port(tcp["port"], where=f"{where}.tcpSocket.port", ports=ports)
        return TcpSocket(tcp.get("host") or "127.0.0.1", port)
    if run := declared.get("exec"):
        return ExecCommand(command(list(run["command"])))
    raise PodUnsupportedError(where, "only httpGet, tcpSocket and exec can run on this machine")


def _port(declared: int | str, *, where: str, ports: Mapping[str, int]) -> int:
    if isinstance(declared, int):
        return declared
    if declared.isdigit():
        return int(declared)
    if declared not in ports:
        raise PodUnsupportedError(where, f"the container names no port {declared!r}")
    return ports[declared]
