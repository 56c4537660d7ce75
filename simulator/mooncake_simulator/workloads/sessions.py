"""Multi-turn sessions over shared system prompts, as a trace.

The defaults give a workload of the size and reuse of the conversation trace released with the paper (FAST'25
§5.2.1 and that file's own numbers): 12 k tokens in and 350 out on average, 3.4 requests/s, four requests in
ten a further turn of an earlier one, a token hit rate near 0.37 with a cache without limits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from mooncake_simulator.workloads.distributions import Distribution, parse_distribution
from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request

Arrival: TypeAlias = Literal["poisson", "uniform", "burst"]

_dist: Final = parse_distribution


class SessionShape(msgspec.Struct, frozen=True, kw_only=True):
    """How sessions arrive and grow."""

    turns: Distribution = _dist("geometric:1.64")
    """Requests a session sends; 39 % of the conversation trace's requests continue an earlier one."""
    gap_s: Distribution = _dist("lognormal:123s:1.0")
    """Seconds between the turns' arrivals; the trace's quartiles are 66, 123 and 264 s."""
    arrival: Arrival = "poisson"
    sessions_per_s: float = 2.08
    """New sessions a second: the trace's 3.4 requests/s over 1.64 turns."""
    burst: int = 10
    """Sessions that arrive together with `arrival` burst."""
    system_prompts: int = 1
    """How many system prompts there are; a session begins with one of them, the first more often."""
    system_tokens: Distribution = _dist("const:512")
    """Length of a system prompt; every request of the trace shares its first block."""
    first_tokens: Distribution = _dist("lognormal:5.2k:1.2")
    """What the user brings with the first turn, beside the system prompt."""
    user_tokens: Distribution = _dist("lognormal:830:1.6")
    """What the user adds with each further turn, beside the answer to the one before."""
    output_tokens: Distribution = _dist("quantiles:1:350:597:1120:2000")
    max_input_tokens: int = 126_195
    """A session ends before a prompt gets longer than this (the longest of the trace)."""


_MOST: Final = 1e9
"""Of tokens, turns, and seconds between them."""

CONVERSATION: Final = SessionShape()
"""Like the conversation trace."""


def generate(
    sessions: int,
    seed: int,
    shape: SessionShape = CONVERSATION,
    on_progress: Callable[[int], None] | None = None,
) -> list[Request]:
    """Requests of so many sessions in the order of their arrival; the same for the same arguments.

    Each turn's prompt is the one before, its answer, and new text of the user, so that it shares all its
    predecessor's full blocks. Arrivals do not wait for answers: gaps are from arrival to arrival.

    Args:
        sessions: how many sessions.
        seed: of all chance.
        shape: how they arrive and grow.
        on_progress: called with the number of sessions done.
    """
    if sessions < 1:
        raise ValueError(f"{sessions} sessions: expected at least 1")
    chance = random.Random(seed)
    names = _Names()
    prompts = [
        # A prompt has at least a token beside that of its system prompt.
        names.blocks_for(min(_tokens(shape.system_tokens, chance), shape.max_input_tokens - 1))
        for _ in range(max(shape.system_prompts, 1))
    ]
    requests: list[Request] = []
    for done, start_s in enumerate(_starts(sessions, shape, chance), start=1):
        requests.extend(_session(start_s, _favoured(prompts, chance), shape, chance, names))
        if on_progress is not None:
            on_progress(done)
    return sorted(requests, key=lambda request: request.timestamp_ms)


class _Prefix(msgspec.Struct, frozen=True):
    """Text by its length and the ids of its full blocks."""

    tokens: int
    full: tuple[int, ...]


class _Names:
    """Ids never used before."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))

    def blocks_for(self, tokens: int) -> _Prefix:
        return _Prefix(tokens, self.new(tokens // BLOCK_TOKENS))

    def grown(self, prefix: _Prefix, by_tokens: int) -> _Prefix:
        """The prefix with so many tokens behind it: a block that was partial gets a name of its own."""
        tokens = prefix.tokens + by_tokens
        return _Prefix(tokens, prefix.full + self.new(tokens // BLOCK_TOKENS - len(prefix.full)))

    def pass_over(self, prefix: _Prefix, by_tokens: int) -> None:
        """As `grown`, for a prompt that is not wanted: the same seed makes the same names."""
        self._next += (prefix.tokens + by_tokens) // BLOCK_TOKENS - len(prefix.full)


def _session(
    start_s: float, system: _Prefix, shape: SessionShape, chance: random.Random, names: _Names
) -> Iterator[Request]:
    turns = max(1, round(_drawn(shape.turns, chance)))
    room = max(1, shape.max_input_tokens - system.tokens)
    prompt = names.grown(system, min(_tokens(shape.first_tokens, chance), room))
    at_s = start_s
    for _ in range(turns):
        output = _tokens(shape.output_tokens, chance)
        partial = names.new(1) if prompt.tokens % BLOCK_TOKENS else ()
        yield Request(
            timestamp_ms=round(at_s * 1000),
            input_length=prompt.tokens,
            output_length=output,
            hash_ids=prompt.full + partial,
        )
        added = output + _tokens(shape.user_tokens, chance)
        if prompt.tokens + added > shape.max_input_tokens:
            names.pass_over(prompt, added)
            return
        prompt = names.grown(prompt, added)
        at_s += _drawn(shape.gap_s, chance)


def _starts(sessions: int, shape: SessionShape, chance: random.Random) -> Iterator[float]:
    if not 1 / _MOST <= shape.sessions_per_s <= _MOST:
        raise ValueError(
            f"{shape.sessions_per_s:g} sessions a second: expected more than 0, at most {_MOST:g}"
        )
    period_s = 1 / shape.sessions_per_s
    at_s = 0.0
    for number in range(sessions):
        yield at_s
        if shape.arrival == "poisson":
            at_s += chance.expovariate(shape.sessions_per_s)
        elif shape.arrival == "uniform":
            at_s += period_s
        elif (number + 1) % shape.burst == 0:
            at_s += period_s * shape.burst


def _favoured(prompts: list[_Prefix], chance: random.Random) -> _Prefix:
    """One of the system prompts, the n-th with a weight of 1/n."""
    weights = [1 / rank for rank in range(1, len(prompts) + 1)]
    return chance.choices(prompts, weights)[0]


def _tokens(lengths: Distribution, chance: random.Random) -> int:
    return max(1, round(_drawn(lengths, chance)))


def _drawn(distribution: Distribution, chance: random.Random) -> float:
    try:
        value = distribution.draw(chance)
    except OverflowError:
        value = math.inf
    if not value <= _MOST:
        raise ValueError(f"{distribution}: a value of {value:g}: no trace holds more than {_MOST:g}")
    return value
