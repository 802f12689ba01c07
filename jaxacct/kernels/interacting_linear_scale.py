"""The likelihood of several independent b-min-sep processes at many noise multipliers, in linear scale.

As in `kernels.linear_scale` the increments of the recurrence are positive and added up without logarithms: an
exponential a step, and a multiplication and an addition for every state, where
`kernels.interacting_recurrence` takes an exponential and a logarithm for each. A state's value is
`V = P/Q (1 - p)^-(free steps)`, a sum of positive terms over all continuations. A block stores `V / S - 1`,
S being the value with all processes free at the first step of the block after the next. No state of the block
has a smaller value: that all processes wait until then is one of its terms.

Values outside float32's range become infinite or NaN, never wrong finite numbers.
"""

import math
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.interacting_recurrence import (
    free_steps,
    log_mean_of_starts,
    log_values_at_the_start,
    overlaps_by_block,
    starts_of,
    with_room,
)
from jaxacct.kernels.linear_scale import above_min, over_the_scale
from jaxacct.kernels.lockouts import Move, moves, states
from jaxacct.kernels.programs import number
from jaxacct.kernels.recurrence import corrected_log1p, tree_sum, two_sum, weighted_sums


def interacting_ratios_of_sums(
    arrays,
    factors,
    overlaps,
    *,
    log_p: float,
    log_q: float,
    block: int,
    processes: int,
    start_distribution=None,
):
    """Return `interacting_log_recurrence` of the log-ratios `weighted_sums(arrays, factors)`.

    `overlaps` are those of a first factor of 1, and are multiplied by that factor. The (count, num_samples)
    float32 are not finite where the value is outside float32's range.
    """
    chex.assert_type([*arrays, factors, overlaps], jnp.float32)
    chex.assert_axis_dimension(overlaps, -1, block)
    options: dict[str, Any] = dict(log_p=log_p, log_q=log_q, block=block, processes=processes)
    if log_q == -math.inf:  # every free process participates, so the result is linear in the log-ratios
        parts = [
            log_values_at_the_start(
                array, 0 * overlaps if i else overlaps, start_distribution=start_distribution, **options
            )
            for i, array in enumerate(arrays)
        ]
        return log_mean_of_starts(weighted_sums([values for values, _ in parts], factors), parts[0][1])
    n, num_samples = arrays[0].shape
    num_blocks, each = -(-n // block), (factors.shape[0], num_samples)
    # A padded step has r = 0 and no overlap, so its probabilities add up to 1.
    padded = [jnp.pad(array, ((0, num_blocks * block - n), (0, 0))) for array in arrays]
    given = [array.reshape(num_blocks, block, num_samples) for array in padded]
    given.append(overlaps_by_block(overlaps, n, block, jnp.float32))
    real = _block_of(moves(block, processes, block), factors, log_p, log_q, block)
    state = _past_the_end(block, processes, log_q, each)
    starts = starts_of(block, processes, start_distribution)
    warm = len(starts.where) > 1
    (table, row, following, scale), _ = lax.scan(
        lambda state, at: (real(state, at), None), state, [part[warm:] for part in given], reverse=True
    )
    if warm:
        # The first block has virtual histories, too. Nothing beyond it refers to them.
        few, size = len(states(block, processes - 1)), math.comb(2 * block + processes - 3, processes - 1)
        state = with_room(table, few, size), with_room(row, few, size), following, scale
        early = _block_of(moves(block, processes, 2 * block - 1), factors, log_p, log_q, block)
        table, row, following, scale = early(state, [part[0] for part in given])
    with np.errstate(over="ignore"):
        weights = starts.chance * np.exp(-log_q * starts.locked_out)
    weights = jnp.asarray(weights, jnp.float32)
    grown = tree_sum(weights[:, None, None] * table[starts.where], axis=0)
    log_scale, lost = scale
    offset = number(float(free_steps(np.array(num_blocks * block * processes), log_q)))
    return (jnp.log(grown + weights.sum()) + lost) + log_scale + offset


def _past_the_end(block: int, processes: int, log_q: float, each):
    """Return the values past the end: the likelihood is 1, but the free steps beyond the end were counted."""
    steps = processes * np.arange(block)[:, None] + states(block, processes - 1).sum(axis=1)
    two_blocks = 2 * block * processes
    with np.errstate(over="ignore"):
        values = np.expm1((steps.ravel() - two_blocks) * log_q).astype(np.float32)
        following = np.expm1(-block * processes * log_q).astype(np.float32)
    table = jnp.broadcast_to(jnp.asarray(values)[:, None, None], (len(values), *each))
    scale = jnp.broadcast_to(number(two_blocks * log_q), each), jnp.zeros(each, jnp.float32)
    return table, table[: steps.shape[1]], jnp.broadcast_to(number(float(following)), each), scale


def _block_of(all_moves, factors, log_p: float, log_q: float, block: int):
    """Return `(state of the next block, arrays and overlaps of this block) -> state of this block`.

    A state is the `V / S - 1` of the block in every state, (block * states, count, num_samples), the same of
    its first step, S over the S of the block before less 1, and ln S in two parts.
    """
    all_moves = [Move(*(part.astype(np.int32) for part in move)) for move in all_moves]
    size, idle = len(all_moves[0].which), all_moves[0].after
    shift = number(log_p - block * log_q)
    steps = jnp.arange(block, dtype=jnp.int32)

    def one_block(state, given):
        table, row, following, (log_scale, lost) = state
        # Divided before the multiplication with e^r: the product of both may be out of range.
        over = over_the_scale(following)

        def step(carry, at):
            table, row = carry
            k, *values, overlap = at
            first = jnp.exp(weighted_sums([value[None] for value in values], factors)[0] + shift)
            total, weight = row[idle], jnp.ones_like(first)
            for j, move in enumerate(all_moves[1:], 1):
                weight = weight * first
                if not len(move.which):
                    continue
                # Rows above k already hold this block, those up to k the next one, in its scale.
                ahead = table[(k + move.delta) % block * size + move.after]
                scale = jnp.where((k + move.delta >= block)[:, None, None], over, 1.0)
                factor = _factor(j, move, overlap, factors)[:, :, None] * weight[None]
                added = factor * (scale + ahead * scale)
                if (move.which == np.arange(len(move.which))).all():
                    total = jnp.concatenate([total[: len(move.which)] + added, total[len(move.which) :]])
                else:
                    total = total.at[move.which].add(added)
            return (lax.dynamic_update_slice_in_dim(table, total, k * size, axis=0), total), None

        row = (row - following[None]) * over[None]
        scale = two_sum(log_scale, corrected_log1p(following) + lost)
        following = row[0]
        (table, row), _ = lax.scan(step, (table, row), (steps, *given), reverse=True)
        return table, row, following, scale

    return one_block


def _factor(j: int, move: Move, overlap, factors):
    """Return (states, count) float32: the number of ways in which j participate, times e^-(their overlap)."""
    ways = np.array([math.log(math.comb(int(free), j)) for free in move.free])
    apart = overlap.at[0].set(0.0)  # [0] stands for processes without overlap
    shared = j * apart[move.ago].sum(axis=-1) + j * (j - 1) // 2 * overlap[0]
    return above_min(jnp.asarray(ways, jnp.float32)[:, None] - shared[:, None] * factors[None, :, 0])


__all__ = ["interacting_ratios_of_sums"]
