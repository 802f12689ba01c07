"""One description of a mechanism: who takes part when, how noise is correlated, and how much."""

from dataclasses import dataclass

import numpy as np

from jaxacct import _validate
from jaxacct.schemes import Scheme
from jaxacct.strategies.non_banded import BandedInverse, Dense, Strategy, cross_terms
from jaxacct.strategies.toeplitz import BandedToeplitz


@dataclass(frozen=True)
class Mechanism:
    """`C x + sigma z`: a sampling scheme, a strategy matrix and a noise multiplier.

    Attributes:
      scheme: who takes part when.
      strategy: banded Toeplitz C, column norm 1, with at most `scheme.min_separation` bands, so that
        two participations of one example never touch the same output; or one of `strategies.non_banded`,
        whose losses are bounds (proofs/non_banded.md).
      noise_multiplier: sigma, the standard deviation of `z` per unit of clip norm x column norm; above 0.

    Zero-out adjacency: the neighbouring data set replaces one example by one whose gradient is zero.
    """

    scheme: Scheme
    strategy: Strategy
    noise_multiplier: float

    def __post_init__(self):
        check_bands(self.scheme, self.strategy)
        sigma = _validate.positive_number("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)

    @property
    def cross_terms(self) -> np.ndarray:
        """() or (iterations,): most that a participation shares with later ones; 0 where losses are exact."""
        scheme = self.scheme
        return scheme.examples_per_unit * cross_terms(self.strategy, scheme.iterations, scheme.min_separation)

    @property
    def is_upper_bound(self) -> bool:
        """Whether what is certified is the privacy of a bound rather than of the mechanism itself."""
        return bool(self.cross_terms.any())


def check_bands(scheme: Scheme, strategy: Strategy) -> None:
    """Refuse a banded strategy under which two participations could overlap, and one of another size."""
    if isinstance(strategy, BandedInverse) and strategy.iterations != scheme.iterations:
        raise ValueError(
            f"strategy must have the scheme's {scheme.iterations} iterations, had {strategy.iterations}"
        )
    if isinstance(strategy, Dense) and len(strategy.matrix) != scheme.iterations:
        raise ValueError(f"strategy must have {scheme.iterations} rows, had {len(strategy.matrix)}")
    if not isinstance(strategy, BandedToeplitz):
        if scheme.side_information is not None:
            raise ValueError(f"strategy must be banded Toeplitz for {scheme.name}: Q is no Gaussian there")
        return
    if strategy.bands > scheme.min_separation:
        raise ValueError(
            f"bands must be at most the minimum separation {scheme.min_separation} of the scheme, "
            f"was {strategy.bands}"
        )
