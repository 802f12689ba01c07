"""Draws of the privacy loss in bulk."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism, checked
from jaxacct.proposals import base as proposals
from jaxacct.statistics.hockey_stick import Direction


def sample_privacy_loss(
    key, mechanism: Mechanism, num_samples: int, direction: str = Direction.REMOVE, dtype=jnp.float32
):
    """Draw privacy losses L = ln P/Q: under P for `direction` "remove", under Q for "add".

    The draws are of the mechanism that also releases the bands - 1 rows after the last step, which can
    only be less private (see `jaxacct.strategies.stationary`); of the n rows alone for a `FiniteToeplitz`.

    Args:
      key: a JAX key; the same key gives the same losses on any device and in any batching.
      num_samples: how many, at least 1.
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
    proposal = proposals.plain(mechanism, direction)
    stream = direction_key(key, direction)
    num_blocks = -(-num_samples // randomness.BLOCK_SIZE)
    batches = draw_in_batches(proposal, stream, 0, num_blocks, dtype)
    return jnp.asarray(np.concatenate([b.loss for b in batches])[:num_samples], dtype)


def direction_key(key, direction: str):
    """The key of one direction's stream of a run."""
    return randomness.stream_key(key, randomness.Stream.REMOVE.at(Direction(direction).place))


def draw_in_batches(
    proposal: proposals.Proposal, stream, first_block: int, num_blocks: int, dtype=jnp.float32
) -> Iterator[proposals.Draws]:
    """Yield the draws of consecutive blocks, in order, with every core of a CPU busy.

    Memory is set by the blocks drawn at once, never by `num_blocks`.
    """
    at_once = blocks_at_once(proposal.mechanism, dtype)
    starts = range(first_block, first_block + num_blocks, at_once)

    def draw(start):
        wanted = min(at_once, first_block + num_blocks - start)
        # Always the same shape, so that a short last batch does not compile anew.
        draws = proposal.draw(stream, start, at_once, dtype)
        keep = wanted * randomness.BLOCK_SIZE
        return proposals.Draws(*(part[:keep] for part in draws))

    threads = workers()
    if threads == 1 or len(starts) == 1:
        yield from map(draw, starts)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = []
        for start in starts:
            waiting.append(pool.submit(draw, start))
            if len(waiting) > threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def workers() -> int:
    """Threads that dispatch work: XLA leaves cores idle inside one CPU computation, not on a GPU."""
    return min(8, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 2


def blocks_at_once(mechanism: Mechanism, dtype=jnp.float32, arrays: int = 12) -> int:
    """How many blocks go to the devices in one call, a multiple of their number.

    A CPU works through them one after the other, so few are enough to hide the call; an accelerator draws
    them side by side, in about `arrays` arrays of the length of the circulant, in a quarter of its memory.
    """
    devices = len(jax.local_devices())
    if jax.default_backend() == "cpu":
        # Of very short samples the calls themselves take longer than what they draw.
        return (16 if mechanism.scheme.iterations <= 64 else 8) * devices
    length = mechanism.strategy.numbers_per_sample(mechanism.scheme.iterations)
    per_block = arrays * randomness.BLOCK_SIZE * length * jnp.dtype(dtype).itemsize
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 4e9)
    # No more than have their rings in a GPU's L2 cache at b = 256 (`gpu_recurrence`).
    return int(min(256, max(1, memory / 4 // per_block))) * devices
