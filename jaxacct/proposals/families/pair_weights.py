"""Weights of replicas that are drawn in pairs: overlaps of their vectors, and the rounds of the tournament.

`families.replicas` has the proposal, proofs/proposals.md, section 2.7, the derivation.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels.programs import any_left
from jaxacct.mechanisms.mechanism import Mechanism

_UNIT = 2.0**-24


def one_of(mechanism: Mechanism, times: int = 1) -> tuple[Mechanism | None, int]:
    """Return (mechanism whose vectors are drawn, number of them whose sum is a unit's counts).

    At an inflated probability for `times` above 1; None where there is none.
    """
    scheme, strategy, sigma = mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier
    if times > 1:
        found = scheme.inflated(times)
        return (None if found is None else Mechanism(found[0], strategy, sigma)), 1
    if scheme.parts is None:
        return mechanism, 1
    one, number = scheme.parts
    return Mechanism(one, strategy, sigma), number


def shared_events(positions, first, second, attractions, m: int, iterations: int):
    """Return `X_ij`, the overlap of the i-th and the j-th vector over sigma^2: (m, m, num_samples) float32.

    Participations are processed sequentially. One overlaps the last one of every other vector; previous ones
    are b steps further away.
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
        index, last, its_counts, shared = state
        step, mine = positions[:, index], pair[:, index][:, None]
        step = jnp.where(step < iterations, step, -1)[:, None]
        both = (first[:, index] * second[:, index])[:, None]
        taking = jnp.where(player == 2 * mine, first[:, index][:, None], 0.0)
        taking = jnp.where(player == 2 * mine + 1, second[:, index][:, None], taking)
        taking = jnp.where(step >= 0, taking, 0.0)
        row = attractions[jnp.clip(iterations - 1 - step, 0, ends - 1)[:, 0]]
        met = jnp.take_along_axis(row, jnp.clip(step - last, 0, width - 1), axis=1) * its_counts
        shared = shared + taking[:, :, None] * met[:, None, :]
        together = (
            (player == 2 * mine)[:, :, None] & (player == 2 * mine + 1)[:, None, :] & (step >= 0)[:, :, None]
        )
        shared = shared + jnp.where(together, (both * row[:, :1])[:, :, None], 0.0)
        last = jnp.where(taking > 0, step, last)
        return index + 1, last, jnp.where(taking > 0, taking, its_counts), shared

    last, counts = jnp.full((size, m), -width, jnp.int32), jnp.zeros((size, m), jnp.float32)
    begun = jnp.int32(0), last, counts, jnp.zeros((size, m, m), jnp.float32)
    shared = jax.lax.while_loop(left, event, begun)[3]
    return (shared + shared.swapaxes(1, 2)).transpose(1, 2, 0)


def log_factor(shared, number: int, slots: int, side: int = 1):
    """Return ln of the factor of a weight, (num_samples,) float32, rounded up and at most 0.

    `shared` are the `shared_events` of pairs in the rows 2 i and 2 i + 1, `number` of which are a unit's own;
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
