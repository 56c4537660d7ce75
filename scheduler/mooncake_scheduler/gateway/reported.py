"""Keeps what engines report beside what the ledger knew, so that requests only look at the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mooncake_core.ledger import InstanceLoad
from mooncake_core.registry import EngineReport, Instance
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.reports import (
    NOTHING,
    STALE_S,
    Foreign,
    Known,
    faded,
    foreign_work,
    weight_of,
)

_UNKNOWN = Known()


class Reported:
    """Foreign work by instance.

    A report is older than the ledger's mirror: what ended in between is not foreign. So a report is compared
    with the most that the ledger knew of in the last seconds, once, when it is first seen; after that it only
    fades. What the ledger knew is kept in two halves of a sliding window.
    """

    def __init__(self) -> None:
        self.foreign: Mapping[str, Foreign] = {}
        """Work that came past the ledger, by instance; those without are left out."""
        self._reports: dict[str, tuple[EngineReport, Foreign]] = {}
        self._lately: dict[str, Known] = {}
        self._before: dict[str, Known] = {}
        self._turned_s = 0.0

    def know(self, loads: Mapping[str, InstanceLoad], now_s: float) -> None:
        """Take note of what the ledger knows; call it often.

        Args:
            loads: of the ledger.
            now_s: monotonic wall seconds.
        """
        if now_s - self._turned_s > STALE_S / 2:
            self._before, self._lately, self._turned_s = self._lately, {}, now_s
        lately = self._lately
        for instance, load in loads.items():
            lately[instance] = Known.of(load).most(lately.get(instance, _UNKNOWN))

    def hear(
        self,
        reports: Mapping[str, EngineReport],
        instances: Iterable[Instance],
        costs: CostModels,
        now_s: float,
        scale: float,
    ) -> None:
        """Take the reports as they are now; call it whenever the registry was read.

        Args:
            reports: the last of each instance.
            instances: those that may be given work.
            costs: tell what a foreign prompt takes.
            now_s: seconds of the shared clock, as in the reports.
            scale: of these, seconds in a wall second.
        """
        kept: dict[str, tuple[EngineReport, Foreign]] = {}
        foreign: dict[str, Foreign] = {}
        for instance in instances:
            report = reports.get(instance.id)
            weight = 0.0 if report is None else weight_of((now_s - report.at_s) / scale)
            if report is None or weight == 0:
                continue
            heard = self._reports.get(instance.id)
            if heard is None or heard[0] != report:
                known = self._lately.get(instance.id, _UNKNOWN).most(self._before.get(instance.id, _UNKNOWN))
                heard = (report, foreign_work(report, known, instance, costs.of(instance)))
            kept[instance.id] = heard
            counted = faded(heard[1], weight)
            if counted != NOTHING:
                foreign[instance.id] = counted
        self._reports, self.foreign = kept, foreign
