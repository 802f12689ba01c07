"""Privacy losses `L = ln P/Q` from outputs or from keys."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.programs import compiled
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.schemes import Scheme
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies import Strategy

_LARGEST = 2**31 - 1


def privacy_loss(mechanism: Mechanism, outputs, batch_sizes=None):
    """Return ln P/Q of given outputs of the mechanism.

    P is the distribution of `C x + sigma z` when one example participates by the scheme, Q the distribution
    with x = 0, or for replace-one adjacency that of `-C x + sigma z`.

    Args:
      mechanism: the mechanism.
      outputs: (batch, iterations) or (iterations,) float32 or float64, per unit of clip norm.
      batch_sizes: of the shape of `outputs`, int32: how many other examples were sampled at each step; for
        `TruncatedBMinSep` only, whose adversary sees them.

    Returns:
      (batch,) or () of the same dtype, natural log. Exact up to rounding for the n x n matrix C; an upper
      bound where C is not banded within the minimum separation (`Mechanism.is_upper_bound`).

    Raises:
      ValueError: the last axis is not the number of iterations; batch sizes are missing, not expected or no
        whole numbers.

    Source: arXiv 2602.09338, theorem 5.1 and its corollary for the warm start.
    """
    checked(mechanism)
    outputs = _as_numbers("outputs", outputs)
    if not isinstance(outputs, jax.Array):  # else it stays as it is: JAX compiles a program per shape
        outputs = outputs.astype(jax.dtypes.canonicalize_dtype(outputs.dtype), copy=False)
    iterations = mechanism.scheme.iterations
    if outputs.ndim not in (1, 2) or outputs.shape[-1] != iterations:
        raise ValueError(
            f"outputs must have shape (batch, {iterations}) or ({iterations},), got {outputs.shape}"
        )
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        outputs = outputs.astype(float)
    if (mechanism.scheme.side_information is None) != (batch_sizes is None):
        raise ValueError("batch_sizes must be given for truncated-b-min-sep, and for no other scheme")
    if batch_sizes is not None:
        batch_sizes = _as_sizes("batch_sizes", batch_sizes)
        if batch_sizes.shape != outputs.shape:
            raise ValueError(f"batch_sizes must have the shape {outputs.shape}, got {batch_sizes.shape}")
        batch_sizes = batch_sizes.reshape(-1, iterations)
    fields = mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier
    rows = outputs.reshape(-1, iterations)
    losses = _loss_of_outputs(*fields, rows, batch_sizes)
    if mechanism.is_replace_one:
        losses = losses - _loss_of_outputs(*fields, -rows, batch_sizes, mechanism.cross_terms)
    return losses if outputs.ndim == 2 else losses[0]


def _as_sizes(name: str, values):
    """Return whole numbers as int32; traced values are returned as they are."""
    numbers = _as_numbers(name, values)
    if not isinstance(numbers, jax.core.Tracer):
        numbers = np.asarray(numbers)
        real = numbers.real
        wrong = ~((real >= 0) & (real <= _LARGEST) & (numbers == np.floor(real)))
        if wrong.any():
            raise ValueError(f"{name} must be whole numbers from 0 to {_LARGEST}, got {numbers[wrong][0]}")
    return numbers.astype(np.int32)


def _as_numbers(name: str, values):
    if isinstance(values, jax.Array):
        return values
    try:
        array = np.asarray(values)
    except jax.errors.TracerArrayConversionError:  # a list of traced values
        return jnp.asarray(values)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(f"{name} must be an array of numbers, got {type(values).__name__}")
    return array


@compiled(static=2)
def _loss_of_outputs(scheme: Scheme, strategy: Strategy, sigma, outputs, batch_sizes, cross_terms=0.0):
    half_norms = jnp.asarray(strategy.square_norms(scheme.iterations) / 2, outputs.dtype)
    lowered = half_norms + jnp.asarray(cross_terms, outputs.dtype)
    excess = strategy.output_scores(outputs) - lax.broadcast_to_rank(lowered, outputs.ndim)
    variance = jnp.asarray(sigma, outputs.dtype) ** 2
    norms = half_norms
    if scheme.examples_overlap:
        products = strategy.truncated_products(scheme.iterations, scheme.min_separation)
        norms = jnp.asarray(products, outputs.dtype)
    return scheme.log_likelihood_ratios(excess / variance, norms / variance, batch_sizes)


def loss_of_scores(
    scheme: Scheme,
    strategy: Strategy,
    scores_,
    sigma,
    direction: str = Direction.REMOVE,
    batch_sizes=None,
    positions=None,
    counts=None,
):
    """Return L of (num_samples, iterations) scores, on the horizon of `jaxacct.strategies.stationary`.

    Participations at `positions`, `counts` each, are added to the scores first
    (`Strategy.add_signal_windows`).

    Where C is not banded within the separation, the result is an upper bound on L for `direction` "remove"
    and a lower bound for "add", so that both divergences are overestimated (proofs/non_banded.md).
    """
    log_ratios, norms, sigma = _log_ratios(scheme, strategy, scores_, sigma, direction)
    if positions is not None:
        log_ratios = strategy.add_signal_windows(log_ratios, positions, 1 / sigma**2, counts)
    return scheme.log_likelihood_ratios(log_ratios, norms, batch_sizes)


def _log_ratios(scheme: Scheme, strategy: Strategy, scores_, sigma, direction: str):
    """Return (log-ratios of one participation, column products over sigma^2, sigma), of the scores' dtype."""
    chex.assert_shape(scores_, (None, scheme.iterations))
    sigma = jnp.asarray(sigma, scores_.dtype)
    norms = jnp.asarray(column_norms(scheme, strategy), scores_.dtype)
    # `||c_i||^2 / 2`, and the cross terms where the loss is bounded from below.
    lowered = jnp.asarray(strategy.half_square_norms(), scores_.dtype)
    if direction != Direction.REMOVE:
        lowered += jnp.asarray(Mechanism(scheme, strategy, 1.0).cross_terms, scores_.dtype)
    return (scores_ - lax.broadcast_to_rank(lowered, scores_.ndim)) / sigma**2, norms / sigma**2, sigma


