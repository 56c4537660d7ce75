"""Who may be given work: the registry's instances, joined with what this gateway sees of them.

The registry is read in the background; requests only ever look at the last list, so that they never wait for
it. While it is away the last list stays.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import msgspec
import structlog

from mooncake_core.registry import EngineReport, Instance, InstanceState, Registry, Role
from mooncake_scheduler.conductor.cost import PrefillPace, class_of
from mooncake_scheduler.gateway.breaker import Breaker, BreakerState
from mooncake_scheduler.gateway.flow import Flow, StagedLostError
from mooncake_scheduler.gateway.http1 import Upstream

_log = structlog.get_logger(__name__)


class Member:
    """One engine instance as this gateway knows it.

    Args:
        instance: as the registry knows it.
        upstream: the connections to it.
    """

    __slots__ = (
        "awaited", "breaker", "cached_tokens", "drains", "inbound_flows", "instance", "lives", "missed",
        "pace", "prompt_tokens", "reachable", "requests", "tokenizer_compared", "tokenizer_mismatch",
        "upstream", "whole",
    )  # fmt: skip

    def __init__(self, instance: Instance, upstream: Upstream) -> None:
        self.instance = instance
        self.whole = _whole(instance)
        """The same in role `both`: as it is seen by requests that one engine serves from start to end."""
        self.upstream = upstream
        self.breaker = Breaker()
        self.reachable = True
        self.missed = False
        """A request could not connect to it, and nobody has seen it well since."""
        self.drains = False
        """Its sidecar said so itself, which the registry may not know."""
        self.lives = 0
        """Times it came back after being out of reach; part of its epoch where nobody else counts."""
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.awaited: dict[Flow, float] = {}
        """Requests whose decode may not have taken yet what is staged here, and until when that counts
        (monotonic seconds)."""
        self.inbound_flows = 0
        """Prefixes being fetched into it for requests of this gateway."""
        self.pace = PrefillPace()
        """What its prefills take, from this gateway's own."""
        self.tokenizer_compared: int | None = None
        """The epoch for which its tokeniser was compared with the gateway's."""
        self.tokenizer_mismatch = ""
        """Why the engine's own tokeniser is asked instead of the gateway's; empty = they agree."""

    @property
    def state(self) -> InstanceState:
        """As the registry says, unless it cannot be reached or says itself that it drains."""
        if not self.reachable:
            return InstanceState.UNREACHABLE
        return InstanceState.DRAINING if self.drains else self.instance.state

    @property
    def in_doubt(self) -> bool:
        """Whether the registry alone does not say how it fares."""
        return self.missed or self.drains or not self.reachable


class Team(msgspec.Struct, frozen=True, eq=False):
    """Instances that may work together as far as versions go."""

    prefill: Sequence[Instance]
    decode: Sequence[Instance]
    classes: Sequence[Instance]
    """One instance of each class: they share a cost model."""

    @classmethod
    def of(cls, prefill: Sequence[Instance], decode: Sequence[Instance]) -> Team:
        """A team of these."""
        if prefill == decode:
            # One list, so that each is looked at once.
            decode = prefill
        return cls(prefill, decode, tuple({class_of(each): each for each in (*prefill, *decode)}.values()))


