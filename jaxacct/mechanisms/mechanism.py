"""Mechanism: sampling scheme, noise correlation, noise multiplier and adjacency."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.schemes import SCHEMES, Scheme
from jaxacct.statistics.hockey_stick import DIRECTIONS, Direction
from jaxacct.strategies import Strategy, prefix_sum_error

# The dominating pair of each: proofs/adjacency.md.
AdjacencyName = Literal["zero-out", "add-or-remove-one", "replace-one"]  # neighbouring data sets
ADJACENCIES: tuple[AdjacencyName, ...] = get_args(AdjacencyName)
ZERO_OUT, ADD_OR_REMOVE_ONE, REPLACE_ONE = ADJACENCIES


@dataclass(frozen=True)
class Mechanism:
    """`C x + sigma z`: a sampling scheme, a strategy matrix and a noise multiplier.

    Attributes:
      scheme: sampling scheme.
      strategy: banded Toeplitz C, column norm 1, with at most `scheme.min_separation` bands, so that
        two participations of one example never touch the same output, accounted for with the bands - 1 rows
        after the last step, or as `FiniteToeplitz` without (proofs/finite_horizon.md); or one of the other
        `strategies`, whose losses are bounds (proofs/non_banded.md).
      noise_multiplier: sigma, the standard deviation of `z` per unit of clip norm x column norm; above 0.
      adjacency: "zero-out": in the neighbouring data set the gradients of one unit (`Scheme.unit`) are zero;
        "add-or-remove-one": it lacks one example, and data sets have at most the stated number of them;
        "replace-one": another example is in the place of one, with the same participations.
    """

    scheme: Scheme
    strategy: Strategy
    noise_multiplier: float
    adjacency: str = ADJACENCIES[0]

    def __post_init__(self):
        check_pair(self.scheme, self.strategy)
        _validate.check_fields(self, noise_multiplier=_validate.noise_multiplier)
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)
        if self.adjacency not in self.scheme.adjacencies:
            allowed = " or ".join(map(repr, self.scheme.adjacencies))
            raise ValueError(
                f"adjacency must be {allowed} for scheme {self.scheme.name}, got {self.adjacency!r} "
                "(proofs/adjacency.md)"
            )

    @property
    def is_add_or_remove(self) -> bool:
        """Whether neighbouring data sets differ in their number of examples."""
        return self.adjacency == ADD_OR_REMOVE_ONE

    @property
    def is_replace_one(self) -> bool:
        """Whether another example replaces one: the pair is `a + sigma z` against `-a + sigma z`."""
        return self.adjacency == REPLACE_ONE

    @property
    def pair_adjacency(self) -> str:
        """Adjacency of the derived dominating pair: add-or-remove-one shares that of zero-out."""
        return REPLACE_ONE if self.is_replace_one else ZERO_OUT

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Divergences to bound: "add" is at most "remove" where Q is one Gaussian, or the pair is symmetric.

        Source: proofs/add_direction.md, theorem 1; proofs/adjacency.md, section 3.
        """
        return (Direction.REMOVE,) if self.scheme.side_information is None else DIRECTIONS

    @property
    def gradient_distance(self) -> int:
        """Largest distance of a unit's gradients in neighbouring data sets, in units of the clip norm."""
        return 2 if self.is_replace_one else 1

    @property
    def unit(self) -> str:
        """Privacy unit: "example" or "user"."""
        return self.scheme.unit

    @property
    def cross_terms(self) -> np.ndarray:
        """() or (iterations,): maximum overlap with later participations; 0 where losses are exact."""
        scheme = self.scheme
        if scheme.examples_overlap:
            return np.array(scheme.overlap_bound(self.strategy))
        return scheme.examples_per_unit * self.strategy.cross_terms(scheme.iterations, scheme.min_separation)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the certified mechanism is an upper bound rather than the mechanism itself."""
        return self.scheme.patterns is None and bool(self.cross_terms.any())

    @property
    def prefix_sum_error(self) -> float:
        """`(1/n) ||A C^-1||_F^2 sigma^2` per unit clip norm squared (arXiv 2602.09338, section 7.1)."""
        n = self.scheme.iterations
        return prefix_sum_error(self.strategy, iterations=n, noise_multiplier=self.noise_multiplier)

    @property
    def is_stationary(self) -> bool:
        """Whether losses are exact and the columns of C are shifts of one another, up to their ends."""
        return self.strategy.is_toeplitz and not self.is_upper_bound


def check_composition(mechanism: Mechanism, compose_with) -> None:
    """Refuse to compose an event with replace-one adjacency: its losses are those of zero-out; ValueError."""
    if compose_with is not None and mechanism.is_replace_one:
        raise ValueError(f"compose_with must not be given with {mechanism.adjacency} adjacency")


def checked(mechanism) -> Mechanism:
    """Return `mechanism` if it is a `Mechanism`; ValueError otherwise."""
    return _validate.instance("mechanism", mechanism, Mechanism, "a jaxacct.Mechanism")


def check_pair(scheme, strategy) -> None:
    """Refuse values that are no scheme or strategy, swapped arguments, and incompatible pairs."""
    kinds = tuple(SCHEMES.values())
    _validate.instance("scheme", scheme, kinds, "one of jaxacct's schemes, such as jaxacct.BMinSep(...)")
    shown = "a strategy matrix, such as jaxacct.BandedToeplitz.square_root(2)"
    _validate.instance("strategy", strategy, Strategy, shown)
    strategy.check(scheme)
