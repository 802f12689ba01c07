"""Two replicas of a scheme with at most one participation, uniform over n steps.

Kept with probability q, two participations at the steps i and j attract each other by `E_ij`, so
`Z_2 = 1 - q^2 + q^2 mean E_ij`. A pair is drawn by its later step, whose total weight is a sum over lags, and
then by its lag (proofs/fixed_counts.md, section 4).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import thresholds_64, uniform_64
from jaxacct.schemes.replicas.base import Attracting, log_attractions

_MAX_NUMBERS = 2.5e8
_UNIT = 2.0**-24
_ROUNDINGS_OF_A_STEP = 16  # of a threshold, and of the two numbers of a table that it is compared with
_ROUNDINGS_OF_AN_EVENT = 20  # of the weights of what may happen, added up
_MAX_LOG_ERROR = 0.5  # of the density that is drawn from


def _numbers(mechanism: Attracting) -> float:
    """Return the size of the table."""
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    return float(n) * (strategy.bands if strategy.rows(n) == n else 1)


def max_replicas(mechanism: Attracting) -> int:
    """Return 2 where two replicas have tables, else 1."""
    return 2 if _numbers(mechanism) <= _MAX_NUMBERS else 1


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the samples drawn in the time of the table: a number of it costs about as much as a step."""
    del m
    return _numbers(mechanism) / mechanism.scheme.iterations


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_2, float64; inf for too inexact draws."""
    assert m == 2
    return _summary(mechanism)[0]


log_normalizer_about = log_normalizer


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the draws (proofs/fixed_counts.md, section 5)."""
    assert m == 2
    return _summary(mechanism)[1], 2.0**-40


@functools.lru_cache(maxsize=1)
def _sums(mechanism: Attracting) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (sums over lags, (ends, n) by `log_attractions`; those of each later step; rarest event)."""
    n = mechanism.scheme.iterations
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weights = np.exp(log_attractions(mechanism)[:, :n])
        weights[:, 1:] *= 2  # either replica may be the later one
        by_lag = np.cumsum(weights, axis=1)
        by_step = by_lag[_row(n, len(by_lag), np.arange(n)), np.arange(n)]
        rarest = float((by_lag / weights).max())
        # Steps are drawn from 64 bits, whose first 32 must distinguish any two.
        if not by_step.min() > 2.0**-30 * by_step.sum():
            rarest = math.inf
    return by_lag, by_step, rarest


def _row(n: int, ends: int, step):
    """Return the row of the table for a later step."""
    return np.minimum(n - 1 - step, ends - 1)


@functools.lru_cache(maxsize=256)
def _summary(mechanism: Attracting) -> tuple[float, float]:
    """Return (ln Z_2, relative error of the drawn distribution); both are inf where draws are too inexact."""
    scheme = mechanism.scheme
    q, (_, by_step, rarest) = scheme.keep_probability, _sums(mechanism)
    both = q**2 * float(by_step.sum()) / scheme.iterations**2
    apart = [q * (1 - q), (1 - q) ** 2]
    total = both + 2 * apart[0] + apart[1]
    if not math.isfinite(total):
        return math.inf, math.inf
    rarest += max(total / part for part in (both, *apart) if part > 0)
    error = 2 * _UNIT * (_ROUNDINGS_OF_A_STEP + _ROUNDINGS_OF_AN_EVENT) * (rarest + 1)
    return (math.log(total), math.expm1(error)) if error < _MAX_LOG_ERROR else (math.inf, math.inf)


def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that draws need, float32."""
    assert m == 2
    scheme = mechanism.scheme
    q, (by_lag, by_step, _) = scheme.keep_probability, _sums(mechanism)
    both = q**2 * by_step.sum() / scheme.iterations**2
    kinds = np.cumsum([both, q * (1 - q), q * (1 - q), (1 - q) ** 2])
    steps = thresholds_64(np.cumsum(by_step)[:-1] / by_step.sum())
    arrays = {
        name: np.asarray(part, np.float32)
        for name, part in (("by_lag", by_lag), ("kinds", kinds / kinds[-1]))
    }
    return jax.device_put(arrays | {"by_step": steps})


def _drawn_steps(key, thresholds, num_samples: int):
    """Return (num_samples,) int32: number of the (2, number) `thresholds_64` at or below 64 random bits."""
    if thresholds.shape[1] == 0:
        return jnp.zeros(num_samples, jnp.int32)
    high, low = threefry.bits_32(key, (2, num_samples))
    below = jnp.searchsorted(thresholds[0], high).astype(jnp.int32)
    at = jnp.minimum(below, thresholds.shape[1] - 1)
    same = (thresholds[0, at] == high) & (below < thresholds.shape[1])
    return below + (same & (thresholds[1, at] <= low)).astype(jnp.int32)


def draw_positions_with_one(key, scheme, arrays, num_samples: int):
    """Return the same as `table.draw_positions_with_one`."""
    n, shape = scheme.iterations, (num_samples,)
    kind_key, pair_key, one_key = threefry.split(key, 3)
    kind = (uniform_64(kind_key, shape)[:, None] > arrays["kinds"][None, :3]).sum(axis=1)
    step_key, lag_key, which_key = threefry.split(pair_key, 3)
    later = _drawn_steps(step_key, arrays["by_step"], num_samples)
    by_lag = arrays["by_lag"]
    row = jnp.minimum(n - 1 - later, len(by_lag) - 1)
    level = uniform_64(lag_key, shape) * by_lag[row, later]

    def halve(_, between):  # the first lag whose sum is not below the level
        low, high = between
        middle = (low + high) // 2
        below = by_lag[row, middle] < level
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    lag, _ = jax.lax.fori_loop(0, n.bit_length(), halve, (jnp.zeros_like(later), later))
    alone = threefry.integers(one_key, shape, n)
    first_is_later = threefry.integers(which_key, shape, 2)
    met = kind == 0
    earlier = jnp.where(met & (lag > 0), later - lag, jnp.where((kind == 1) | (kind == 2), alone, n))
    last = jnp.where(met, later, n)
    # Both at one step are in the second slot alone, which is then the first one.
    same = met & (lag == 0)
    positions = jnp.stack([jnp.where(same, later, earlier), jnp.where(same, n, last)], axis=1)
    counts = jnp.where(positions < n, jnp.where(same[:, None], 2.0, 1.0), 0.0)
    of_pair = jnp.stack([1 - first_is_later, first_is_later], axis=1)
    mine = jnp.where(same[:, None], jnp.asarray([1, 0], jnp.int32), of_pair)
    mine = jnp.where(met[:, None], mine, (kind == 1)[:, None].astype(jnp.int32))
    mine = jnp.where(positions < n, mine, 0).astype(jnp.float32)
    return positions, counts, mine
