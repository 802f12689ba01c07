"""Gaussian differential privacy with the arguments in the order of individual accounting: mu first.

The curve itself, its inversions and its composition are those of `jaxacct.accountants.tradeoff`.
"""

import numpy as np

from jaxacct.accountants.tradeoff.curves import gaussian
from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp, gdp_mu


def gdp_delta(mu, epsilon) -> np.ndarray:
    """delta of mu-GDP at epsilon (natural log), any real epsilon; arrays broadcast, float64.

    `Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)`; at mu = 0 it is `max(0, 1 - e^eps)`.

    Raises:
      ValueError: a negative or infinite mu, a NaN.

    Source: arXiv 2209.15596, section 2; Dong, Roth and Su 2019, corollary 2.13.
    """
    mu, epsilon = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    if not np.all(np.isfinite(mu) & (mu >= 0)):
        raise ValueError("mu must be finite numbers of at least 0")
    if np.any(np.isnan(epsilon)):
        raise ValueError("epsilon must not be NaN")
    return np.exp(np.asarray(gaussian.gdp_log_delta(epsilon, mu)))


def gdp_epsilon(mu, delta: float) -> np.ndarray:
    """The least epsilon of at least 0 with `gdp_delta(mu, epsilon) <= delta`; mu an array, float64.

    Raises:
      ValueError: a bad mu, a delta outside (0, 1).
    """
    return np.asarray(gaussian.gdp_epsilon(delta, np.asarray(mu, float)))


__all__ = ["compose_gdp", "gdp_delta", "gdp_epsilon", "gdp_mu"]
