"""One description of a mechanism: who takes part when, how noise is correlated, and how much."""

from dataclasses import dataclass

from jaxacct import _validate
from jaxacct.schemes import Scheme
from jaxacct.toeplitz import BandedToeplitz


@dataclass(frozen=True)
class Mechanism:
    """`C x + sigma z`: a sampling scheme, a strategy matrix and a noise multiplier.

    Attributes:
      scheme: who takes part when.
      strategy: banded Toeplitz C, column norm 1, with at most `scheme.min_separation` bands, so that
        two participations of one example never touch the same output.
      noise_multiplier: sigma, the standard deviation of `z` per unit of clip norm x column norm; above 0.

    Zero-out adjacency: the neighbouring data set replaces one example by one whose gradient is zero.
    """

    scheme: Scheme
    strategy: BandedToeplitz
    noise_multiplier: float

    def __post_init__(self):
        check_bands(self.scheme, self.strategy)
        sigma = _validate.positive_number("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)


def check_bands(scheme: Scheme, strategy: BandedToeplitz) -> None:
    """Refuse a strategy whose bands would let two participations of one example overlap."""
    if strategy.bands > scheme.min_separation:
        raise ValueError(
            f"bands must be at most the minimum separation {scheme.min_separation} of the scheme, "
            f"was {strategy.bands}"
        )