def losses_of_mirrored(
    scheme: Scheme, strategy: Strategy, scores_, sigma, direction, batch_sizes, positions=None, counts=None
):
    """Return (L, ln f(y)) of replace-one, `L = ln f(y) - ln f(-y)`; f is P/Q of zero-out at outputs y.

    The scores of -y are the negated bits. Arguments and shapes are those of `loss_of_scores`; where C is not
    banded within the separation L is an upper bound, of an upper and of a lower bound on f.
    """
    assert direction == Direction.REMOVE and batch_sizes is None
    if positions is not None:
        scores_ = strategy.add_signal_windows(scores_, positions, 1.0, counts)
    log_f = loss_of_scores(scheme, strategy, scores_, sigma)
    return log_f - loss_of_scores(scheme, strategy, -scores_, sigma, Direction.ADD), log_f


def loss_of_mirrored(*arguments):
    """L of `losses_of_mirrored`."""
    return losses_of_mirrored(*arguments)[0]


def loss_by_pairs(scheme: Scheme, strategy: Strategy, scores_, sigma):
    """Return an upper bound on L of (num_samples, iterations) scores, where the scheme has a `pair_bound`."""
    log_ratios, norms, _ = _log_ratios(scheme, strategy, scores_, sigma, Direction.REMOVE)
    return scheme.log_likelihood_ratios_by_pairs(log_ratios, norms)  # pyrefly: ignore[missing-attribute]


def column_norms(scheme: Scheme, strategy: Strategy) -> np.ndarray:
    """Return the column products that a likelihood needs at sigma = 1, float64, on `loss_of_scores`' horizon.

    Half their square norms, () or (iterations,); or where `scheme.examples_overlap` the products of columns d
    steps apart, (min_separation,) or (iterations, min_separation).
    """
    if scheme.examples_overlap:
        return strategy.column_products(scheme.min_separation)
    return strategy.half_square_norms()
