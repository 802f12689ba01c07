"""The paper's fit of one mu to a composition of subsampled steps: approximate, never a guarantee."""

import math
from dataclasses import dataclass

import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.common import validate as _validate
from jaxacct.individual.fourier import FourierAccountant
from jaxacct.individual.rdp import rdp_to_epsilon


@dataclass(frozen=True, eq=False)
class ApproximateBlackwell:
    """**Approximate** fit: the smallest mu whose curve is above the accountant's on a *finite* epsilon range.

    Condition (5.1) of arXiv 2209.15596 asks for all real epsilon. There the smallest mu tends to `sqrt(T) /
    sigma`, the value without subsampling, so the printed condition gives no amplification at all
    (proofs/errata.md); on a finite range it is a fit. The (epsilon, delta) that follows comes from the Renyi
    divergence `a mu^2 / 2`.

    Attributes:
      accountant: of the composition.
      epsilon_range: (lowest, highest) epsilon of the fit, nats; required.
      points: number of points on that range.
    """

    accountant: FourierAccountant
    epsilon_range: tuple[float, float]
    points: int = 30

    def __post_init__(self):
        low, high = self.epsilon_range
        if not 0 <= low < high < math.inf:
            raise ValueError(f"epsilon_range must lie in [0, inf), lowest first, got {self.epsilon_range!r}")
        _validate.positive_integer("points", self.points)

    def mu(self, counts) -> np.ndarray:
        """Return (groups,) the fitted mu. **Private**, and an approximation."""
        epsilons = np.linspace(*self.epsilon_range, self.points)
        curves = np.stack([self.accountant.delta(float(e), counts) for e in epsilons])
        return gdp_mu(epsilons[:, None], curves).max(axis=0)

    def epsilon(self, counts, delta: float) -> np.ndarray:
        """Return (groups,) epsilon at delta by the Renyi route; an approximation (**private**)."""
        orders = np.concatenate(
            [np.geomspace(1.01, 2, 60), np.linspace(2.05, 64, 1240), np.geomspace(65, 4096, 200)]
        )
        mu = self.mu(counts)
        return rdp_to_epsilon(orders * np.square(mu)[:, None] / 2, orders, delta)[0]
