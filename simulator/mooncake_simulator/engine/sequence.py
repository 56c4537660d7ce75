"""One request inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from mooncake_simulator.engine.hashing import BlockNames

NextToken = Callable[[int], int]
"""Gives the token at an output position (0 = the first generated)."""


class State(Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = auto()
    LOADING = auto()
    """Its blocks are allocated and KV is on its way into them."""
    READY = auto()
    """KV has arrived; it continues with the next step."""
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Limits:
    """When generation ends."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token: int | None = None
    stop_tokens: frozenset[int] = frozenset()


@dataclass(slots=True)
class Times:
    """Moments in a sequence's life, in model seconds; None = not yet."""

    arrived_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens, blocks and progress; `tokens` is the prompt and then what was generated."""

    id: str
    tokens: list[int]
    limits: Limits
    next_token: NextToken
    times: Times
    sink: Callable[[Emission], None]
    salt: str | None = None
    transfer: dict[str, Any] | None = None
    """`kv_transfer_params` of the request."""
    prompt_tokens: int = 0
    names: BlockNames = field(default_factory=BlockNames)
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV lies in `blocks`."""
    stored: int = 0
    """Blocks already offered to the prefix cache."""
    local_tokens: int = 0
    external_tokens: int = 0
    cached_tokens: int = -1
    """Tokens that needed no computing when it was first admitted; -1 = not admitted yet."""
    received: bool = False
    """Its prompt's KV came from a prefill engine: what follows is a decode step."""
    preemptions: int = 0
    transfer_answer: dict[str, Any] | None = None
    """`kv_transfer_params` that the answer carries (NIXL)."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step gave one sequence: a token, an end, or both."""

    sequence: Sequence
    token: int | None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_reason: int | str | None = None
