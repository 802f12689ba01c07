"""Interface of replica modules.

A module draws two participation vectors jointly (`Scheme.replicas`):

* `fits(mechanism)`: whether its tables fit;
* `log_normalizer(mechanism)`: ln Z_2 = ln E_Q f^2 on the rows of the strategy, float64, inf on overflow;
* `errors(mechanism)`: (relative, total variation) errors of the drawn distribution;
* `tables(mechanism)`: the arrays that draws need;
* `draw_with_one(key, scheme, arrays, num_samples)`: sums of both vectors, (num_samples, iterations) float32,
  one of the two, and the number of lifts of the tables, (num_samples,) float32, rounded down;
* `draw_positions_with_one`, where columns do not overlap: the same as positions, their counts, and the counts
  of one of the vectors, (num_samples, slots) each.

Where C has more bands than the minimum separation, participations that far apart or farther attract not by
their overlap but by its upper bound `log_lift` (proofs/non_banded.md): `log_normalizer` is then an upper
bound on ln Z_2.
"""

from typing import Any, Protocol

import numpy as np


class Attracting(Protocol):
    """Scheme, Toeplitz strategy and noise multiplier: a `Mechanism`."""

    @property
    def scheme(self) -> Any: ...
    @property
    def strategy(self) -> Any: ...
    @property
    def noise_multiplier(self) -> float: ...

    def __hash__(self) -> int: ...


def log_lift(mechanism: Attracting) -> float:
    """Return a bound on the overlap of a participation with later ones of two replicas b steps away or more.

    Over sigma^2; 0 where C has no more bands than b.
    """
    scheme = mechanism.scheme
    kappa = mechanism.strategy.cross_terms(scheme.iterations, scheme.min_separation)
    return 2 * scheme.examples_per_unit * float(np.max(kappa)) / mechanism.noise_multiplier**2


def stationary_lockouts(b: int, p: float) -> np.ndarray:
    """Return (b,) float64: the stationary probabilities of being locked out for 0..b-1 more steps."""
    weights = np.full(b, p)
    weights[0] = 1.0
    return weights / (1 + (b - 1) * p)


def attractions(mechanism: Attracting) -> np.ndarray:
    """Return (ends, b + 1) float64: `E_d = exp(<c_i, c_{i-d}> / sigma^2)`, e to the `log_attractions`."""
    return np.exp(log_attractions(mechanism))


def log_attractions(mechanism: Attracting) -> np.ndarray:
    """Return (ends, b + 1) float64: `<c_i, c_{i-d}> / sigma^2` of participations d < b apart, 0 for d = b.

    Row k is for the later one at the step i = n - 1 - k, the last row also for all earlier steps
    (`Strategy.products_from_end`). Those b steps apart or more are in `log_lift`.
    """
    strategy, b = mechanism.strategy, mechanism.scheme.min_separation
    if not strategy.is_toeplitz:
        raise TypeError("replicas need a Toeplitz strategy")
    shared = strategy.products_from_end(b + 1) / mechanism.noise_multiplier**2
    shared[:, b] = 0.0
    return shared


MIN_ENTRY = 1e-30  # smallest number of a float32 table in its unit for draws; 1 / this is the largest one


def has_room(table: np.ndarray) -> bool:
    """Return whether all numbers of a table but zeros are in [`MIN_ENTRY`, 1 / `MIN_ENTRY`]."""
    least = float(table.min(where=table > 0, initial=1.0))
    return MIN_ENTRY <= least and float(table.max(initial=0.0)) <= 1 / MIN_ENTRY and float(table.min()) >= 0
