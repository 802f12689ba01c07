"""Buffered linear Toeplitz strategy matrices (BLT; arXiv 2404.16706, 2408.08868).

Losses are bounds as for `Toeplitz`.

The first column is 1, then a sum of decaying exponentials, up to scale. Its inverse has the same form with as
many terms, so noise `C^{-1} z` needs a few running sums, however long the run (proofs/buffered.md).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy

from jaxacct.common import validate as _validate
from jaxacct.strategies.base import BufferedRecursion, schedule_of
from jaxacct.strategies.series import product, quotient, sums_at_lags
from jaxacct.strategies.stationary import ComputedColumn, checked_numbers
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, checked

_SLOWEST = 1e-3  # minimum (1 - decay) n of the search: hardly a decay over n steps
_MIN_ERROR_REDUCTION = 1e-6  # relative; a smaller one is not worth two copies of the noise
_STEEP = 20.0  # maximum logit of the search: shares of 2e-9
_BLOCK = 1024  # steps; the search multiplies powers of starts of blocks and within one


@dataclass(frozen=True)
class BufferedToeplitz(ComputedColumn):
    """Lower-triangular Toeplitz C: first column `1, c_1, c_2, ..`, `c_t = sum_j weights_j decays_j^(t-1)`.

    It is non-increasing, so `squared_sensitivity` is exact. C is this scaled to a first column of norm 1.

    Attributes:
      decays: (buffers,) numbers from 0 to below 1.
      weights: (buffers,) numbers above 0 that add up to at most 1.
      iterations: n, the size of C.

    Raises:
      ValueError: other numbers.

    Example:
      >>> first = BufferedToeplitz((0.5,), (0.5,), iterations=4).array
      >>> first / first[0]
      array([1.   , 0.5  , 0.25 , 0.125])
    """

    decays: tuple[float, ...]
    weights: tuple[float, ...]
    iterations: int
    kind: ClassVar[str] = "buffered-toeplitz"

    def __post_init__(self):
        _validate.check_fields(self, iterations=_validate.positive_integer)
        decays = checked_numbers("decays", self.decays, lambda x: (x >= 0) & (x < 1), "from 0 to below 1")
        weights = checked_numbers("weights", self.weights, lambda x: x > 0, "above 0")
        _validate.set_fields(self, decays=tuple(decays.tolist()), weights=tuple(weights.tolist()))
        if decays.size != weights.size:
            raise ValueError(f"weights must be as many as decays, {decays.size}, got {weights.size}")
        if weights.sum() > 1 + 1e-12:
            raise ValueError(f"weights must add up to at most 1, added up to {float(weights.sum())!r}")

    @property
    def given_norm(self) -> float:
        """Norm of the first column that begins with 1."""
        return float(np.linalg.norm(_column(np.array(self.decays), np.array(self.weights), self.iterations)))

    @property
    def buffers(self) -> int:
        """Number of running sums that make the noise."""
        return len(self.decays)

    @property
    def named_bands(self) -> int:
        """Number of buffers."""
        return self.buffers

    def first_column(self) -> np.ndarray:
        first = _column(np.array(self.decays), np.array(self.weights), self.iterations)
        return first / np.linalg.norm(first)

    @classmethod
    def optimal(
        cls,
        *,
        iterations: int,
        buffers: int,
        min_separation: int | None = None,
        participations: int = 1,
        workload: Workload = PREFIX_SUMS,
    ) -> "BufferedToeplitz":
        """Return the matrix of locally minimal error at a given unamplified sensitivity.

        Minimises `(1/n) ||A C^-1||_F^2` times `squared_sensitivity`: a local minimum.

        Args:
          iterations: n; up to 100,000 in seconds.
          buffers: maximum; buffers without effect are dropped.
          min_separation: minimum number of steps between two participations; required for more than one.
          participations: at most `ceil(iterations / min_separation)`.
          workload: A; effect of the noise on the optimizer's iterates, prefix sums by default.

        Raises:
          ValueError: an impossible schedule, or more steps than a varying learning rate allows.
        """
        n = _validate.positive_integer("iterations", iterations)
        buffers = _validate.positive_integer("buffers", buffers)
        separation, k = schedule_of(n, min_separation, participations)
        separation = min(separation, n)
        error_of = checked(workload).error_of(n, n)
        if n == 1:
            return cls((0.0,), (1.0,), 1)

        def search(start):
            return _search(start, error_of, n, separation, k)

        best = search(_start(n, buffers))
        while best[1].size > 1:
            fewer = search(_one_fewer(*best[1:]))
            if fewer[0] > best[0] + _MIN_ERROR_REDUCTION:
                break
            best = fewer
        return cls(tuple(best[1]), tuple(best[2]), n)

    def noise_recursion(self) -> BufferedRecursion:
        return _recursion(self)

    def unit_workload_error(self, iterations: int, workload: Workload) -> float:
        inverse = _inverse_column(np.array(self.decays), np.array(self.weights), iterations)
        return workload.error(inverse) / float(self.array[0]) ** 2

    def describe(self) -> str:
        return f"buffered Toeplitz, {self.buffers} buffers"


def _column(decays: np.ndarray, weights: np.ndarray, n: int) -> np.ndarray:
    """Return `1, c_1, c_2, ..`, (n,) float64."""
    return np.append(1.0, _powers(decays, n) @ weights)


def _powers(decays: np.ndarray, n: int, block: int = 1) -> np.ndarray:
    """Return `decays^(t-1)` for t = 1 .. n - 1, (n - 1, buffers); blocks of 1024 are 20 times as fast."""
    starts, within = decays ** np.arange(0, n - 1, block)[:, None], decays ** np.arange(block)[:, None]
    return (starts[:, None] * within).reshape(-1, decays.size)[: n - 1]


def _poles(decays: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p and m >= 0, (buffers,) each: the inverse of `1, c_1, ..` is `1, -sum_j m_j p_j^(t-1)`.

    Running sums of the noise obey `s <- diag(decays) s + 1 w` with `w = z - weights . s`, and
    `diag(decays) - 1 weights^T` has the eigenvalues of a symmetric matrix (proofs/buffered.md, section 1).
    """
    roots = np.sqrt(weights)
    poles, vectors = np.linalg.eigh(np.diag(decays) - np.outer(roots, roots))
    return poles, (vectors.T @ roots) ** 2


