"""Sees every change of a cluster's Pods in their order, and holds each against what rollouts promise."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from e2e.kube import PATIENCE_S, Kube, KubeError, is_true

_POOL, _ROLE, _PAIRING = "mooncake.io/pool", "mooncake.io/role", "mooncake.io/pairing"
_GATE = "mooncake.io/routable"
_ROLES = ("prefill", "decode")
_ROUNDING = 1e-9

Counts = dict[str, int]
"""Instances by pairing revision."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The pools after one change of one Pod, by role."""

    present: Mapping[str, int]
    """All that hold their place, those that end included."""
    made: Mapping[str, Counts]
    """Those that were neither told to end nor chosen to go."""
    routable: Mapping[str, Counts]


@dataclass
class Promise:
    """What must hold after each change; see ``broken``."""

    replicas: int
    """Of each role."""
    max_skew: float
    max_surge: int = 1
    left: str = ""
    """The pairing revision that is being left; all others count as updated."""

    def broken(self, seen: Seen) -> list[str]:
        """Everything that does not hold, in words."""
        return [*self._places(seen), *self._floors(seen), *self._skew(seen)]

    def _places(self, seen: Seen) -> list[str]:
        most = self.replicas + self.max_surge
        return [f"{role}: {n} of {most} places" for role, n in seen.present.items() if n > most]

    def _floors(self, seen: Seen) -> list[str]:
        found = []
        for role in _ROLES:
            (other,) = (each for each in _ROLES if each != role)
            routable, partners = seen.routable[role], seen.routable[other]
            if (count := sum(routable.values())) < self.replicas:
                found.append(f"{role}: {count} routable")
            if (paired := sum(n for r, n in routable.items() if partners.get(r))) < self.replicas:
                found.append(f"{role}: {paired} routable with a partner of their own revision")
        return found

    def _skew(self, seen: Seen) -> list[str]:
        allowed = max(self.max_skew, 1 / self.replicas) + _ROUNDING
        updated = {role: self._share(seen.routable[role]) for role in _ROLES}
        under_way = {role: self._share(seen.made[role]) for role in _ROLES}
        found = []
        if (skew := abs(updated["prefill"] - updated["decode"])) > allowed:
            found.append(f"updated {updated}: {skew:.0%} apart")
        for role, other in (_ROLES, _ROLES[::-1]):
            if under_way[role] - updated[other] > allowed:
                found.append(f"{role} goes for {under_way[role]:.0%}, {other} is at {updated[other]:.0%}")
        return found

    def _share(self, counts: Counts) -> float:
        updated = sum(count for revision, count in counts.items() if revision != self.left)
        return min(updated / self.replicas, 1.0)


@dataclass
class _Life:
    name: str
    role: str
    pairing: str
    routable: bool
    staying: bool


@dataclass
class RolloutWatch:
    """Follows the engine Pods of one namespace: ``async with RolloutWatch(kube, namespace) as watch``."""

    kube: Kube
    namespace: str
    promise: Promise | None = None
    """Held from now on; None = only looking."""
    broken: list[str] = field(default_factory=list)
    history: list[Seen] = field(default_factory=list)
    pairings: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Revisions that ever ran under a name."""
    _lives: dict[str, _Life] = field(default_factory=dict)
    _watching: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        pods, version = await self.kube.snapshot("Pod", self.namespace)
        for pod in pods:
            self._take("ADDED", pod)
        self.history = [self._seen()]
        self._watching = asyncio.create_task(self._watch(version))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching

    @property
    def now(self) -> Seen:
        """The latest state."""
        return self.history[-1]

    async def until(self, what: str, holds: Callable[[Seen], bool], within_s: float = 2 * PATIENCE_S) -> None:
        """Wait for a state; every one since the call counts, however short it lasted.

        Raises:
            AssertionError: a promise was broken, watching ended, or time is over.
        """
        first = len(self.history) - 1
        try:
            async with asyncio.timeout(within_s):
                while not any(holds(seen) for seen in self.history[first:]):
                    first = len(self.history)
                    self.must_hold()
                    assert not self._has_ended(), "watching has ended"
                    self._changed.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 1)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {within_s:.0f} s; last seen: {self.now}") from None
        self.must_hold()

    def _has_ended(self) -> bool:
        return self._watching is None or self._watching.done()

    def must_hold(self) -> None:
        """Fail where a promise was broken."""
        assert not self.broken, self.broken[:10]

    def counts(self, role: str, old: str, new: str, since: int = 0) -> list[tuple[int, int]]:
        """Routable instances of two revisions, one pair for each change of either."""
        found: list[tuple[int, int]] = []
        for seen in self.history[since:]:
            pair = (seen.routable[role].get(old, 0), seen.routable[role].get(new, 0))
            if not found or found[-1] != pair:
                found.append(pair)
        return found

    async def _watch(self, version: str) -> None:
        while True:
            try:
                async for kind, pod in self.kube.watch("Pod", version, self.namespace):
                    version = pod["metadata"]["resourceVersion"]
                    if _POOL in (pod["metadata"].get("labels") or {}):
                        self._take(kind, pod)
                        self._note()
            except KubeError as error:
                self.broken.append(f"changes were missed: {error}")
                return

    def _take(self, kind: str, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        if labels.get(_ROLE) not in _ROLES:
            return
        if kind == "DELETED":
            self._lives.pop(metadata["uid"], None)
            return
        self.pairings[metadata["name"]].add(labels[_PAIRING])
        ends = "deletionTimestamp" in metadata
        gate = next((c for c in pod["status"].get("conditions") or () if c["type"] == _GATE), None)
        chosen = gate is not None and gate["status"] == "False" and gate.get("reason") == "Draining"
        self._lives[metadata["uid"]] = _Life(
            name=metadata["name"],
            role=labels[_ROLE],
            pairing=labels[_PAIRING],
            # By the gate alone, which is what the operator decides: a probe that was slow once takes nobody
            # out of use, for schedulers go by the registry.
            routable=is_true(pod, _GATE) and not ends,
            staying=not ends and not chosen,
        )

    def _note(self) -> None:
        seen = self._seen()
        if seen == self.history[-1]:
            return
        self.history.append(seen)
        if self.promise is not None:
            place = len(self.history) - 1
            self.broken += [f"at {place}: {each} ({seen})" for each in self.promise.broken(seen)]
        self._changed.set()

    def _seen(self) -> Seen:
        made: dict[str, Counts] = {role: {} for role in _ROLES}
        routable: dict[str, Counts] = {role: {} for role in _ROLES}
        present = dict.fromkeys(_ROLES, 0)
        for life in self._lives.values():
            present[life.role] += 1
            if life.staying:
                made[life.role][life.pairing] = made[life.role].get(life.pairing, 0) + 1
            if life.routable:
                routable[life.role][life.pairing] = routable[life.role].get(life.pairing, 0) + 1
        return Seen(present, made, routable)
