"""Weights of two phases of balls-in-bins against products of the columns themselves, also round the cycle."""

import numpy as np
import pytest

from jaxacct import BallsInBins, BandedToeplitz, Mechanism
from jaxacct.schemes.replicas.balls_in_bins import pair_weights
from tests.oracles.enumeration import strategy_matrix


@pytest.mark.parametrize(("n", "b", "bands"), [(12, 5, 4), (12, 5, 1), (4, 9, 3), (10, 10, 7), (7, 3, 3)])
def test_weights_are_of_the_columns(n, b, bands):
    strategy = BandedToeplitz.square_root(bands)
    matrix = strategy_matrix(strategy.coefficients, n + bands - 1, n)
    steps = np.arange(n)
    means = [matrix @ (steps % b == phase) for phase in range(b)]
    exact = np.array([[np.exp(one @ other / 0.49) for other in means] for one in means])
    found = pair_weights(Mechanism(BallsInBins(n, b), strategy, 0.7))
    np.testing.assert_allclose(found, exact, rtol=1e-12)
