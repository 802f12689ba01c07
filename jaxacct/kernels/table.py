"""Likelihood ratio, draws and rounding of the process of a sampling table (proofs/sampling_table.md).

A row has units of several `phases` side by side, with up to K - 1 participations left; all of them wait one
row (`schemes.table.Unfolded`). With f_i[j] the likelihood ratio from row i on of a unit that is eligible
there with j participations left,

    f_i[j] = (1 - p_i[j]) f_{i+1}[j]  +  p_i[j] e^{r_i} f_{i + lockout_i}[j - 1],        f = 1 past the end.

g = ln f - offset is unchanged by a wait, so that an increment of g is `softplus(weight_i + r_i + g_{i +
lockout_i} - g_{i+1})`: positive, and added with compensation (proofs/rounding.md, section 3). b-min-sep is
K = 1 with the same lockout everywhere (arXiv 2602.09338, eq. 1).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import exponentials, threefry
from jaxacct.kernels.exponentials import added, first_reached, look_up
from jaxacct.kernels.programs import any_left
from jaxacct.kernels.recurrence import compensated_step, softplus, two_sum

SHARE_ERROR = 2.0**-51
"""Bound on the error of a drawn choice's probability, beside one relative to it, over the number of choices
(proofs/sampling_table.md, section 4)."""
_RARE_SHARE = 2.0**-30  # choices below this probability have an absolute error: as total variation


class Outcome(NamedTuple):
    """What an eligible unit may do that makes it ineligible for a lockout.

    Attributes:
      chance: (n, K) float64.
      examples: number of the unit's examples that participate.
      counts: whether one participation less is left afterwards.
    """

    chance: np.ndarray
    examples: int
    counts: bool


class Draws(NamedTuple):
    """Numbers that draws of participations need; words are two flat arrays (`kernels.exponentials`).

    Attributes:
      hazards: words by (n + 1, K): -ln of the probability of waiting from step 0 on.
      outcomes: words by `Outcome` but the last, and (n, K): cumulative probabilities, given one of them.
      examples: of each of them.
      lockout: (n,) int32, in steps.
      start: words by first eligible step but the last: cumulative probabilities.
      most: largest number of outcomes of one unit.
      longest: largest number of steps that an eligible unit waits.
    """

    hazards: tuple
    outcomes: tuple
    examples: tuple[int, ...]
    counts: tuple[bool, ...]
    lockout: np.ndarray
    start: tuple
    num_left: int
    most: int
    longest: int

    @classmethod
    def of(cls, outcomes: list[Outcome], lockout, start, most: int) -> "Draws":
        """Return the words of a table's numbers; past the last of `start` a unit is never eligible."""
        chances = np.stack([outcome.chance for outcome in outcomes])
        total = chances.sum(axis=0)
        return cls(
            exponentials.words_of_integers(exponentials.integers_of(total).ravel()),
            words_of_shares(chances),
            tuple(outcome.examples for outcome in outcomes),
            tuple(outcome.counts for outcome in outcomes),
            lockout.astype(np.int32),
            exponentials.words_of(shares(np.asarray(start))[:-1], 64),
            chances.shape[2],
            most,
            longest_wait(total),
        )


def longest_wait(chances) -> int:
    """Return the largest number of steps to the next certain outcome, of (n, K) chances; n where K > 1."""
    n, K = chances.shape
    certain = np.flatnonzero(chances[:, 0] == 1) if K == 1 else np.zeros(0, int)
    return int(np.diff(certain, prepend=-1, append=n).max()) - 1


def shares(weights):
    """Return cumulative shares of weights along the first axis; 1 where all are 0."""
    reached = np.cumsum(weights, axis=0)
    with np.errstate(invalid="ignore"):
        return np.clip(np.where(reached[-1:] > 0, reached / reached[-1:], 1.0), 0.0, 1.0)


def words_of_shares(weights) -> tuple[np.ndarray, np.ndarray]:
    """Return words of the cumulative shares but the last, (choices - 1, ..), the other axes as one."""
    reached = shares(weights)[:-1]
    return exponentials.words_of(reached.reshape(len(reached), math.prod(reached.shape[1:])), 64)


