"""The GPU's kernel by Pallas' interpreter, and signals added as windows; neither needs a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from jaxacct.kernels.likelihoods import gpu_recurrence
from jaxacct.kernels.randomness import BLOCK_SIZE
from jaxacct.kernels.table import first_values
from jaxacct.proposals import base as proposals
from jaxacct.schemes.table import SamplingTable
from tests.gpus import lowered
from tests.oracles import enumeration
from tests.oracles.settings import slow


def path_of(n: int, lockout, starts: int, p: float = 0.3) -> tuple:
    """The arguments of the recurrence after the log-ratios; at every seventh step a unit cannot join."""
    join = np.where(np.arange(n) % 7 == 3, 0.0, p)
    start = np.full(min(starts, n), 1.0)
    path = SamplingTable(join, lockout, turns=False, start=start / start.sum()).path
    return path.weights, path.certain, path.lockout, len(start)


def step_by_step(ratios, weights, certain, lockout, starts: int) -> np.ndarray:
    """g of the first eligible steps by its definition, in float64."""
    g = np.zeros((len(ratios) + 1 + int(lockout.max()), *ratios.shape[1:]))
    for i in reversed(range(len(ratios))):
        inputs = weights[i, 0, 0] + ratios[i].astype(float) + g[i + lockout[i]] - g[i + 1]
        g[i] = g[i + 1] + np.logaddexp(0, inputs)
    return g[:starts]


@pytest.mark.parametrize(
    ("n", "lockout", "starts", "num_samples", "p", "scale"),
    [
        (31, 2, 2, 5, 1e-6, 300.0),
        (40, np.arange(40) % 5 + 2, 3, 131, 0.3, 3.0),
        slow(1, 2, 1, 1, 0.3, 3.0),
        slow(64, 16, 16, 128, 0.3, 3.0),
        slow(65, 16, 1, 3, 0.3, 300.0),
        slow(5, 9, 5, 7, 0.3, 3.0),
        slow(100, 33, 33, 257, 1e-6, 300.0),
        slow(100, np.arange(100, 0, -1) + 1, 50, 3, 0.01, 30.0),
    ],
)
def test_kernel_against_the_recurrence_in_float64(n, lockout, starts, num_samples, p, scale):
    """Any lockouts, samples that fill no program, ratios to 1000; within the scan's own float32 error."""
    path = path_of(n, lockout, starts, p)
    ratios = (scale * np.random.default_rng(n).normal(size=(n, num_samples))).astype(np.float32)
    scan, kernel = (
        np.asarray(jax.jit(lambda r, run=run: run(r, *path))(ratios), float)
        for run in (first_values, functools.partial(gpu_recurrence.kernel_values, interpret=True))
    )
    exact = step_by_step(ratios, *path)
    size = np.abs(exact).max() + np.abs(ratios).max() + np.abs(path[0][np.isfinite(path[0])]).max() + 1
    assert kernel.shape == scan.shape == exact.shape
    assert np.abs(kernel - exact).max() <= 2 * np.abs(scan - exact).max() + 4 * 2.0**-24 * size
    assert np.abs(kernel - exact).max() <= (n + 8) * 2.0**-23 * size


def test_kernel_compiles_for_a_gpu():
    path = path_of(40, np.arange(40) % 5 + 2, 3)
    text = lowered(lambda ratios: gpu_recurrence.kernel_values(ratios, *path), jnp.zeros((40, 128)))
    assert "table_recurrence" in text and "triton" in text


def test_the_probe_compares_with_the_scan(monkeypatch):
    """While another program is traced too; without a GPU, and with a wrong kernel, it is refused."""
    probe = gpu_recurrence._works.__wrapped__
    assert probe() == (jax.default_backend() == "gpu")
    real = functools.partial(gpu_recurrence.kernel_values, interpret=True)
    monkeypatch.setattr(gpu_recurrence, "kernel_values", real)
    seen = []
    jax.jit(lambda x: (seen.append(probe()), x)[1])(1.0)
    assert seen == [True]
    monkeypatch.setattr(gpu_recurrence, "kernel_values", lambda *a, **k: real(*a, **k) + 1e-3)
    assert not probe()


def test_what_the_kernel_covers(monkeypatch, x64):
    """Uncounted participations, none of them certain, in float32, where the kernel is right."""
    weights, certain, lockout, _ = path_of(20, 4, 4)
    monkeypatch.setattr(gpu_recurrence, "_works", lambda: False)
    assert not gpu_recurrence.serves(weights, certain, lockout, jnp.float32)
    monkeypatch.setattr(gpu_recurrence, "_works", lambda: True)
    assert gpu_recurrence.serves(weights, certain, lockout, jnp.float32)
    assert not gpu_recurrence.serves(weights, certain, lockout, jnp.float64)
    assert not gpu_recurrence.serves(weights, ~certain, lockout, jnp.float32)
    assert not gpu_recurrence.serves(weights, certain, 0 * lockout + 1, jnp.float32)
    for shape in ((20, 2, 1), (20, 1, 2)):
        wider = np.broadcast_to(weights, shape)
        assert not gpu_recurrence.serves(wider, np.zeros(shape, bool), lockout, jnp.float32)


@pytest.mark.parametrize(
    ("n", "b", "bands", "p", "warm"),
    [
        slow(1, 2, 2, 0.5, True),
        slow(5, 9, 4, 0.9, False),
        slow(40, 3, 3, 1.0, True),
        (41, 6, 6, 0.3, True),
        slow(64, 8, 1, 0.2, False),
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
    if n == 41:  # counted twice, not at all, and down, as of an example whose batch is truncated
        counts = np.random.default_rng(1).integers(-1, 3, positions.shape)
        ours = jax.jit(lambda *arrays: strategy.add_signal_windows(*arrays[:2], 0.7, arrays[2]))(
            jnp.asarray(before), jnp.asarray(positions), jnp.asarray(counts)
        )
        rows, slots = np.nonzero(positions < n)
        participation[rows, positions[rows, slots]] = counts[rows, slots]
        expected = before + 0.7 * participation @ dense.T @ dense
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_a_machine_with_a_gpu_may_use_its_cpu(monkeypatch, key):
    scheme = BMinSep(20, 4, 0.2, warm_start=True)
    ratios = jax.random.normal(key, (6, 20))
    expected = jax.jit(scheme.log_likelihood_ratios)(ratios)
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_recurrence, "serves", lambda *path: asked.append(path) or True)
    np.testing.assert_array_equal(jax.jit(lambda r: scheme.log_likelihood_ratios(r))(ratios), expected)
    assert asked


def test_a_block_drawn_by_windows_is_the_same_block(monkeypatch, key):
    mechanism = Mechanism(BMinSep(90, 7, 0.05, True), BandedToeplitz.square_root(6), 0.8)
    given = key, mechanism.scheme, mechanism.strategy, 0.8, (), jnp.float32
    draw_block = proposals.plain(mechanism, "remove").draw_block
    by_fft = jax.jit(lambda: draw_block(*given))()
    monkeypatch.setattr(proposals, "few_windows", lambda *_: True)
    by_windows = jax.jit(lambda: draw_block(*given))()
    assert by_windows.loss.shape == (BLOCK_SIZE,)
    np.testing.assert_allclose(by_windows.loss, by_fft.loss, rtol=1e-4, atol=1e-5)
    assert np.ptp(by_fft.loss) > 1
