"""The largest weighted term is at most the scale: Z and likelihood ratios by enumeration, outputs by search.

Warm starts too, of which a weight may have more than of a cold one.
"""

import math

import numpy as np
import pytest

import jaxacct as ja
from jaxacct.proposals.base import ProposalSpec
from tests.oracles import enumeration, tuples
from tests.proposals_by_name import proposal_by_name

STRATEGY = ja.BandedToeplitz((2.0, 1.0))
C = STRATEGY.array
WARM, COLD = ja.BMinSep(4, 2, 0.3), ja.BMinSep(4, 2, 0.3, False)
RARE = ja.BMinSep(4, 2, 0.02)
# (scheme, name of a proposal, epsilon, how near to the scale a term comes).
FAMILIES = [
    (WARM, "replicas:2", 0.7, 1 - 1e-6),
    (WARM, "replicas:4", 1.5, 1 - 1e-6),
    (COLD, "replicas:2", 0.7, 1 - 1e-6),
    (ja.CyclicPoisson(4, 2, 0.5), "replicas:2", 0.7, 1 - 1e-6),
    (ja.MultiAttribution(3, 2, 0.3, 2), "replicas:2", 0.7, 1 - 1e-6),
    (RARE, "replicas:2,4", 0.1, 0.9),
    (RARE, "replicas:4,8", 0.5, 0.55),
    (ja.BMinSep(4, 2, 0.02, False), "replicas:4,8", 0.5, 0.9),
    (ja.IndependentAttribution(3, 2, 0.3, 2), "replicas:4", 0.7, 0.5),
    (ja.IndependentAttribution(3, 2, 0.3, 2), "replicas:6", 1.5, 0.4),
]


def log_weight(mechanism, name: str):
    """Of outputs: ln of the weight that a draw has at most."""
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    one, number = scheme.parts or (scheme, 1)
    m, *times = ProposalSpec.parse(name).parameters
    other = scheme.inflated(times[0])[0] if times else one
    log_z = m / 2 * math.log(tuples.count_distribution(other, C, sigma / math.sqrt(m - 1), 2)[0])

    def of_outputs(y):
        own, others = (enumeration.log_ratio(distribution, C, sigma, y) for distribution in (scheme, other))
        # In pairs a user's own vectors share nothing with each other at best.
        return log_z + (number * others if number > 1 else own) - m * others

    return of_outputs


@pytest.mark.parametrize(("scheme", "name", "epsilon", "near"), FAMILIES)
def test_no_weighted_term_exceeds_the_scale(scheme, name, epsilon, near):
    mechanism = ja.Mechanism(scheme, STRATEGY, 1.2)
    log_scale = proposal_by_name(mechanism, epsilon, "remove", name).log_scale
    weight, rng = log_weight(mechanism, name), np.random.default_rng(4)

    def terms(y):
        loss = enumeration.log_ratio(scheme, C, 1.2, y)
        positive = loss > epsilon
        parts = np.where(positive, np.log(-np.expm1(np.where(positive, epsilon - loss, -1.0))), -math.inf)
        return weight(y) + parts - log_scale

    y = rng.normal(size=(3000, scheme.iterations + 1)) * rng.choice([1.0, 2.0, 5.0], size=(3000, 1)) + 1
    for step in (0.5, 0.2, 0.1, 0.03, 0.01, 0.003, 1e-3):
        best = y[np.argsort(terms(y))[-40:]]
        moved = best[rng.integers(40, size=400)] + step * rng.normal(size=(400, y.shape[1]))
        y = np.concatenate([best, moved])
    assert math.log(near) <= terms(y).max() <= 1e-9
