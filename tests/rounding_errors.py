"""Actual errors of float32 losses: recomputed in float64 from the same normals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import Mechanism
from jaxacct.kernels import randomness
from jaxacct.likelihood.loss import loss_of_mirrored, loss_of_scores
from jaxacct.likelihood.rounding import loss_lines
from jaxacct.proposals.families import mirrored
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.statistics.lines import total

# What is measured is the loss in float32, compiled as users have it. What it is computed from and compared
# with may be slow: to compile it as well takes ten times as long.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def loss_margin(mechanism: Mechanism, replicas: int = 1, *, delta_v: float = 1e-12) -> float:
    """Reserve for float32 losses of samples, in nats."""
    lines = mirrored.loss_lines if mechanism.is_replace_one else loss_lines
    return total(lines(mechanism, delta_v, replicas), "epsilon")


def measured_error(key, mechanism: Mechanism, replicas: int = 1) -> float:
    """The largest |float32 loss - float64 loss| of one block of draws from the same normals.

    Runs in float64 for a moment whatever the JAX configuration. Measured under P (the sum of `replicas`
    participation vectors, at least one participation each) and under Q.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    seen = scheme.side_information
    tables = None if seen is None else seen.tables()
    normals = _normals(key, strategy, scheme.iterations)
    participations, batch_sizes = _probe(key, tables, scheme, replicas)
    worst = 0.0
    given = loss_of_mirrored if mechanism.is_replace_one else loss_of_scores, scheme, strategy
    for participation in participations:
        sigma = mechanism.noise_multiplier
        single = np.asarray(_losses(*given, sigma, normals, participation, batch_sizes))
        with jax.enable_x64(True):
            exact = _exact_losses(
                *given,
                np.float64(sigma),
                tuple(np.asarray(part, np.float64) for part in normals),
                np.asarray(participation, np.float64),
                batch_sizes,
            )
            worst = float(np.maximum(worst, np.max(np.abs(single - np.asarray(exact)))))  # max() drops NaN
    return worst


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=QUICK)
def _normals(key, strategy, n):
    return strategy.draw_normals(jax.random.split(key, 3)[0], n, randomness.BLOCK_SIZE, jnp.float32)


def _probe(key, tables, scheme, replicas):
    """The participations under P and under Q, and batch sizes where there are any."""
    _, counts_key, somewhere_key = jax.random.split(key, 3)
    if scheme.side_information is None:
        batch_sizes = None
        drawn = [_participation(key, scheme) for key in jax.random.split(counts_key, replicas)]
        counts = np.sum(drawn, axis=0)
        others = np.zeros_like(counts)
    else:
        counts, others, batch_sizes = _cut_participations(key, counts_key, tables, scheme)
    # A sample without a participation has hardly a loss to round; where they are rare it would hide them.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(somewhere_key)))
    one = (np.arange(scheme.iterations) == rng.integers(scheme.iterations, size=(len(counts), 1))).astype(
        np.float32
    )
    counts = np.where(np.asarray(counts).any(axis=1, keepdims=True), counts, one)
    return (counts, others), batch_sizes


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def _participation(key, scheme):
    return scheme.draw_participation(key, randomness.BLOCK_SIZE)


@functools.partial(jax.jit, static_argnums=3, compiler_options=QUICK)
def _cut_participations(key, counts_key, tables, scheme):
    size = randomness.BLOCK_SIZE
    batch_sizes = scheme.side_information.draw(jax.random.fold_in(key, 0), size, tables)
    return *(scheme.draw_counts(counts_key, size, side, batch_sizes) for side in DIRECTIONS), batch_sizes


def _losses_of(loss, scheme, strategy, sigma, normals, participation, batch_sizes):
    drawn = strategy.scores_from_normals(normals, scheme.iterations, sigma, participation)
    return loss(scheme, strategy, drawn, sigma, Direction.REMOVE, batch_sizes)


_losses = jax.jit(_losses_of, static_argnums=(0, 1, 2))
_exact_losses = jax.jit(_losses_of, static_argnums=(0, 1, 2), compiler_options=QUICK)


def measured_weight_error(key, mechanism: Mechanism, replicas: int) -> float:
    """The largest error of `L - replicas L_1` in float32, L_1 the loss of one example; draws as above.

    Outputs have the sum of so many vectors of one example, drawn independently.
    """
    scheme, _ = mechanism.scheme.parts or (mechanism.scheme, 1)
    one = Mechanism(scheme, mechanism.strategy, mechanism.noise_multiplier)
    normals = _normals(key, one.strategy, one.scheme.iterations)
    (counts, _), _ = _probe(key, None, one.scheme, replicas)

    def weights(losses, dtype, sigma):
        drawn = tuple(np.asarray(part, dtype) for part in normals), np.asarray(counts, dtype)
        both = ((each.scheme, each.strategy, sigma, *drawn, None) for each in (mechanism, one))
        loss, single = (losses(loss_of_scores, *given) for given in both)
        return np.asarray(loss - dtype(replicas) * single)

    sigma = mechanism.noise_multiplier
    found = weights(_losses, np.float32, sigma)
    with jax.enable_x64(True):
        return float(np.max(np.abs(found - weights(_exact_losses, np.float64, np.float64(sigma)))))
