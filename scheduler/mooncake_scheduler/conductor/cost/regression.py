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
        self._floor: Matrix = tuple(tuple((1 - MEMORY) * each for each in row) for row in information)  # type: ignore[assignment]
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
        # Written out, as `_solve_all` is: every prefill of every request comes here. The matrix is symmetric.
        x0, x1, x2 = x
        w0, w1, w2 = weight * x0, weight * x1, weight * x2
        (a00, a01, a02), (_, a11, a12), (_, _, a22) = old
        (f00, f01, f02), (_, f11, f12), (_, _, f22) = floor
        b01 = MEMORY * a01 + f01 + w0 * x1
        b02 = MEMORY * a02 + f02 + w0 * x2
        b12 = MEMORY * a12 + f12 + w1 * x2
        info: Matrix = (
            (MEMORY * a00 + f00 + w0 * x0, b01, b02),
            (b01, MEMORY * a11 + f11 + w1 * x1, b12),
            (b02, b12, MEMORY * a22 + f22 + w2 * x2),
        )
        self._information = info
        step = _solve_all(info, (residual * w0, residual * w1, residual * w2))
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


def _solve_all(matrix: Matrix, right: Vector) -> Vector | None:
    """As `_solve` for all three unknowns of a symmetric matrix."""
    (a00, a01, a02), (_, a11, a12), (_, _, a22) = matrix
    if a00 <= 1e-300:
        return None
    f1, f2 = a01 / a00, a02 / a00
    b11, b12, b22 = a11 - f1 * a01, a12 - f1 * a02, a22 - f2 * a02
    if b11 <= 1e-300:
        return None
    f3 = b12 / b11
    c22 = b22 - f3 * b12
    if c22 <= 1e-300:
        return None
    r1 = right[1] - f1 * right[0]
    z = (right[2] - f2 * right[0] - f3 * r1) / c22
    y = (r1 - b12 * z) / b11
    return ((right[0] - a01 * y - a02 * z) / a00, y, z)


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
