"""privacy_loss against enumeration, jax-privacy, published values and limits."""

import numpy as np
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, privacy_loss
from tests.oracles import enumeration
from tests.oracles.recurrences import log_likelihood_ratios
from tests.oracles.settings import SMALL, SOME_IN_CI
from tests.refusals import refused


def outputs_of(scheme, sigma, rng, batch=40):
    """Half noise alone, half with a few participations, so that both signs of the loss occur."""
    signal = (rng.random((batch, scheme.iterations)) < 0.3) * (np.arange(batch) % 2)[:, None]
    return signal + sigma * rng.normal(size=signal.shape)


def test_enumeration_to_1e_9(x64):
    for scheme, bands in [*SMALL[::2], SMALL[15]]:
        strategy = BandedToeplitz.square_root(bands)
        for sigma in (0.05, 0.3, 1.0, 100.0):
            outputs = outputs_of(scheme, sigma, np.random.default_rng(1))
            ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, sigma), outputs))
            exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs)
            # Relative in P/Q - 1 as well as in the loss: tiny losses at huge sigma would hide otherwise.
            np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("bands", [2, 16, 64])
def test_long_runs_against_a_recurrence_and_jax_privacy(bands, x64):
    """The peer with two bands, as its last columns are wrong with more (tests/project/test_errata.py)."""
    rng, sigma = np.random.default_rng(bands), 0.3
    scheme = BMinSep.from_batch_size(
        dataset_size=102_400, batch_size=200, iterations=1024, min_separation=bands
    )
    strategy = BandedToeplitz.square_root(bands)
    outputs = outputs_of(scheme, sigma, rng, batch=6) * 0.2
    ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, sigma), outputs))
    dense = enumeration.strategy_matrix(strategy.coefficients, 1024, 1024)
    ratios = (outputs @ dense - np.square(dense).sum(axis=0) / 2) / sigma**2
    np.testing.assert_allclose(ours, log_likelihood_ratios(scheme, ratios, 0.5), rtol=1e-8, atol=1e-10)
    if bands == 2:
        p = scheme.sampling_probability
        peer = batch_selection.BMinSepSampling(sampling_prob=p, iterations=1024, min_sep=bands)
        losses = [sample_generation.compute_privacy_loss(peer, y, sigma, strategy.array) for y in outputs]
        np.testing.assert_allclose(ours, np.asarray(losses, float).reshape(-1), rtol=1e-8, atol=1e-10)


# Published losses at noise 1 (design/PEERS.md, 3a), re-derived there by enumeration. Their c_col is not
# scaled to norm 1, so outputs and sigma are divided by its norm instead.
PUBLISHED = [
    (BallsInBins(4, 2), [1, 0, 1, 0], [1.0], 0.4337808304830272),
    (BallsInBins(4, 2), [1, 0.5, 1, 0.5], [1, 0.5], 0.9052974004451105),
    (BMinSep(3, 2, 0.5, False), [1, 1, 1], [1.0], 0.6070560625306676),
    (BMinSep(3, 2, 0.5, False), [1, 1, 1], [1, 0.5], 0.9239798890121712),
    (BMinSep(3, 2, 0.5), [1, 1, 1], [1, 0.5], 0.8329398380809252),
    (BMinSep(3, 2, 0.5, False), [0, 1, 1], [1, 0.5], 0.4155349444473233),
    (CyclicPoisson(3, 2, 0.5), [1, 0, 1], [1.0], 0.24576433028848393),
    (CyclicPoisson(3, 2, 0.5), [1, 0.5, 1], [1, 0.5], 0.4468602908276156),
    (CyclicPoisson(3, 2, 1 / 3), [1, 1, 1], [1, 0.5], 0.485401681402855),
]


def test_published_values(x64):
    for scheme, outputs, coefficients, loss in PUBLISHED:
        norm = np.linalg.norm(coefficients)
        mechanism = Mechanism(scheme, BandedToeplitz(tuple(coefficients)), 1 / norm)
        ours = float(privacy_loss(mechanism, np.array(outputs, float) / norm))
        assert ours == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("scheme", "bands"), SOME_IN_CI)
def test_float32_is_finite_and_close(scheme, bands):
    strategy = BandedToeplitz.square_root(bands)
    for sigma in (0.05, 100.0):
        outputs = outputs_of(scheme, sigma, np.random.default_rng(4)).astype(np.float32)
        ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, sigma), outputs))
        assert ours.dtype == np.float32
        exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs.astype(float))
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("shape", [(11,), (2, 11), (1, 1, 12), ()])
def test_wrong_shape_is_refused(shape):
    mechanism = Mechanism(BMinSep(12, 4, 0.3), BandedToeplitz.square_root(4), 0.7)
    refused(r"outputs must have shape \(batch, 12\)", privacy_loss, mechanism, np.zeros(shape))
