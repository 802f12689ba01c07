"""Estimates of delta at several noise multipliers, from samples with the same randomness."""

from typing import NamedTuple

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.estimates.estimate import estimate_delta
from jaxacct.kernels import randomness
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Scheme
from jaxacct.strategies import Strategy


class DeltaCurve(NamedTuple):
    """Estimates of delta at each noise multiplier, (count,) float64 each; no guarantee.

    Attributes:
      low: lower end, the larger of both directions; each interval holds with the requested confidence, but
        all share their samples. As of `Estimate`, 0 where only an upper bound is drawn.
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
    sigmas = _checked(noise_multipliers)
    mechanisms = [Mechanism(scheme, strategy, sigma) for sigma in sigmas]
    options = dict(num_samples=num_samples, confidence=confidence, key=randomness.checked_key(key))
    estimates = [estimate_delta(mechanism, epsilon, proposal="plain", **options) for mechanism in mechanisms]
    ends = np.array([(each.low, each.value, each.high) for each in estimates])
    return DeltaCurve(np.array(sigmas), *ends.T)


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
