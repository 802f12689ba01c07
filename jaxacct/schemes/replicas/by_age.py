"""Two replicas of b-min-sep whose participations overlap at any distance.

Where C has more bands than the separation b, the tables of `table` include overlaps of pairs less than b
steps apart, and give every participation one lift for all others, as large as if those were b, 2 b, .. steps
away. Here a state has both replicas' ages, the steps since each last participated, up to G > b. So the
overlap of a participation with the last one of each replica is exact up to there, and the lift for previous
ones follows from the age: they are b, 2 b, .. steps before the last (proofs/non_banded.md, "Ages").

A replica has a *code*: age - 1 for 1..G steps, the last of them standing for longer ones, too; G without any
participation; G + s for a virtual history that locks out for s more steps (warm start: it has no overlap).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.exponentials import words_of
from jaxacct.kernels.randomness import uniform_64
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.kernels.table import SHARE_ERROR, draw_place, shares
from jaxacct.schemes.replicas.base import MIN_ENTRY, Attracting, has_room, log_lift, stationary_lockouts

_MAX_NUMBERS = 1.2e8  # maximum of the table: steps and pairs of codes, 4 bytes each
_LONG_AGE = 128  # resolved ages in steps, or 2 b
_UNIT = 2.0**-24


def longest_age(mechanism: Attracting) -> int:
    """Return G, the longest resolved age; 0 where the tables would be too large."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    age = min(n, max(2 * b, _LONG_AGE), math.isqrt(int(_MAX_NUMBERS / n)) - b)
    return age if age >= b + b // 4 else 0


def fits(mechanism: Attracting) -> bool:
    """Return whether columns overlap and the tables fit."""
    return mechanism.strategy.is_toeplitz and log_lift(mechanism) > 0 and longest_age(mechanism) > 0


class _Codes(NamedTuple):
    """Transitions of every code, (codes,): the next code, whether it may participate, and ln of its factors.

    Attributes:
      near: overlap of a participation with that of the age, over sigma^2, if that is below b.
      far: upper bound on its overlap with all previous ones, b steps away or more.
    """

    after: np.ndarray
    free: np.ndarray
    near: np.ndarray
    far: np.ndarray


def _codes(mechanism: Attracting) -> _Codes:
    n, b, oldest = mechanism.scheme.iterations, mechanism.scheme.min_separation, longest_age(mechanism)
    shared = mechanism.strategy.column_products(n) / mechanism.noise_multiplier**2
    # Some are computed by a Fourier transform: raised by more than its error.
    at_most = np.maximum.accumulate((np.maximum(shared, 0.0) * (1 + 1e-9) + 1e-12)[::-1])[::-1]
    at_most = np.append(at_most, np.zeros(oldest + b))
    earlier = at_most.copy()  # sums over d, d + b, ..
    for d in range(n - 1, -1, -1):
        earlier[d] += earlier[d + b]
    ages, none = np.arange(1, oldest + 1), np.zeros(b)
    near = np.where(ages < b, np.append(shared, np.zeros(oldest))[ages], 0.0)
    far = np.where(ages < b, 0.0, at_most[ages]) + earlier[ages + b]
    far[-1] = earlier[oldest]
    after = np.concatenate([np.minimum(ages, oldest - 1), [oldest], oldest + np.arange(b - 1)])
    free = np.concatenate([ages >= b, np.arange(b) == 0])
    return _Codes(after, free, np.concatenate([near, none]), np.concatenate([far, none]))


