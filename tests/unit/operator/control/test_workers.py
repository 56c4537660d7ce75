"""Queue, workers and resync together, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import structlog

from mooncake_operator.control.backoff import Backoff
from mooncake_operator.control.contract import Key, Result
from mooncake_operator.control.resync import Resync
from mooncake_operator.control.workers import Workers
from mooncake_operator.control.workqueue import QueueClosedError, WorkQueue
from mooncake_operator.kube.errors import ThrottledError, UnavailableError
from mooncake_testing.virtual_time import run_in_virtual_time

A, B = Key("default", "a"), Key("default", "b")


class Recorder:
    """A reconciler that notes when it was called, and does as it is told."""

    def __init__(
        self, act: Callable[[Key, int], Result] = lambda key, n: Result(), takes_s: float = 0.0
    ) -> None:
        self.calls: list[tuple[float, Key]] = []
        self.running: set[Key] = set()
        self.most_at_once = 0
        self._act = act
        self._takes_s = takes_s

    async def reconcile(self, key: Key) -> Result:
        assert key not in self.running
        self.running.add(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            self.calls.append((asyncio.get_running_loop().time(), key))
            await asyncio.sleep(self._takes_s)
            return self._act(key, sum(called == key for _, called in self.calls))
        finally:
            self.running.remove(key)

    def times_s(self, key: Key = A) -> list[float]:
        return [at for at, called in self.calls if called == key]


async def work_for(
    seconds: float,
    reconciler: Recorder,
    begin: Callable[[WorkQueue[Key]], object],
    backoff: Backoff[Key] | None = None,
    *,
    ends: bool = True,
) -> None:
    """Let three workers work; `ends` = until what they have begun is finished, else cut it off."""
    queue: WorkQueue[Key] = WorkQueue()
    workers = Workers(
        queue, reconciler, backoff or Backoff(first_s=1, longest_s=60, chance=lambda: 1.0), count=3
    )
    task = asyncio.create_task(workers.run())
    begin(queue)
    await asyncio.sleep(seconds)
    if ends:
        queue.close()
    else:
        task.cancel()
    await asyncio.gather(task, return_exceptions=not ends)


def test_what_a_pass_logs_names_its_cluster_and_no_other() -> None:
    named: list[object] = []

    def act(key: Key, call: int) -> Result:
        named.append(structlog.contextvars.get_contextvars().get("cluster"))
        return Result()

    def begin(queue: WorkQueue[Key]) -> None:
        for key in (A, B):
            queue.add(key)

    run_in_virtual_time(work_for(1, Recorder(act), begin))
    assert sorted(map(str, named)) == ["default/a", "default/b"]
    assert "cluster" not in structlog.contextvars.get_contextvars()


def test_failures_double_the_wait_up_to_a_limit_and_a_success_starts_it_over() -> None:
    def act(key: Key, call: int) -> Result:
        if call != 5:
            raise UnavailableError(500, "", "not now")
        return Result(requeue_after_s=10)

    recorder = Recorder(act)
    backoff: Backoff[Key] = Backoff(first_s=1, longest_s=5, chance=lambda: 1.0)
    run_in_virtual_time(work_for(40, recorder, lambda queue: queue.add(A), backoff))
    assert recorder.times_s() == [0, 1, 3, 7, 12, 22, 23, 25, 29, 34, 39]


def test_what_the_server_asks_to_wait_is_waited() -> None:
    def act(key: Key, call: int) -> Result:
        if call == 1:
            raise ThrottledError(429, "", "slow down", retry_after_s=17)
        return Result()

    recorder = Recorder(act)
    run_in_virtual_time(work_for(60, recorder, lambda queue: queue.add(A)))
    assert recorder.times_s() == [0, 17]


def test_a_key_that_always_fails_does_not_hold_up_others() -> None:
    def act(key: Key, call: int) -> Result:
        if key == A:
            raise ValueError("a bug")
        return Result(requeue_after_s=1)

    recorder = Recorder(act)
    run_in_virtual_time(work_for(10.5, recorder, lambda queue: (queue.add(A), queue.add(B))))
    assert len(recorder.times_s(B)) == 11


class Slow(Recorder):
    """A reconciler to whom some clusters take long, whose API calls time out, say."""

    def __init__(self, slow: set[Key], takes_s: float) -> None:
        super().__init__(lambda key, n: Result(requeue_after_s=1))
        self._slow, self._slowness_s = slow, takes_s

    async def reconcile(self, key: Key) -> Result:
        self._takes_s = self._slowness_s if key in self._slow else 0.0
        return await super().reconcile(key)


def test_a_slow_cluster_takes_one_worker_and_the_others_go_on_as_if_it_were_not_there() -> None:
    recorder = Slow({A}, takes_s=1000)
    others = [Key("default", f"c{number}") for number in range(50)]
    run_in_virtual_time(
        work_for(10.5, recorder, lambda queue: [queue.add(key) for key in (A, *others)], ends=False)
    )
    assert {len(recorder.times_s(key)) for key in others} == {11}


def test_with_more_slow_clusters_than_workers_everybody_still_gets_a_turn_in_order_of_waiting() -> None:
    slow = [Key("slow", f"c{number}") for number in range(6)]
    quick = [Key("quick", f"c{number}") for number in range(20)]
    recorder = Slow(set(slow), takes_s=10)
    run_in_virtual_time(
        work_for(300, recorder, lambda queue: [queue.add(key) for key in (*slow, *quick)], ends=False)
    )
    waits = [later - earlier for key in quick for earlier, later in pairwise(recorder.times_s(key))]
    # Three workers, six slow keys: two rounds of them at most, and the second that each rests between passes.
    assert max(waits) <= 2 * 10 + 1


def test_one_key_is_reconciled_by_one_worker_at_a_time_and_again_when_it_changed_meanwhile() -> None:
    recorder = Recorder(takes_s=2.0)

    async def scenario() -> None:
        def begin(queue: WorkQueue[Key]) -> None:
            for delay_s in (0, 0.5, 1, 1.5):
                queue.add_after(A, delay_s)
                asyncio.get_running_loop().call_later(delay_s, queue.add, A)
            queue.add(B)

        await work_for(20, recorder, begin)

    run_in_virtual_time(scenario())
    assert recorder.times_s(A) == [0, 2]
    assert recorder.most_at_once == 2


def test_a_pass_that_hangs_is_ended_and_tried_again() -> None:
    async def scenario() -> list[float]:
        recorder = Recorder(takes_s=1000)
        queue: WorkQueue[Key] = WorkQueue()
        backoff: Backoff[Key] = Backoff(first_s=1, chance=lambda: 1.0)
        workers = Workers(queue, recorder, backoff, count=1, pass_timeout_s=30)
        task = asyncio.create_task(workers.run())
        queue.add(A)
        await asyncio.sleep(35)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return recorder.times_s()

    assert run_in_virtual_time(scenario()) == [0, 31]


def test_a_foreign_cancellation_inside_a_pass_is_a_failure_and_no_end_of_the_worker() -> None:
    def act(key: Key, call: int) -> Result:
        if call == 1:
            raise asyncio.CancelledError
        return Result()

    recorder = Recorder(act)
    run_in_virtual_time(work_for(5, recorder, lambda queue: queue.add(A)))
    assert recorder.times_s() == [0, 1]


def test_closing_lets_a_pass_end_and_begins_no_other() -> None:
    async def scenario() -> tuple[list[float], float]:
        recorder = Recorder(takes_s=3)
        queue: WorkQueue[Key] = WorkQueue()
        workers = Workers(queue, recorder, Backoff(chance=lambda: 0.0), count=1)
        task = asyncio.create_task(workers.run())
        queue.add(A)
        await asyncio.sleep(1)
        queue.add(B)
        queue.close()
        await task
        with pytest.raises(QueueClosedError):
            await queue.take()
        return [at for at, _ in recorder.calls], asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) == ([0], 3)


def test_a_worker_that_is_cancelled_while_waiting_passes_the_wake_up_on() -> None:
    async def scenario() -> Key:
        queue: WorkQueue[Key] = WorkQueue()
        first, second = asyncio.create_task(queue.take()), asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.add(A)
        first.cancel()
        return await second

    assert run_in_virtual_time(scenario()) == A


class Lister:
    """What a LIST gives, time and again."""

    def __init__(self, *answers: Iterable[Key] | Exception) -> None:
        self._answers = list(answers)
        self.at_s: list[float] = []

    async def __call__(self) -> Iterable[Key]:
        self.at_s.append(asyncio.get_running_loop().time())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def resync_for(seconds: float, lister: Lister, request_at_s: Iterable[float] = ()) -> Recorder:
    recorder = Recorder()

    def begin(queue: WorkQueue[Key]) -> None:
        resync = Resync(lister, queue, Backoff(chance=lambda: 0.5), period_s=100, chance=lambda: 0.5)
        tasks.append(asyncio.create_task(resync.run()))
        for at_s in request_at_s:
            asyncio.get_running_loop().call_later(at_s, resync.request)

    tasks: list[asyncio.Task[None]] = []
    await work_for(seconds, recorder, begin)
    tasks[0].cancel()
    return recorder


def test_every_object_is_looked_at_again_each_period() -> None:
    recorder = run_in_virtual_time(resync_for(250, Lister([A, B])))
    assert recorder.times_s(A) == recorder.times_s(B) == [0, 100, 200]


def test_an_object_that_vanished_unseen_gets_a_last_pass() -> None:
    recorder = run_in_virtual_time(resync_for(350, Lister([A, B], [A])))
    assert recorder.times_s(A) == [0, 100, 200, 300]
    assert recorder.times_s(B) == [0, 100]


def test_a_gap_in_a_watch_leads_to_one_list_however_often_it_is_reported() -> None:
    lister = Lister([A])
    run_in_virtual_time(resync_for(90, lister, request_at_s=(10, 10.2, 10.7)))
    assert lister.at_s == [0, 11]


def test_a_list_that_fails_is_repeated_soon_but_not_at_once() -> None:
    lister = Lister(UnavailableError(0, "", "away"), UnavailableError(0, "", "away"), [A])
    recorder = run_in_virtual_time(resync_for(90, lister))
    assert lister.at_s == [0, 2, 6]
    assert recorder.times_s() == [6]
