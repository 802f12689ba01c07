"""Many noise multipliers from the same draws: the same losses as one at a time, and sound estimates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism, Poisson, TruncatedBMinSep, sample_privacy_loss
from jaxacct.accountants.gaussian import gaussian_delta
from jaxacct.estimates import shared_draws
from jaxacct.estimates.shared_draws import delta_curve, sample_privacy_losses
from jaxacct.kernels import gpu_recurrence
from jaxacct.proposals import base
from tests.draws import block_keys
from tests.oracles.settings import IDS, SMALL

FALSE_ALARM = 1e-6


@pytest.mark.parametrize("direction", ["remove", "add"])
# Every third setting: one of each kind, cold and warm.
@pytest.mark.parametrize(
    ("scheme", "bands"),
    [
        pytest.param(*SMALL[i], id=IDS[i], marks=() if i in (3, 9, 21) else pytest.mark.slow)
        for i in range(0, len(SMALL), 3)
    ],
)
def test_the_same_losses_as_one_at_a_time(scheme, bands, direction, key):
    strategy, sigmas = BandedToeplitz.square_root(bands), [0.4, 1.0, 7.0]
    together = sample_privacy_losses(key, scheme, strategy, sigmas, 300, direction)
    assert together.shape == (3, 300)
    for row, sigma in zip(together, sigmas, strict=True):
        alone = sample_privacy_loss(key, Mechanism(scheme, strategy, sigma), 300, direction)
        np.testing.assert_allclose(row, alone, rtol=2e-5, atol=2e-5)


def test_what_float32_has_no_room_for_is_made_again_in_logarithms(key):
    """At a tenth of the noise e^r is beyond float32: that row again, and only that."""
    setting = BMinSep(12, 3, 0.3), BandedToeplitz.square_root(3)
    row, _, _ = sample_privacy_losses(key, *setting, [0.04, 1.0, 7.0], 300)
    alone = sample_privacy_loss(key, Mechanism(*setting, 0.04), 300)
    blocks = block_keys(base.direction_key(key, "remove"), 0, 16)
    beyond = ~np.isfinite(
        shared_draws._blocks(*setting, "remove", False, jnp.array([0.04, 1.0, 7.0]), blocks)
    )
    assert beyond[0].any() and not beyond[1:].any()
    np.testing.assert_allclose(row, alone, rtol=1e-4)
    assert row.max() > 100


@pytest.mark.parametrize(("warm", "direction"), [(True, "remove"), (False, "add")])
def test_the_same_losses_by_the_kernel_of_a_gpu(warm, direction, monkeypatch, key):
    """By Pallas' interpreter."""
    setting = BMinSep(40, 4, 0.1, warm), BandedToeplitz.square_root(3), [0.4, 1.0, 7.0], 300, direction
    expected = sample_privacy_losses(key, *setting)
    kernel = gpu_recurrence.first_block_of_sums
    monkeypatch.setattr(gpu_recurrence, "serves", lambda _: True)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    monkeypatch.setattr(gpu_recurrence, "first_block_of_sums", functools.partial(kernel, interpret=True))
    shared_draws._blocks.clear_cache()
    ours = sample_privacy_losses(key, *setting)
    shared_draws._blocks.clear_cache()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(expected[1]) > 0.1


def test_the_curve_holds_the_exact_deltas(key):
    """One participation for certain: a Gaussian. 10 intervals, each wrong with probability 1e-7."""
    sigmas = np.geomspace(0.5, 3, 10)
    curve = delta_curve(
        Poisson(1, 1.0),
        BandedToeplitz.identity(),
        sigmas,
        1.0,
        num_samples=50_000,
        confidence=1 - FALSE_ALARM / 10,
        key=key,
    )
    exact = np.array([gaussian_delta(1.0, sigma, 1.0) for sigma in sigmas])
    assert np.all(curve.low <= exact) and np.all(exact <= curve.high)
    assert np.all(np.diff(curve.value) < 0)  # shared draws: no noise between neighbours


def test_bad_input(key):
    scheme, strategy = BMinSep(8, 3, 0.2), BandedToeplitz.square_root(2)
    for sigmas in ([], [0.0, 1.0], [np.inf], 1.0, [[1.0]]):
        with pytest.raises(ValueError, match="noise_multipliers must be a list of numbers above 0"):
            sample_privacy_losses(key, scheme, strategy, sigmas, 10)
    with pytest.raises(ValueError, match="must not be truncated"):
        sample_privacy_losses(key, TruncatedBMinSep(8, 3, 0.1, 20, 50), strategy, [1.0], 10)
    with pytest.raises(ValueError, match="bands must be at most"):
        sample_privacy_losses(key, scheme, BandedToeplitz.square_root(4), [1.0], 10)
    # As many as above of a mechanism of theirs: the same programs.
    setting = BMinSep(12, 3, 0.3), BandedToeplitz.square_root(3), [0.4, 1.0, 7.0]
    assert np.all(np.isfinite(delta_curve(*setting, 0.5, num_samples=200).high))
