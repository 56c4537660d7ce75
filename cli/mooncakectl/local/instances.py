"""Pods that are one instance: they live and die together, as the operator has it on Kubernetes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

from mooncake_core.api.managed import SIDECAR_CONTAINER
from mooncakectl.local.backoff import RestartBackoff
from mooncakectl.local.changes import Changes
from mooncakectl.local.containers import ContainerKind, PodSpec
from mooncakectl.local.pods import PodSupervisor
from mooncakectl.local.supervision import EventSink, Phase

INSTANCE_LABEL = "mooncake.io/instance"
_OVER = (Phase.BACK_OFF, Phase.FAILED, Phase.COMPLETED)


def instances_of_several_pods(specs: Iterable[PodSpec]) -> dict[str, list[PodSpec]]:
    """The Pods of each instance that has more than one, by the instance's name."""
    groups: dict[str, list[PodSpec]] = defaultdict(list)
    for spec in specs:
        if name := spec.labels.get(INSTANCE_LABEL):
            groups[name].append(spec)
    return {name: pods for name, pods in groups.items() if len(pods) > 1}


class InstanceSupervisor:
    """Starts all Pods of an instance anew, as new Pods, when one of them has lost its engine.

    An engine that restarts by itself does not get back into the group that it left, and the others hang.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[PodSpec],
        pods: MutableMapping[str, PodSupervisor],
        make: Callable[[PodSpec], PodSupervisor],
        *,
        on_event: EventSink,
        changes: Changes,
    ) -> None:
        """Prepare; `watch` does it.

        Args:
            name: the instance's.
            specs: its Pods.
            pods: the supervisors of all Pods by name; new ones take the places of old ones.
            make: makes and starts a Pod's supervisor.
            on_event: told what happens.
            changes: notified when a Pod's status changes.
        """
        self.name = name
        self._specs = specs
        self._pods = pods
        self._make = make
        self._on_event = on_event
        self._changes = changes
        self._backoff = RestartBackoff()

    async def watch(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            pod, why = await self._loss()
            self._on_event(pod, "engine", f"{why}; all {len(self._specs)} Pods of {self.name} start anew")
            await asyncio.gather(*(self._pods[spec.name].stop() for spec in self._specs))
            await asyncio.sleep(self._backoff.delay_s(loop.time() - began_s))
            for spec in self._specs:
                self._pods[spec.name] = self._make(spec)

    async def _loss(self) -> tuple[str, str]:
        """The Pod that lost its engine, and how."""
        while True:
            for spec in self._specs:
                if (why := _lost_engine(spec, self._pods)) is not None:
                    return spec.name, why
            await self._changes.wait()


def _lost_engine(spec: PodSpec, pods: Mapping[str, PodSupervisor]) -> str | None:
    main = {c.name for c in spec.of_kind(ContainerKind.MAIN)} - {SIDECAR_CONTAINER}
    for status in pods[spec.name].status.containers:
        if status.name in main and (status.restarts or status.phase in _OVER):
            return status.message or "it ended"
    return None
