"""Likelihood ratios at several noise multipliers at once, in linear scale: about one exponential a step.

In logarithms (`kernels.recurrence`) a step takes an exponential, a logarithm and compensated sums. Here the
increments are positive and added up without logarithms, relative to a scale that is renewed once a block, in
a fifth of the time. The rounding error is as small, since only increments round. The price is range: growth
by more than 2^100 = e^69 in a block, or beyond float32's largest number, e^88, gives infinity or NaN, never a
wrong finite number, and must be recomputed in logarithms. That requires one participation with a log-ratio of
about 70 (noise multipliers near 0.1), or nearly certain participations: b |ln(1 - p)| above 69.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.programs import number
from jaxacct.kernels.recurrence import corrected_log1p, first_offsets, phase_totals, two_sum, weighted_sums

# Maximum number of factors multiplied before a logarithm is taken, which takes as long as three of them.
_ROUNDS = 16
# Counts up to this are unrolled in the program; more are a loop, which compiles faster.
_WRITTEN_OUT = 16
# ln of the smallest coefficient of a count that is resolved, above the smallest normal float32.
_LEAST = -80.0
# Numbers up to this may be divisors without a relevant loss.
_ROOM = 2.0**100


class Counts(NamedTuple):
    """Distribution of the number of a unit's examples at a step, given at least one.

    `j` examples have the log-ratio `j r_i - j (j - 1) h_i`, `h_i` half the square norm of a column over the
    variance of the noise.

    Attributes:
      log_one: ln of the probability of one.
      log_more: (k - 1,) float64, ln of the probability of 2, 3, .. over the probability of one less.
      halves: () or (n,) float32, h_i for a first factor of 1.
    """

    log_one: float
    log_more: np.ndarray
    halves: jax.Array


def first_block_of_sums(
    arrays, factors, *, log_p: float, log_q: float, block: int, counts: Counts | None = None
):
    """Return `blocked_log_recurrence` of the log-ratios `weighted_sums(arrays, factors)`, never stored.

    With `G_i = f_i q^-(n+1-i)` the recurrence is a sum of positive terms, `G_i = G_{i+1} + w_i G_{i+b}`, `w_i
    = p q^-b e^{r_i}`. A block stores `H_i = G_i / S - 1`, S being G at the first step of the next block; H is
    at most the sum of w over one block, however many participations there are in all. `counts`, where a step
    may have several examples, need p below 1. The (block, count, num_samples) float32 are not finite where
    the value is outside float32's range.

    Source: arXiv 2602.09338, eq. (1) and theorem 5.1.
    """
    chex.assert_type([*arrays, factors], jnp.float32)
    if log_q == -np.inf:  # nothing is added up inside a block: a product of e^r for every phase
        totals = weighted_sums([phase_totals(array, block) for array in arrays], factors)
        return totals + number(log_p * -(-arrays[0].shape[0] // block))
    n, num_samples = arrays[0].shape
    num_blocks = -(-n // block)
    each = factors.shape[0], num_samples
    # A padded step has r = 0 and reads f = 1, so it gives f = 1.
    padded = [jnp.pad(array, ((0, num_blocks * block - n), (0, 0))) for array in arrays]
    by_block = [array.reshape(num_blocks, block, num_samples) for array in padded]
    weights = _weights(factors, log_p - block * log_q, counts)
    by_block = [*by_block, _of_steps(counts, num_blocks * block, n).reshape(num_blocks, block)]
    steps = jnp.arange(block, dtype=jnp.int32)

    def one_block(carry, given):
        later, following, (log_scale, lost) = carry
        # Divided before the multiplication with e^r: the product of both may be out of range.
        over = over_the_scale(following)

        def step(carry, at):
            added, block_of = carry
            k, *values, half = at
            ahead = lax.dynamic_index_in_dim(block_of, k, keepdims=False)
            ratios = weighted_sums([value[None] for value in values], factors)[0]
            added = added + weights(ratios, half) * (over + ahead * over)
            # In place of a value that no step reads again: a second array would be out of cache.
            return (added, lax.dynamic_update_index_in_dim(block_of, added, k, 0)), None

        start = jnp.zeros(each, jnp.float32), later
        (last, now), _ = lax.scan(step, start, (steps, *given), reverse=True)
        return (now, last, two_sum(log_scale, corrected_log1p(following) + lost)), None

    # Past the end f is 1: G is q^k at step n + k, and S that of the last of them.
    with np.errstate(over="ignore"):
        past = np.expm1((np.arange(block) - (block - 1)) * log_q).astype(np.float32)
    later = jnp.broadcast_to(jnp.asarray(past)[:, None, None], (block, *each))
    scales = jnp.broadcast_to(number((block - 1) * log_q), each), jnp.zeros(each, jnp.float32)
    # Its first step separately, too: sliced out of a block that is changed in place, it costs copies of all.
    following = jnp.broadcast_to(number(past[0]), each)
    (first, _, scales), _ = lax.scan(one_block, (later, following, scales), by_block, reverse=True)
    log_scale, lost = scales
    offsets = jnp.asarray(first_offsets(log_q, block, num_blocks * block), jnp.float32)
    return (corrected_log1p(first) + lost[None]) + log_scale[None] + offsets[:, None, None]


def first_block_of_factors(given, *, factors, log_p: float, log_q: float, block: int):
    """Return `blocked_log_recurrence` for several kinds of factors of a participation, without exponentials.

    As `first_block_of_sums`, with compensated sums, for p below 1.

    Args:
      given: several (n, num_samples), (n or 1, 1) or () arrays, the first (n, num_samples) float32.
      factors: of a step of `given`, (num_samples,), (1,) or () each, a tuple of (num_samples,) float32, one a
        kind.
      log_p: ln p.
      log_q: ln(1 - p).
      block: minimum separation b.

    Returns:
      One (block, num_samples) float32 per kind; not finite where the value is outside float32's range.
    """
    n, num_samples = given[0].shape
    num_blocks = -(-n // block)
    last = n - (num_blocks - 1) * block  # steps of the last block
    shift = number(math.exp(log_p - block * log_q))
    # Past the end f is 1: G is q^k at step n + k. S is that of the last step of a block of these, and for the
    # steps that the last block has past the end that of the first.
    places = np.arange(block)
    past = np.expm1((places - np.where(places < last, block - 1, block)) * log_q).astype(np.float32)

    def of_step(given, i):
        here = [
            jnp.reshape(one, one.shape[1:])
            if one.ndim < 2 or one.shape[0] == 1
            else lax.dynamic_index_in_dim(one, i, keepdims=False)
            for one in given
        ]
        return factors(*here)

    def all_blocks(given):
        nothing = jnp.zeros(num_samples, jnp.float32)
        beyond = nothing + number(math.expm1((last - block) * log_q))

        def one_block(turn, carry):
            blocks, followings, scales = carry
            inverses = list(map(over_the_scale, followings))
            steps = jnp.where(turn == 0, last, block)
            first = (num_blocks - 1 - turn) * block

            def step(turn, carry):
                sums, blocks = carry
                k, found = steps - 1 - turn, []
                for factor, inverse, values, (total, lost) in zip(
                    of_step(given, first + k), inverses, blocks, sums, strict=True
                ):
                    ahead = lax.dynamic_index_in_dim(values, k, keepdims=False)
                    # Divided before the multiplication with e^r: the product of both may be out of range.
                    found.append(two_sum(total, (shift * factor) * (inverse + ahead * inverse) + lost))
                # In place of a value that no step reads again: a second array would be out of cache.
                blocks = [
                    lax.dynamic_update_index_in_dim(values, total, k, 0)
                    for values, (total, _) in zip(blocks, found, strict=True)
                ]
                return found, blocks

            total = jnp.where(turn == 0, beyond, nothing)
            sums, blocks = lax.fori_loop(0, steps, step, ([(total, nothing)] * kinds, blocks))
            scales = [
                two_sum(log_scale, corrected_log1p(following) + lost)
                for (log_scale, lost), following in zip(scales, followings, strict=True)
            ]
            return blocks, [total for total, _ in sums], scales

        blocks = [jnp.broadcast_to(jnp.asarray(past)[:, None], (block, num_samples))] * kinds
        scales = [(nothing + number((block - 1) * log_q), nothing)] * kinds
        # The first step of a block separately, too, as in `first_block_of_sums`.
        start = blocks, [nothing + number(past[0])] * kinds, scales
        firsts, _, scales = lax.fori_loop(0, num_blocks, one_block, start)
        return firsts, scales

    kinds = len(jax.eval_shape(of_step, list(given), 0))
    firsts, scales = all_blocks(list(given))
    offsets = jnp.asarray(first_offsets(log_q, block, num_blocks * block), jnp.float32)[:, None]
    return tuple(
        (corrected_log1p(first) + lost[None]) + log_scale[None] + offsets
        for first, (log_scale, lost) in zip(firsts, scales, strict=True)
    )


def _of_steps(counts: Counts | None, steps: int, n: int):
    """Return (steps,) float32: h_i of n steps, and 0 beyond, where all counts have the log-ratio 0."""
    halves = jnp.zeros(()) if counts is None else counts.halves
    return jnp.pad(jnp.broadcast_to(jnp.asarray(halves, jnp.float32), (n,)), (0, steps - n))


def _weights(factors, shift: float, counts: Counts | None):
    """Return (ratios of (.., count, num_samples), h of (..)) -> e^shift times the likelihood ratio.

    With several it is `w_1 x (1 + c_1 x (1 + c_2 x (..)))`, `c_j = w_{j+1} / w_j e^{-2 j h}`, x = e^r: one
    exponential for all counts.
    """
    log_one = shift if counts is None else shift + counts.log_one
    added = number(log_one)
    if counts is None:
        return lambda ratios, half: jnp.exp(ratios + added)
    # Only e^shift x is available.
    log_more = jnp.asarray(counts.log_more - log_one, jnp.float32)
    js = jnp.arange(1, len(counts.log_more) + 1, dtype=jnp.float32)

    def weights(ratios, half):
        first = jnp.exp(ratios + added)
        half = half[..., None, None]
        doubled = lax.broadcast_to_rank(2 * factors[:, :1], half.ndim)

        def more(total, log_more, j):
            return 1 + first * above_min(log_more - j * (half * doubled)) * total

        total = jnp.ones_like(first)
        if len(counts.log_more) < _WRITTEN_OUT:
            for j in range(len(counts.log_more), 0, -1):
                total = more(total, log_more[j - 1], js[j - 1])
        else:
            total = lax.scan(lambda t, at: (more(t, *at), None), total, (log_more, js), reverse=True)[0]
        return first * total

    return weights


def over_the_scale(following):
    """Return 1 / (1 + following), `following` a new scale over the old one, less 1; NaN if it is too large.

    Reciprocals of the largest float32 numbers are flushed to 0, which would drop all participations that they
    multiply.
    """
    return jnp.where(following < _ROOM, 1 / (1 + following), jnp.nan)


def above_min(log):
    """Return e^log for coefficients of many samples; NaN where it is below the normal float32 range.

    Its factor may be so large that the lost digits would matter.
    """
    # Otherwise it would be recomputed for every sample.
    return lax.optimization_barrier(jnp.exp(jnp.where(log > _LEAST, log, jnp.nan)))


def log_growth_of_sums(arrays, factors, *, log_odds: float, cycle_length: int, counts: Counts | None = None):
    """Return `sum_k ln(1 + e^{log_odds + r_k})` per phase, r = `weighted_sums(arrays, factors)`.

    A few factors are multiplied before a logarithm is taken, as `(1 + h)(1 + w) = 1 + (h + w + h w)`, which
    is exact to rounding where they are near 1. `log_odds` are those of p; `cycle_length` 1 is one phase of
    all steps. The (cycle_length, count, num_samples) float32 are not finite where the value is outside
    float32's range.
    """
    chex.assert_type([*arrays, factors], jnp.float32)
    n, num_samples = arrays[0].shape
    rounds = -(-n // cycle_length)
    groups = -(-rounds // _ROUNDS)
    group = -(-rounds // groups)
    padding = (0, groups * group * cycle_length - n), (0, 0)
    # A padded step has r = -inf, a factor of one.
    padded = [jnp.pad(a, padding, constant_values=0 if i else -np.inf) for i, a in enumerate(arrays)]
    given = [array.reshape(groups, group, cycle_length, num_samples) for array in padded]
    halves = _of_steps(counts, groups * group * cycle_length, n).reshape(groups, group, cycle_length)
    weights = _weights(factors, log_odds, counts)

    def several(carry, values):
        *values, halves = values
        grown = jnp.zeros(carry[0].shape, jnp.float32)
        for k in range(group):
            weight = weights(weighted_sums([value[k] for value in values], factors), halves[k])
            grown = grown + weight + grown * weight
        # Otherwise it is computed once for the sum and once for the rounding.
        added = lax.optimization_barrier(corrected_log1p(grown))
        total, lost = carry
        return two_sum(total, added + lost), None

    nothing = jnp.zeros((cycle_length, factors.shape[0], num_samples), jnp.float32)
    (total, lost), _ = lax.scan(several, (nothing, nothing), (*given, halves))
    return total + lost
