"""Leadership: one operator acts, others wait, decided by a Lease.

The rules are those of client-go's leader election: the holder renews; whoever has watched an unchanged Lease
for its whole duration, by its own clock, may take it. Clocks of machines are never compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import AlreadyExistsError, KubeError, NotFoundError, PreconditionError
from mooncake_operator.kube.resources import LEASE, Object

_log = structlog.get_logger()
_MANAGER = "mooncake-operator"


class LeadershipLostError(Exception):
    """The Lease could not be renewed in time, or another has it: this process must not act any more."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How the Lease is held."""

    namespace: str
    name: str
    identity: str
    """Unique among the candidates."""
    duration_s: float = 15.0
    """An unchanged Lease may be taken after this long."""
    renew_deadline_s: float = 10.0
    """Without a renewal for this long the holder gives up; less than `duration_s`."""
    retry_s: float = 2.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Leadership:
    """One candidate."""

    def __init__(self, client: Client, terms: LeaseTerms, *, now: Callable[[], datetime] = _utc_now) -> None:
        """Take the client and the terms; `now` only fills the Lease's time stamps."""
        self._client = client
        self._terms = terms
        self._now = now
        self._seen: tuple[str, float] | None = None
        """The resourceVersion last seen, and since when it has been that one."""
        self._ours: Object | None = None
        """The Lease as we wrote it last."""
        self.held = False
        self._taken_s = 0.0
        """Before the write that took the Lease, on the loop's clock."""

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        said = False
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(self._terms.renew_deadline_s):
                    holder = await self._try()
            except (KubeError, TimeoutError) as error:
                _log.warning("lease: no answer", error=str(error) or "timed out")
            else:
                if holder is None:
                    # Others count from the write, which may have been long before its answer.
                    self._taken_s = began_s
                    self.held = True
                    _log.info("lease: this operator is active", identity=self._terms.identity)
                    return
                if not said:
                    _log.info("lease: waiting", holder=holder, identity=self._terms.identity)
                    said = True
            await asyncio.sleep(self._terms.retry_s)

    async def hold(self) -> None:
        """Renew for ever.

        Raises:
            LeadershipLostError: the Lease is another's, or could not be renewed in time.
        """
        clock = asyncio.get_running_loop().time
        renewed_s = self._taken_s
        while True:
            await asyncio.sleep(self._terms.retry_s)
            deadline_s = renewed_s + self._terms.renew_deadline_s
            try:
                async with asyncio.timeout_at(deadline_s):
                    began_s = clock()
                    holder = await self._try()
            except (KubeError, TimeoutError) as error:
                if clock() >= deadline_s:
                    self.held = False
                    why = str(error) or type(error).__name__
                    raise LeadershipLostError(f"the lease could not be renewed: {why}") from error
                continue
            if holder is not None:
                self.held = False
                raise LeadershipLostError(f"the lease is held by {holder}")
            renewed_s = began_s

    async def release(self) -> None:
        """Let another take over at once; quietly does nothing where that fails."""
        if not self.held:
            return
        self.held, self._ours = False, None
        try:
            async with asyncio.timeout(self._terms.retry_s):
                lease = await self._client.get(LEASE, self._terms.namespace, self._terms.name)
                if lease["spec"].get("holderIdentity") == self._terms.identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._client.replace(lease, manager=_MANAGER)
        except (KubeError, TimeoutError) as error:
            _log.warning("lease: not released", error=str(error) or "timed out")

    async def _try(self) -> str | None:
        """Take or renew the Lease; returns who has it if not we."""
        if self._ours is not None:
            # As client-go does since 1.29: nobody can have written it if it still has our version.
            renewed = {**self._ours, "spec": {**self._ours["spec"], "renewTime": self._stamp()}}
            try:
                self._ours = await self._client.replace(renewed, manager=_MANAGER)
                return None
            except (PreconditionError, NotFoundError):
                self._ours = None
        try:
            lease = await self._client.get(LEASE, self._terms.namespace, self._terms.name)
        except NotFoundError:
            return await self._write(self._new(), exists=False)
        spec = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._terms.identity) and not self._expired(lease):
            return str(holder)
        stamp = self._stamp()
        if holder != self._terms.identity:
            transitions = int(spec.get("leaseTransitions") or 0) + 1
            spec |= {"acquireTime": stamp, "leaseTransitions": transitions}
        spec |= {
            "holderIdentity": self._terms.identity,
            "renewTime": stamp,
            "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
        }
        return await self._write(lease, exists=True)

    async def _write(self, lease: Object, *, exists: bool) -> str | None:
        try:
            write = self._client.replace if exists else self._client.create
            self._ours = await write(lease, manager=_MANAGER)
        except (AlreadyExistsError, PreconditionError, NotFoundError):
            # Someone else wrote at the same moment. If that was our own earlier request, the next try shows.
            current = await self._client.get(LEASE, self._terms.namespace, self._terms.name)
            holder = current.get("spec", {}).get("holderIdentity") or "nobody yet"
            return None if holder == self._terms.identity else str(holder)
        return None

    def _expired(self, lease: Object) -> bool:
        now_s = asyncio.get_running_loop().time()
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now_s)
        duration_s = lease["spec"].get("leaseDurationSeconds") or self._terms.duration_s
        return now_s - self._seen[1] >= float(duration_s)

    def _new(self) -> Object:
        stamp = self._stamp()
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._terms.name, "namespace": self._terms.namespace},
            "spec": {
                "holderIdentity": self._terms.identity,
                "acquireTime": stamp,
                "renewTime": stamp,
                "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
                "leaseTransitions": 0,
            },
        }

    def _stamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
