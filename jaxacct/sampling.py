"""Draws of the privacy loss in bulk."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct import _validate, proposals, randomness, scores
from jaxacct.mechanism import Mechanism
from jaxacct.privacy_loss import DIRECTIONS


def sample_privacy_loss(
    key, mechanism: Mechanism, num_samples: int, direction: str = "remove", dtype=jnp.float32
):
    """Draw privacy losses L = ln P/Q: under P for `direction` "remove", under Q for "add".

    The draws are of the mechanism that also releases the bands - 1 rows after the last step, which can
    only be less private (see `jaxacct.scores`).

    Args:
      key: a JAX key; the same key gives the same losses on any device and in any batching.
      num_samples: how many, at least 1.
      direction: "remove" (P against Q) or "add" (Q against P).
      dtype: float32, or float64 when JAX has x64 enabled.

    Returns:
      (num_samples,) of `dtype`, natural log, in the order of the sample index.
    """
    num_samples = _validate.positive_integer("num_samples", num_samples)
    _validate.one_of("direction", direction, DIRECTIONS)
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs jax_enable_x64, which is off")
    proposal = proposals.plain(mechanism, direction)
    stream = direction_key(key, direction)
    at_once = blocks_at_once(mechanism, dtype)
    num_blocks = -(-num_samples // randomness.BLOCK_SIZE)
    parts = [
        proposal.draw(stream, first, at_once, dtype).loss for first in range(0, num_blocks, at_once)
    ]
    return jnp.asarray(np.concatenate(parts)[:num_samples], dtype)


def direction_key(key, direction: str):
    """The key of one direction's stream of a run."""
    return randomness.stream_key(key, DIRECTIONS.index(direction))


def blocks_at_once(mechanism: Mechanism, dtype=jnp.float32, memory_bytes: float = 1e9) -> int:
    """How many blocks of samples fit in `memory_bytes` of working memory, between 1 and 16.

    A batch holds about twelve arrays of the length of the circulant at once; more than 16 blocks do not
    run faster on a CPU.
    """
    length = scores.circulant_length(mechanism.scheme.iterations, mechanism.strategy.bands)
    per_block = 12 * randomness.BLOCK_SIZE * length * jnp.dtype(dtype).itemsize
    return int(min(16, max(1, memory_bytes // per_block)))
