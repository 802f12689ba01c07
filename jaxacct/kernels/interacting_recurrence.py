"""The likelihood of several independent b-min-sep processes whose signals add up, in logarithms.

With counts `x = x^1 + .. + x^m`, two participations d steps apart share `<c_i, c_{i-d}>`, so

    P/Q = E prod_{participations} e^{r_i} prod_{pairs of different processes} e^{-<c_i, c_{i'}> / sigma^2},

the weight of replicas (proofs/proposals.md, 2.2) with the attractions inverted and every participation at
step i weighed by `e^{r_i}`. The state is how long each of the other processes stays barred
(`kernels.bars`); a participation meets those of the last b - 1 steps, earlier ones of a process being b
steps and more away (proofs/shared_examples.md).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.bars import moves, start_states
from jaxacct.kernels.recurrence import log_add_exp


def numbers_kept(block: int, processes: int, warm: bool) -> int:
    """Numbers that the recurrence holds at a time for one sample."""
    codes = 2 * block - 1 if warm else block
    return block * math.comb(codes + processes - 2, processes - 1)


def interacting_log_recurrence(
    log_ratios, overlaps, *, log_p: float, log_q: float, block: int, processes: int, start_law=None
):
    """ln P/Q of the sum of `processes` independent b-min-sep vectors.

    Time comes first and samples last, as for `recurrence.blocked_log_recurrence`.

    Args:
      log_ratios: (n, ...) float, `r_i` of a single participation.
      overlaps: (block,) or (n, block) of the same dtype: `<c_i, c_{i-d}> / sigma^2` at [.., d].
      log_p, log_q: ln p and ln(1 - p), -inf at p = 1; static.
      block: minimum separation b >= 1; static.
      processes: m >= 1; static.
      start_law: (block,) probabilities of being barred for 0..b-1 first steps, static; None is cold.

    Returns:
      (...) of the same dtype. Exact up to rounding.
    """
    n, samples = log_ratios.shape[0], log_ratios.shape[1:]
    num_blocks, dtype = -(-n // block), log_ratios.dtype
    # A padded step has r = 0 and shares nothing, so all that may happen there adds up to 1.
    spare = num_blocks * block - n
    ratios = jnp.pad(log_ratios, [(0, spare)] + [(0, 0)] * len(samples))
    shared = jnp.broadcast_to(jnp.asarray(overlaps, dtype), (n, block))
    shared = jnp.pad(shared, [(0, spare), (0, 0)]).reshape(num_blocks, block, block)
    ratios = ratios.reshape(num_blocks, block, *samples)
    real = _block_of(moves(block, processes, block), log_p, log_q, block, len(samples))
    later = jnp.zeros((block * math.comb(block + processes - 2, processes - 1), *samples), dtype)
    # Gradients keep one state a block and make the others again.
    remade = jax.checkpoint(lambda later, step: (real(later, *step), None))  # pyright: ignore
    if start_law is None or block == 1:
        return lax.scan(remade, later, (ratios, shared), reverse=True)[0][0]
    later, _ = lax.scan(remade, later, (ratios[1:], shared[1:]), reverse=True)
    # The first block has virtual histories too. Nothing refers to one from there beyond it.
    size = math.comb(2 * block + processes - 3, processes - 1)
    later = later.reshape(block, -1, *samples)
    later = jnp.pad(later, [(0, 0), (0, size - later.shape[1])] + [(0, 0)] * len(samples))
    early = _block_of(moves(block, processes, 2 * block - 1), log_p, log_q, block, len(samples))
    first = early(later.reshape(block * size, *samples), ratios[0], shared[0])
    earliest, number, chance = start_states(block, processes, np.asarray(start_law))
    possible = chance > 0
    weights = np.log(chance[possible]).reshape(-1, *[1] * len(samples))
    reached = first[(earliest * size + number)[possible]]
    return jax.nn.logsumexp(reached + jnp.asarray(weights, dtype), axis=0)


def _block_of(all_moves, log_p: float, log_q: float, block: int, ndim: int):
    """`(values of the next block, ratios, overlaps) -> values of this block`, (block * states, ...) each."""
    size = len(all_moves[0].which)
    parts = []
    for j, move in enumerate(all_moves):
        idle = move.free - j
        chosen = np.flatnonzero(idle == 0) if log_q == -math.inf else np.arange(len(idle))
        ways = np.array([math.log(math.comb(int(free), j)) for free in move.free[chosen]])
        fixed = ways + j * log_p + (idle[chosen] * log_q if log_q > -math.inf else 0.0)
        parts.append((j, *(np.asarray(field)[chosen] for field in move), fixed))

    def column(values, dtype):
        return jnp.asarray(values, dtype).reshape(-1, *[1] * ndim)

    def step(values, at):
        k, ratio, overlap = at
        dtype = values.dtype
        total = None
        apart = overlap.at[0].set(0.0)  # [0] stands for those that nothing is shared with
        for j, which, _, ago, delta, after, fixed in parts:
            if not len(which):
                continue
            pull = apart[ago].sum(axis=-1)
            weight = column(fixed, dtype) - j * column(pull, dtype) - (j * (j - 1) // 2) * overlap[0]
            # Rows above k already hold this block, those up to k the next one.
            part = values[(k + delta) % block * size + after] + weight + j * ratio
            if log_q == -math.inf:  # exactly one j for each state
                blank = jnp.zeros((size, *part.shape[1:]), dtype) if total is None else total
                total = blank.at[which].set(part)
            elif total is None:
                total = part
            elif len(which) == size:
                total = log_add_exp(total, part)
            else:
                total = total.at[which].set(log_add_exp(total[which], part))
        assert total is not None  # some j is possible in every state
        return lax.dynamic_update_slice_in_dim(values, total, k * size, axis=0), None

    def solve(values, ratios, overlaps):
        return lax.scan(step, values, (jnp.arange(block), ratios, overlaps), reverse=True)[0]

    return solve
