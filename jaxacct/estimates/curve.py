"""Estimates of delta at several noise multipliers, from samples with the same randomness."""

import math
from typing import NamedTuple

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.sampling import sample_privacy_loss
from jaxacct.schemes import Scheme
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import DIRECTIONS
from jaxacct.strategies import Strategy


class DeltaCurve(NamedTuple):
    """Estimates of delta at each noise multiplier, (count,) float64 each; no guarantee.

    Attributes:
      low: lower end, the larger of both directions; each interval holds with the requested confidence, but
        all share their samples. 0 where losses are upper bounds.
      value: estimate, as `low`.
      high: upper end, as `low`.
    """

    noise_multipliers: np.ndarray
    low: np.ndarray
    value: np.ndarray
    high: np.ndarray


def delta_curve(
    scheme: Scheme,
    strategy: Strategy,
    noise_multipliers,
    epsilon: float,
    *,
    num_samples: int = 20_000,
    confidence: float = 0.95,
    key=None,
) -> DeltaCurve:
    """Estimate delta(epsilon) at every noise multiplier by plain samples, both directions.

    All noise multipliers have the same key, so neighbours differ by little noise.

    Args:
      scheme: any scheme.
      strategy: strategy matrix.
      noise_multipliers: (count,) above 0.
      epsilon: nats, at least 0.
      num_samples: per noise multiplier and direction.
      confidence: of each interval, in (0, 1).
      key: JAX key; from the operating system by default.

    Returns:
      The estimates and intervals of each noise multiplier; not a guarantee.

    Raises:
      ValueError: bad arguments.
    """
    epsilon = _validate.epsilon(epsilon)
    risk = (1 - _validate.open_probability("confidence", confidence)) / len(DIRECTIONS)
    _validate.positive_integer("num_samples", num_samples)
    sigmas = _checked(noise_multipliers)
    mechanisms = [Mechanism(scheme, strategy, sigma) for sigma in sigmas]
    key = randomness.checked_key(key)

    def of(mechanism: Mechanism, direction) -> tuple[float, float, float]:
        losses = np.asarray(sample_privacy_loss(key, mechanism, num_samples, direction), np.float64)
        terms = hockey_stick.hockey_stick(epsilon - direction.sign * losses)
        counts = bounds.bin_terms(terms)
        low = 0.0 if mechanism.is_upper_bound else bounds.lower_confidence_bound(counts, risk / 2)
        high = bounds.upper_confidence_bound(counts, risk / 2)
        mean = math.fsum(terms) / terms.size
        return min(low, mean), mean, max(high, mean)

    found = [[of(mechanism, direction) for direction in mechanism.directions] for mechanism in mechanisms]
    return DeltaCurve(np.array(sigmas), *np.max(np.array(found), axis=1).T)


def _checked(noise_multipliers) -> list[float]:
    try:
        given = np.asarray(noise_multipliers, np.float64)
    except (TypeError, ValueError):
        given = np.array(np.nan)
    if given.ndim != 1 or not given.size or not np.all(np.isfinite(given) & (given > 0)):
        raise ValueError(f"noise_multipliers must be a list of numbers above 0, got {noise_multipliers!r}")
    for sigma in given.tolist():
        _validate.noise_multiplier("noise_multipliers", sigma)
    return given.tolist()
