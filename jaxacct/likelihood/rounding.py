"""How far the float32 privacy loss can be from the exact one, and what is put aside for it.

A loss is the logarithm of thousands of terms added up in float32, and delta may be 1e-10. The guarantee is
therefore evaluated at `epsilon - margin`: if every computed loss is within `margin` of the exact loss of
the same draw, a term evaluated there is at least the exact term (proofs/derivations.md section 5).

The margin is eight times the largest error seen on 256 draws of the mechanism itself, at P and at Q, with
a floor of 16 units in the last place of a loss as large as epsilon. `tests/test_rounding.py` measures the
error over many configurations with other draws and fails when one comes near the margin.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import randomness
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism

SAFETY_FACTOR = 8
_FLOOR_ULPS = 16 * 2.0**-24


@functools.lru_cache(maxsize=256)
def _loss_margin(mechanism: Mechanism, epsilon: float, replicas: int) -> float:
    return _margin(measured_error(_probe_key(), mechanism, replicas), epsilon)


def _probe_key():
    # The draws only probe arithmetic, so their key is fixed: the margin is a function of the mechanism.
    return randomness.key_from_words([0, 0])


def _margin(error: float, epsilon: float) -> float:
    return SAFETY_FACTOR * error + _FLOOR_ULPS * (1 + abs(epsilon))


def loss_margin(mechanism: Mechanism, epsilon: float, replicas: int = 1, shifts=()) -> float:
    """Margin on epsilon (natural log) for losses computed in float32; deterministic.

    Args:
      mechanism: the mechanism.
      epsilon: the target, for the floor.
      replicas: participation vectors added up in the drawn outputs, m >= 1.
      shifts: (iterations,) arrays by which normalised scores are pushed down, of shifted laws drawn from too.
    """
    margin = _loss_margin(mechanism, epsilon, replicas)
    for shift in shifts:
        margin = max(margin, _margin(measured_error(_probe_key(), mechanism, 1, shift), epsilon))
    return margin


def measured_error(key, mechanism: Mechanism, replicas: int = 1, shift=None) -> float:
    """The largest |float32 loss - float64 loss| of one block of draws from the same normals.

    Runs in float64 for a moment whatever the JAX configuration. Measured under P (the
    sum of `replicas` participation vectors, at least one participation each) and under Q; both with the
    normalised scores pushed down by `shift`, (iterations,) float32.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    seen = scheme.side_information
    tables = None if seen is None else seen.tables()
    normals, participations, batch_sizes = _probe(key, tables, scheme, strategy, replicas)
    worst = 0.0
    for participation in participations:
        sigma = mechanism.noise_multiplier
        single = np.asarray(_losses(scheme, strategy, sigma, normals, participation, shift, batch_sizes))
        with jax.enable_x64(True):
            exact = _losses(
                scheme,
                strategy,
                np.float64(mechanism.noise_multiplier),
                tuple(np.asarray(part, np.float64) for part in normals),
                np.asarray(participation, np.float64),
                None if shift is None else np.asarray(shift, np.float64),
                batch_sizes,
            )
            worst = max(worst, float(np.max(np.abs(single - np.asarray(exact)))))
    return worst


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _probe(key, tables, scheme, strategy, replicas):
    """Normals, the participations under P and under Q, and batch sizes where there are any."""
    normals_key, counts_key, somewhere_key = jax.random.split(key, 3)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, jnp.float32)
    if scheme.side_information is None:
        batch_sizes = None
        drawn = [scheme.draw_participation(part, size) for part in jax.random.split(counts_key, replicas)]
        counts = jnp.stack(drawn).sum(axis=0)
        others = jnp.zeros_like(counts)
    else:
        batch_sizes = scheme.side_information.draw(jax.random.fold_in(key, 0), size, tables)
        counts, others = (
            scheme.draw_counts(counts_key, size, side, batch_sizes) for side in ("remove", "add")
        )
    # A sample without a participation has hardly a loss to round; where they are rare it would hide them.
    somewhere = jax.random.randint(somewhere_key, (size, 1), 0, n)
    one = (jnp.arange(n) == somewhere).astype(jnp.float32)
    counts = jnp.where(counts.any(axis=1, keepdims=True), counts, one)
    return normals, (counts, others), batch_sizes


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(scheme, strategy, sigma, normals, participation, shift, batch_sizes):
    drawn = strategy.scores_from_normals(normals, scheme.iterations, sigma, participation)
    drawn = drawn if shift is None else drawn - sigma * shift
    return loss_of_scores(scheme, strategy, drawn, sigma, "remove", batch_sizes)
