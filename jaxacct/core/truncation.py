"""Batches truncated to a maximum size: the increase of delta (proofs/truncation.md has statement and proof).

Truncation matters only if the example at hand is sampled into a step that has to be truncated. Given the
others' batch sizes r, which the adversary may see, that event E has a probability pi(r) that is independent
of the noise, and outside E the mechanism is the one without truncation. So delta grows by little more than E
pi(r), and all else - likelihoods, proposals, verification - is that of the mechanism without truncation.

This pays where the maximum is a few standard deviations above the mean batch; at the mean it is useless, and
arXiv 2602.09338, appendix D, whose likelihoods include truncation, would be needed.
"""

import math

import numpy as np
import scipy

from jaxacct.common import validate as _validate
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.families.replicas import log_normalizer

MAX_SECOND_MOMENT = 100.0  # maximum second moment of the likelihood ratio that `reserve` allows


def reserve(scheme, epsilon: float, dataset_size: int, max_batch_size: int) -> float:
    """Return an upper bound on the increase of delta(epsilon) by truncating batches.

    It holds for a mechanism that `covers` accepts. Larger batches are truncated to `max_batch_size` by a
    uniformly random subset; a truncated example stays locked out. ValueError for multi-attribution, or a
    maximum that is not above the largest expected batch.
    """
    if not scheme.supports_truncation:
        raise ValueError(
            f"max_batch_size must not be given for {scheme.name}: the accountant does not cover it"
        )
    size = _validate.positive_integer("dataset_size", dataset_size)
    max_size = _validate.positive_integer("max_batch_size", max_batch_size)
    _validate.nonnegative_number("epsilon", epsilon)
    rates = scheme.participation_probabilities()
    if max_size <= size * rates.max():
        raise ValueError(
            f"max_batch_size must be above the expected batch size {size * rates.max():.6g}, got {max_size}"
        )
    # Others sampled, r ~ Binomial(|D| - 1, rate), independent of the example; truncation occurs when r >=
    # maximum.
    due = scipy.stats.binom.sf(max_size - 1, size - 1, rates)
    sampled, any_step = float(rates @ due), float(due.sum())
    none = math.exp(scheme.log_probability_of_none())
    remove = any_step
    if none > 0:
        remove = min(remove, sampled * (1 + tail_bound(scheme, epsilon) / none))
    add = sampled if epsilon >= -math.log(none or 5e-324) else any_step
    # NumPy's maximum and minimum keep a NaN, which the caller's comparison then refuses. The last factor
    # covers float64 binomial tails.
    return float(np.minimum(1.0, np.maximum(remove, add) * (1 + 1e-9)))


def tail_bound(scheme, epsilon: float) -> float:
    """Return Markov's bound on P(f > e^epsilon (1 - pi)) in `reserve`, f = P/Q without truncation."""
    return math.exp(min(0.0, math.log(MAX_SECOND_MOMENT) - epsilon - scheme.log_probability_of_none()))


def covers(mechanism: Mechanism, epsilon: float) -> bool:
    """Return whether `reserve` holds for this noise: its E_P f = Z_2 is at most the allowed one."""
    _validate.nonnegative_number("epsilon", epsilon)
    if mechanism.scheme.log_probability_of_none() == -math.inf or tail_bound(mechanism.scheme, epsilon) == 1:
        return True
    return bool(log_normalizer(mechanism) <= np.log(MAX_SECOND_MOMENT))
