"""One request on a simulated cluster, from its place in the queue to its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.model import Ask, Placement, Stage, World
from mooncake_simulator.cluster.batch import Member
from mooncake_simulator.cluster.failures import DECODE_DIED
from mooncake_simulator.cluster.holding import NO_PLACE
from mooncake_simulator.cluster.outcome import Outcome
from mooncake_simulator.cluster.prefill import Job
from mooncake_simulator.cluster.prefixes import Prefix
from mooncake_simulator.cluster.tiers import Turn
from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request, blocks_of

if TYPE_CHECKING:
    from mooncake_simulator.cluster.simulation import Simulation

TOO_LONG = "too_long"
"""Prompt and answer are more KV than an instance's memory ever holds."""


class _Found(NamedTuple):
    """What of a prompt's prefix is there when it is computed."""

    tokens: int
    fetched_tokens: int
    wait_s: float = 0.0
    """For which its instance waits until the last of it has come."""


class Life:
    """An admitted request: what it does next, and what is told of it.

    Args:
        world: where it lives.
        request: as the trace has it.
        outcome: what became of it is written down there.
        ask: as the Conductor was asked.
        placement: as the Conductor answered.
    """

    __slots__ = (
        "ask", "decoding", "gone", "model", "moves", "outcome", "placement", "prefill", "request", "sent_s",
        "streamed", "turn", "withheld", "world",
    )  # fmt: skip

    def __init__(
        self, world: Simulation, request: Request, outcome: Outcome, ask: Ask, placement: Placement
    ) -> None:
        self.world = world
        self.request = request
        self.outcome = outcome
        self.ask = ask
        self.placement = placement
        first = placement.prefill or placement.decode
        self.prefill = world.numbers[first.id]
        self.model = world.costs.of(first)
        self.withheld = False
        self.decoding = self.streamed = False
        self.sent_s = 0.0
        """When its KV has left the node, had every layer of it been there at once."""
        self.gone = False
        """An instance died that had it: what is left of it there is not heard."""
        self.turn: Turn | None = None
        self.moves = 0
        """How often it was bound to another instance while it waited."""

    def move(self, placement: Placement, prefix: Prefix) -> None:
        """Wait at another instance: it has left the line of the one before.

        Args:
            placement: the new one; its decode instance is that of the old one.
            prefix: what is held of the prompt.
        """
        assert placement.prefill is not None
        world = self.world
        self.moves += 1
        self.placement = placement
        self.prefill = world.numbers[placement.prefill.id]
        self.model = world.costs.of(placement.prefill)
        entry = world.board.book.get(self.ask.id)
        assert entry is not None
        reservation = world.conductor.reservation(self.ask, placement, entry.reserved_s)
        moved = world.board.book.move(reservation)
        assert moved is not None, "who waits for a turn can be moved"
        self.outcome.moved += 1
        self.dispatch(prefix)

    def dispatch(self, prefix: Prefix) -> None:
        """Fetch what the placement says, and queue."""
        world, placement = self.world, self.placement
        ready_s = world.agenda.now_s
        if placement.fetch_tokens:
            source = prefix.source(self.prefill)
            ready_s = self._fetch(placement.prefix_tokens, placement.fetch_tokens, source)
        if world.tiers is not None and self.turn is None:
            self.turn = world.tiers.turn(self.request.hash_ids, self.request.input_length)
        if world.order is None:
            # Else those who wait behind it would count on it, and may be sent before it.
            world.residency.promise(self.prefill, self.request.hash_ids)
        waiting = world.board.book.waiting(self.ask.id)
        world.queues[self.prefill].add(Job(ready_s, self._begin, self._prefilled, waiting, self))

    def _fetch(self, prefix_tokens: int, tokens: int, source: int) -> float:
        """The last `tokens` of a prefix leave a holder, by its number; returns when they will be there."""
        world = self.world
        now_s = world.agenda.now_s
        size_bytes = tokens * world.kv_bytes_per_token
        ready_s = world.receivers[self.prefill].send(size_bytes, now_s)
        if source < world.spec.prefill:
            return max(ready_s, world.senders[source].send(size_bytes, now_s))
        if world.tiers is None:
            return ready_s
        first = (prefix_tokens - tokens) // BLOCK_TOKENS
        return max(ready_s, world.tiers.fetch(self.request.hash_ids, first, blocks_of(prefix_tokens)))

    def serve_whole(self) -> None:
        """Queue at an engine that does both."""
        world, outcome = self.world, self.outcome
        outcome.cached_tokens = cached = self.placement.prefix_tokens
        outcome.prefill_s = self.model.prefill_s(outcome.prompt_tokens, cached)
        steps = max(1, outcome.output_tokens - 1)
        member = Member(outcome.prompt_tokens, steps, self._computed, self._ended, cached)
        if not world.batches[self.prefill].ever_fits(member):
            outcome.refused = TOO_LONG
            self._leave()
            return
        world.residency.promise(self.prefill, self.request.hash_ids)
        world.batches[self.prefill].join(member)

    def _computed(self) -> None:
        world, now_s = self.world, self.world.agenda.now_s
        world.residency.arrive(self.prefill, self.request.hash_ids)
        world.board.finish_prefill(self.ask.id, now_s)
        self.outcome.ttft_s = now_s - self.outcome.arrival_s

    def lose(self) -> None:
        """Its instance died: where no token was sent yet, it begins anew."""
        world, outcome = self.world, self.outcome
        self.gone = True
        world.holding.leave(self.ask.id)
        self._leave()
        if self.streamed:
            outcome.failed = DECODE_DIED
            return
        outcome.ttft_s = outcome.prefill_ended_s = None
        world.again(self)

    def _leave(self) -> None:
        world = self.world
        world.board.drop(self.ask.id, world.agenda.now_s)
        del world.lives[self.ask.id]

    def _begin(self) -> tuple[float, float]:
        if self.gone:
            return 0.0, 0.0
        self.world.board.begin_prefill(self.ask.id, self.world.agenda.now_s)
        outcome = self.outcome
        tokens, found = outcome.prompt_tokens, self._found()
        outcome.cached_tokens = cached = found.tokens
        outcome.fetched_tokens = found.fetched_tokens
        outcome.prefill_s = self.model.prefill_s(tokens, cached)
        occupied_s = self.model.occupied_s(tokens, cached)
        # Layer by layer while it is computed, beside what others fetch from this node.
        self.sent_s = self._leaves()
        return found.wait_s + occupied_s, outcome.prefill_s - occupied_s

    def _found(self) -> _Found:
        """The prefix as it is when its turn comes, in the cache and fetched.

        In line that is what was counted on. While it waits for its turn others may compute more of it, or
        what it counted on has to make room: then it is fetched, by the same rule by which it was placed.
        """
        world, placement = self.world, self.placement
        if world.order is None:
            return _Found(placement.prefix_tokens, placement.fetch_tokens)
        most_tokens = self.outcome.prompt_tokens - 1
        blocks = self.request.hash_ids
        held = min(world.residency.promised_depth(self.prefill, blocks) * BLOCK_TOKENS, most_tokens)
        fetched = placement.fetch_tokens
        if fetched and held >= placement.prefix_tokens - fetched:
            held = max(held, placement.prefix_tokens)
        found = _Found(held, fetched)
        if held < placement.prefix_tokens:
            found = self._fetch_again(held)
        world.residency.promise(self.prefill, blocks)
        return found

    def _fetch_again(self, held_tokens: int) -> _Found:
        world, rebinding = self.world, self.world.conductor.rebinding
        if rebinding is None:
            # A policy may know an order of turns and not what one instance would do: it computes the rest.
            return _Found(held_tokens, 0)
        view, prefix = world.look_at(self.request, self.prefill)
        again = rebinding.prefill_at(self.ask, World(world.agenda.now_s, (view,), (), world.costs))
        if not again.fetch_tokens:
            return _Found(held_tokens, 0)
        ready_s = self._fetch(again.prefix_tokens, again.fetch_tokens, prefix.source(self.prefill))
        return _Found(again.prefix_tokens, again.fetch_tokens, ready_s - world.agenda.now_s)

    def _prefilled(self) -> None:
        if self.gone:
            return
        world, placement = self.world, self.placement
        now_s = world.agenda.now_s
        blocks = self.request.hash_ids
        world.residency.arrive(self.prefill, blocks)
        if world.spec.fetch == "store":
            world.store(self.prefill, blocks, self.turn)
        self.outcome.prefill_ended_s = now_s
        if world.conductor.holds:
            self._hold()
            return
        if world.conductor.checks_stages:
            scene = world.scene(placement, self.ask)
            refused = world.conductor.check_stage(Stage.DECODE, self.ask, placement, scene)
            if refused is not None:
                self._refuse_after_prefill(refused.reason.value)
                return
        world.board.finish_prefill(self.ask.id, now_s)
        self._send(streamed=True)

    def _hold(self) -> None:
        """Its KV is staged: it waits until there is a place to decode, which most often is now."""
        world = self.world
        now_s = world.agenda.now_s
        world.board.finish_prefill(self.ask.id, now_s, held=True)
        held = world.conductor.hold(self.ask, self.placement, world.slo, self.outcome.arrival_s, now_s)
        world.holding.join(held, self._seated, self._given_up)

    def _seated(self, decode: Instance) -> None:
        at_once = decode.id == self.placement.decode.id
        self.outcome.held_s = self._held_s()
        self.placement = replace(self.placement, decode=decode)
        self._send(streamed=at_once and not self.outcome.held_s)

    def _given_up(self) -> None:
        self.outcome.held_s = self._held_s()
        self._refuse_after_prefill(NO_PLACE)

    def _held_s(self) -> float:
        assert self.outcome.prefill_ended_s is not None
        return self.world.agenda.now_s - self.outcome.prefill_ended_s

    def _refuse_after_prefill(self, reason: str) -> None:
        self.outcome.refused = reason
        self.outcome.wasted_prefill = True
        self._leave()

    def _leaves(self) -> float:
        """Its whole KV takes its turn on the way out of its node; returns when it has left."""
        size_bytes = self.outcome.prompt_tokens * self.world.kv_bytes_per_token
        return self.world.senders[self.prefill].hand_over(size_bytes, self.world.agenda.now_s)

    def _send(self, *, streamed: bool) -> None:
        """The KV goes to decode.

        Args:
            streamed: layer by layer while it was computed: only what the network did not keep up with is
                still on its way. Else it went to where there was no place for it, and goes again.
        """
        now_s = self.world.agenda.now_s
        arrives_s = max(now_s, self.sent_s) if streamed else self._leaves()
        self.outcome.ttft_s = (now_s if streamed else arrives_s) - self.outcome.arrival_s
        self.world.agenda.at(arrives_s, self._hand_over)

    def _hand_over(self) -> None:
        if self.gone:
            return
        if self.placement.decode.id not in self.world.present_decode:
            self.lose()
            return
        self.decoding = True
        batch = self.world.batches[self.world.numbers[self.placement.decode.id]]
        steps = self.outcome.output_tokens - 1
        if not steps:
            self._ended(None)
            return
        member = Member(self.outcome.prompt_tokens + 1, steps, self._joined, self._ended)
        if not batch.ever_fits(member):
            self.outcome.ttft_s = None
            self._refuse_after_prefill(TOO_LONG)
            return
        self.withheld = not batch.fits(member.prompt_tokens)
        batch.join(member)

    def _joined(self) -> None:
        self.streamed = True
        if self.withheld and not self.gone:
            # Its first token comes with its place: until then it was not known whether there would be more.
            self.outcome.ttft_s = self.world.agenda.now_s - self.outcome.arrival_s

    def _ended(self, tbt_s: float | None) -> None:
        if self.gone:
            return
        world, outcome = self.world, self.outcome
        now_s = world.agenda.now_s
        outcome.tbt_s = tbt_s
        outcome.ended_s = now_s
        self._leave()
        world.holding.look()
        world.conductor.observe_output("default", outcome.prompt_tokens, outcome.output_tokens)
