"""Privacy odometer: consecutive filters, so that the budget need not be fixed in advance."""

from collections.abc import Sequence

import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp, gdp_epsilon
from jaxacct.common import validate as _validate


class PrivacyOdometer:
    """Spent budget, rounded up to the end of the current piece (arXiv 2209.15596, section 3.3).

    After m pieces the release is `sqrt(D_1^2 + .. + D_m^2)`-GDP. Values between the ends of pieces would
    depend on the data through the time of the query, so they are not available.

    Args:
      pieces: the mu of each piece, fixed before the first step.
    """

    def __init__(self, pieces: Sequence[float]):
        self.pieces = tuple(_validate.scale("pieces", piece) for piece in pieces)
        if not self.pieces:
            raise ValueError("pieces must have at least one mu, got none")
        self._piece, self._squares = 0, []

    def charge(self, mu: float) -> None:
        """Charge a mechanism that is mu-GDP for every possible example, before it runs.

        Raises:
          ValueError: it fits in none of the remaining pieces; nothing is charged.
        """
        mu = _validate.scale_or_zero("mu", mu)
        squares, piece = [*self._squares, mu * mu], self._piece
        while not np.sum(squares) <= self.pieces[piece] ** 2 * (1 + 1e-12):
            squares, piece = [mu * mu], piece + 1
            if piece == len(self.pieces):
                raise ValueError(f"mu must fit in one of the pieces that are left, got {mu!r}")
        self._squares, self._piece = squares, piece

    def spent_mu(self) -> float:
        """Return the guarantee so far: whole pieces that were begun; 0 before the first mechanism."""
        begun = self._piece + (1 if self._squares or self._piece else 0)
        return float(compose_gdp(self.pieces[:begun])) * (1 + 1e-12) if begun else 0.0

    def epsilon(self, delta: float) -> float:
        """Return `spent_mu` as epsilon at delta."""
        return gdp_epsilon(delta, self.spent_mu())
