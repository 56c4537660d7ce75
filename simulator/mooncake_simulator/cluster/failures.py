"""Instances that die, and come back with nothing in their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from mooncake_core.registry import Instance
from mooncake_simulator.cluster.agenda import Agenda

NO_INSTANCE = "no_instance"
"""Why a request was refused: nobody was there to prefill it, or to decode it."""
DECODE_DIED = "decode_died"
"""Why a request failed: its answer had begun, and whoever was decoding it died."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One instance dies at a moment, and may come back."""

    instance: str
    """`p-0`, `p-1` … of those that prefill, `d-0` … of those that decode."""
    at_s: float
    """Seconds since the start of the run."""
    back_s: float = inf
    """When it serves again; left out, it never does."""

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < self.back_s or self.at_s == inf:
            raise ValueError(
                f"{self.instance} dies at {self.at_s:g} s and is back at {self.back_s:g} s: write moments "
                "from 0 on, the second after the first"
            )


class Present:
    """Which of some instances can be sent requests.

    Args:
        instances: all of them.
    """

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances
        self.now = list(instances)
        """Those that are there, in their order; one list for ever."""
        self._down: set[str] = set()

    def __contains__(self, instance_id: str) -> bool:
        return instance_id not in self._down

    def change(self, instance_id: str, *, there: bool) -> None:
        """An instance came or went."""
        if there:
            self._down.discard(instance_id)
        else:
            self._down.add(instance_id)
        self.now[:] = [each for each in self._instances if each.id not in self._down]


def schedule(
    agenda: Agenda,
    failures: Iterable[Failure],
    *,
    dies: Callable[[str], None],
    returns: Callable[[str], None],
) -> None:
    """Put failures on the agenda.

    Args:
        agenda: the time.
        failures: what is to happen.
        dies: called with the name of one that dies.
        returns: called with the name of one that is back.
    """
    for failure in failures:
        agenda.at(failure.at_s, dies, failure.instance)
        if failure.back_s < inf:
            agenda.at(failure.back_s, returns, failure.instance)
