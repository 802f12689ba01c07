"""Gaussian differential privacy: the curve of one parameter mu, its inversions and its composition."""

import numpy as np
from scipy import optimize, special

from jaxacct import _validate

_MOST_MU = 1e4  # a larger mu is no privacy; inversions refuse it


def gdp_delta(mu, epsilon) -> np.ndarray:
    """delta of mu-GDP at epsilon (natural log), any real epsilon; arrays broadcast, float64.

    `Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)`; at mu = 0 it is `max(0, 1 - e^eps)`.

    Raises:
      ValueError: a negative or non-finite mu, a NaN epsilon.

    Source: arXiv 2209.15596, section 2; Dong, Roth and Su 2019, corollary 2.13.
    """
    mu, epsilon = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    if not np.all(np.isfinite(mu) & (mu >= 0)):
        raise ValueError("mu must be finite numbers of at least 0")
    if np.any(np.isnan(epsilon)):
        raise ValueError("epsilon must not be NaN")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        upper, lower = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
        log_first, log_second = special.log_ndtr(upper), epsilon + special.log_ndtr(lower)
        # The difference of two nearly equal numbers: their ratio first.
        delta = np.exp(log_first) * -np.expm1(np.minimum(0.0, log_second - log_first))
        none = np.maximum(0.0, -np.expm1(epsilon))
    delta = np.where(mu > 0, delta, none)
    return np.where(np.isneginf(epsilon), 1.0, np.where(np.isposinf(epsilon), 0.0, delta))


def gdp_epsilon(mu, delta: float) -> np.ndarray:
    """The smallest epsilon of at least 0 with `gdp_delta(mu, epsilon) <= delta`; mu an array, float64.

    Raises:
      ValueError: a bad mu, a delta outside (0, 1).
    """
    delta = _validate.open_probability("delta", delta)
    mu = np.asarray(mu, float)
    gdp_delta(mu, 0.0)
    low, high = np.zeros(mu.shape), np.ones(mu.shape)
    while np.any(growing := gdp_delta(mu, high) > delta):
        high = np.where(growing, 2 * high, high)
    for _ in range(200):
        middle = (low + high) / 2
        enough = gdp_delta(mu, middle) <= delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(gdp_delta(mu, 0.0) <= delta, 0.0, high)


def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-DP.

    Raises:
      ValueError: epsilon below 0 or not finite, a delta outside (0, 1).
    """
    epsilon = _validate.nonnegative_number("epsilon", epsilon)
    delta = _validate.open_probability("delta", delta)
    high = 1.0
    while gdp_delta(high, epsilon) <= delta:
        high *= 2
        if high > _MOST_MU:
            raise ValueError(f"delta must be further from 1: no mu below {_MOST_MU:g} reaches {delta!r}")
    found = optimize.brentq(lambda mu: float(gdp_delta(mu, epsilon)) - delta, 0.0, high, xtol=1e-15)
    while gdp_delta(found, epsilon) > delta:  # the safe side of the root
        found = float(np.nextafter(found, 0.0))
    return float(found)


def compose_gdp(mus, axis=None) -> np.ndarray:
    """`sqrt(sum mu^2)`: the parameter of the composition, also where each mu is chosen adaptively but the sum
    of squares is bounded in advance (arXiv 2209.15596, theorem 2)."""
    mus = np.asarray(mus, float)
    if not np.all(mus >= 0):
        raise ValueError("mus must be at least 0")
    return np.sqrt(np.sum(np.square(mus), axis=axis))
