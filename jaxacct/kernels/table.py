"""Likelihood ratio, draws and rounding of the process of a sampling table (proofs/sampling_table.md).

A row has units of several `phases` side by side, with up to K - 1 participations left; all of them wait one
row (`schemes.table.Unfolded`). With f_i[j] the likelihood ratio from row i on of a unit that is eligible
there with j participations left,

    f_i[j] = (1 - p_i[j]) f_{i+1}[j]  +  p_i[j] e^{r_i} f_{i + lockout_i}[j - 1],        f = 1 past the end.

g = ln f - offset is unchanged by a wait, so that an increment of g is `softplus(weight_i + r_i + g_{i +
lockout_i} - g_{i+1})`: positive, and added with compensation (proofs/rounding.md, section 3). b-min-sep is
K = 1 with the same lockout everywhere (arXiv 2602.09338, eq. 1).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import thresholds_64
from jaxacct.kernels.recurrence import softplus, two_sum


class Draws(NamedTuple):
    """Numbers that draws of participations need: thresholds of 64 random bits, high and low words first."""

    join: np.ndarray
    """(2, n, K) uint32: threshold below which an eligible unit joins."""
    certain: np.ndarray
    """(n, K) bool: an eligible unit joins."""
    lockout: np.ndarray
    """(n,) int32, in steps."""
    turns: bool
    start: np.ndarray
    """(2, number of starts) uint32: thresholds of the cumulative probabilities of the first eligible step."""
    starts_always: bool
    """Whether the last of these is certain."""
    keep: np.ndarray | None
    """(2,) uint32: threshold below which a participation is kept; None where all are."""

    @classmethod
    def of(cls, join, lockout, turns: bool, start, keep: float) -> "Draws":
        """Return the thresholds of a table's numbers (`schemes.table.SamplingTable`)."""
        always = math.fsum(start) > 1 - 1e-12
        return cls(
            thresholds_64(join.ravel()).reshape(2, *join.shape),
            join == 1,
            lockout.astype(np.int32),
            turns,
            thresholds_64(np.minimum(np.cumsum(start), 1.0)),
            always,
            None if keep == 1 else thresholds_64([keep])[:, 0],
        )


def log_likelihood_ratios(log_ratios, weights, certain, lockout, start, never: float = 0.0):
    """Return ln of the likelihood ratio of samples, natural log.

    Args:
      log_ratios: (n, num_samples) float: log-ratio of a participation at each step; a last row of phases may
        be incomplete.
      weights: (rows, phases, K) NumPy, ln of the weight of a participation; -inf where a unit cannot join.
      certain: (rows, phases, K) NumPy bool: an eligible unit joins.
      lockout: (rows,) NumPy int: rows from a participation to the next row at which the unit is eligible.
      start: NumPy, ln of the weights of the first eligible steps: phases, or rows where there is one phase.
      never: probability of never being eligible.

    Returns:
      (num_samples,) of the dtype of `log_ratios`.
    """
    (rows, phases, K), (n, samples), dtype = weights.shape, log_ratios.shape, log_ratios.dtype
    lanes = tuple(size for size in (phases, K) if size > 1)
    ratios = jnp.pad(log_ratios, ((0, rows * phases - n), (0, 0)))
    ratios = ratios.reshape(rows, *lanes[: phases > 1], *[1] * (K > 1), samples)
    weights = jnp.asarray(weights.reshape(rows, *lanes, 1), dtype)
    sure = None if not certain.any() else jnp.asarray(certain.reshape(rows, *lanes, 1))
    is_product = K == 1 and lockout.max() == 1  # both branches end at the same value
    # The ring holds the rows that a participation may lead to, and those at which a unit may start.
    length = 1 + (0 if is_product else max(int(lockout.max()), len(start) - 1 if phases == 1 else 0))

    def step(carry, given):
        ring, g, lost = carry
        i, ratio, weight, wait, sure = given
        weight = weight + ratio
        ahead = g if is_product else _after_one(lax.dynamic_index_in_dim(ring, wait, keepdims=False), K)
        difference = weight if is_product else weight + (ahead - g) - lost
        carry = two_sum(g, softplus(difference) + lost)
        if sure is not None:
            joined = two_sum(ahead, weight + lost if is_product else weight)
            carry = tuple(jnp.where(sure, one, other) for one, other in zip(joined, carry, strict=True))
        if not is_product:
            ring = lax.dynamic_update_index_in_dim(ring, carry[0], i, 0)
        return (ring, *carry), None

    nothing = jnp.zeros((*lanes, samples), dtype)
    here = np.arange(rows)
    given = here % length, ratios, weights, (here + lockout) % length, sure
    ends = jnp.zeros((length, *lanes, samples), dtype), nothing, nothing
    (ring, first, _), _ = lax.scan(step, ends, given, reverse=True)
    if K > 1:
        ring, first = ring[..., -1, :], first[..., -1, :]
    terms = first[: len(start)] if phases > 1 else first[None] if len(start) == 1 else ring[: len(start)]
    terms = terms + jnp.asarray(start, dtype)[:, None]
    if never:
        terms = jnp.concatenate([terms, jnp.full((1, samples), math.log(never), dtype)])
    return terms[0] if len(terms) == 1 else jax.nn.logsumexp(terms, axis=0)


