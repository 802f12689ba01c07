"""Replicas of cyclic Poisson: what they save, where there are none, and an attack."""

import math

import numpy as np
import pytest

from jaxacct import BandedToeplitz, Budget, CyclicPoisson, Mechanism
from jaxacct.proposals.candidates import choose_candidate
from jaxacct.proposals.families.replicas import max_replicas, replica_proposal
from jaxacct.schemes.replicas import cyclic
from jaxacct.statistics import bounds, hockey_stick
from tests.draws import mean_interval
from tests.oracles import tuples
from tests.proposals.test_proposals import draw


def test_fewer_samples_than_two_replicas_need():
    scheme = CyclicPoisson.from_batch_size(dataset_size=8000, batch_size=100, iterations=240, cycle_length=8)
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(8), 2.0)
    chosen, predicted = choose_candidate(mechanism, 1.5, "remove", Budget.split(1e-5))
    assert chosen.replicas > 2 and 5 * predicted[chosen.name] < predicted["replicas:2"] < predicted["plain"]


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        (CyclicPoisson(7200, 256, 0.3), 2),
        (CyclicPoisson(1000, 64, 0.3), 3),
        (CyclicPoisson(1000, 16, 0.3), 5),
        (CyclicPoisson(20, 1, 0.3), 2),
        (CyclicPoisson(3, 2, 1.0), 3),
    ],
    ids=str,
)
def test_as_many_as_there_are_tables_for(scheme, most):
    assert max_replicas(Mechanism(scheme, BandedToeplitz.identity(), 1.0)) == most


def test_no_bound_below_the_truth(monkeypatch, key):
    """Two steps, one of them for certain; false alarm 1e-6. Replicas that do not attract would win."""
    scheme, sigma, epsilon = CyclicPoisson(2, 2, 1.0), 1.0, 0.5
    mechanism = Mechanism(scheme, BandedToeplitz.identity(), sigma)
    exact = tuples.two_step_delta(scheme, (1.0,), sigma, epsilon, "remove")

    def interval():
        cyclic._totals.cache_clear()
        scheme.replicas.log_normalizer.cache_clear()
        scheme.replicas.tables.cache_clear()
        proposal = replica_proposal(mechanism, 3, epsilon)
        terms = hockey_stick.weighted_terms(draw(proposal, 100, key), "remove", epsilon)
        scale = math.exp(proposal.log_scale)
        counts = bounds.bin_terms(np.minimum(terms / scale, 1))
        return terms.max() / scale, *(scale * end for end in mean_interval(counts, 1e-6))

    largest, low, high = interval()
    assert low <= exact <= high < 1.5 * exact and largest <= 1 + 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(cyclic, "log_attractions", lambda mechanism: np.zeros((1, 3)))
        assert interval()[2] < exact
    assert interval() == (largest, low, high)
