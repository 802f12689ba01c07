"""Likelihood of several independent b-min-sep processes whose signals add up, in logarithms.

With counts `x = x^1 + .. + x^m`, two participations d steps apart overlap by `<c_i, c_{i-d}>`, so

    P/Q = E prod_{participations} e^{r_i} prod_{pairs of different processes} e^{-<c_i, c_{i'}> / sigma^2},

the weight of replicas (proofs/proposals.md, 2.2) with the attractions inverted and every participation at
step i weighed by `e^{r_i}`. The state is how long each of the other processes stays locked out
(`kernels.lockouts`); a participation meets those of the last b - 1 steps, earlier ones of a process being b
steps and more away (proofs/shared_examples.md).

As in `kernels.recurrence`, the recurrence runs on ln P/Q less ln(1 - p) for every step at which a process is
free. A step without participation leaves it unchanged, so the rounding error does not grow with thousands of
steps (proofs/rounding.md, section 7).
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.lockouts import Move, moves, start_states, states
from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, log_add_exp, softplus, tree_sum, two_sum


def numbers_kept(block: int, processes: int, warm: bool) -> int:
    """Return how many numbers the recurrence holds at a time for one sample."""
    codes = 2 * block - 1 if warm else block
    return block * math.comb(codes + processes - 2, processes - 1)


def interacting_log_recurrence(
    log_ratios, overlaps, *, log_p: float, log_q: float, block: int, processes: int, start_distribution=None
):
    """Return ln P/Q of the sum of `processes` independent b-min-sep vectors, (...), exact up to rounding.

    Time comes first and samples last; numbers are static.

    Args:
      log_ratios: (n, ...) float, `r_i` of a single participation.
      overlaps: (block,) or (n, block) of the same dtype: `<c_i, c_{i-d}> / sigma^2` at [.., d].
      log_p: ln p.
      log_q: ln(1 - p), -inf at p = 1.
      block: minimum separation b >= 1.
      processes: m >= 1.
      start_distribution: (block,) probabilities of being locked out for 0..b-1 first steps; None is a cold
        start.
    """
    chex.assert_axis_dimension(overlaps, -1, block)
    n, samples = log_ratios.shape[0], log_ratios.shape[1:]
    num_blocks, dtype = -(-n // block), log_ratios.dtype
    # A padded step has r = 0 and no overlap, so its probabilities add up to 1.
    spare = num_blocks * block - n
    ratios = jnp.pad(log_ratios, [(0, spare)] + [(0, 0)] * len(samples))
    ratios = ratios.reshape(num_blocks, block, *samples)
    shared = overlaps_by_block(overlaps, n, block, dtype)
    one_step = _certain_step if log_q == -math.inf else _step
    real = _block_of(one_step, moves(block, processes, block), log_p, log_q, block)
    # Gradients keep one state a block and recompute the others.
    remade = jax.checkpoint(lambda later, step: (real(later, *step), None))  # pyright: ignore
    end = _past_the_end(block, processes, log_q, samples, dtype)
    # All steps of all processes, without those that are locked out at the start.
    free = num_blocks * block * processes
    if start_distribution is None or block == 1:
        (values, lost), _ = lax.scan(remade, end, (ratios, shared), reverse=True)
        return values[0] + (lost[0] + jnp.asarray(free_steps(np.array(free), log_q), dtype))
    later, _ = lax.scan(remade, end, (ratios[1:], shared[1:]), reverse=True)
    # The first block has virtual histories, too. Nothing beyond it refers to them.
    size = math.comb(2 * block + processes - 3, processes - 1)
    later = _Later(*(with_room(part, len(states(block, processes - 1)), size) for part in later))
    early = _block_of(one_step, moves(block, processes, 2 * block - 1), log_p, log_q, block)
    first = early(later, ratios[0], shared[0])
    earliest, number, chance = start_states(block, processes, np.asarray(start_distribution))
    locked_out = states(block, processes).sum(axis=1)
    weights = np.log(chance) + free_steps(free - locked_out, log_q)
    terms = first.values[earliest * size + number] + _column(weights, dtype, len(samples))
    # As a tree, as there may be tens of thousands.
    largest = lax.stop_gradient(terms.max(axis=0))
    return largest + jnp.log(tree_sum(jnp.exp(terms - largest[None]), 0))


def overlaps_by_block(overlaps, n: int, block: int, dtype):
    """Return (blocks, block, block) of `overlaps` as of `interacting_log_recurrence`, 0 at padded steps."""
    num_blocks = -(-n // block)
    shared = jnp.broadcast_to(jnp.asarray(overlaps, dtype), (n, block))
    return jnp.pad(shared, [(0, num_blocks * block - n), (0, 0)]).reshape(num_blocks, block, block)


class _Later(NamedTuple):
    """Natural log of the values of the next block in every state, (rows * states, ...), with compensation.

    `lost` has one row, that of the step after; at p = 1 one row for every step.
    """

    values: jax.Array
    lost: jax.Array


def _column(numbers, dtype, ndim: int):
    """Reshape one number per state, for `ndim` axes of samples."""
    return jnp.asarray(numbers, dtype).reshape(-1, *[1] * ndim)


def free_steps(count: np.ndarray, log_q: float) -> np.ndarray:
    """Return the log-probability of so many free steps without participation, float64; 0 at p = 1."""
    return count * (log_q if log_q > -math.inf else 0.0)


def _past_the_end(block: int, processes: int, log_q: float, samples, dtype) -> _Later:
    """Return the values past the end: the likelihood is 1, but the free steps beyond the end were counted."""
    steps = processes * np.arange(block)[:, None] + states(block, processes - 1).sum(axis=1)
    values = _column(free_steps(steps, log_q), dtype, len(samples))
    values = jnp.broadcast_to(values, (steps.size, *samples))
    lost = steps.size if log_q == -math.inf else steps.shape[1]
    return _Later(values, jnp.zeros_like(values[:lost]))


def with_room(part, size: int, room: int):
    """Pad rows of `size` states to rows of `room`."""
    rows = part.reshape(-1, size, *part.shape[1:])
    rows = jnp.pad(rows, [(0, 0), (0, room - size)] + [(0, 0)] * (part.ndim - 1))
    return rows.reshape(-1, *part.shape[1:])


def _block_of(one_step, all_moves, log_p: float, log_q: float, block: int):
    """Return `(_Later of the next block, ratios, overlaps) -> _Later of this block`."""
    # New arrays of 32 bits: JAX caches arrays with the width of the first use.
    all_moves = [Move(*(part.astype(np.int32) for part in move)) for move in all_moves]
    step = one_step(all_moves, log_p, log_q, block)

    def solve(later, ratios, overlaps):
        steps = jnp.arange(block, dtype=jnp.int32)
        return lax.scan(step, later, (steps, ratios, overlaps), reverse=True)[0]

    return solve


def _log_factor(counts, free, ago, log_one: float, overlap, ratio):
    """Return ln of the factor of `counts` participations in every state, (states, ...).

    `counts` and `free` are (states,) int; `ago` is (states, processes - 1) int, as in `Move`; `overlap` is
    that of this step with the b - 1 last steps, and `ratio` the log-ratio of one participation at this step.
    """
    dtype, ndim = ratio.dtype, ratio.ndim
    ways = np.array([math.log(math.comb(int(f), int(j))) for f, j in zip(free, counts, strict=True)])
    apart = overlap.at[0].set(0.0)  # [0] stands for processes without overlap
    own = jnp.asarray(counts, dtype) * apart[ago].sum(axis=-1)
    own = own + jnp.asarray(counts * (counts - 1) // 2, dtype) * overlap[0]
    fixed = jnp.asarray(ways + counts * log_one, dtype) - own
    return _column(fixed, dtype, ndim) + _column(counts, dtype, ndim) * ratio[None]


def _step(all_moves, log_p: float, log_q: float, block: int):
    """Return the update of one step back in time, for p < 1.

    `g(s) = g_0 + ln(1 + sum_j e^{a_j})`, g_0 that of the next step without participation.
    """
    size, idle = len(all_moves[0].which), all_moves[0].after
    log_one = log_p - block * log_q

    def step(later, at):
        k, ratio, overlap = at
        values, lost = later
        # Rows above k already hold this block, those up to k the next one.
        before = values[(k + 1) % block * size + idle]
        total = None
        for j, move in enumerate(all_moves[1:], 1):
            if not len(move.which):
                continue
            ahead = values[(k + move.delta) % block * size + move.after]
            counts = np.full(len(move.which), j)
            factor = _log_factor(counts, move.free, move.ago, log_one, overlap, ratio)
            if total is None:  # one process is always free
                total = (ahead - before) + factor
                continue
            part = log_add_exp(total[move.which], (ahead - before[move.which]) + factor)
            if (move.which == np.arange(len(move.which))).all():
                total = jnp.concatenate([part, total[len(move.which) :]])
            else:
                total = total.at[move.which].set(part)
        now, lost = two_sum(before, softplus(total) + lost[idle])
        return _Later(lax.dynamic_update_slice_in_dim(values, now, k * size, axis=0), lost), None

    return step


def _certain_step(all_moves, log_p: float, log_q: float, block: int):
    """Return the update of one step back in time at p = 1: all free processes participate."""
    free = all_moves[0].free
    size = len(free)
    ago, delta, after = (np.zeros_like(part) for part in all_moves[0][2:])
    for j, move in enumerate(all_moves):
        chosen = np.flatnonzero(move.free == j)
        where = move.which[chosen]
        ago[where], delta[where], after[where] = move.ago[chosen], move.delta[chosen], move.after[chosen]

    def step(later, at):
        k, ratio, overlap = at
        row = (k + delta) % block * size + after
        factor = _log_factor(free, free, ago, log_p, overlap, ratio)
        now = two_sum(later.values[row], factor + later.lost[row])
        kept = (
            lax.dynamic_update_slice_in_dim(old, new, k * size, 0)
            for old, new in zip(later, now, strict=True)
        )
        return _Later(*kept), None

    return step


def rounding_bound(
    sums,
    block: int,
    variance: float,
    counts: tuple[int, int],
    max_ratio: float,
    ratio_error: float,
    log_max: float,
) -> float:
    """Bound the float32 error of `interacting_log_recurrence` (proofs/rounding.md, section 7).

    It is the error of ln of the summand of a vector of `counts[0]` participations, of `counts[1]` at most, in
    nats; infinity where no bound is known.

    Args:
      sums: of the scheme (`Scheme.sums`).
      block: minimum separation b.
      variance: of the noise, sigma^2.
      counts: see above.
      max_ratio: largest |log-ratio| of one participation.
      ratio_error: of one log-ratio, in units of 2^-24.
      log_max: upper bound on the natural log of the likelihood ratio.
    """
    count, most = counts
    unit, number, together = 2.0**-24, sums.processes, math.log(sums.terms)
    depth = math.ceil(math.log2(max(sums.terms, 2))) + 20
    overlap = 1.5 * number / variance
    own = ratio_error + (number + 7) * overlap
    if sums.probability == 1:
        top = math.log(number) + max_ratio + overlap
        return unit * (count * (own + 5 * top) + depth + 4 * (count * top + together))
    log_q = -math.log1p(-sums.probability)
    free = number * (sums.steps + 2 * block) * log_q
    growth = log_max + free + number * math.log1p((block - 1) * sums.probability)
    shift = -math.log(sums.probability) + block * log_q
    top = shift + math.log(number) + max_ratio + overlap
    # One participation: its factor, differences of g, and the sum over how many participate at a step.
    local = own + 4 * top + 4 * growth
    local += (number - 1) * (3 * (number * top + growth) + SOFTPLUS_ROUNDINGS)
    steps = SOFTPLUS_ROUNDINGS + 2  # of an increment
    ends = steps * growth + 2 * sums.steps * unit * growth + 3 * free
    # Computed increments exceed the exact ones by a little: d grows with the d of all vectors.
    each = 4 + 3 * number
    slope = unit * ((most + number) * each + steps * (2 * most + 1))
    if not slope < 0.5:
        return math.inf
    of_all = unit * (most * local + ends) / (1 - slope)
    last = depth + 4 * (growth + together + number * shift)
    drift = (count + number) * each + steps * (2 * count + 1)
    return unit * (count * local + drift * of_all + ends + last)
