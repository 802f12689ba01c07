"""The GPU's kernel by Pallas' interpreter, and signals added as windows; neither needs a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from jaxacct.kernels.likelihoods import gpu_recurrence
from jaxacct.kernels.randomness import BLOCK_SIZE
from jaxacct.kernels.recurrence import blocked_log_recurrence, log_probabilities
from jaxacct.proposals import base as proposals
from tests.oracles import enumeration


def step_by_step(ratios, log_p: float, log_q: float, block: int) -> np.ndarray:
    """ln f of the first `block` steps by its definition, in float64."""
    log_f = np.zeros((len(ratios) + block, *ratios.shape[1:]))
    for i in reversed(range(len(ratios))):
        log_f[i] = np.logaddexp(log_q + log_f[i + 1], log_p + ratios[i].astype(float) + log_f[i + block])
    return log_f[:block]


@pytest.mark.parametrize(
    ("n", "b", "num_samples", "p", "scale"),
    [
        (1, 1, 1, 0.3, 3.0),
        pytest.param(30, 1, 130, 0.3, 3.0, marks=pytest.mark.slow),
        (31, 2, 5, 1e-6, 300.0),
        pytest.param(64, 16, 128, 0.3, 3.0, marks=pytest.mark.slow),
        pytest.param(65, 16, 3, 0.3, 300.0, marks=pytest.mark.slow),
        pytest.param(65, 16, 3, 1.0, 2.0, marks=pytest.mark.slow),
        pytest.param(5, 9, 7, 0.3, 3.0, marks=pytest.mark.slow),
        pytest.param(100, 33, 257, 1e-6, 300.0, marks=pytest.mark.slow),
    ],
)
def test_kernel_against_the_recurrence_in_float64(n, b, num_samples, p, scale):
    """Every block size, samples that fill no program, ratios to 1000; within the scan's own float32 error."""
    log_p, log_q = log_probabilities(p)
    options = dict(log_p=log_p, log_q=log_q, block=b)
    ratios = (scale * np.random.default_rng(n * b).normal(size=(n, num_samples))).astype(np.float32)
    scan = jax.jit(functools.partial(blocked_log_recurrence, **options))
    ours = jax.jit(functools.partial(gpu_recurrence.first_block, **options, interpret=True))(ratios)
    single = np.asarray(scan(jnp.asarray(ratios)), float)
    exact = step_by_step(ratios, **options)
    size = np.abs(exact).max() + np.abs(ratios).max() + 1
    assert np.abs(ours - exact).max() <= 2 * np.abs(single - exact).max() + 4 * 2.0**-24 * size
    assert np.abs(ours - exact).max() <= (n + 8) * 2.0**-23 * size


def test_kernel_over_blocks_of_samples():
    """`vmap` over blocks is one more axis of the grid."""
    log_p, log_q = log_probabilities(0.2)
    run = jax.jit(
        functools.partial(gpu_recurrence.first_block, log_p=log_p, log_q=log_q, block=5, interpret=True)
    )
    ratios = jnp.asarray(np.random.default_rng(1).normal(size=(3, 22, 128)), jnp.float32)
    together = jax.jit(jax.vmap(run))(ratios)
    for part, alone in zip(together, ratios, strict=True):
        np.testing.assert_array_equal(part, run(alone))


@pytest.mark.parametrize(
    ("n", "b", "count"),
    [
        (1, 1, 1),
        (22, 5, 30),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((23, 3, 6), (50, 16, 7), (40, 9, 2))),
    ],
)
def test_sums_in_the_kernel_are_those_outside(n, b, count):
    """More noise multipliers than one thread takes, counts that are no multiple of it, odd steps."""
    log_p, log_q = log_probabilities(0.2)
    rng = np.random.default_rng(n)
    arrays = [jnp.asarray(rng.normal(size=(n, 131)), jnp.float32) for _ in range(2)]
    factors = jnp.asarray(rng.normal(size=(count, 2)), jnp.float32)
    options = dict(log_p=log_p, log_q=log_q, block=b)
    kernel = functools.partial(gpu_recurrence.first_block_of_sums, **options, interpret=True)
    ours = jax.jit(kernel)(arrays, factors)
    ratios = np.einsum("vk,kns->nvs", np.asarray(factors, float), np.asarray(arrays, float))
    exact = step_by_step(ratios, **options)
    assert ours.shape == exact.shape == (b, count, 131)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=(n + 8) * 2.0**-23 * (np.abs(exact).max() + 1))


def test_sums_where_every_step_takes_part():
    """p = 1 has no kernel."""
    arrays = [np.ones((7, 3), np.float32), np.full((7, 3), 0.5, np.float32)]
    factors = np.array([[1.0, 2.0], [0.0, -1.0]], np.float32)
    kernel = functools.partial(gpu_recurrence.first_block_of_sums, log_p=0.0, log_q=-np.inf, block=3)
    ours = jax.jit(kernel)(arrays, factors)
    # Steps 1, 4, 7 from the first; 2, 5 and 3, 6 from the others.
    np.testing.assert_allclose(ours[:, :, 0], np.outer([3, 2, 2], [2, -0.5]), rtol=1e-6)


