"""Two replicas where a state also has the label of the locked-out one's participation.

A label is a count, or whether the step was truncated: the attraction of a participation depends on it. It is
1 or more for a participation, 0 for none, and for the virtual history of a warm start, which does not
interact. `U_i(s, a)` is the total weight from step i on when one replica is free and the other, of label a,
locked out for s more steps; s = 0 when both are free. A module defines the events of a step (`Chain`), and
has weights, tables and draws from here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.base import (
    draw_indices,
    start_distribution,
    starts_locked_out,
    thresholds_in_order,
    thresholds_of,
)


class Chain(NamedTuple):
    """Events of a step.

    Attributes:
      sampling: a `BMinSep`, or an object with its fields.
      labels: number of labels, 0 included.
      alone: (weights, step) -> (b - 1, labels, labels): of every state (s, a), s >= 1, the weight of the free
        replica waiting (0) or participating with each label.
      together: (weights, step) -> (outcomes,): of two free replicas; all their joint events.
    """

    sampling: Any
    labels: int
    alone: Callable[[np.ndarray, int], np.ndarray]
    together: Callable[[np.ndarray, int], np.ndarray]


def backward(chain: Chain) -> tuple[float, np.ndarray]:
    """Return (ln Z, U of shape (n + b, b, labels)), backwards in time; float64, inf where Z overflows."""
    n, b = chain.sampling.iterations, chain.sampling.min_separation
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weights = np.ones((n + b, b, chain.labels))
        for i in range(n - 1, -1, -1):
            if b > 1:
                weights[i, 1:] = chain.alone(weights, i).sum(axis=-1)
            weights[i, 0] = chain.together(weights, i).sum()
        total = (
            _starts(chain.sampling, weights).sum() if starts_locked_out(chain.sampling) else weights[0, 0, 0]
        )
        log_z = float(np.log(total))
    return (log_z if math.isfinite(log_z) else math.inf), weights


def tables(chain: Chain, weights: np.ndarray) -> dict:
    """Return the arrays that `walk` needs, from the weights of `backward`."""
    n, b = chain.sampling.iterations, chain.sampling.min_separation
    together = np.stack([_distribution(chain.together(weights, i)) for i in range(n)])
    arrays: dict[str, Any] = {"together": thresholds_of(together), "alone": None, "starts": None}
    if b > 1:
        arrays["alone"] = thresholds_of(np.stack([_distribution(chain.alone(weights, i)) for i in range(n)]))
    if starts_locked_out(chain.sampling):
        arrays["starts"] = thresholds_in_order(_starts(chain.sampling, weights))
    return arrays


def _distribution(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)


def _starts(sampling, weights: np.ndarray) -> np.ndarray:
    """Return (b, b): the weights of the two replicas' initial lockouts under a warm start."""
    b, n = sampling.min_separation, sampling.iterations
    distribution = start_distribution(sampling)
    first, second = np.indices((b, b))
    reach = weights[np.minimum(np.minimum(first, second), n), np.abs(first - second), 0]
    return distribution[:, None] * distribution * reach


def walk(keys, sampling, arrays, num_samples: int, labels_of, seen):
    """Scan over the steps once, and return the values of `seen`, the steps as a new first axis.

    `labels_of` maps (num_samples,) outcomes of `Chain.together` to (2, num_samples) labels, and `seen` the
    labels at a step, 0 without participation, to the stored value.
    """
    n, b = sampling.iterations, sampling.min_separation
    lockouts = jnp.zeros((2, num_samples), jnp.int32)
    if arrays["starts"] is not None:
        lockouts = jnp.stack(draw_indices(keys[:2], arrays["starts"], num_samples))
    steps = {"bits": threefry.bits_32_at_once(keys[2], (n, num_samples, 1)), "together": arrays["together"]}
    if arrays["alone"] is not None:
        steps["alone"] = arrays["alone"]

    def step(state, at):
        lockouts, labels = state
        free = lockouts == 0
        outcome = jnp.sum(at["bits"] >= at["together"][None], axis=-1).astype(jnp.int32)
        joined = jnp.where(free.all(axis=0), labels_of(outcome), 0)
        if b > 1:
            # The other one's lockout and label decide; a locked-out replica does not join.
            other, history = lockouts[::-1], labels[::-1]
            waits = free & (other > 0)
            row = jnp.maximum(lockouts.max(axis=0), 1) - 1
            thresholds = at["alone"][row, jnp.where(waits, history, 0).max(axis=0)]
            alone = jnp.sum(at["bits"] >= thresholds, axis=-1).astype(jnp.int32)
            joined = jnp.where(waits, alone, joined)
        labels = jnp.where(joined > 0, joined, labels)
        lockouts = jnp.maximum(jnp.where(joined > 0, b, lockouts) - 1, 0)
        return (lockouts, labels), seen(joined)

    return jax.lax.scan(step, (lockouts, jnp.zeros_like(lockouts)), steps)[1]