def errors(mechanism: Attracting) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_with_one` draws from.

    A float32 uniform, fine near 0, is compared with sums of three float32 weights, each within a dozen
    roundings. A share has the error of the sum that it ends, over itself; the largest such ratios of all
    states are counted. The starts are drawn as those of a table, the uniforms of the three comparisons of a
    step are multiples of 2^-64. No product of a factor and a weight is below `MIN_ENTRY` in the unit of its
    step, so that none is flushed.
    """
    scheme, odds = mechanism.scheme, _backward(mechanism).odds
    n, max_count = scheme.iterations, 2 * scheme.max_participations
    relative = 16 * _UNIT * (n * odds[0] + max_count * (2 + odds[1] * (1 + odds[2]) + odds[2]))
    variation = scheme.min_separation**2 * SHARE_ERROR + 3 * n * 2.0**-64
    return math.expm1(min(600.0, relative)), variation


def log_normalizer(mechanism: Attracting) -> float:
    """Return ln Z, float64, an upper bound on that of two replicas; inf where it overflows."""
    return _backward(mechanism).log_z


class _Weights(NamedTuple):
    """Weights of the remaining steps, backwards in time.

    Attributes:
      log_z: ln Z, inf on overflow.
      odds: the largest ratios: of any participation, of both to one, of one to the other.
      starts: (b, b) the weight of both initial lockouts.
      ahead: (n, codes, codes) float32 after each step, the largest 1 in each.
    """

    log_z: float
    odds: tuple[float, float, float]
    starts: np.ndarray
    ahead: np.ndarray


def _factors(mechanism: Attracting):
    """Return (codes, factors of the first participating alone, of both, of none), (codes, codes) float64."""
    p = mechanism.scheme.sampling_probability
    q = -np.expm1(log_probabilities(p)[0]) if p < 1 else 0.0
    codes = _codes(mechanism)
    pull = np.exp(codes.near + codes.far)
    waits, joins = np.where(codes.free, q, 1.0), np.where(codes.free, p, 0.0) * pull
    equal = np.exp(mechanism.strategy.column_products(1)[0] / mechanism.noise_multiplier**2)
    both = np.outer(joins * pull, joins * pull) * equal
    return codes, np.outer(joins, pull * waits), both, np.outer(waits, waits)


@functools.lru_cache(maxsize=1)
def _backward(mechanism: Attracting) -> _Weights:
    scheme = mechanism.scheme
    n, b = scheme.iterations, scheme.min_separation
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes, alone, together, stays = _factors(mechanism)
        after, size = codes.after, len(codes.after)
        inside = slice(b - 1, size - b + 1)  # codes of the free
        weights, odds = np.ones((size, size)), np.zeros(3)
        least = min(float(part.min(where=part > 0, initial=1.0)) for part in (alone, together, stays))
        ahead, log_scale, narrow = np.empty((n, size, size), np.float32), 0.0, True
        for i in range(n - 1, -1, -1):
            largest = weights.max()
            weights /= largest
            log_scale += float(np.log(largest))
            narrow &= bool(weights.min() * least >= MIN_ENTRY)
            ahead[i] = weights
            only = alone * weights[0, after]
            either, both = only + only.T, together * weights[0, 0]
            some, stay = either + both, stays * weights[after][:, after]
            weights = some + stay
            one = only[inside, inside]
            max_odds = (
                (some / stay).max(),
                (both[inside, inside] / either[inside, inside]).max(),
                (one / one.T).max(),
            )
            odds = np.maximum(odds, max_odds)
        stationary = stationary_lockouts(b, scheme.sampling_probability)
        distribution = stationary if scheme.warm_start else np.eye(b)[0]
        begin = size - b + np.arange(b)
        starts = np.outer(distribution, distribution) * weights[np.ix_(begin, begin)]
        log_z = float(np.log(starts.sum())) + log_scale
    narrow &= all(map(has_room, (alone, together, stays)))
    if not (math.isfinite(log_z) and np.isfinite(odds).all() and narrow):
        return _Weights(math.inf, (math.inf, math.inf, math.inf), starts, ahead)
    return _Weights(log_z, (float(odds[0]), float(odds[1]), float(odds[2])), starts, ahead)


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting) -> dict:
    """Return the arrays that `draw_with_one` needs."""
    found = _backward(mechanism)
    if not math.isfinite(found.log_z):
        raise OverflowError("the tables of two replicas overflow")
    codes, *factors = _factors(mechanism)
    rounded_down = 1 - (2 * mechanism.scheme.max_participations + 8) * _UNIT
    lifts = (codes.far / log_lift(mechanism) * rounded_down).astype(np.float32)
    return {
        "starts": words_of(shares(found.starts.ravel())[:-1], 64),
        "ahead": jnp.asarray(found.ahead),
        "lifts": jnp.asarray(lifts[:, None] + lifts),
    } | {
        name: jnp.asarray(f, jnp.float32)
        for name, f in zip(("alone", "together", "stays"), factors, strict=True)
    }


def _after(code, none: int):
    """Return `_Codes.after` of any codes, faster than a look-up; `none` is the code without participation."""
    return jnp.where(code < none, jnp.minimum(code + 1, none - 1), jnp.maximum(code - 1, none))


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (sums of two participation vectors, one of them, their lifts), float32; see `replicas.base`."""
    start_key, walk_key = jax.random.split(key)
    lockout, other_lockout = jnp.divmod(
        draw_place(start_key, num_samples, arrays["starts"]), scheme.min_separation
    )
    uniforms = uniform_64(walk_key, (scheme.iterations, num_samples))
    size = arrays["stays"].shape[0]
    none = size - scheme.min_separation
    ahead = arrays["ahead"].reshape(-1)

    def of(table, *place):
        """Return entries of a table of pairs of codes, or of one for every step, without a bounds check."""
        index = functools.reduce(lambda found, code: found * size + code, place)
        return table.reshape(-1).at[index.astype(jnp.uint32)].get(mode="promise_in_bounds")

    def step(state, at):
        one, two, lifts = state
        i, u = at
        later, later_of_two = _after(one, none), _after(two, none)
        only = of(arrays["alone"], one, two) * of(ahead, i, 0, later_of_two)
        other = of(arrays["alone"], two, one) * of(ahead, i, later, 0)
        both = of(arrays["together"], one, two) * of(ahead, i, 0, 0)
        stay = of(arrays["stays"], one, two) * of(ahead, i, later, later_of_two)
        level = u * (both + only + other + stay)
        # A weight of 0 never occurs, even after underflow.
        joined = (level <= both) & (both > 0)
        first = joined | ((level <= both + only) & (only > 0))
        second = joined | (~first & (level <= both + only + other) & (other > 0))
        number = first.astype(jnp.float32) + second.astype(jnp.float32)
        lifts = lifts + number * of(arrays["lifts"], one, two)
        one, two = jnp.where(first, 0, later), jnp.where(second, 0, later_of_two)
        return (one, two, lifts), (number.astype(jnp.int8), first)

    begun = none + lockout, none + other_lockout, jnp.zeros(num_samples, jnp.float32)
    (_, _, lifts), drawn = jax.lax.scan(step, begun, (jnp.arange(scheme.iterations), uniforms))
    together, alone = (part.T.astype(jnp.float32) for part in drawn)
    return together, alone, lifts