def share_errors(chances, number: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of one of `number` choices with these probabilities.

    Choices are along the first axis; the errors hold in every state of the others.
    """
    rare = int(((chances > 0) & (chances < _RARE_SHARE)).sum(axis=0).max())
    least = float(chances.min(where=chances >= _RARE_SHARE, initial=1.0))
    return SHARE_ERROR * (1 / least + number + rare), SHARE_ERROR * rare


def chosen(words, table, place):
    """Return int32 indices: how many rows of `words_of_shares`, at a place of each, random words reach."""
    reached = [jnp.asarray(part).at[:, place].get(mode="promise_in_bounds") for part in table]
    return jnp.sum(~exponentials.below([word[None] for word in words], reached), axis=0, dtype=jnp.int32)


def log_likelihood_ratios(
    log_ratios, weights, certain, lockout, start, never: float = 0.0, recurrence: Callable | None = None
):
    """Return ln of the likelihood ratio of samples, natural log.

    Args:
      log_ratios: (n, num_samples) float: log-ratio of a participation at each step; a last row of phases may
        be incomplete.
      weights: (rows, phases, K) NumPy, ln of the weight of a participation; -inf where a unit cannot join.
      certain: (rows, phases, K) NumPy bool: an eligible unit joins.
      lockout: (rows,) NumPy int: rows from a participation to the next row at which the unit is eligible.
      start: NumPy, ln of the weights of the first eligible steps: phases, or rows where there is one phase.
      never: probability of never being eligible.
      recurrence: `first_values`, or what computes the same.

    Returns:
      (num_samples,) of the dtype of `log_ratios`.

    Source: arXiv 2602.09338, eq. (1) and theorem 5.1. Exact up to rounding.
    """
    samples, dtype = log_ratios.shape[1], log_ratios.dtype
    terms = (recurrence or first_values)(log_ratios, weights, certain, lockout, len(start))
    terms = terms + jnp.asarray(start, dtype)[:, None]
    if never:
        terms = jnp.concatenate([terms, jnp.full((1, samples), math.log(never), dtype)])
    return terms[0] if len(terms) == 1 else jax.nn.logsumexp(terms, axis=0)


def ring_length(lockout, starts: int) -> int:
    """Return how many rows are kept: those that participations lead to, and those at which units start."""
    return 1 + max(int(lockout.max()), starts - 1)


def first_values(log_ratios, weights, certain, lockout, starts: int):
    """Return (starts, num_samples): g at the first eligible steps, by one scan over the rows.

    The arguments are those of `log_likelihood_ratios`; `starts` is the number of first eligible steps.
    """
    (rows, phases, K), (n, samples), dtype = weights.shape, log_ratios.shape, log_ratios.dtype
    lanes = tuple(size for size in (phases, K) if size > 1)
    ratios = jnp.pad(log_ratios, ((0, rows * phases - n), (0, 0)))
    ratios = ratios.reshape(rows, *lanes[: phases > 1], *[1] * (K > 1), samples)
    weights = jnp.asarray(weights.reshape(rows, *lanes, 1), dtype)
    sure = None if not certain.any() else jnp.asarray(certain.reshape(rows, *lanes, 1))
    # Both branches end at the same value, and the first row alone is needed.
    is_product = K == 1 and lockout.max() == 1 and (phases > 1 or starts == 1)
    length = 1 if is_product else ring_length(lockout, starts if phases == 1 else 1)

    def step(carry, given):
        ring, g, lost = carry
        i, ratio, weight, wait, sure = given
        weight = weight + ratio
        ahead = g if is_product else _after_one(lax.dynamic_index_in_dim(ring, wait, keepdims=False), K)
        if is_product:
            carry = two_sum(g, softplus(weight) + lost)
        else:
            carry = compensated_step(g, lost, weight, ahead)
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
    return first[:starts] if phases > 1 else first[None] if starts == 1 else ring[:starts]


def _after_one(values, K: int):
    """Return the values of one participation less, along the axis before the last."""
    return values if K == 1 else jnp.concatenate([values[..., :1, :], values[..., :-1, :]], axis=-2)


def thin(log_ratios, keep: float):
    """Return `ln(1 - keep + keep e^r)`: log-ratios of participations that are kept with a probability."""
    if keep == 1:
        return log_ratios
    log_p, log_q = math.log(keep), math.log1p(-keep)
    return log_q + softplus(log_ratios + (log_p - log_q))


def draw_counts(key, num_samples: int, draws: Draws):
    """Draw (num_samples, `draws.most`) int32 steps of participation, ascending, and the examples at each.

    Steps n and above are none.

    A unit that is eligible leaves at the first step at which the hazards of the steps since exceed a unit
    exponential; 64 bits then choose the outcome. Jittable.
    """
    n, K, most = len(draws.lockout), draws.num_left, draws.most
    hazards, outcomes, lockout = jax.tree.map(jnp.asarray, (draws.hazards, draws.outcomes, draws.lockout))
    examples, counts = (jnp.asarray(np.array(part, np.int32)) for part in (draws.examples, draws.counts))
    start_key, wait_key, which_key = jax.random.split(key, 3)

    def unfinished(state):
        return any_left((state[0] < most) & (state[1] < n))

    def turn(state):
        k, free, left, positions, found = state
        here = step = jnp.minimum(free, n)
        if draws.longest:
            wait = exponentials.exponential_words(words_at(wait_key, k, num_samples))
            goal = added(look_up(hazards, here * K + left), wait)
            high = jnp.minimum(here + draws.longest, n)
            step = first_reached(
                lambda at: look_up(hazards, (at + 1) * K + left), goal, here, high, draws.longest
            )
        at = jnp.minimum(step, n - 1)
        words = (
            words_at(which_key, k, num_samples) if len(draws.examples) > 1 else [at.astype(jnp.uint32)] * 2
        )
        outcome = chosen(words, outcomes, at * K + left)
        positions = positions.at[k].set(jnp.where(examples[outcome] > 0, step, n))
        left = jnp.maximum(left - counts[outcome], 0)
        free = jnp.where(step < n, step + lockout[at], n)
        return k + 1, free, left, positions, found.at[k].set(examples[outcome])

    free = draw_place(start_key, num_samples, draws.start)
    left = jnp.full(num_samples, K - 1, jnp.int32)
    nothing = jnp.full((most, num_samples), n, jnp.int32)
    *_, positions, found = lax.while_loop(unfinished, turn, (jnp.int32(0), free, left, nothing, 0 * nothing))
    if not all(draws.examples):
        positions, found = lax.sort((positions, found), dimension=0, num_keys=1)
    return positions.T, found.T


def words_at(key, turn, num_samples: int):
    """Draw the words of a turn of a loop, (num_samples,) each; turns that are never reached cost nothing."""
    return threefry.two_words(jax.random.fold_in(key, turn.astype(jnp.uint32)), (num_samples,))


def draw_place(key, num_samples: int, cumulative):
    """Draw (num_samples,) int32 places, by the words of their cumulative probabilities without the last."""
    last = len(cumulative[0])
    if not last:
        return jnp.zeros(num_samples, jnp.int32)
    first, second = threefry.two_words(key, (num_samples,))
    # The first cumulative probability above the bits: at or above the bits and one.
    goal = added((first, second), (jnp.zeros_like(first), jnp.ones_like(first)))
    begin = jnp.zeros(num_samples, jnp.int32)
    return first_reached(functools.partial(look_up, cumulative), goal, begin, last, last)


def counts_at(positions, counts, iterations: int):
    """Return (num_samples, iterations) float32: `counts` at the steps `positions`, 0 elsewhere.

    `positions` are (num_samples, slots) int32, distinct in a row; iterations and above is no participation.
    `counts` are a scalar or of that shape.
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    nowhere = jnp.zeros((positions.shape[0], iterations), jnp.float32)
    return nowhere.at[rows, positions].set(jnp.asarray(counts, jnp.float32), mode="drop")
