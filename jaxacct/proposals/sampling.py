"""Privacy losses in bulk."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.proposals import base
from jaxacct.statistics.hockey_stick import Direction


def sample_privacy_loss(
    key, mechanism: Mechanism, num_samples: int, direction: str = Direction.REMOVE, dtype=jnp.float32
):
    """Draw privacy losses L = ln P/Q: under P for `direction` "remove", under Q for "add".

    The samples are of the mechanism that also releases the bands - 1 rows after the last step, which is at
    most as private (see `jaxacct.strategies.stationary`); of the n rows alone for a `FiniteToeplitz`.

    Args:
      key: JAX key; the same key gives the same losses on any device and in any batching.
      mechanism: the mechanism.
      num_samples: at least 1.
      direction: "remove" (P against Q) or "add" (Q against P).
      dtype: float32, or float64 when JAX has x64 enabled.

    Returns:
      (num_samples,) of `dtype`, natural log, in the order of the sample index.
    """
    checked(mechanism)
    num_samples = _validate.positive_integer("num_samples", num_samples)
    direction = Direction.of(direction)
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs jax_enable_x64, which is off")
    proposal = base.plain(mechanism, direction)
    stream = base.direction_key(key, direction)
    num_blocks = -(-num_samples // randomness.BLOCK_SIZE)
    batches = base.draw_in_batches(proposal, stream, 0, num_blocks, dtype)
    return jnp.asarray(np.concatenate([b.loss for b in batches])[:num_samples], dtype)
