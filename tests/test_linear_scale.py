"""Likelihood ratios at several noise multipliers in linear scale, against enumeration."""

import jax
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxacct import BallsInBins, BMinSep, CyclicPoisson, Poisson
from tests.oracles import enumeration

# The factors of sigma = 2, 0.5 and 0.07: with the last, e^r is beyond float32 for most of the large ratios.
SIGMAS = np.array([2.0, 0.5, 0.07])
FACTORS = np.stack([SIGMAS**-2, 1 / SIGMAS], axis=1).astype(np.float32)


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson(9, 0.2),
        BMinSep(5, 1, 1.0),
        CyclicPoisson(11, 4, 0.3),
        BallsInBins(10, 4),
        BMinSep(12, 3, 0.3),
        BMinSep(7, 3, 1.0),
        BMinSep(5, 8, 0.4, False),
        pytest.param(CyclicPoisson(12, 3, 1.0), marks=pytest.mark.slow),
        pytest.param(BMinSep(10, 4, 0.25, False), marks=pytest.mark.slow),
        pytest.param(BMinSep(9, 1, 0.4, False), marks=pytest.mark.slow),
        pytest.param(BMinSep(1, 2, 0.5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_against_enumeration(scheme):
    """Right to float32's rounding wherever finite; infinite or NaN only where e^r has no room, and there."""
    assert scheme.takes_sums
    rng = np.random.default_rng(scheme.iterations)
    arrays = [rng.normal(size=(scheme.iterations, 200)).astype(np.float32) for _ in range(2)]
    ours = np.asarray(jax.jit(scheme.log_likelihood_ratios_of_sums)(arrays, FACTORS))
    law = enumeration.pattern_law(scheme)
    patterns, weights = np.array(list(law)), np.log(list(law.values()))
    ratios = np.einsum("vk,kns->vns", FACTORS.astype(float), np.array(arrays, float))
    exact = logsumexp(weights[:, None] + np.einsum("xn,vns->vxs", patterns, ratios), axis=1)
    assert ours.shape == exact.shape
    finite = np.isfinite(ours)
    np.testing.assert_allclose(ours[finite], exact[finite], rtol=5e-6, atol=5e-6)
    assert finite[:2].all()
    # Whatever is added up, not multiplied, is at the mercy of the range.
    assert scheme.sampling_probability == 1 or not finite[2].all()
    assert finite[2, ratios[2].max(axis=0) < 15].all()
