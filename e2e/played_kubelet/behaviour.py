"""How played Pods behave: delays and failures, decided for each Pod by a script."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ImageMissing:
    """The image cannot be pulled: the containers wait with ErrImagePull for ever."""


@dataclass(frozen=True, slots=True)
class NeverReady:
    """The containers run, and their readiness probes fail for ever."""


@dataclass(frozen=True, slots=True)
class Exits:
    """The first container ends, as often as given (0 = again and again), and is restarted as its Pod says.

    Attributes:
        after_s: seconds between start and end.
        code: exit code.
        times: how often.
        reason: as the kubelet would say, e.g. OOMKilled.
        backoff_s: seconds in CrashLoopBackOff before each restart.
    """

    after_s: float = 0.0
    code: int = 1
    times: int = 0
    reason: str = "Error"
    backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class NodePressure:
    """The Pod is evicted by its node: phase Failed, reason Evicted."""

    after_s: float = 0.0


Fault = ImageMissing | NeverReady | Exits | NodePressure


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What happens to one Pod.

    Attributes:
        start_s: seconds from being bound to running.
        ready_s: seconds from running to ready.
        stop_s: seconds from deletion to being gone, at most the Pod's grace period; None = it never goes.
        fault: what goes wrong, if anything.
    """

    start_s: float = 0.0
    ready_s: float = 0.0
    stop_s: float | None = 0.0
    fault: Fault | None = None


Script = Callable[[dict[str, Any]], Behaviour]
"""Pod → behaviour; asked once for each Pod."""


def obedient(_: dict[str, Any]) -> Behaviour:
    """Starts and stops at once."""
    return Behaviour()
