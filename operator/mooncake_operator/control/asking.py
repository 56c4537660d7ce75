"""What a cluster's running parts say of themselves, asked no more often than it is needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mooncake_operator.control.schedulers import Schedulers, View, addresses
from mooncake_operator.control.stores import Stores
from mooncake_operator.kube.resources import Object, is_terminating
from mooncake_operator.planning import reasons
from mooncake_operator.planning.capacity import StoreLevel
from mooncake_operator.planning.manifests.objects import is_ready

_EVERY_S = 25.0
"""Between two questions about measurements: a little less than the rest of a settled cluster."""
_PATIENCE_S = 20.0
"""How long schedulers may be silent, or without their Redis, before a user hears of it."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back."""

    view: View
    unreachable: str = ""
    """Why schedulers that are ready do not answer; empty = they do, or are not ready."""
    degraded: tuple[str, ...] = ()
    """What does not work as it should, in a scheduler's words."""
    measured: bool = False
    """Whether `statistics` and `store` were asked for this time."""
    statistics: Sequence[dict[str, Any]] = ()
    store: StoreLevel | None = None


class Inquiry:
    """Asks for one cluster; what it remembers saves requests and patience, nothing else."""

    def __init__(self, schedulers: Schedulers, stores: Stores) -> None:
        """Take whom to ask."""
        self._schedulers = schedulers
        self._stores = stores
        self._measured_s: float | None = None
        self._silence = _Patience()
        self._degradation = _Patience()

    async def ask(
        self, pods: Sequence[Object], token: str, now_s: float, *, told: Collection[str]
    ) -> Answers:
        """Ask all that is due.

        Args:
            pods: of the cluster.
            token: of the schedulers' admin port.
            now_s: Unix seconds.
            told: reasons that the cluster's conditions give already.
        """
        view = await self._schedulers.view(pods, token)
        silent = self._silence.is_over(bool(view.silence), now_s, told=reasons.SCHEDULER_UNREACHABLE in told)
        degraded = self._degradation.is_over(
            bool(view.degraded), now_s, told=reasons.SHARED_STATE_AWAY in told
        )
        answers = Answers(view, view.silence if silent else "", view.degraded if degraded else ())
        if self._measured_s is not None and 0 <= now_s - self._measured_s < _EVERY_S:
            return answers
        # Whoever has just been silent would only cost another timeout.
        statistics = [] if view.silence else await self._schedulers.statistics(pods, token)
        store = await self._stores.level(pod for pod in pods if _is_ready_master(pod))
        # While there is nobody to ask, asking costs nothing, and an answer is waited for.
        self._measured_s = now_s if addresses(pods) else None
        return replace(answers, measured=True, statistics=statistics, store=store)


class _Patience:
    """A fault that has only just begun may be over before anybody has read of it."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def is_over(self, faulty: bool, now_s: float, *, told: bool) -> bool:
        """Whether the fault is there, and has been for long enough or was told of before."""
        if not faulty:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return told or now_s - self._since_s >= _PATIENCE_S


def _is_ready_master(pod: Object) -> bool:
    role = (pod["metadata"].get("labels") or {}).get("mooncake.io/role")
    return role == "store-master" and is_ready(pod) and not is_terminating(pod)
