"""Fitting the cost models online, one an instance class, from what its instances were seen to take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from mooncake_scheduler.conductor.cost.model import CostModels
from mooncake_scheduler.conductor.cost.regression import Matrix, NonNegativeRegression, Vector

LEAST_SEEN = 16
LEAST_SPREAD = 2.0
"""Largest over smallest observation (tokens computed; KV tokens) before constants are told apart."""
ENOUGH_SEEN = 256
"""After so many the model counts without spread: it is right where the traffic is."""

# Scales that bring the basis to about 1 at common sizes, so that the sums stay well conditioned.
_PREFILL_SCALES: Vector = (1.0, 1e4, 1e8)
_DECODE_SCALES: Vector = (1.0, 10.0, 1e5)
# (tokens, cached) and (batch, KV tokens) at which a profile is taken to have been measured.
_PREFILL_POINTS = ((512, 0), (2_048, 0), (8_192, 0), (8_192, 4_096), (32_768, 0), (131_072, 0))
_DECODE_POINTS = ((1, 4_096), (8, 65_536), (16, 262_144), (64, 131_072), (64, 1_048_576))
_PRIOR_WEIGHT = 2.0
_FAINT = 1e-6
"""Certainty of constants that nobody has measured: anything seen outweighs it."""


class _Side(msgspec.Struct, eq=False):
    """The fit of one side (prefill or decode) of one instance class."""

    fit: NonNegativeRegression
    scales: Vector
    warm: bool
    seen: int = 0
    smallest: float = 0.0
    largest: float = 0.0

    def observe(self, basis: Vector, size: float, seconds: float) -> None:
        scales = self.scales
        self.fit.observe((basis[0] / scales[0], basis[1] / scales[1], basis[2] / scales[2]), seconds)
        if self.seen == 0 or size < self.smallest:
            self.smallest = size
        if size > self.largest:
            self.largest = size
        self.seen += 1
        if not self.warm and self.seen >= LEAST_SEEN:
            self.warm = self.seen >= ENOUGH_SEEN or self.largest >= LEAST_SPREAD * self.smallest

    def constants(self) -> Vector:
        found, scales = self.fit.constants, self.scales
        return (found[0] / scales[0], found[1] / scales[1], found[2] / scales[2])


class CostFitting:
    """Keeps `CostModels` in step with what is observed.

    A class with a profile starts from its constants and is believed at once; one without starts cold, and
    each of its two sides counts as known when enough of different sizes was seen. Only computing time is
    observed here: what a request waited in a queue or for a transfer has to be left out by the caller.
    """

    def __init__(self, costs: CostModels) -> None:
        self._costs = costs
        self._prefill: dict[str, _Side] = {}
        self._decode: dict[str, _Side] = {}

    def observe_prefill(self, instance_class: str, tokens: int, cached: int, seconds: float) -> None:
        """A prompt of `tokens`, the first `cached` of which needed no computing, took `seconds`."""
        if tokens <= 0 or not 0.0 < seconds < float("inf"):
            return
        cached = max(0, min(cached, tokens - 1))
        self.observe_computed(instance_class, tokens - cached, tokens * tokens - cached * cached, seconds)

    def observe_computed(self, instance_class: str, tokens: int, squares: int, seconds: float) -> None:
        """As `observe_prefill`, of one prompt or several together: Σ n − p and Σ n² − p² took `seconds`."""
        if tokens <= 0 or not 0.0 < seconds < float("inf"):
            return
        side = self._prefill.get(instance_class)
        if side is None:
            side = self._prefill[instance_class] = self._prefill_side(instance_class)
        side.observe((1.0, float(tokens), float(squares)), tokens, seconds)
        a, b, c = side.constants()
        self._replace(instance_class, a_s=a, b_s_per_token=b, c_s_per_token2=c, cold_prefill=not side.warm)

    def observe_step(self, instance_class: str, batch: float, kv_tokens: float, seconds: float) -> None:
        """A decode step of `batch` requests with `kv_tokens` in all took `seconds`."""
        if batch <= 0 or kv_tokens < 0 or not 0.0 < seconds < float("inf"):
            return
        side = self._decode.get(instance_class)
        if side is None:
            side = self._decode[instance_class] = self._decode_side(instance_class)
        side.observe((1.0, float(batch), float(kv_tokens)), kv_tokens, seconds)
        t0, t1, t2 = side.constants()
        self._replace(
            instance_class, t0_s=t0, t1_s_per_request=t1, t2_s_per_token=t2, cold_decode=not side.warm
        )

    def _prefill_side(self, instance_class: str) -> _Side:
        model = self._costs.of_class(instance_class)
        prior = (model.a_s, model.b_s_per_token, model.c_s_per_token2)
        points = [(1.0, float(n - p), float(n * n - p * p)) for n, p in _PREFILL_POINTS]
        return _side(prior, points, _PREFILL_SCALES, known=model.knows_prefill)

    def _decode_side(self, instance_class: str) -> _Side:
        model = self._costs.of_class(instance_class)
        prior = (model.t0_s, model.t1_s_per_request, model.t2_s_per_token)
        points = [(1.0, float(batch), float(kv_tokens)) for batch, kv_tokens in _DECODE_POINTS]
        return _side(prior, points, _DECODE_SCALES, known=model.knows_decode)

    def _replace(self, instance_class: str, **constants: float | bool) -> None:
        model = self._costs.of_class(instance_class)
        if model.cold:
            # From here on each side speaks for itself.
            model = replace(model, cold=False, cold_prefill=True, cold_decode=True)
        self._costs.replace(instance_class, replace(model, **constants))


def _side(prior: Vector, points: Sequence[Vector], scales: Vector, *, known: bool) -> _Side:
    scaled: Vector = (prior[0] * scales[0], prior[1] * scales[1], prior[2] * scales[2])
    information = [[_FAINT if i == j else 0.0 for j in range(3)] for i in range(3)]
    if known:
        for point in points:
            x = [point[i] / scales[i] for i in range(3)]
            y = max(sum(x[i] * scaled[i] for i in range(3)), 1e-6)
            for i in range(3):
                for j in range(3):
                    information[i][j] += _PRIOR_WEIGHT * x[i] * x[j] / (y * y)
    matrix: Matrix = tuple((row[0], row[1], row[2]) for row in information)  # type: ignore[assignment]
    fit = NonNegativeRegression(scaled, matrix, unguarded=0 if known else LEAST_SEEN)
    return _Side(fit, scales, warm=known)
