"""Two replicas of nested allocation: exact weights of pairs of classes, exact draws.

The steps of two classes, d = c' - c >= 0 apart, alternate: c, c', c + b, c' + b, .. Only neighbours in this
chain are less than b apart: d steps from c to c', b - d on to the next step of c. Along the chain the state
is whether the step before has a kept participation, and how many remain: f of the first class, g of the
second. `U_p(state)` is the total weight of what happens from place p on; the next participation is found by
bisection of a ratio of two such numbers (proofs/fixed_counts.md, section 11).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import fixed_counts, threefry
from jaxacct.kernels.randomness import uniform_64
from jaxacct.schemes.replicas.base import (
    Attracting,
    draw_indices,
    drawn_together,
    fits_two,
    log_attractions,
    rarest_event,
    summary_of_two,
    thresholds_in_order,
)


def table_bytes(mechanism: Attracting) -> float:
    """Return the bytes of the table: by lag and pair of lengths, or by pair if C ends with step n."""
    scheme = mechanism.scheme
    b, each = scheme.min_separation, 2 * (scheme.max_participations + 1) ** 2
    ends_at_n = (
        mechanism.strategy.rows(scheme.iterations) == scheme.iterations and mechanism.strategy.bands > 1
    )
    kinds = b * (b + 1) // 2 if ends_at_n else 3 * b
    return 8.0 * kinds * each * 2 * (scheme.iterations // b + 1)


def max_replicas(mechanism: Attracting) -> int:
    """Return 2 where two replicas have tables, else 1."""
    return 2 if fits_two(mechanism, table_bytes(mechanism)) else 1


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return the number of samples drawn in the time of the table: a number takes as long as a step."""
    del m
    return table_bytes(mechanism) / 8 / mechanism.scheme.iterations


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Ln Z_2, float64; inf where draws would be too inexact."""
    assert m == 2
    return _summary(mechanism)[0]


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the drawn distribution; classes have 32-bit thresholds."""
    assert m == 2
    scheme = mechanism.scheme
    classes = m * scheme.min_separation * 2.0**-32
    return _summary(mechanism)[1], classes + 2.0**-40 * scheme.max_participations


@functools.lru_cache(maxsize=256)
def _summary(mechanism: Attracting) -> tuple[float, float]:
    """Return (ln Z_2, relative error of the drawn distribution)."""
    _, _, pairs, rarest = _weights(mechanism)
    total = float(pairs.sum())
    log_z = math.log(total) if 0 < total < math.inf else math.inf
    return summary_of_two(log_z, rarest, 2 * mechanism.scheme.max_participations)


@functools.lru_cache(maxsize=1)
def _weights(mechanism: Attracting) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Build the table.

    Returns:
      U: (kinds, places + 1, 2, k + 1, k + 1) float64 by (whether the step before is kept, f, g), over the
        number of pairs of sets.
      attraction: (kinds, places), of a kept participation to a kept one at the step before.
      pairs: (b, b), probability of two classes times the mean attraction of their sets.
      rarest: as of `error_of_events`.
    """
    scheme = mechanism.scheme
    n, b, k, q = scheme.iterations, scheme.min_separation, scheme.max_participations, scheme.keep_probability
    turns, log_attraction = scheme.num_turns, log_attractions(mechanism)
    kinds_of, first, second = _kinds(mechanism)
    places = np.arange(2 * turns[0])
    is_first, turn = places % 2 == 0, places // 2
    steps = np.where(is_first, first[:, None], second[:, None]) + b * turn
    lag = (second - first)[:, None]
    lag = np.where(is_first, b - lag, lag)
    each = np.exp(-np.array([fixed_counts.log_choose(int(rows), k) for rows in turns]) / k)
    each = np.where(is_first, each[first][:, None], each[second][:, None]) * (steps < n)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        row = np.clip(n - 1 - steps, 0, len(log_attraction) - 1)
        attraction = np.exp(log_attraction[row, lag])
        table, rarest = np.zeros((len(first), len(places) + 1, 2, k + 1, k + 1)), 1.0
        table[:, -1, :, 0, 0] = 1.0
        for place in reversed(places):
            ahead = table[:, place + 1]
            fewer = np.zeros_like(ahead)
            if is_first[place]:
                fewer[..., 1:, :] = ahead[..., :-1, :]
            else:
                fewer[..., 1:] = ahead[..., :-1]
            fewer *= each[:, place, None, None, None]
            for before in (0, 1):
                pull = attraction[:, place, None, None] if before else 1.0
                kinds = np.stack([(1 - q) * fewer[:, 0], q * pull * fewer[:, 1]])
                event = kinds.sum(axis=0)
                table[:, place, before] = ahead[:, 0] + event
                rarest = max(rarest, rarest_event(table[:, place, before], event, kinds))
        share = turns / n
        pairs = np.outer(share, share) * table[kinds_of, 0, 0, k, k]
    return table, attraction, pairs, rarest


def _kinds(mechanism: Attracting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (b, b) int kinds of pairs of classes, symmetric, and the two classes of each kind."""
    scheme = mechanism.scheme
    b, turns = scheme.min_separation, scheme.num_turns
    first, second = np.triu_indices(b)
    # Where all columns of C are whole, only the lag and the numbers of steps matter.
    ends = len(log_attractions(mechanism)) > 1
    numbers = [first, second] if ends else [second - first, turns[first], turns[second]]
    _, found, kind = np.unique(np.stack(numbers), axis=1, return_index=True, return_inverse=True)
    kinds = np.zeros((b, b), np.int64)
    kinds[first, second] = kinds[second, first] = kind.ravel()
    return kinds, first[found], second[found]