def _after_one(values, K: int):
    """Return the values of one participation less, along the axis before the last."""
    return values if K == 1 else jnp.concatenate([values[..., :1, :], values[..., :-1, :]], axis=-2)


def thin(log_ratios, keep: float):
    """Return `ln(1 - keep + keep e^r)`: log-ratios of participations that are kept with a probability."""
    if keep == 1:
        return log_ratios
    log_p, log_q = math.log(keep), math.log1p(-keep)
    return log_q + softplus(log_ratios + (log_p - log_q))


def draw_participation(key, num_samples: int, draws: "Draws"):
    """Draw (num_samples, n) float32 of 0 and 1, a step at a time; jittable.

    `draws` holds thresholds of 64 bits, so that every step has a relative error of at most 2^-65 over the
    rarer of its outcomes.
    """
    start_key, step_key, keep_key = threefry.split(key, 3)
    _, n, K = draws.join.shape
    words = threefry.two_words(step_key, (n, num_samples))
    free = _first_steps(start_key, num_samples, draws)
    left = jnp.full(num_samples, K - 1, jnp.int32)

    def step(carry, given):
        free, left = carry
        i, words, join, certain, lockout = given
        of_each = 0 if K == 1 else left
        joins = (below(words, join[:, of_each]) | certain[of_each]) & (free == i)
        wait = jnp.where(joins | draws.turns, lockout, 1)
        free = jnp.where(free == i, i + wait, free)
        left = left - joins.astype(jnp.int32) if K > 1 else left
        return (free, left), joins

    given = np.arange(n, dtype=np.int32), words, draws.join.swapaxes(0, 1), draws.certain, draws.lockout
    _, joins = lax.scan(step, (free, left), jax.tree.map(jnp.asarray, given))
    if draws.keep is not None:
        joins = joins & below(threefry.two_words(keep_key, joins.shape), draws.keep)
    return joins.T.astype(jnp.float32)


def _first_steps(key, num_samples: int, draws: "Draws"):
    """Return (num_samples,) int32: the first eligible step of each sample; n and above is none."""
    (_, number), n = draws.start.shape, len(draws.lockout)
    # A step without a probability has the threshold of the step before it, and is never the first.
    last = number - 1 if draws.starts_always else n
    words = threefry.two_words(key, (num_samples, 1))
    first = jnp.sum(~below(words, jnp.asarray(draws.start)[:, None]), axis=1, dtype=jnp.int32)
    return jnp.where(first < number - draws.starts_always, first, last)


def below(words, threshold):
    """Return whether 64 random bits are below a threshold of two words."""
    return (words[0] < threshold[0]) | ((words[0] == threshold[0]) & (words[1] < threshold[1]))