def _inverse_column(decays: np.ndarray, weights: np.ndarray, n: int, block: int = 1) -> np.ndarray:
    """Return the first column of the inverse of the matrix with the column `1, c_1, ..`, (n,) float64."""
    poles, masses = _poles(decays, weights)
    return np.append(1.0, -(_powers(poles, n, block) @ masses))


@functools.lru_cache(maxsize=64)
def _recursion(strategy: BufferedToeplitz) -> BufferedRecursion:
    n = strategy.iterations
    decays, weights = np.array(strategy.decays), np.array(strategy.weights)
    first = float(strategy.array[0])
    inverse = _inverse_column(decays, weights, n) / first
    reach = np.array([np.abs(quotient(inverse, np.array([1.0, -decay]))).sum() for decay in decays])
    return BufferedRecursion(first, weights, decays, float(np.abs(inverse).sum()), reach)


def _log_error(decays, weights, error_of: Callable, n: int, min_separation: int, participations: int):
    """Return the log of error x squared norm of C x, and its gradients in decays and weights.

    x has `participations` ones, `min_separation` steps apart. With h the column of the inverse,
    `dh / dc_k = -h * h` delayed by k.
    """
    powers = _powers(decays, n, _BLOCK)
    c, h = np.append(1.0, powers @ weights), _inverse_column(decays, weights, n, _BLOCK)
    error, slopes = error_of(h)
    squared = product(h, h)[:n]
    of_error = -sums_at_lags(slopes, squared, n)
    y = _shifted_sums(c, min_separation, participations)
    square = float(np.dot(y, y))
    of_square = 2 * _shifted_sums(y[::-1], min_separation, participations)[::-1]
    of_c = (of_error / error + of_square / square)[1:]
    of_decays = (of_c[1:] * np.arange(1, n - 1)) @ powers[:-1]
    return np.log(error) + np.log(square), weights * of_decays, of_c @ powers


def _shifted_sums(series: np.ndarray, separation: int, times: int) -> np.ndarray:
    """Return the sum of `times` copies of a series, each delayed by `separation`; of its length."""
    n = series.size
    rows = -(-n // separation)
    sums = np.append(series, np.zeros(rows * separation - n)).reshape(rows, separation).cumsum(axis=0)
    if times < rows:
        sums[times:] -= sums[:-times].copy()
    return sums.ravel()[:n]


def _start(n: int, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (decays, weights) to start from: log-spaced, and near those of the square root of sums."""
    decays = 1 - (np.geomspace(1 / (n + 1), 0.6, buffers) if buffers > 1 else np.array([(n + 1) ** -0.5]))
    weights = np.sqrt(1 - decays)
    return decays, 0.9 * weights / weights.sum()


def _one_fewer(decays: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums with two neighbours merged: similar ones, or one of negligible weight."""
    together = weights[:-1] + weights[1:]
    missed = weights[:-1] * weights[1:] / together * np.diff(np.log1p(-decays)) ** 2
    i = int(np.argmin(missed))
    mean = (weights[i] * decays[i] + weights[i + 1] * decays[i + 1]) / together[i]
    decays, weights = np.delete(decays, i), np.delete(weights, i)
    decays[i], weights[i] = mean, together[i]
    return decays, weights


def _search(start, error_of: Callable, n: int, separation: int, participations: int):
    """Return (log error, decays, weights) from one start, by BFGS on logits of the weights and a rest."""
    decays, weights = start
    buffers = decays.size
    highest = np.repeat([np.log(n / _SLOWEST), _STEEP], buffers)

    def numbers(x):
        x = np.clip(x, -_STEEP, highest)
        shares = np.exp(x[buffers:] - max(0.0, x[buffers:].max()))
        rest = np.exp(-max(0.0, x[buffers:].max()))
        return scipy.special.expit(x[:buffers]), shares / (shares.sum() + rest)

    def objective(x):
        decays, weights = numbers(x)
        value, of_decays, of_weights = _log_error(decays, weights, error_of, n, separation, participations)
        of_logits = weights * (of_weights - np.dot(of_weights, weights))
        inside = (x >= -_STEEP) & (x <= highest)
        return value, np.append(of_decays * decays * (1 - decays), of_logits) * inside

    x = np.append(scipy.special.logit(decays), np.log(weights / (1 - weights.sum())))
    optimum = scipy.optimize.minimize(
        objective, x, jac=True, method="BFGS", options={"gtol": 1e-6, "maxiter": 500}
    )
    decays, weights = numbers(optimum.x)
    order = np.argsort(-decays)
    return optimum.fun, decays[order], weights[order]
