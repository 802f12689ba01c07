"""Clip norms that differ by step: a public sequence, fixed before the run.

Gradients of step t are multiplied by C / C_t, C the largest norm, and clipped to C; the noisy mean is
multiplied by C_t / C. Sums and noise are those of one clip norm, and so is the guarantee
(proofs/released_numbers.md, section 7).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate

_MAX_RATIO = 1e6  # of two norms: gradients in float32 are multiplied by at most so much


def checked(norms, steps: int) -> list[float]:
    """Return the clip norms of all steps; ValueError unless there is a usable one for each."""
    try:
        found = np.asarray(norms, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"clip_norm must be a number or one for each step, got {norms!r}") from None
    if found.shape != (steps,):
        raise ValueError(f"clip_norm must be a number or the plan's {steps}, got shape {found.shape}")
    values = [_validate.positive_number("clip_norm", value) for value in found.tolist()]
    if max(values) > _MAX_RATIO * min(values):
        raise ValueError(
            f"clip_norm must have norms within a factor of {_MAX_RATIO:g}, got {min(values):g} to "
            f"{max(values):g}"
        )
    return values


def shares_of(norms: Sequence[float], clip_norm: float) -> jax.Array:
    """Return (steps,) float32: `C_t / C`, each in (0, 1].

    Args:
      norms: C_t.
      clip_norm: C, the clip norm that noise is for.

    Raises:
      ValueError: for a norm above it.
    """
    values = checked(norms, len(norms))
    if max(values) > clip_norm:
        raise ValueError(f"norms must be at most the clip norm {clip_norm:g}, got {max(values):g}")
    return jnp.asarray(np.asarray(values) / clip_norm, jnp.float32)


def divided(loss: Callable[..., jax.Array], share) -> Callable[..., jax.Array]:
    """Return the loss of a step divided by its share, so that a gradient of norm C_t has norm C."""
    return jax.tree_util.Partial(_divided, loss, share)


def _divided(loss, share, params, example):
    value = loss(params, example)
    value, *aux = value if isinstance(value, tuple) else (value,)
    dtype = jnp.promote_types(jnp.result_type(value), jnp.float32)
    value = jnp.asarray(value, dtype) / jnp.asarray(share, dtype)
    return (value, *aux) if aux else value


def multiplied(tree, share):
    """Return a pytree of float32 times a share."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(share, leaf.dtype), tree)