class Roster:
    """The instances of one cluster.

    Args:
        registry: where they announce themselves.
        model: the model served; instances that name another are left out.
        count_lives: make a new epoch when an instance comes back after being out of reach (for registries
            that nobody writes to when an engine restarts).
    """

    def __init__(self, registry: Registry, model: str, *, count_lives: bool) -> None:
        self.registry = registry
        self.members: dict[str, Member] = {}
        self.stores: dict[str, Instance] = {}
        self.reports: dict[str, EngineReport] = {}
        self.registry_away = False
        self.source_flows: dict[str, int] = {}
        """Prefixes being fetched out of each store for requests of this gateway."""
        self.block_size_tokens = 16
        """Of the engines; all instances of one model share it."""
        self.version = 0
        """Grows when the instances or what is known of them changed."""
        self._model = model
        self._count_lives = count_lives
        self._teams: tuple[int, list[Team]] = (-1, [])
        self._wholes: tuple[int, Team] = (-1, Team.of((), ()))
        self._unusable: dict[str, str] = {}
        """URLs of instances that are left out because it is none."""
        self._tripped = 0
        """Breakers that are not closed."""

    async def refresh(self) -> None:
        """Read the registry."""
        try:
            instances = await self.registry.instances()
            self.reports = await self.registry.reports()
        except (ConnectionError, OSError) as error:
            if not self.registry_away:
                _log.warning("the registry is away, the last instances known are used", error=str(error))
            self.registry_away = True
            return
        self.registry_away = False
        self._take(instances)
        sizes = [member.instance.block_size_tokens for member in self.members.values()]
        self.block_size_tokens = min(sizes, default=self.block_size_tokens)

    def _take(self, instances: Sequence[Instance]) -> None:
        seen = set()
        for instance in instances:
            if instance.role is not Role.STORE and not self._has_address(instance):
                continue
            seen.add(instance.id)
            if instance.role is Role.STORE:
                if self.stores.get(instance.id) != instance:
                    self.stores[instance.id] = instance
                    self.version += 1
                continue
            if instance.model and self._model and instance.model != self._model:
                continue
            self._take_engine(instance)
        lost = [self.members.pop(gone) for gone in [i for i in self.members if i not in seen]]
        for member in lost:
            # Not heard of is not dead: its sidecar may be. Streams of a dead engine break by themselves.
            member.upstream.retire()
            self.version += 1
        for gone in [i for i in self.stores if i not in seen]:
            del self.stores[gone]
            self.version += 1
        for member in lost:
            self.lost(member)

    def _has_address(self, instance: Instance) -> bool:
        """Whether its URL is one; of one that is none it is said once, and it is left out."""
        member = self.members.get(instance.id)
        if member is not None and member.instance.url == instance.url:
            return True
        try:
            Upstream(instance.url)
        except ValueError as error:
            if self._unusable.get(instance.id) != instance.url:
                self._unusable[instance.id] = instance.url
                _log.error("an instance is left out", instance=instance.id, error=str(error))
            return False
        self._unusable.pop(instance.id, None)
        return True

    def _take_engine(self, instance: Instance) -> None:
        member = self.members.get(instance.id)
        if member is not None and self._count_lives:
            instance = msgspec.structs.replace(instance, epoch=instance.epoch + member.lives)
        if member is None:
            self.members[instance.id] = Member(instance, Upstream(instance.url))
        elif member.instance == instance:
            return
        else:
            if member.instance.url != instance.url:
                member.upstream.retire()
                member.upstream = Upstream(instance.url)
            began_anew = member.instance.epoch != instance.epoch
            if began_anew:
                member.breaker = Breaker()
                member.missed = member.drains = False
                member.reachable = True
            member.instance = instance
            member.whole = _whole(instance)
            if began_anew:
                self.lost(member)
        self.version += 1

    # -- what requests look at

    def teams(self, excluded: Collection[str] = ()) -> list[Team]:
        """Candidates for prefill and decode, in groups of one engine version; the largest first."""
        if not excluded and not self._tripped and self._teams[0] == self.version:
            return self._teams[1]
        grouped: dict[tuple[str, str], tuple[list[Instance], list[Instance]]] = {}
        for member in self._open(excluded):
            instance = member.instance
            prefill, decode = grouped.setdefault((instance.engine, instance.engine_version), ([], []))
            if instance.role is not Role.DECODE:
                prefill.append(instance)
            if instance.role is not Role.PREFILL:
                decode.append(instance)
        teams = sorted(
            (Team.of(prefill, decode) for prefill, decode in grouped.values()),
            key=lambda team: -min(len(team.prefill), len(team.decode)),
        )
        if not excluded and not self._tripped:
            self._teams = (self.version, teams)
        return teams

    def wholes(self, excluded: Collection[str] = ()) -> Team:
        """Candidates for requests that one engine serves from start to end: all that decode."""
        if not excluded and not self._tripped and self._wholes[0] == self.version:
            return self._wholes[1]
        able = [m.whole for m in self._open(excluded) if m.instance.role is not Role.PREFILL]
        team = Team.of(able, able)
        if not excluded and not self._tripped:
            self._wholes = (self.version, team)
        return team

    def _open(self, excluded: Collection[str]) -> list[Member]:
        now_s = time.monotonic()
        return [
            member
            for member in self.members.values()
            if member.state is InstanceState.READY
            and member.instance.id not in excluded
            and (not self._tripped or member.breaker.admits(now_s))
        ]

    def tokenizing_engine(self) -> Upstream | None:
        """An engine whose `/tokenize` can be asked; None without one."""
        able = self._open(())
        return min(able, key=lambda member: member.requests).upstream if able else None

    # -- what requests tell

    def served(self, member: Member) -> None:
        """An instance served a leg."""
        if self._tripped:
            member.breaker.succeeded()
            self._count_tripped()
        elif member.breaker.faults:
            member.breaker.succeeded()

    def faulted(self, member: Member) -> None:
        """An instance failed in a way that counts against it."""
        member.breaker.failed(time.monotonic())
        self._count_tripped()

    def lost(self, member: Member) -> None:
        """An instance is gone or began anew: who still waits for KV staged there would wait in vain."""
        awaited, member.awaited = member.awaited, {}
        now_s = time.monotonic()
        for flow, until_s in awaited.items():
            if now_s < until_s:
                flow.interrupt(StagedLostError())

    def missed(self, member: Member) -> None:
        """A request could not connect to an instance: who still waits for KV staged there waits in vain."""
        member.missed = True
        self.lost(member)

    def heard_drain(self, member: Member, *, draining: bool) -> None:
        """What its sidecar says of its own drain."""
        if member.drains != draining:
            member.drains = draining
            self.version += 1
            _log.info(
                "instance drains" if draining else "instance drains no longer", instance=member.instance.id
            )

    def sent(self, member: Member) -> None:
        """A leg is sent to an instance."""
        member.requests += 1
        if self._tripped:
            member.breaker.sent(time.monotonic())

    def _count_tripped(self) -> None:
        self._tripped = sum(m.breaker.state is not BreakerState.CLOSED for m in self.members.values())
        self.version += 1

    def saw_health(self, member: Member, *, healthy: bool) -> bool:
        """A probe's outcome; True when the instance came back from being out of reach."""
        if member.reachable == healthy:
            return False
        member.reachable = healthy
        self.version += 1
        _log.info("instance reachable" if healthy else "instance unreachable", instance=member.instance.id)
        if healthy:
            member.breaker = Breaker()
            self._count_tripped()
            if self._count_lives:
                member.lives += 1
                epoch = member.instance.epoch + 1
                member.instance = msgspec.structs.replace(member.instance, epoch=epoch)
                member.whole = _whole(member.instance)
        else:
            self.lost(member)
        return healthy

    def close(self) -> None:
        """Close all connections to engines."""
        for member in self.members.values():
            member.upstream.close()


def _whole(instance: Instance) -> Instance:
    return instance if instance.role is Role.BOTH else msgspec.structs.replace(instance, role=Role.BOTH)