def test_the_probe_compares_with_the_scan(monkeypatch):
    """While another program is traced too; without a GPU, and with a wrong kernel, it is refused."""
    probe = gpu_recurrence._works.__wrapped__
    assert probe() == (jax.default_backend() == "gpu")
    names = ("first_block", "first_block_of_sums")
    real = {name: getattr(gpu_recurrence, name) for name in names}
    for name in names:
        monkeypatch.setattr(gpu_recurrence, name, functools.partial(real[name], interpret=True))
    seen = []
    jax.jit(lambda x: (seen.append(probe()), x)[1])(1.0)
    assert seen == [True]
    for name in names:
        with monkeypatch.context() as wrong:
            by_name = functools.partial(real[name], interpret=True)
            wrong.setattr(gpu_recurrence, name, lambda *a, f=by_name, **k: f(*a, **k) + 1e-3)
            assert not probe()


def test_a_gpu_is_served_in_float32_only(monkeypatch, x64):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not gpu_recurrence.serves(jnp.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_recurrence, "_works", lambda: True)
    assert gpu_recurrence.serves(jnp.float32)
    assert not gpu_recurrence.serves(jnp.float64)


def test_a_machine_with_a_gpu_may_use_its_cpu(monkeypatch, key):
    scheme = BMinSep(20, 4, 0.2, warm_start=True)
    ratios = jax.random.normal(key, (6, 20))
    expected = jax.jit(scheme.log_likelihood_ratios)(ratios)
    monkeypatch.setattr(gpu_recurrence, "serves", lambda *_: True)
    np.testing.assert_array_equal(jax.jit(lambda r: scheme.log_likelihood_ratios(r))(ratios), expected)


@pytest.mark.parametrize(
    ("n", "b", "bands", "p", "warm"),
    [
        pytest.param(1, 2, 2, 0.5, True, marks=pytest.mark.slow),
        pytest.param(5, 9, 4, 0.9, False, marks=pytest.mark.slow),
        pytest.param(40, 3, 3, 1.0, True, marks=pytest.mark.slow),
        (41, 6, 6, 0.3, True),
        pytest.param(64, 8, 1, 0.2, False, marks=pytest.mark.slow),
    ],
)
def test_windows_are_the_signal(n, b, bands, p, warm, x64, key):
    """Same positions as participation vectors; the windows' sum is what two FFTs give."""
    scheme, strategy = BMinSep(n, b, p, warm), BandedToeplitz.square_root(bands)
    participation = np.asarray(jax.jit(lambda k: scheme.draw_participation(k, 200))(key), float)
    positions = np.asarray(jax.jit(lambda k: scheme.draw_positions(k, 200))(key))
    assert positions.shape == (200, scheme.max_participations)
    for row, steps in zip(participation, positions, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), steps[steps < n])
        assert np.all(np.diff(steps[steps < n]) >= b) and np.all(np.diff(steps) >= 0)
    before = np.random.default_rng(0).normal(size=(200, n))
    add = jax.jit(lambda *arrays: strategy.add_signal_windows(*arrays, 0.7))
    ours = add(jnp.asarray(before), jnp.asarray(positions))
    dense = enumeration.strategy_matrix(strategy.coefficients, n + bands - 1, n)
    expected = before + 0.7 * participation @ dense.T @ dense
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)
    if n == 41:  # counted twice, not at all, and down, as of an example whose batch is cut
        counts = np.random.default_rng(1).integers(-1, 3, positions.shape)
        ours = jax.jit(lambda *arrays: strategy.add_signal_windows(*arrays[:2], 0.7, arrays[2]))(
            jnp.asarray(before), jnp.asarray(positions), jnp.asarray(counts)
        )
        rows, slots = np.nonzero(positions < n)
        participation[rows, positions[rows, slots]] = counts[rows, slots]
        expected = before + 0.7 * np.asarray(jax.jit(strategy.signal_scores)(jnp.asarray(participation)))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_a_block_drawn_by_windows_is_the_same_block(monkeypatch, key):
    mechanism = Mechanism(BMinSep(90, 7, 0.05, True), BandedToeplitz.square_root(6), 0.8)
    draw = functools.partial(
        proposals.plain(mechanism, "remove").draw_block,
        key,
        mechanism.scheme,
        mechanism.strategy,
        0.8,
        (),
        jnp.float32,
    )
    by_fft = jax.jit(lambda: draw())()
    monkeypatch.setattr(proposals, "few_windows", lambda *_: True)
    by_windows = jax.jit(lambda: draw())()
    assert by_windows.loss.shape == (BLOCK_SIZE,)
    np.testing.assert_allclose(by_windows.loss, by_fft.loss, rtol=1e-4, atol=1e-5)
    assert np.ptp(by_fft.loss) > 1
