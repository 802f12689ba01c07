"""Two replicas of an example whose batches are cut at steps drawn independently of each other.

As under multi-attribution a state holds with which label the barred replica took part: 1 where its step was
not cut, 2 where it was, 0 for the virtual history of a warm start. Participations d steps apart attract by
`E_d^{a j}`, a and j the counts of their labels, and those of one step share its label. `U_i(s, a)` is the
total weight from step i on when one replica is free and the other, of label a, barred for s more steps; s = 0
when both are free (proofs/truncated_batches.md, section 4).

The counts of labels 1 and 2 are 1 and 2 under P, and 0 and 1 (up to the sign) under Q.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.b_min_sep import (
    MAX_TABLE_BYTES,
    draw_index,
    log_attractions,
    start_law,
    thresholds_of,
)
from jaxacct.schemes.replicas.base import Attracting

LABELS = 3  # none or virtual, not cut, cut


class Labelled(NamedTuple):
    """What is drawn: the mechanism of the sampling before cutting, and what a label counts.

    Attributes:
      mechanism: of a `BMinSep`.
      chances: (iterations,) probability that a step is cut, a tuple of floats.
      counts: of labels 1 and 2.
    """

    mechanism: Attracting
    chances: tuple[float, ...]
    counts: tuple[int, int]


def fits(mechanism: Attracting) -> bool:
    """Whether the tables of two replicas fit."""
    return 8 * _numbers(mechanism) <= MAX_TABLE_BYTES


def table_samples(mechanism: Attracting) -> float:
    """How many samples are drawn in the time that the tables take, about."""
    return 5 * _numbers(mechanism) / mechanism.scheme.iterations


def _numbers(mechanism: Attracting) -> float:
    """Numbers in the tables."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    return float(n + b) * (2 * LABELS * b + 8) + 2.0 * b * b


def total_variation(mechanism: Attracting) -> float:
    """How far the drawn law is from that of the tables.

    Every step rounds five probabilities at most and that of a cut to multiples of 2^-32, and the start 2 b.
    """
    return (7 * mechanism.scheme.iterations + 2 * mechanism.scheme.min_separation) * 2.0**-32


@functools.lru_cache(maxsize=64)
def log_normalizer(labelled: Labelled) -> float:
    """ln of the mean of `e^{<C s, C s'> / sigma^2}` over two replicas' counts; inf where it overflows."""
    return _backward(labelled)[0]


@functools.lru_cache(maxsize=2)
def tables(labelled: Labelled) -> dict:
    """The arrays that `draw` needs."""
    _, weights, parts = _backward(labelled)
    scheme = labelled.mechanism.scheme
    n, b = scheme.iterations, scheme.min_separation
    arrays = {
        "together": _thresholds(np.stack([_together(weights, parts, i) for i in range(n)])),
        "alone": None,
        "starts": None,
        "cut": jnp.asarray(_words(np.array(labelled.chances))),
        "counts": jnp.asarray([0, *labelled.counts], jnp.float32),
    }
    if b > 1:
        arrays["alone"] = _thresholds(np.stack([_alone(weights, parts, i) for i in range(n)]))
    if _warm(scheme):
        joint = _starts(scheme, weights)
        arrays["starts"] = [thresholds_of(_law(joint.sum(axis=1))), thresholds_of(_law(joint))]
    return arrays


def _warm(scheme) -> bool:
    return scheme.warm_start and scheme.min_separation > 1


def _law(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)


def _words(probabilities: np.ndarray) -> np.ndarray:
    return np.minimum(np.round(probabilities * 2.0**32), 2.0**32 - 1).astype(np.uint32)


def _thresholds(weights: np.ndarray):
    return jnp.asarray(_words(np.cumsum(_law(weights), axis=-1)[..., :-1]))


