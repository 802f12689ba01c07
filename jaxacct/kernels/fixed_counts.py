"""Sums over all participation patterns with a fixed number of participations, in logarithms.

A pattern is `s_0 < .. < s_{k-1}` with gaps of at least b steps. Its columns `v_j = s_j - j (b - 1)` are k
strictly increasing integers below `m = n - (k - 1)(b - 1)`, and every such choice is a pattern. With W(j) the
sum over the participations j, .., k - 1 at columns from v on,

    W(j) at v  =  W(j) at v + 1  +  e^{r at step v + j (b - 1)} (W(j + 1) at v + 1),        W(k) = 1,

so a sample takes m k additions of logarithms. On a cycle of n steps the last gap has to be at least b, too,
which is `v_{k-1} - v_0 <= m - b`: the patterns whose first column is a are chains in the columns a .. a + m -
b. Columns are cut into blocks so that such a window is the end of one block and the beginning of the next
(proofs/fixed_counts.md, sections 1 and 2).
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, compensated_step, tree_sum


def num_columns(iterations, count, separation):
    """Return m, the number of columns, of integers or arrays; at least `count` where there is a pattern."""
    return iterations - (count - 1) * (separation - 1)


def log_num_patterns(iterations: int, count: int, separation: int, rotated: bool) -> float:
    """Return ln of the number of patterns, linear or on a cycle; `count` is at least 1."""
    m = num_columns(iterations, count, separation)
    if rotated and count > 1:
        return math.log(iterations / count * math.comb(iterations - count * (separation - 1) - 1, count - 1))
    return math.log(math.comb(m, count))


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


def log_sum_of_rotated_patterns(log_ratios, count: int, separation: int):
    """Return `log_sum_of_patterns` over the patterns on a cycle, with its arguments and result."""
    n, k, b = len(log_ratios), count, separation
    if k == 1 or b == 1:
        return log_sum_of_patterns(log_ratios, k, b)
    m = num_columns(n, k, b)
    reach = m - b  # of a window beyond its first column
    width = -(-m // 2) if 2 * (reach + 1) >= m else reach + 1
    blocks = -(-m // width)
    # Lanes: chains of the participations 1 .. that begin in a column of a block, and in the same way, time
    # and participations reversed, chains that end with the last participation in a column of a later block.
    offset = np.arange(width)[:, None, None]
    block = np.arange(blocks)[:, None]
    number = np.arange(1, k)
    column = block * width + offset
    forward = column + number * (b - 1)
    column = block[1:] * width + width - 1 - offset
    backward = column + (k - number) * (b - 1)
    rows = np.concatenate([forward, backward], axis=1)
    # A column beyond the last one has no participation.
    columns = np.concatenate([forward - number * (b - 1), backward - (k - number) * (b - 1)], axis=1)
    chains, known = _chains(log_ratios, np.clip(rows, 0, n - 1), columns < m)
    totals = []
    for here in range(blocks):
        first = np.arange(here * width, min((here + 1) * width, m))
        total = chains[1 : first.size + 1, here] + log_ratios[first[0] : first[-1] + 1, None]
        ends = known[1 : first.size + 1, here]
        # The end of each window in the next block; below 0 it is in this one, with all participations.
        last = np.minimum(first + reach, m - 1) - (here + 1) * width
        alone = int((last < 0).sum())
        parts = [jnp.where(ends[:alone, -1:], total[:alone, -1], -jnp.inf)]
        if alone < first.size:
            # The participations 0 .. j - 1 are in the block of the first one, the others in the next. Windows
            # end one column later each, then at the last one.
            lane, there = blocks + here, width - 1 - last[alone:]
            moving = 1 + int((there > there[-1]).sum())
            other = chains[there[-1] : there[0] + 1, lane][::-1, ::-1]
            same = jnp.broadcast_to(other[-1:], (there.size - moving, *other.shape[1:]))
            both = total[alone:] + jnp.concatenate([other, same])
            ends = ends[alone:] & known[there, lane][:, ::-1]
            parts.append(jnp.where(ends[:, :, None], both, -jnp.inf).reshape(ends.size, -1))
        totals += parts
    total = jnp.concatenate(totals)
    top = lax.stop_gradient(total.max(axis=0))
    return top + jnp.log(tree_sum(jnp.exp(total - top[None]), axis=0))


def _chains(log_ratios, rows, inside):
    """Return ln of the sums over chains of the participations 1 .. j - 1 from each column of a block on.

    Args:
      log_ratios: (n, num_samples).
      rows: (width, lanes, k - 1) the step of each participation at each column.
      inside: the same shape, whether the column is one.

    Returns:
      (width + 1, lanes, k, num_samples), j = 1 .. k in the third axis, columns from the first axis on; and
      whether there is such a chain, (width + 1, lanes, k) bool. Where there is none the number is undefined.
    """
    _, lanes, size = rows.shape
    # Chains of the participations i .. i + length - 1, the shortest first, each length by its first one.
    numbers = [size - length + 1 for length in range(1, size + 1)]
    lengths = np.repeat(np.arange(1, size + 1), numbers)
    places = np.cumsum([0, *numbers[:-1]])
    left = inside[::-1, :, 0].cumsum(axis=0)[::-1]  # columns from here on
    order = np.where(inside[:, None, :, 0], -np.sign(left[:, None] - lengths[:, None]), 1)

    def step(carry, given):
        g, lost = carry
        ratios, order = given
        # The chain after its first participation is one participation shorter, possibly empty.
        rest = [g[place + 1 : place + number] for place, number in zip(places, numbers, strict=True)]
        ahead = jnp.concatenate([jnp.zeros_like(ratios), *rest[:-1]])
        ratios = jnp.concatenate([ratios[:number] for number in numbers])
        carry = _extended(g, lost, ratios, ahead, order[:, :, None])
        return carry, jnp.stack([carry[0][place] for place in places], axis=1)

    nothing = jnp.zeros((len(lengths), lanes, log_ratios.shape[1]), log_ratios.dtype)
    given = log_ratios[rows.swapaxes(1, 2)], jnp.asarray(order)
    _, found = lax.scan(step, (nothing, nothing), given, reverse=True)
    found = jnp.concatenate([found, jnp.zeros_like(found[:1])])
    found = jnp.concatenate([jnp.zeros_like(found[:, :, :1]), found], axis=2)
    left = np.concatenate([left, np.zeros_like(left[:1])])
    return found, left[:, :, None] >= np.arange(size + 1)


def _extended(g, lost, log_ratios, ahead, order):
    """Return (g, lost) one column earlier: compensated logarithms `g + lost` of sums over chains.

    `ahead` is ln of the sum over the rest of the chain from the next column on. `order` is below 0 where
    chains also start later, 0 at the last column at which one can start, above 0 where none can.
    """
    more, rounded = compensated_step(g, lost, log_ratios, ahead)
    only = jnp.where(order == 0, log_ratios + ahead, 0)
    return jnp.where(order < 0, more, only), jnp.where(order < 0, rounded, 0)


def log_mean_over_patterns(log_ratios, count: int, separation: int, rotated: bool):
    """Return ln of the mean over all patterns, (num_samples,); arguments as of `log_sum_of_patterns`."""
    summed = log_sum_of_rotated_patterns if rotated else log_sum_of_patterns
    total = summed(log_ratios, count, separation)
    return total - jnp.asarray(log_num_patterns(len(log_ratios), count, separation, rotated), total.dtype)


def rounding_bound(
    count: int,
    terms: int,
    log_patterns: float,
    log_none: float,
    max_ratio: float,
    ratio_error: float,
) -> float:
    """Bound the float32 error of `log_mean_over_patterns` (proofs/fixed_counts.md, section 3).

    Args:
      count: k.
      terms: number of terms of the last sum, 1 where there is none.
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
    blocks = 1 if terms == 1 else 2
    increments = (SOFTPLUS_ROUNDINGS + 3) * blocks * 2 * k * largest
    last = math.ceil(math.log2(max(terms, 2))) + 24 + 16 * largest
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
