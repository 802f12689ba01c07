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
from jaxacct.kernels.exponentials import (
    added,
    below,
    exponential_words,
    first_reached,
    integers_of,
    look_up,
    words_of,
    words_of_integers,
)
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.recurrence import softplus, two_sum


class Outcome(NamedTuple):
    """What an eligible unit may do that makes it ineligible for a lockout."""

    chance: np.ndarray
    """(n, K) float64."""
    kept: bool
    """Whether it is a participation."""
    counts: bool
    """Whether one participation less is left afterwards."""


class Draws(NamedTuple):
    """Numbers that draws of participations need; words are two flat arrays (`kernels.exponentials`)."""

    hazards: tuple
    """Words by (n + 1, K): -ln of the probability of waiting from step 0 on."""
    outcomes: list
    """Words by (n, K), for all `Outcome`s but the last: cumulative probabilities, given one of them."""
    kept: tuple[bool, ...]
    """Which of them are participations."""
    counts: tuple[bool, ...]
    lockout: np.ndarray
    """(n,) int32, in steps."""
    start: list
    """Words of cumulative probabilities of the first eligible step, (1,) each; the last one is certain."""
    num_left: int
    most: int
    """Largest number of outcomes of one unit."""

    @classmethod
    def of(cls, outcomes: list[Outcome], lockout, start, most: int) -> "Draws":
        """Return the words of a table's numbers; past the last of `start` a unit is never eligible."""
        chances = np.stack([outcome.chance for outcome in outcomes])
        total = chances.sum(axis=0)
        return cls(
            words_of_integers(integers_of(total).ravel()),
            [words_of(part.ravel(), 64) for part in shares(chances)[:-1]],
            tuple(outcome.kept for outcome in outcomes),
            tuple(outcome.counts for outcome in outcomes),
            lockout.astype(np.int32),
            [words_of(part, 64) for part in shares(np.asarray(start)[:, None])[:-1]],
            chances.shape[2],
            most,
        )


def shares(weights):
    """Return cumulative shares of weights along the first axis; 1 where all are 0."""
    reached = np.cumsum(weights, axis=0)
    with np.errstate(invalid="ignore"):
        return np.clip(np.where(reached[-1:] > 0, reached / reached[-1:], 1.0), 0.0, 1.0)


def chosen(words, reached):
    """Return int32 indices: how many of a list of words, cumulative probabilities, random words reach."""
    found = jnp.zeros(words[0].shape, jnp.int32)
    for each in reached:
        found = found + jnp.where(below(words, each), 0, 1)
    return found


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
    # Both branches end at the same value, and the first row alone is needed.
    is_product = K == 1 and lockout.max() == 1 and (phases > 1 or len(start) == 1)
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


def draw_positions(key, num_samples: int, draws: Draws):
    """Draw (num_samples, `draws.most`) int32: steps of participation, ascending; n and above is none.

    A unit that is eligible leaves at the first step at which the hazards of the steps since exceed a unit
    exponential; 64 bits then choose the outcome. Jittable.
    """
    n, K, most = len(draws.lockout), draws.num_left, draws.most
    hazards, outcomes, lockout = jax.tree.map(jnp.asarray, (draws.hazards, draws.outcomes, draws.lockout))
    kept, counts = jnp.asarray(np.array(draws.kept)), jnp.asarray(np.array(draws.counts, np.int32))
    start_key, wait_key, which_key = threefry.split(key, 3)
    waits = threefry.two_words(wait_key, (most, num_samples))
    which = threefry.two_words(which_key, (most, num_samples)) if outcomes else waits

    def unfinished(state):
        return any_left((state[0] < most) & (state[1] < n))

    def turn(state):
        k, free, left, positions = state
        here = jnp.minimum(free, n)
        goal = added(look_up(hazards, here * K + left), exponential_words([word[k] for word in waits]))
        step = first_reached(lambda at: look_up(hazards, (at + 1) * K + left), goal, here, n, n)
        at = jnp.minimum(step, n - 1)
        reached = [look_up(words, at * K + left) for words in outcomes]
        outcome = chosen([word[k] for word in which], reached)
        found = jnp.where(kept[outcome], step, n)
        left = jnp.maximum(left - counts[outcome], 0)
        return k + 1, jnp.where(step < n, step + lockout[at], n), left, positions.at[k].set(found)

    free = chosen(threefry.two_words(start_key, (num_samples,)), draws.start)
    left = jnp.full(num_samples, K - 1, jnp.int32)
    nothing = jnp.full((most, num_samples), n, jnp.int32)
    *_, positions = lax.while_loop(unfinished, turn, (jnp.int32(0), free, left, nothing))
    return (positions if all(draws.kept) else jnp.sort(positions, axis=0)).T
