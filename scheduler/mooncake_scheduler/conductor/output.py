"""How many tokens an answer will have, learned from those that ended.

Three ways are kept side by side, each with its error, and the one that erred least is used (conductor.md,
Admission): the client's `max_tokens`; the mean of all (the paper's system level: every decode lasts t_d); the
mean of the tenant's requests of like prompt length (the request level that the papers left open).
"""

from __future__ import annotations

LEAST_SEEN = 5
"""Answers of a kind before its mean is believed."""
MEMORY = 200
"""Answers over which means and errors are taken."""
MOST_CLASSES = 16_384


class _Running:
    """A mean that is exact at first and fades over `MEMORY` values later."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.seen = 0

    def add(self, value: float) -> None:
        if self.seen < MEMORY:
            self.seen += 1
        self.value += (value - self.value) / self.seen


class _Class:
    """What was seen of one tenant's requests of like prompt length."""

    __slots__ = ("class_error", "limit_error", "mean_tokens", "system_error")

    def __init__(self) -> None:
        self.mean_tokens = _Running()
        self.class_error = _Running()
        self.system_error = _Running()
        self.limit_error = _Running()


class OutputPrediction:
    """Predicted output lengths."""

    def __init__(self, default_tokens: int = 256) -> None:
        """Takes the answer length that is assumed before anything was learned."""
        if default_tokens < 1:
            raise ValueError(f"default_tokens is at least 1, not {default_tokens}")
        self._default_tokens = default_tokens
        self._all_tokens = _Running()
        self._classes: dict[tuple[str, int], _Class] = {}

    @property
    def mean_tokens(self) -> float:
        """Mean length of the answers that ended lately, whoever asked."""
        return self._default_tokens if self._all_tokens.seen < LEAST_SEEN else self._all_tokens.value

    def predict(self, tenant: str, prompt_tokens: int, max_tokens: int | None = None) -> int:
        """Tokens that the answer is expected to have; never above `max_tokens`, at least 1."""
        return self._best(self._classes.get((tenant, prompt_tokens.bit_length())), max_tokens)

    def observe(
        self, tenant: str, prompt_tokens: int, output_tokens: int, *, max_tokens: int | None = None
    ) -> None:
        """Learn from an answer that came to its end (not from one cut short by its client or a fault)."""
        key = (tenant, prompt_tokens.bit_length())
        known = self._classes.pop(key, None)
        if known is None:
            known = _Class()
            if len(self._classes) >= MOST_CLASSES:
                del self._classes[next(iter(self._classes))]
        # Errors are those of predictions made without this answer.
        if known.mean_tokens.seen:
            known.class_error.add(abs(known.mean_tokens.value - output_tokens))
        if self._all_tokens.seen:
            known.system_error.add(abs(self._all_tokens.value - output_tokens))
        if max_tokens is not None:
            known.limit_error.add(abs(max_tokens - output_tokens))
        known.mean_tokens.add(output_tokens)
        self._classes[key] = known
        self._all_tokens.add(output_tokens)

    def _best(self, known: _Class | None, max_tokens: int | None) -> int:
        guess = self.mean_tokens
        if known is not None and known.mean_tokens.seen >= LEAST_SEEN:
            best = (known.class_error.value, known.mean_tokens.value)
            system = (known.system_error.value, self._all_tokens.value)
            if system < best:
                best = system
            if max_tokens is not None and known.limit_error.seen >= LEAST_SEEN:
                limit = (known.limit_error.value, max_tokens)
                if limit < best:
                    best = limit
            guess = best[1]
        tokens = round(guess)
        if max_tokens is not None and tokens > max_tokens:
            tokens = max_tokens
        return tokens if tokens > 1 else 1
