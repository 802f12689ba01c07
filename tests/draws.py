"""Draws of a proposal for tests."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxacct.core.verify import Run, Stop, draw
from jaxacct.proposals import base
from jaxacct.proposals.threshold import Resolved
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import Direction, hockey_stick


def draws_of(proposal: base.Proposal, key, blocks: int) -> base.Draws:
    """So many blocks, as many at once as estimates and verifications draw: the same programs."""
    parts = base.draw_in_batches(proposal, key, 0, blocks)
    return base.Draws(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def draw_line(line, delta_v: float, q: float, key, max_samples: int):
    """Return the evidence of a line, as a verification draws it with that failure probability."""
    plain = base.plain(line.near.mechanism, Direction.ADD)
    run = Run(Resolved(plain, line.epsilon, hockey_stick, (), 0.5), line)
    budget: Any = SimpleNamespace(delta_v=delta_v, failure_probability=q)
    return draw(run, budget, Stop(max_samples=max_samples), "job", key)


def block_keys(key, first_block: int, num_blocks: int):
    """Return (num_blocks,) keys of consecutive blocks of one stream, as `randomness.block_trees` has them."""
    indices = np.arange(first_block, first_block + num_blocks, dtype=np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


def mean_interval(counts, confidence=0.95) -> tuple[float, float]:
    """Return an interval that holds the mean with probability at least `confidence`, at all times at once."""
    q = (1 - confidence) / 2
    return bounds.lower_confidence_bound(counts, q), bounds.upper_confidence_bound(counts, q)
