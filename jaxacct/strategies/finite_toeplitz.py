"""Banded Toeplitz strategy matrices with n rows: no rows after the last step (proofs/finite_horizon.md).

A training run releases the n rows of `C x + sigma z`. `BandedToeplitz` is accounted for with the bands - 1
rows after them as well, a valid bound that costs noise where bands are a large part of n. Here the last
columns end at row n: their norms are smaller, and the overlap of two of them depends on the distance of the
later one from the end.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.strategies.banded_toeplitz import BandedToeplitz, FirstColumn, Toeplitz
from jaxacct.strategies.base import Strategy, check_iterations
from jaxacct.strategies.stationary import Stationary, circulant_length, filtered

# With more steps for each band but the first, the rows after the end are certified, too: that costs at most
# 0.6 % of the noise, and sampling is faster.
MAX_STEPS_PER_BAND = 20


@dataclass(frozen=True)
class FiniteToeplitz(FirstColumn):
    """Banded Toeplitz strategy matrix with n rows and n columns.

    Attributes:
      coefficients: as for `BandedToeplitz`, (bands,); stored scaled to norm 1.
      iterations: n, the size of C, at least `bands`: the first column has norm 1.
      given_norm: as for `BandedToeplitz`.

    Raises:
      ValueError: as `BandedToeplitz`, or fewer steps than bands.

    Example:
      >>> FiniteToeplitz((4, 3), iterations=2).square_norms(2)
      array([1.  , 0.64])
    """

    coefficients: tuple[float, ...]
    iterations: int
    given_norm: float = field(default=0.0, compare=False, repr=False)
    kind: ClassVar[str] = "finite-toeplitz"

    def __post_init__(self):
        _validate.check_fields(self, iterations=_validate.positive_integer)
        super().__post_init__()
        if self.bands > (n := self.iterations):
            raise ValueError(f"coefficients must be at most iterations {n} numbers, got {self.bands}")

    def of_first_steps(self) -> BandedToeplitz:
        return BandedToeplitz(self.coefficients, self.given_norm)

    def check(self, scheme) -> None:
        """Refuse overlapping participations."""
        check_iterations(self, scheme)
        BandedToeplitz(self.coefficients).check(scheme)

    # Windows near the end are cut off.
    rows, draw_normals, add_signal_windows = Strategy.rows, Strategy.draw_normals, Strategy.add_signal_windows

    def half_square_norms(self) -> np.ndarray:
        """Return (iterations,): the last bands - 1 columns are cut off."""
        return self.square_norms(self.iterations) / 2

    def column_products(self, block: int) -> np.ndarray:
        """Return (iterations, block): the last bands - 1 columns are cut off."""
        return self.truncated_products(self.iterations, block)

    def products_from_end(self, block: int) -> np.ndarray:
        return self.truncated_products(self.bands + block, block)[: -self.bands - 1 : -1]

    def scores_from_normals(self, normals, iterations: int, sigma, participation=None):
        """Return scores on the n rows: outputs, then their scores, by two FFTs each."""
        kind = Stationary if self.bands == 1 else Strategy
        return kind.scores_from_normals(self, normals, iterations, sigma, participation)

    def signal(self, participation):
        length = circulant_length(participation.shape[-1], self.bands)
        return filtered(participation, np.fft.rfft(self.array, length), length)

    def gram(self, weights: np.ndarray) -> np.ndarray:
        c = self.array
        outputs = np.convolve(weights, c)[: weights.size]
        return np.correlate(np.append(outputs, np.zeros(c.size - 1)), c, "valid")

    def describe(self) -> str:
        return f"banded Toeplitz, {self.bands} bands, {self.iterations} x {self.iterations}"


def ending(strategy: Strategy, scheme) -> Strategy:
    """Return the n x n matrix for a banded Toeplitz one, where it matters; else the strategy itself.

    It matters for n up to `MAX_STEPS_PER_BAND` (bands - 1). Fixed-order
    batches are accounted for by it anyway; there the columns of a banded matrix may overlap.
    """
    if not isinstance(strategy, BandedToeplitz):
        return strategy
    if scheme.patterns is not None:
        return (
            strategy
            if strategy.bands <= scheme.min_separation
            else Toeplitz(strategy.coefficients, strategy.given_norm)
        )
    n, bands = scheme.iterations, strategy.bands
    if bands <= n <= MAX_STEPS_PER_BAND * (bands - 1):
        return FiniteToeplitz(strategy.coefficients, n, strategy.given_norm)
    return strategy
