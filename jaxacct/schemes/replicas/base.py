"""What replicas know of a mechanism. A module of replicas holds, for m participation vectors together:

* `most_replicas(mechanism)`: the largest m that there are tables for;
* `log_normalizer(mechanism, m)`: ln Z_m = ln E_Q f^m on the rows of the strategy, float64, inf on overflow;
* `tables(mechanism, m)`: the arrays that `draw_counts` needs;
* `table_samples(mechanism, m)`: how many samples are drawn in the time that the tables take, about;
* `errors(mechanism, m)`: (relative, total variation) errors of the drawn law;
* `draw_counts(key, scheme, arrays, num_samples)`: sums of m vectors, (num_samples, iterations) float32.
"""

from typing import Any, Protocol


class Attracting(Protocol):
    """A scheme, a banded Toeplitz strategy and a noise multiplier: a `Mechanism`."""

    @property
    def scheme(self) -> Any: ...
    @property
    def strategy(self) -> Any: ...
    @property
    def noise_multiplier(self) -> float: ...

    def __hash__(self) -> int: ...
