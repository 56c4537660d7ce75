"""Leader election on a jumping clock, with a Lease that is kept in memory as the API server would keep it."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest

from mooncake_operator.control.leadership import Leadership, LeadershipLostError, LeaseTerms
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import (
    AlreadyExistsError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from mooncake_testing.virtual_time import run_in_virtual_time


class OneLease:
    """An API server that knows one Lease, and resource versions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away_for: set[str] = set()
        self.asked = 0

    def store(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def of(self, identity: str) -> Client:
        return cast(Client, _Connection(self, identity))


class _Connection:
    def __init__(self, server: OneLease, identity: str) -> None:
        self._server = server
        self._identity = identity

    async def get(self, *_: Any) -> dict[str, Any]:
        await self._travel()
        if self._server.lease is None:
            raise NotFoundError(404, "NotFound", "no lease")
        return copy.deepcopy(self._server.lease)

    async def create(self, lease: dict[str, Any], *, manager: str) -> dict[str, Any]:
        await self._travel()
        if self._server.lease is not None:
            raise AlreadyExistsError(409, "AlreadyExists", "taken")
        return self._server.store(lease)

    async def replace(self, lease: dict[str, Any], *, manager: str) -> dict[str, Any]:
        await self._travel()
        if self._server.lease is None:
            raise NotFoundError(404, "NotFound", "no lease")
        if lease["metadata"]["resourceVersion"] != self._server.lease["metadata"]["resourceVersion"]:
            raise PreconditionError(409, "Conflict", "changed")
        return self._server.store(lease)

    async def _travel(self) -> None:
        self._server.asked += 1
        await asyncio.sleep(0.01)
        if self._identity in self._server.away_for:
            raise UnavailableError(0, "", "away")


def candidate(server: OneLease, identity: str) -> Leadership:
    return Leadership(server.of(identity), LeaseTerms("ns", "operator", identity))


def test_of_many_candidates_one_leads_and_keeps_leading() -> None:
    async def scenario() -> int:
        server = OneLease()
        all_ = [candidate(server, f"c{n}") for n in range(5)]
        tasks = [asyncio.create_task(each.acquire()) for each in all_]
        await asyncio.sleep(1)
        (leader,) = [each for each in all_ if each.held]
        hold = asyncio.create_task(leader.hold())
        await asyncio.sleep(300)
        assert not hold.done()
        leading = sum(each.held for each in all_)
        for task in (*tasks, hold):
            task.cancel()
        return leading

    assert run_in_virtual_time(scenario()) == 1


def test_a_leader_that_dies_is_succeeded_after_the_leases_duration_and_not_before() -> None:
    async def scenario() -> float:
        server = OneLease()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        hold = asyncio.create_task(first.hold())
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(60)
        assert not waiting.done()
        hold.cancel()
        died_s = asyncio.get_running_loop().time()
        await waiting
        return asyncio.get_running_loop().time() - died_s

    assert 11 <= run_in_virtual_time(scenario()) <= 20


def test_a_leader_without_an_answer_gives_up_before_another_may_begin() -> None:
    async def scenario() -> None:
        server = OneLease()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(5)
        server.away_for = {"first"}
        with pytest.raises(LeadershipLostError, match="could not be renewed"):
            await first.hold()
        assert not first.held
        assert not waiting.done()
        await waiting

    run_in_virtual_time(scenario())


def test_a_short_absence_of_the_api_server_costs_no_leadership() -> None:
    async def scenario() -> None:
        server = OneLease()
        leader = candidate(server, "first")
        await leader.acquire()
        hold = asyncio.create_task(leader.hold())
        await asyncio.sleep(10)
        server.away_for = {"first"}
        await asyncio.sleep(6)
        server.away_for = set()
        await asyncio.sleep(60)
        assert not hold.done()
        hold.cancel()

    run_in_virtual_time(scenario())


def test_a_released_lease_is_taken_at_the_next_look() -> None:
    async def scenario() -> float:
        server = OneLease()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(1)
        await first.release()
        await waiting
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) <= 4


def test_a_lease_that_another_took_is_lost() -> None:
    async def scenario() -> None:
        server = OneLease()
        leader = candidate(server, "first")
        await leader.acquire()
        assert server.lease is not None
        server.store({**server.lease, "spec": {**server.lease["spec"], "holderIdentity": "thief"}})
        with pytest.raises(LeadershipLostError, match="held by thief"):
            await leader.hold()

    run_in_virtual_time(scenario())


def test_a_lease_that_nobody_has_touched_is_renewed_by_one_request() -> None:
    async def scenario() -> tuple[int, int]:
        server = OneLease()
        leader = candidate(server, "first")
        await leader.acquire()
        hold = asyncio.create_task(leader.hold())
        version, asked = server.version, server.asked
        await asyncio.sleep(60)
        hold.cancel()
        return server.version - version, server.asked - asked

    renewals, requests = run_in_virtual_time(scenario())
    assert renewals == requests > 20


def test_a_lease_that_somebody_deleted_or_labelled_is_ours_again_at_the_next_renewal() -> None:
    async def scenario() -> None:
        server = OneLease()
        leader = candidate(server, "first")
        await leader.acquire()
        hold = asyncio.create_task(leader.hold())
        await asyncio.sleep(5)
        server.lease = None
        await asyncio.sleep(5)
        assert server.lease is not None
        server.store({**server.lease, "metadata": {**server.lease["metadata"], "labels": {"a": "b"}}})
        await asyncio.sleep(5)
        assert not hold.done()
        assert server.lease["spec"]["holderIdentity"] == "first"
        assert server.lease["metadata"]["labels"] == {"a": "b"}
        hold.cancel()

    run_in_virtual_time(scenario())
