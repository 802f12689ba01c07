"""Weights of replicas that are drawn in pairs: overlaps of their vectors, and the rounds of the tournament.

`families.pairs` has the proposal, proofs/proposals.md, section 2.7, the derivation.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import any_left

_UNIT = 2.0**-24


def shared_events(positions, first, second, attractions, m: int, iterations: int):
    """Return `shared_rows` from participations at positions, processed sequentially.

    A participation overlaps the last one of every other vector; previous ones are b steps further away.
    `positions` are (num_samples, slots) int32, of m / 2 pairs one after the other, with equally many slots
    each; iterations and above is none. `first` and `second` say which of the pair participates there,
    float32; `attractions` are `log_attractions`.
    """
    (ends, width), (size, slots) = attractions.shape, positions.shape
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), positions.shape)
    positions, slot = jax.lax.sort((positions, slot), num_keys=1)
    first, second = (jnp.take_along_axis(part, slot, axis=1) for part in (first, second))
    pair = slot // (slots // (m // 2))
    player = jnp.arange(m, dtype=jnp.int32)[None]

    def left(state):
        return any_left((state[0] < slots) & (positions[:, jnp.minimum(state[0], slots - 1)] < iterations))

    def event(state):
        index, last, shared = state
        step, mine = positions[:, index], pair[:, index][:, None]
        step = jnp.where(step < iterations, step, -1)[:, None]
        both = (first[:, index] * second[:, index])[:, None]
        taking = jnp.where(player == 2 * mine, first[:, index][:, None], 0.0)
        taking = jnp.where(player == 2 * mine + 1, second[:, index][:, None], taking)
        taking = jnp.where(step >= 0, taking, 0.0)
        row = attractions[jnp.clip(iterations - 1 - step, 0, ends - 1)[:, 0]]
        met = jnp.take_along_axis(row, jnp.clip(step - last, 0, width - 1), axis=1)
        shared = shared + taking[:, :, None] * met[:, None, :]
        together = (
            (player == 2 * mine)[:, :, None] & (player == 2 * mine + 1)[:, None, :] & (step >= 0)[:, :, None]
        )
        shared = shared + jnp.where(together, (both * row[:, :1])[:, :, None], 0.0)
        return index + 1, jnp.where(taking > 0, step, last), shared

    begun = jnp.int32(0), jnp.full((size, m), -width, jnp.int32), jnp.zeros((size, m, m), jnp.float32)
    shared = jax.lax.while_loop(left, event, begun)[2]
    return (shared + shared.swapaxes(1, 2)).transpose(1, 2, 0)


def shared_rows(vectors, attractions, slots: int):
    """Return `X_ij`, the overlap of the i-th and the j-th vector over sigma^2: (m, m, num_samples) float32.

    Participations of one vector are b steps apart or more, so a participation of another overlaps at most two
    of them: the first from its step on, and the last before. Sums of at most `2 slots` non-negative numbers,
    each of a few roundings. `vectors` are (m, num_samples, iterations) counts of at most `slots`
    participations, `attractions` the `log_attractions`.
    """
    (ends, width), n = attractions.shape, vectors.shape[-1]
    b = width - 1
    steps = jnp.arange(n, dtype=jnp.int32)
    edge = [(0, 0), (0, 0)]
    after = jax.lax.cummin(jnp.where(vectors > 0, steps, n + b), axis=2, reverse=True)
    after = jnp.pad(after, [*edge, (0, 1)], constant_values=n + b)
    before = jax.lax.cummax(jnp.where(vectors > 0, steps, -b), axis=2)
    before = jnp.pad(before, [*edge, (1, 0)], constant_values=-b)

    def slot(start, _):
        place = jnp.take_along_axis(after, jnp.minimum(start, n)[..., None], axis=2)[..., 0]
        return place + 1, place

    places = jax.lax.scan(slot, jnp.zeros(vectors.shape[:2], jnp.int32), length=slots)[1]
    places = jnp.moveaxis(places, 0, 2)  # (m, num_samples, slots), n and above for none
    at = jnp.minimum(places, n - 1)
    counts = jnp.where(places < n, jnp.take_along_axis(vectors, at, axis=2), 0.0)

    def with_one(one):
        later, earlier, its_counts = (part[None] for part in one)

        def met(place, of_later, lag):
            row = jnp.clip(n - 1 - of_later, 0, ends - 1)
            its = jnp.take_along_axis(its_counts, jnp.clip(place, 0, n - 1), axis=2)
            return attractions[row, jnp.minimum(lag, b)] * its

        following = jnp.take_along_axis(later, at, axis=2)
        preceding = jnp.take_along_axis(earlier, at, axis=2)
        both = met(following, following, following - at) + met(preceding, at, at - preceding)
        return (both * counts).sum(axis=2)

    return jax.lax.map(with_one, (after, before, vectors))


def log_factor(shared, number: int, slots: int, side: int = 1):
    """Return ln of the factor of a weight, (num_samples,) float32, rounded up and at most 0.

    `shared` are the `shared_rows` of pairs in the rows 2 i and 2 i + 1, `number` of which are a unit's own;
    `side` -1 rounds down.
    """
    m = len(shared)
    meet, own = rounds(m, number)

    def add_up(which):
        return jnp.einsum("lij,ijs->ls", jnp.asarray(which, jnp.float32), shared, precision="highest")

    # No number is negative, and zeros are exact: 2 slots + m roundings each, and a few of the numbers.
    relative = side * (2 * slots + 2 * m + 20) * _UNIT
    aligned = (m - 1) * add_up(meet)
    total = aligned.sum(axis=0) / (m - 1)
    raised = total + relative * total
    lowered = _log_mean_exp(aligned) - relative * aligned.max(axis=0)
    sizes = 1 + total + aligned.max(axis=0)
    factor = raised - lowered
    if number > 1:
        apart = add_up(own)
        factor = factor + _log_mean_exp(-apart) + relative * apart.max(axis=0)
        sizes = sizes + apart.max(axis=0)
    return jnp.minimum(factor + side * (m + 40) * _UNIT * sizes, 0.0)


def _log_mean_exp(values):
    return jax.nn.logsumexp(values, axis=0) - math.log(len(values))


@functools.cache
def rounds(m: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairings of the m - 1 rounds of a tournament, and which pairs are both a unit's own.

    Player m - 1 is fixed, the others are 0 .. m - 2 in a circle: in round l those meet whose numbers add up
    to 2 l, and l meets the fixed one. Rows 2 i and 2 i + 1 meet in round 0. A unit's own are the players l ..
    l + number - 1 of round l, so that all rounds have the same distribution. Both are (m - 1, m, m) bool
    arrays, true for each pair of rows once.
    """
    circle = m - 1
    player = np.array([m - 1, 0] + [p for i in range(1, m // 2) for p in (i, circle - i)])
    meet, own = np.zeros((2, circle, m, m), bool)
    for i in range(m):
        for j in range(i + 1, m):
            one, two = sorted((player[i], player[j]))
            sum_ = 2 * one if two == m - 1 else one + two
            meet[:, i, j] = (2 * np.arange(circle) - sum_) % circle == 0
            turned = np.array([(one - np.arange(circle)) % circle, (two - np.arange(circle)) % circle])
            own[:, i, j] = (turned < number).all(axis=0) & (two < m - 1)
    return meet, own