@functools.lru_cache(maxsize=1)
def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that draws need: thresholds, and U in units of the largest of each (f, g)."""
    assert m == 2
    table, attraction, pairs, _ = _weights(mechanism)
    units = table.max(axis=(0, 1, 2))
    arrays = {"weights": table / np.where(units > 0, units, 1.0), "attraction": attraction}
    found = {name: jax.device_put(np.asarray(part, np.float32)) for name, part in arrays.items()}
    return found | {
        "classes": thresholds_in_order(pairs),
        "kinds": jnp.asarray(_kinds(mechanism)[0], jnp.int32),
    }


def draw_fitting(key, scheme, arrays, num_samples: int):
    """Draw pairs; returns what `balanced_min_sep.draw_fitting` does. All pairs are ones of the scheme."""
    n, b, k, q = scheme.iterations, scheme.min_separation, scheme.max_participations, scheme.keep_probability
    *class_keys, wait_key, keep_key = threefry.split(key, 4)
    one, two = draw_indices(class_keys, arrays["classes"], num_samples)
    kind = arrays["kinds"][one, two]
    first, second = jnp.minimum(one, two), jnp.maximum(one, two)
    places = arrays["attraction"].shape[1]

    def weight(place, before, left):
        return arrays["weights"][kind, place, before, left[0], left[1]]

    def turn(carry, uniforms):
        place, before, left = carry
        level = uniforms[0] * weight(place, before, left)

        def halve(_, between):
            low, high = between
            middle = (low + high) // 2
            reached = weight(middle, jnp.where(middle == place, before, 0), left) >= level
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        end = jnp.full_like(place, places)
        at, _ = jax.lax.fori_loop(0, (places + 1).bit_length(), halve, (place, end))
        some = (left.sum(axis=0) > 0) & (at < places)
        at = jnp.where(some, at, places - 1)
        before = jnp.where(at == place, before, 0)
        is_first = at % 2 == 0
        left = jnp.where(some[None], left - jnp.stack([is_first, ~is_first]).astype(left.dtype), left)
        left = jnp.maximum(left, 0)
        pull = jnp.where(before > 0, arrays["attraction"][kind, at], 1.0)
        kept = q * pull * weight(at + 1, 1, left)
        lost = (1 - q) * weight(at + 1, 0, left)
        is_kept = some & ((uniforms[1] * (kept + lost) > lost) if q < 1 else True)
        step = jnp.where(is_first, first, second) + b * (at // 2)
        # The first class is that of the first replica where it is not above the other.
        who = jnp.where(is_kept, jnp.where(is_first == (one <= two), 1, 2), 0)
        return (jnp.where(some, at + 1, places), is_kept.astype(jnp.int32), left), (step, who)

    nothing = jnp.zeros(num_samples, jnp.int32)
    start = nothing, nothing, jnp.full((2, num_samples), k, jnp.int32)
    uniforms = jnp.stack([uniform_64(one, (2 * k, num_samples)) for one in (wait_key, keep_key)], axis=1)
    _, (steps, who) = jax.lax.scan(turn, start, uniforms)
    return *drawn_together(steps.T, who.T, n), jnp.ones(num_samples, bool)
