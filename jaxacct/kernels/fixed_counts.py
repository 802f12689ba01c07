"""Sums over all participation patterns with a fixed number of participations, in logarithms.

A pattern is `s_0 < .. < s_{k-1}` with gaps of at least b steps. Its columns `v_j = s_j - j (b - 1)` are k
strictly increasing integers below `m = n - (k - 1)(b - 1)`, and every such choice is a pattern. With W(j) the
sum over the participations j, .., k - 1 at columns from v on,

    W(j) at v  =  W(j) at v + 1  +  e^{r at step v + j (b - 1)} (W(j + 1) at v + 1),        W(k) = 1,

so a sample takes m k additions of logarithms (proofs/fixed_counts.md, section 1).
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, compensated_step


def num_columns(iterations, count, separation):
    """Return m, the number of columns, of integers or arrays; at least `count` where there is a pattern."""
    return iterations - (count - 1) * (separation - 1)


def log_num_patterns(iterations: int, count: int, separation: int) -> float:
    """Return ln of the number of patterns; `count` is at least 1."""
    return math.log(math.comb(num_columns(iterations, count, separation), count))


def log_choose(n: int, k: int) -> float:
    """Return ln C(n, k) of the exact integer, float64; -inf where k > n."""
    return math.log(math.comb(n, k)) if n >= k else -math.inf


def column_probabilities(columns: int, count: int, number: int) -> np.ndarray:
    """Return (columns,) the probability of each column to be that of participation `number`, from 0.

    `C(v, number) C(columns - 1 - v, count - 1 - number)` over their sum, for a uniform subset of `count`
    columns. Logarithms are added up from the largest one on, in blocks, so that the relative error is about
    `2^-51 sqrt(columns)` times the size of the logarithm.
    """
    m, after = columns, count - 1 - number
    v = np.arange(number, m - after - 1.0)  # columns with a next one
    steps = np.log1p(number / (v + 1 - number)) + np.log1p(-after / (m - 1 - v))
    top = int(np.count_nonzero(steps > 0))
    logs = np.concatenate([-_running(steps[:top][::-1])[::-1], [0.0], _running(steps[top:])])
    found = np.zeros(m)
    found[number : m - after] = np.exp(logs)
    return found / math.fsum(found)


def _running(values: np.ndarray) -> np.ndarray:
    """Return running sums by blocks, whose errors grow with the root of their number."""
    width = max(1, math.isqrt(values.size))
    rows = np.append(values, np.zeros(-values.size % width)).reshape(-1, width).cumsum(axis=1)
    before = np.append(0.0, rows[:-1, -1].cumsum())[: len(rows)]
    return (rows + before[:, None]).ravel()[: values.size]


def log_sum_of_patterns(log_ratios, count: int, separation: int):
    """Return ln of the sum over all patterns of e to the sum of their log-ratios.

    Args:
      log_ratios: (n, num_samples) float, of a participation at each step.
      count: k >= 1 participations; static.
      separation: b >= 1; static.

    Returns:
      (num_samples,) of the same dtype.
    """
    m = num_columns(len(log_ratios), count, separation)
    shifts = np.arange(count) * (separation - 1)
    columns = jnp.stack([log_ratios[shift : shift + m] for shift in shifts], axis=1)
    order = np.sign(np.arange(m)[:, None] - (m - count + np.arange(count)))

    def step(carry, given):
        g, lost = carry
        ratios, order = given
        ahead = jnp.concatenate([g[1:], jnp.zeros_like(g[:1])])
        return _extended(g, lost, ratios, ahead, order[:, None]), None

    nothing = jnp.zeros((count, log_ratios.shape[1]), log_ratios.dtype)
    (g, _), _ = lax.scan(step, (nothing, nothing), (columns, jnp.asarray(order)), reverse=True)
    return g[0]


def _extended(g, lost, log_ratios, ahead, order):
    """Return (g, lost) one column earlier: compensated logarithms `g + lost` of sums over chains.

    `ahead` is ln of the sum over the rest of the chain from the next column on. `order` is below 0 where
    chains also start later, 0 at the last column at which one can start, above 0 where none can.
    """
    more, rounded = compensated_step(g, lost, log_ratios, ahead)
    only = jnp.where(order == 0, log_ratios + ahead, 0)
    return jnp.where(order < 0, more, only), jnp.where(order < 0, rounded, 0)


def log_mean_over_patterns(log_ratios, count: int, separation: int):
    """Return ln of the mean over all patterns, (num_samples,); arguments as of `log_sum_of_patterns`."""
    total = log_sum_of_patterns(log_ratios, count, separation)
    return total - jnp.asarray(log_num_patterns(len(log_ratios), count, separation), total.dtype)


def rounding_bound(
    count: int, log_patterns: float, log_none: float, max_ratio: float, ratio_error: float
) -> float:
    """Bound the float32 error of `log_mean_over_patterns` (proofs/fixed_counts.md, section 3).

    Args:
      count: k.
      log_patterns: upper bound on ln of the number of chains of up to k participations.
      log_none: ln P(x = 0).
      max_ratio: largest |log-ratio| of one participation.
      ratio_error: of one log-ratio, in units of 2^-24.

    Returns:
      The error, natural log.
    """
    k, ratio, local = count, max_ratio, ratio_error
    if log_none > -math.inf:  # ln(1 - q + q e^r) in the place of r
        log_q = log_none / k
        ratio += 1 - log_q - math.log(-math.expm1(log_q))
        local += (SOFTPLUS_ROUNDINGS + 4) * ratio
    largest = k * ratio + log_patterns  # |ln of a sum over chains|
    local += 3 * ratio + 8 * largest
    increments = (SOFTPLUS_ROUNDINGS + 3) * 2 * k * largest
    last = 25 + 16 * largest
    return 2.0**-24 * (k * local + increments + last)


__all__ = [
    "column_probabilities",
    "log_choose",
    "log_mean_over_patterns",
    "log_num_patterns",
    "log_sum_of_patterns",
    "num_columns",
    "rounding_bound",
]