def _backward(labelled: Labelled):
    """(ln Z, U of shape (n + b, b, 3), what `_alone` and `_together` need), backwards in time."""
    mechanism, chances = labelled.mechanism, np.array(labelled.chances)
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    counts, law = np.array([0, *labelled.counts]), np.stack([1 - chances, chances], axis=1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        logs = log_attractions(mechanism)
        both = np.exp(logs[:, :1] * counts[1:] ** 2)  # (ends, 2)
        s = np.arange(1, b)
        pulls = np.exp(logs[:, b - s, None, None] * np.outer(counts, counts[1:]))  # (ends, b - 1, 3, 2)
        parts = (n, b, p, law, both, pulls)
        weights = np.ones((n + b, b, LABELS))
        for i in range(n - 1, -1, -1):
            if b > 1:
                weights[i, 1:] = _alone(weights, parts, i).sum(axis=-1)
            weights[i, 0] = _together(weights, parts, i).sum()
        total = _starts(scheme, weights).sum() if _warm(scheme) else weights[0, 0, 0]
        log_z = float(np.log(total))
    return (log_z if math.isfinite(log_z) else math.inf), weights, parts


def _alone(weights, parts, i: int) -> np.ndarray:
    """(b - 1, 3, 3): of state (s, a) at step i, the weight of the free replica waiting or taking a label."""
    n, b, p, law, _, pulls = parts
    s = np.arange(1, b)
    found = np.empty((b - 1, LABELS, LABELS))
    found[:, :, 0] = (1 - p) * weights[i + 1, : b - 1]
    # It is barred when the other is free again, s steps on.
    after = weights[i + s, b - s, 1:][:, None, :]
    found[:, :, 1:] = p * law[i] * after * pulls[min(n - 1 - i, len(pulls) - 1)]
    return found


def _together(weights, parts, i: int) -> np.ndarray:
    """(5,): nobody, one with label 1, one with label 2, both with label 1, both with label 2."""
    n, b, p, law, both, _ = parts
    one = weights[i + 1, b - 1, 1:]  # barred for b - 1 more steps from the next one on
    two = weights[i + b, 0, 0] * both[min(n - 1 - i, len(both) - 1)]
    nobody = (1 - p) ** 2 * weights[i + 1, 0, 0]
    return np.concatenate([[nobody], 2 * p * (1 - p) * law[i] * one, p**2 * law[i] * two])


def _starts(scheme, weights) -> np.ndarray:
    """(b, b): the weights of the two replicas' initial bars under a warm start."""
    b, n = scheme.min_separation, scheme.iterations
    law = start_law(scheme)
    first, second = np.indices((b, b))
    reach = weights[np.minimum(np.minimum(first, second), n), np.abs(first - second), 0]
    return law[:, None] * law * reach


def draw(key, scheme, arrays, num_samples: int):
    """`(cut, counts)`: which steps are cut, bool, and the two replicas' counts together, float32.

    Args:
      key: a JAX key.
      scheme: the `BMinSep` of the tables; static.
      arrays: `tables`.
      num_samples: static.

    Returns two arrays of (num_samples, iterations).
    """
    n, b = scheme.iterations, scheme.min_separation
    first_key, second_key, walk_key, cut_key = threefry.split(key, 4)
    bars = jnp.zeros((2, num_samples), jnp.int32)
    if arrays["starts"] is not None:
        first = draw_index(first_key, arrays["starts"][0], num_samples)
        bars = jnp.stack([first, draw_index(second_key, arrays["starts"][1][first], num_samples)])
    bits = threefry.bits_32(walk_key, (n, num_samples))
    steps = {"bits": bits, "together": arrays["together"]}
    if arrays["alone"] is not None:
        steps["alone"] = arrays["alone"]

    def step(state, at):
        bars, labels = state
        free = bars == 0
        outcome = jnp.sum(at["bits"][:, None] >= at["together"], axis=-1).astype(jnp.int32)
        of_both = outcome >= LABELS
        label = jnp.where(of_both, outcome - (LABELS - 1), outcome)
        joined = jnp.where(free.all(axis=0), jnp.stack([label, jnp.where(of_both, label, 0)]), 0)
        if b > 1:
            # The other one's bar and label decide; whoever is barred does not join.
            other, history = bars[::-1], labels[::-1]
            waits = free & (other > 0)
            row = jnp.maximum(bars.max(axis=0), 1) - 1
            thresholds = at["alone"][row, jnp.where(waits, history, 0).max(axis=0)]
            alone = jnp.sum(at["bits"][:, None] >= thresholds, axis=-1).astype(jnp.int32)
            joined = jnp.where(waits, alone, joined)
        labels = jnp.where(joined > 0, joined, labels)
        bars = jnp.maximum(jnp.where(joined > 0, b, bars) - 1, 0)
        return (bars, labels), (joined.max(axis=0), (joined > 0).sum(axis=0))

    _, (label, number) = jax.lax.scan(step, (bars, jnp.zeros_like(bars)), steps)
    by_chance = threefry.bits_32(cut_key, (n, num_samples)) < arrays["cut"][:, None]
    cut = jnp.where(label > 0, label == LABELS - 1, by_chance)
    counts = number.astype(jnp.float32) * arrays["counts"][label]
    return cut.T, counts.T
