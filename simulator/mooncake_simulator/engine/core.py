"""The engine's loop: plan a step, let its model time pass, give out its tokens and events."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.engine.batching import Scheduler
from mooncake_simulator.engine.clock import ModelClock
from mooncake_simulator.engine.connectors import Connectors
from mooncake_simulator.engine.events import EventPublisher
from mooncake_simulator.engine.faults import Faults
from mooncake_simulator.engine.hashing import BlockHasher
from mooncake_simulator.engine.links import SharedLink
from mooncake_simulator.engine.metrics import EngineMetrics
from mooncake_simulator.engine.options import EngineOptions
from mooncake_simulator.engine.pool import BlockPool, Stored
from mooncake_simulator.engine.sequence import Emission, Sequence, State
from mooncake_simulator.engine.steps import Step

LOG = logging.getLogger(__name__)

_LONGEST_CATCH_UP_WALL_S = 2.0
"""A machine that stood still longer than this was away: that time is not caught up with."""


class Engine:
    """Scheduler, clock, events and connectors of one simulated engine."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.clock = ModelClock(options.time_scale)
        self.cost = CostModel.from_profile(options.profile)
        self.metrics = EngineMetrics(options)
        self.faults = Faults()
        self.faults.update(options.faults)
        self.connectors = Connectors()
        self.publisher = EventPublisher(options.events, options.block_size, options.host_ip, self.faults)
        self.ingress = self.link(options.profile.network_bytes_per_s)
        self.egress = self.link(options.profile.network_bytes_per_s)
        self.scheduler: Scheduler
        self.dead = False
        self.steps = 0
        self._at_s = 0.0
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.use(Connectors())

    def use(self, connectors: Connectors) -> None:
        """Put the connectors in place, before anything runs."""
        self.connectors = connectors
        self.scheduler = Scheduler(
            BlockPool(self.options.num_gpu_blocks),
            BlockHasher(self.options.block_size, self.options.hash_seed),
            connectors,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            max_model_len=self.options.max_model_len,
            prefix_caching=self.options.prefix_caching,
        )

    def link(self, bytes_per_s: float) -> SharedLink:
        """A link in this engine's model time."""
        return SharedLink(bytes_per_s, self.clock.now_s, self.options.time_scale)

    async def start(self) -> None:
        """Open the sockets of events and connectors, begin to step.

        Raises:
            OSError: an address is in use.
        """
        self.publisher.start()
        await self.connectors.start()
        self.spawn(self._run())

    async def stop(self) -> None:
        """End the loop and close the sockets."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connectors.stop()
        await self.publisher.stop()
        self.clock.close()

    def submit(self, sequence: Sequence) -> None:
        """Take a request; its tokens go to its sink."""
        self.scheduler.add(sequence)
        self.connectors.submitted(sequence)
        self.wake()

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a request from outside: its client left (`abort`), or a stop string appeared (`stop`)."""
        if sequence.state is State.FINISHED:
            return
        self.scheduler.finish(sequence, reason)
        self._ended(sequence, reason)
        self.wake()

    def abort_all(self) -> None:
        """End every request with finish_reason `abort`, as vLLM does when it is told to go."""
        scheduler = self.scheduler
        for sequence in [
            *scheduler.running,
            *scheduler.ready,
            *scheduler.waiting,
            *scheduler.loading.values(),
        ]:
            self.finish(sequence, "abort")
            sequence.sink(Emission(sequence, None, "abort"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the loop; an error in it is logged and kills the engine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def wake(self) -> None:
        """Look again whether there is something to do."""
        self._wake.set()

    def loaded(self, sequence: Sequence, external_tokens: int) -> None:
        """KV of so many tokens beyond the local ones has arrived."""
        self.scheduler.loaded(sequence, external_tokens)
        self.wake()

    def load_failed(self, sequence: Sequence, message: str, policy: str) -> None:
        """KV will not arrive: the request fails, or is computed here (policy `recompute`)."""
        LOG.warning("%s: KV did not arrive: %s", sequence.id, message)
        if policy == "recompute":
            self.loaded(sequence, 0)
            return
        if sequence.state is not State.FINISHED:
            self.finish(sequence, "error")
            sequence.sink(Emission(sequence, None, "error"))
        self.loaded(sequence, 0)

    def release_held(self, sequence_id: str) -> bool:
        """Free the blocks of an ended sequence that a connector kept."""
        released = self.scheduler.release_held(sequence_id)
        self.wake()
        return released

    def publish_store_copy(self, event: Stored) -> None:
        """Announce blocks that lie in the store now."""
        self.publisher.publish_store_copy(event)

    def die(self, reason: str) -> None:
        """End the process as one whose engine core has crashed."""
        LOG.critical("EngineCore encountered a fatal error: %s", reason)
        self.dead = True
        os._exit(1)

    async def _run(self) -> None:
        idle = True
        while True:
            if self.faults.stall_s:
                stall_s, self.faults.stall_s = self.faults.stall_s, 0.0
                await asyncio.sleep(stall_s)
                idle = True
            step = self.scheduler.plan()
            for sequence in step.loads:
                sequence.times.scheduled_s = self.clock.now_s()
                self.connectors.load(sequence)
            if not step.work:
                idle = True
                self._wake.clear()
                if not step.loads:
                    await self._wake.wait()
                continue
            await self._pass_time(step, idle)
            idle = False
            self._give_out(step)

    async def _pass_time(self, step: Step, idle: bool) -> None:
        now_s = self.clock.now_s()
        behind_s = now_s - self._at_s
        if idle or behind_s > _LONGEST_CATCH_UP_WALL_S * self.options.time_scale:
            self._at_s = now_s
        for item in step.work:
            if item.sequence.times.scheduled_s is None:
                item.sequence.times.scheduled_s = max(self._at_s, item.sequence.times.arrived_s)
        self._at_s += step.duration_s(self.cost)
        await self.clock.until(self._at_s)

    def _give_out(self, step: Step) -> None:
        self.steps += 1
        now_s = self._at_s
        emissions = self.scheduler.complete(step)
        metrics = self.metrics
        metrics.iteration_tokens.observe(sum(item.tokens for item in step.work))
        metrics.generation_tokens.inc(len(emissions))
        # Before the tokens go out: who reacts to a token finds its events published.
        self.publisher.publish(self.scheduler.pool.take_events())
        for emission in emissions:
            sequence = emission.sequence
            times = sequence.times
            if times.first_token_s is None:
                times.first_token_s = max(now_s, times.arrived_s)
                metrics.ttft.observe(times.first_token_s - times.arrived_s)
                metrics.prompt_processed(sequence)
                self.connectors.prefilled(sequence)
            elif times.last_token_s is not None:
                metrics.itl.observe(max(0.0, now_s - times.last_token_s))
            times.last_token_s = now_s
            if emission.finish_reason is not None:
                self._ended(sequence, emission.finish_reason)
            sequence.sink(emission)
        self._count_towards_death(len(emissions))

    def _ended(self, sequence: Sequence, reason: str) -> None:
        self.metrics.request_finished(sequence, reason, max(self._at_s, sequence.times.arrived_s))
        self.connectors.finished(sequence, reason)

    def _count_towards_death(self, tokens: int) -> None:
        left = self.faults.die_after_tokens
        if left is not None:
            self.faults.die_after_tokens = left - tokens
            if left <= tokens:
                os.kill(os.getpid(), signal.SIGKILL)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("engine task failed", exc_info=error)
            self.die(repr(error))
