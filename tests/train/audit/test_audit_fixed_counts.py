"""Fixed numbers of participations: the trainer's sampler, attacked with the exact likelihood ratio.

Every example of a run is a trial with a Gaussian output of its own. Its likelihood ratio is the sum over all
patterns in float64, so that nothing but the sampler and the certificate is ours. Each bound is wrong with
probability 1e-6.
"""

import jax
import numpy as np
import pytest

from jaxacct import (
    BalancedMinSep,
    BandedToeplitz,
    CalibrationOptions,
    EpochwiseAllocation,
    calibrate,
)
from tests.oracles import enumeration
from tests.train.audit.exact_checks import epsilon_lower_bound
from train.batches.sampler import Sampler

EPSILON, DELTA, TRIALS = 1.0, 0.1, 40_000
STRATEGY = BandedToeplitz.square_root(2)
# The scheme, a noise multiplier that is certified, and a sampler that participates more often.
SETTINGS = [
    pytest.param(BalancedMinSep(8, 2, 2), 1.09, BalancedMinSep(8, 2, 4), id="balanced-min-sep"),
    pytest.param(EpochwiseAllocation(8, 4, 2), 1.10, EpochwiseAllocation(8, 2, 2), id="epochwise-allocation"),
]


def attacked(scheme, sampled, sigma: float) -> float:
    """Lower bound on epsilon from one run of the sampler of `sampled`; the adversary believes in `scheme`."""
    sampler, generator = Sampler(sampled, TRIALS, TRIALS, (1, 2, 3, 4)), np.random.default_rng(0)
    x = np.zeros((TRIALS, scheme.iterations))
    for step in range(scheme.iterations):
        batch = sampler.next()
        x[batch, step] = 1
    rows = scheme.iterations + STRATEGY.bands - 1
    matrix = enumeration.strategy_matrix(STRATEGY.coefficients, rows, scheme.iterations)
    scores = [
        enumeration.log_ratio(
            scheme, STRATEGY.coefficients, sigma, mean + sigma * generator.standard_normal((TRIALS, rows))
        )
        for mean in (x @ matrix.T, 0.0)
    ]
    return epsilon_lower_bound(*scores, DELTA, 1 - 1e-6)


@pytest.mark.parametrize(("scheme", "sigma", "other"), SETTINGS)
def test_the_sampler_stays_under_the_certified_epsilon_and_a_broken_one_does_not(scheme, sigma, other):
    given = dict(noise_multiplier=sigma, key=jax.random.key(5), options=CalibrationOptions(proposal="plain"))
    plan = calibrate(scheme, STRATEGY, epsilon=EPSILON, delta=DELTA, dataset_size=TRIALS, **given)
    assert plan.certified and plan.mechanism.noise_multiplier == sigma
    assert 0.4 < attacked(scheme, scheme, sigma) <= EPSILON
    assert attacked(scheme, other, sigma) > EPSILON
    assert attacked(scheme, scheme, 0.6 * sigma) > EPSILON
