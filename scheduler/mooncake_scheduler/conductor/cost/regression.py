"""Recursive least squares for three constants that are never negative, at a fixed cost an observation.

y = θ0·x0 + θ1·x1 + θ2·x2. Observations weigh by their relative error, so that short and long ones count
alike. Old ones fade exponentially, yet never below the certainty of the start: steady traffic of one shape
does not wear away what is known of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Vector: TypeAlias = tuple[float, float, float]
Matrix: TypeAlias = tuple[Vector, Vector, Vector]

MEMORY = 0.98
"""Weight of an observation against the next one: some 50 count."""
FIRST_SCALE = 0.25
LEAST_SCALE = 0.02
SCALE_GAIN = 0.05
OUTLIER_SCALES = 4.0
"""A residual counts at most as so many times the usual one."""
_SUBSETS = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))


class NonNegativeRegression:
    """Three constants, refined by every observation."""

    def __init__(self, prior: Vector, information: Matrix, unguarded: int = 0) -> None:
        """Starts from constants that are known with some certainty.

        Args:
            prior: The constants, none negative.
            information: How well they are known: Σ x·xᵀ / y² over the observations they stand for. It has to
                be positive definite.
            unguarded: Observations to take at their word, where the prior is no measure of what is usual.
        """
        self.constants = prior
        self._information = information
        self._floor = tuple(tuple((1 - MEMORY) * each for each in row) for row in information)
        self._unguarded = unguarded
        self._scale = FIRST_SCALE

    def observe(self, x: Vector, y: float) -> None:
        """Learn that `x` gave `y` (> 0).

        An outlier's pull is bounded, not ignored: when all observations are off, they are the new truth.
        """
        predicted = _dot(self.constants, x)
        residual = y - predicted
        if self._unguarded:
            self._unguarded -= 1
            # Between the two, so that neither a first guess of nothing nor a slow outlier rules.
            reference = 0.5 * (predicted + y)
        else:
            reference = max(predicted, 0.1 * y)
            most = OUTLIER_SCALES * self._scale
            seen = min(abs(residual) / reference, most)
            self._scale = max(LEAST_SCALE, self._scale + SCALE_GAIN * (seen - self._scale))
            residual = max(-most * reference, min(most * reference, residual))
        self._learn(x, residual, 1.0 / (reference * reference))

    def _learn(self, x: Vector, residual: float, weight: float) -> None:
        old, floor = self._information, self._floor
        info: Matrix = tuple(
            tuple(MEMORY * old[i][j] + floor[i][j] + weight * x[i] * x[j] for j in range(3)) for i in range(3)
        )  # type: ignore[assignment]
        self._information = info
        step = _solve(info, tuple(weight * residual * each for each in x), (0, 1, 2))
        if step is None:
            return
        wanted = (
            self.constants[0] + step[0],
            self.constants[1] + step[1],
            self.constants[2] + step[2],
        )
        self.constants = wanted if min(wanted) >= 0 else nearest_non_negative(info, wanted)


def nearest_non_negative(information: Matrix, wanted: Sequence[float]) -> Vector:
    """The constants without a negative one that are nearest in the sense of the information matrix.

    The quadratic program of three unknowns, solved by trying which of them are zero.
    """
    target = tuple(_dot(row, wanted) for row in information)
    best: Vector = (0.0, 0.0, 0.0)
    best_loss = 0.0
    for free in _SUBSETS:
        found = _solve(information, target, free)
        if found is None or min(found) < 0:
            continue
        loss = 0.5 * _dot(found, [_dot(row, found) for row in information]) - _dot(found, target)
        if loss < best_loss:
            best, best_loss = found, loss
    return best


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _solve(matrix: Matrix, right: Sequence[float], free: Sequence[int]) -> Vector | None:
    """Solve for the free unknowns by Gaussian elimination, the others being 0; None when singular."""
    rows = [[*(matrix[i][j] for j in free), right[i]] for i in free]
    size = len(free)
    for column in range(size):
        pivot = rows[column][column]
        if pivot <= 1e-300:
            return None
        for below in range(column + 1, size):
            factor = rows[below][column] / pivot
            for k in range(column, size + 1):
                rows[below][k] -= factor * rows[column][k]
    found = [0.0, 0.0, 0.0]
    for row in range(size - 1, -1, -1):
        known = sum(rows[row][k] * found[free[k]] for k in range(row + 1, size))
        found[free[row]] = (rows[row][size] - known) / rows[row][row]
    return (found[0], found[1], found[2])
