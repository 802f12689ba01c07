"""privacy_loss against enumeration, jax-privacy, published values and limits."""

import numpy as np
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation

from jaxacct import BallsInBins, BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Poisson, privacy_loss
from tests.oracles import enumeration
from tests.oracles.settings import SMALL, SOME_IN_CI


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


class _PeerNumPy:
    """NumPy for jax-privacy 2.0.0, with the norms of the last columns in the right order.

    It sets `squared_norms[-bands + 1:] = np.cumsum(c**2)[:-1]`, but the last column is the shortest: the
    order should be reversed. With one or two bands, all that its tests use, there is no difference;
    `test_the_peers_last_columns` shows by enumeration which order is right.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def cumsum(values):
        total = np.cumsum(values)
        return np.append(total[:-1][::-1], total[-1])


def peer_losses(scheme, strategy, sigma, outputs):
    peer = batch_selection.BMinSepSampling(
        sampling_prob=scheme.sampling_probability,
        iterations=scheme.iterations,
        min_sep=scheme.min_separation,
    )
    losses = [sample_generation.compute_privacy_loss(peer, row, sigma, strategy.array) for row in outputs]
    return np.asarray(losses, float).reshape(-1)


@pytest.mark.parametrize("sigma", [0.3])
@pytest.mark.parametrize("bands", [2, 16, 64])
def test_jax_privacy_on_the_same_outputs(bands, sigma, x64, monkeypatch):
    rng = np.random.default_rng(bands)
    scheme = BMinSep.from_batch_size(
        dataset_size=102_400, batch_size=200, iterations=1024, min_separation=bands
    )
    strategy = BandedToeplitz.square_root(bands)
    outputs = outputs_of(scheme, sigma, rng, batch=6) * 0.2
    ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, sigma), outputs))
    if bands > 2:
        monkeypatch.setattr(sample_generation, "np", _PeerNumPy())
    theirs = peer_losses(scheme, strategy, sigma, outputs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


def test_the_peers_last_columns(x64):
    """Enumeration sides with us and not with jax-privacy 2.0.0 on three or more bands."""
    scheme, strategy = BMinSep(6, 4, 0.3), BandedToeplitz.square_root(4)
    outputs = np.random.default_rng(9).normal(size=(5, 6))
    exact = enumeration.log_ratio(scheme, strategy.coefficients, 1.0, outputs)
    ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, 1.0), outputs))
    np.testing.assert_allclose(ours, exact, rtol=1e-12)
    assert np.abs(peer_losses(scheme, strategy, 1.0, outputs) - exact).max() > 1e-3


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


def test_warm_start_at_p_1_is_balls_in_bins(x64):
    outputs = np.random.default_rng(2).normal(size=(20, 23))
    strategy = BandedToeplitz.square_root(4)
    ours = privacy_loss(Mechanism(BMinSep(23, 5, 1.0), strategy, 0.6), outputs)
    bins = privacy_loss(Mechanism(BallsInBins(23, 5), strategy, 0.6), outputs)
    np.testing.assert_allclose(ours, bins, rtol=1e-12)


def test_separation_1_is_poisson(x64):
    outputs = np.random.default_rng(3).normal(size=(20, 50))
    identity = BandedToeplitz((1.0,))
    ours = privacy_loss(Mechanism(BMinSep(50, 1, 0.1), identity, 0.8), outputs)
    poisson = privacy_loss(Mechanism(Poisson(50, 0.1), identity, 0.8), outputs)
    cyclic = privacy_loss(Mechanism(CyclicPoisson(50, 1, 0.1), identity, 0.8), outputs)
    np.testing.assert_allclose(ours, poisson, rtol=1e-11)
    np.testing.assert_allclose(cyclic, poisson, rtol=1e-11)


@pytest.mark.parametrize(("scheme", "bands"), SOME_IN_CI)
def test_float32_is_finite_and_close(scheme, bands):
    strategy = BandedToeplitz.square_root(bands)
    for sigma in (0.05, 100.0):
        outputs = outputs_of(scheme, sigma, np.random.default_rng(4)).astype(np.float32)
        ours = np.asarray(privacy_loss(Mechanism(scheme, strategy, sigma), outputs))
        assert ours.dtype == np.float32
        exact = enumeration.log_ratio(scheme, strategy.coefficients, sigma, outputs.astype(float))
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=4e-6)


def test_scale_of_coefficients_does_not_matter():
    outputs = np.random.default_rng(5).normal(size=(4, 10)).astype(np.float32)
    one = privacy_loss(Mechanism(BMinSep(10, 3, 0.2), BandedToeplitz((2.0, 1.0)), 1.0), outputs)
    two = privacy_loss(Mechanism(BMinSep(10, 3, 0.2), BandedToeplitz((4.0, 2.0)), 1.0), outputs)
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("shape", [(11,), (2, 11), (1, 1, 12), ()])
def test_wrong_shape_is_refused(shape):
    mechanism = Mechanism(BMinSep(12, 4, 0.3), BandedToeplitz.square_root(4), 0.7)
    with pytest.raises(ValueError, match=r"outputs must have shape \(batch, 12\)"):
        privacy_loss(mechanism, np.zeros(shape))
