"""End-to-end soundness of the variants on mechanisms of exactly known delta, and what is refused."""

import jax
import pytest
from scipy import stats

from jaxacct import (
    BandedToeplitz,
    Budget,
    Mechanism,
    MultiAttribution,
    TruncatedBMinSep,
    verify,
)
from tests.schemes.test_truncated_b_min_sep import mixture_delta, pair_delta

FALSE_ALARM = 1e-6
EPSILON = 0.7


def multi_attribution_delta(sigma: float) -> float:
    """n = 1 and three examples: counts are Binomial(3, 0.3)."""
    distribution = {float(j): stats.binom.pmf(j, 3, 0.3) for j in range(4)}
    return mixture_delta(distribution, {0.0: 1.0}, sigma, EPSILON)


VARIANTS = {
    "multi-attribution": (MultiAttribution(1, 1, 0.3, 3), BandedToeplitz.identity(), multi_attribution_delta),
    "truncated": (
        TruncatedBMinSep(1, 1, 0.4, 4, 8),
        BandedToeplitz.identity(),
        lambda sigma: pair_delta(7, 0.4, 4, sigma, EPSILON, "remove"),
    ),
}


@pytest.mark.slow  # `core/test_verify.py` has those of stubs, and of one scheme, in CI
@pytest.mark.parametrize("name", VARIANTS)
def test_false_acceptances_stay_within_q(name):
    """Just above the line, acceptances are Binomial(runs, <= q); false alarm 1e-6, and below it they come."""
    scheme, strategy, exact = VARIANTS[name]
    mechanism = Mechanism(scheme, strategy, 1.2)
    delta_v, q, runs = 0.9999 * exact(1.2), 0.05, 64
    budget = Budget(delta_v + q * (1 - delta_v), delta_v, q)
    options = dict(budget=budget, max_samples=8192)

    def accepted(mechanism, run):
        seen = verify(mechanism, EPSILON, budget.delta, key=jax.random.key(run), **options)
        return seen.remove.certified

    limit = stats.binom.isf(FALSE_ALARM, runs, q)
    assert sum(accepted(mechanism, run) for run in range(runs)) <= limit < runs / 4
    quieter = Mechanism(scheme, strategy, 2.4)
    assert all(accepted(quieter, run) for run in range(5))
