"""Two replicas of an example whose batches are truncated at independent steps.

A participation has label 1 where its step is not truncated, 2 where it is (`labelled.walk`). Those d
steps apart attract by `E_d^{a j}`, a and j the counts of their labels, and those of one step share its label
(proofs/truncated_batches.md, section 4).

The counts of labels 1 and 2 are 1 and 2 under P, and 0 and 1 (up to the sign) under Q.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.base import MAX_TABLE_BYTES, Attracting, log_attractions
from jaxacct.schemes.replicas.labelled.walk import Chain, backward, walk
from jaxacct.schemes.replicas.labelled.walk import tables as walk_tables

LABELS = 3  # none or virtual, not truncated, truncated


class Labelled(NamedTuple):
    """Mechanism of the sampling before truncation, and the count of each label.

    Attributes:
      mechanism: of a `BMinSep`.
      chances: (iterations,) probability that a step is truncated, a tuple of floats.
      counts: of labels 1 and 2.
    """

    mechanism: Attracting
    chances: tuple[float, ...]
    counts: tuple[int, int]


def fits(mechanism: Attracting) -> bool:
    """Return whether the tables of two replicas fit."""
    return 8 * _numbers(mechanism) <= MAX_TABLE_BYTES


def _numbers(mechanism: Attracting) -> float:
    """Return the size of the tables."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    return float(n + b) * (2 * LABELS * b + 8) + 2.0 * b * b


def total_variation(mechanism: Attracting) -> float:
    """Return the total variation error of the draws from the tables.

    Every step rounds at most five probabilities and that of truncation to multiples of 2^-32, and the start 2
    b.
    """
    return (7 * mechanism.scheme.iterations + 2 * mechanism.scheme.min_separation) * 2.0**-32


@functools.lru_cache(maxsize=64)
def log_normalizer(labelled: Labelled) -> float:
    """Return ln of the mean of `e^{<C s, C s'> / sigma^2}` over two replicas' counts; inf on overflow."""
    return backward(_chain(labelled))[0]


@functools.lru_cache(maxsize=2)
def tables(labelled: Labelled) -> dict:
    """Return the arrays that `draw` needs."""
    chain = _chain(labelled)
    chances = np.round(np.array(labelled.chances) * 2.0**32)
    return walk_tables(chain, backward(chain)[1]) | {
        "cut": jnp.asarray(np.minimum(chances, 2.0**32 - 1), jnp.uint32),
        "counts": jnp.asarray([0, *labelled.counts], jnp.float32),
    }


def _chain(labelled: Labelled) -> Chain:
    mechanism, chances = labelled.mechanism, np.array(labelled.chances)
    scheme = mechanism.scheme
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    counts, distribution = np.array([0, *labelled.counts]), np.stack([1 - chances, chances], axis=1)
    s = np.arange(1, b)
    with np.errstate(over="ignore", invalid="ignore"):
        logs = log_attractions(mechanism)
        both = np.exp(logs[:, :1] * counts[1:] ** 2)  # (ends, 2)
        pulls = np.exp(logs[:, b - s, None, None] * np.outer(counts, counts[1:]))  # (ends, b - 1, 3, 2)

    def alone(weights, i):
        """Return the weights of the free replica waiting, participating without truncation, or with it."""
        found = np.empty((b - 1, LABELS, LABELS))
        found[:, :, 0] = (1 - p) * weights[i + 1, : b - 1]
        # It is locked out when the other is free again, s steps on.
        after = weights[i + s, b - s, 1:][:, None, :]
        found[:, :, 1:] = p * distribution[i] * after * pulls[min(n - 1 - i, len(pulls) - 1)]
        return found

    def together(weights, i):
        """Return (5,): none, one with label 1, one with label 2, both with label 1, both with label 2."""
        one = weights[i + 1, b - 1, 1:]  # locked out for b - 1 more steps from the next one on
        two = weights[i + b, 0, 0] * both[min(n - 1 - i, len(both) - 1)]
        neither = (1 - p) ** 2 * weights[i + 1, 0, 0]
        return np.concatenate(
            [[neither], 2 * p * (1 - p) * distribution[i] * one, p**2 * distribution[i] * two]
        )

    return Chain(scheme, LABELS, alone, together)


def draw(key, scheme, arrays, num_samples: int):
    """Return `(cut, counts)`: which steps are truncated, bool, and the two replicas' total counts, float32.

    Args:
      key: JAX key.
      scheme: the `BMinSep` of the tables; static.
      arrays: `tables`.
      num_samples: static.

    Returns:
      Two arrays of (num_samples, iterations).
    """
    *keys, cut_key = threefry.split(key, 4)

    def labels_of(outcome):
        of_both = outcome >= LABELS
        label = jnp.where(of_both, outcome - (LABELS - 1), outcome)
        return jnp.stack([label, jnp.where(of_both, label, 0)])

    def seen(joined):
        # One byte each: there are as many as outputs.
        return joined.max(axis=0).astype(jnp.int8), (joined > 0).sum(axis=0).astype(jnp.int8)

    label, number = walk(keys, scheme, arrays, num_samples, labels_of, seen)
    # Separately: XLA would compute these words again for both likelihoods.
    by_chance = threefry.bits_32(cut_key, (scheme.iterations, num_samples)) < arrays["cut"][:, None]
    cut = jnp.where(label > 0, label == LABELS - 1, by_chance)
    counts = number.astype(jnp.float32) * jnp.where(label == 1, arrays["counts"][1], arrays["counts"][2])
    return cut.T, counts.T
