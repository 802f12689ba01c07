"""Draws of a proposal for tests."""

import math

import jax
import numpy as np

from jaxacct.proposals import base
from jaxacct.statistics import bounds
from jaxacct.statistics.hockey_stick import hockey_stick, weighted_terms


def draws_of(proposal: base.Proposal, key, blocks: int) -> base.Draws:
    """So many blocks, as many at once as estimates and verifications draw: the same programs."""
    parts = base.draw_in_batches(proposal, key, 0, blocks)
    return base.Draws(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def block_keys(key, first_block: int, num_blocks: int):
    """Return (num_blocks,) keys of consecutive blocks of one stream, as `randomness.block_keys` has them."""
    indices = np.arange(first_block, first_block + num_blocks, dtype=np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


def mean_interval(counts, false_alarm=0.05) -> tuple[float, float]:
    """Return an interval that misses the mean with probability at most `false_alarm`, at all times."""
    q = false_alarm / 2
    return bounds.lower_confidence_bound(counts, q), bounds.upper_confidence_bound(counts, q)


def divergence_interval(
    proposal: base.Proposal, draws: base.Draws, epsilon: float, false_alarm: float, profile=hockey_stick
) -> tuple[float, float]:
    """Return an interval for the divergence of which a proposal has these draws; no term is above 1.

    Its ends are wider by the errors of the drawn distribution, and by 1e-4 of themselves for float32.
    """
    scale = math.exp(proposal.log_scale)
    terms = weighted_terms(draws, proposal.direction, epsilon, profile) / scale
    assert terms.min() >= 0 and terms.max() <= 1 + 1e-5, proposal.name
    low, high = mean_interval(bounds.bin_terms(np.minimum(terms, 1.0)), false_alarm)
    slack = proposal.relative_error + proposal.total_variation + 1e-4
    return scale * low * (1 - slack), scale * high * (1 + slack)


def trained(scheme, size: int, seed: int) -> np.ndarray:
    """(size, iterations) participations in the batches that a scheme draws."""
    generator = np.random.default_rng(seed)
    batches = scheme.batches(size, generator)
    steps = [np.bincount(batches.draw(i, generator), minlength=size) for i in range(scheme.iterations)]
    return np.stack(steps, axis=1)


def drawn_by(sampler, size: int) -> np.ndarray:
    """(size, iterations) participations in all batches of a trainer's sampler."""
    return np.stack(
        [np.bincount(sampler.next(), minlength=size) for _ in range(sampler.scheme.iterations)], 1
    )
