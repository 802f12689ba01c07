"""Noise by running sums: the matrix that was accounted for is the one that is applied, over long runs too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal

from jaxacct import BufferedToeplitz
from train.noise import recursion as noise
from train.noise.normals import LARGEST

KEY = np.arange(8, dtype=np.uint32)
STEPS, LEVELS, SIZE = 10_000, 2.0**20, 6
# The optimum of four buffers for one participation in 10,000 steps.
LONG = BufferedToeplitz((0.999704, 0.995801, 0.959023, 0.663107), (0.0226, 0.04759, 0.14062, 0.27889), STEPS)


def units(strategy, levels=LEVELS) -> np.ndarray:
    """(buffers,) grid units that a whole number in the first part of the state stands for."""
    reach = strategy.noise_recursion().reach
    return 2.0 ** np.maximum(0, np.ceil(np.log2(1.001 * levels * LARGEST * reach / 2**30)))


def sums_of(parts, strategy, levels=LEVELS) -> np.ndarray:
    """Running sums, (.., buffers, size) extended floats, of (.., 2 buffers, size) int32."""
    whole, fraction = np.split(np.asarray(parts).astype(np.longdouble), 2, axis=-2)
    return (whole + fraction * np.longdouble(2.0) ** -31) * units(strategy, levels)[:, None]


@pytest.fixture(scope="module")
def long_run():
    """W and z, (steps, size), and the running sums before each step, (steps, buffers, size)."""
    params = jnp.zeros(SIZE)

    def step(state, _):
        drawn, after = noise.draw(LONG, LEVELS, state, params)
        return after, (drawn, noise.standard_normals(state.key, state.step, SIZE), state.recent)

    _, (w, z, parts) = jax.jit(lambda s: jax.lax.scan(step, s, None, STEPS))(noise.init(LONG, params, KEY))
    return np.asarray(w), np.asarray(z), sums_of(parts, LONG)


def exact_sums(w: np.ndarray, dtype: Any = np.longdouble) -> np.ndarray:
    """(steps, buffers, size) sums of the integers before each step."""
    decays = np.array(LONG.decays, dtype)[:, None]
    sums, now = [], np.zeros((LONG.buffers, SIZE), dtype)
    for row in w.astype(dtype):
        sums.append(now)
        now = decays * now + row
    return np.array(sums)


def mean_error(sums: np.ndarray, exact: np.ndarray) -> float:
    """Maximum error of the mean of a step's integer, in grid units."""
    return float(np.abs(np.tensordot(np.array(LONG.weights), sums - exact, (0, 1))).max())


def test_the_matrix_applied_is_the_one_accounted_for(long_run):
    """`C W = levels z` up to c_0 / 2 at every step, the sums in extended precision; n = 10,000."""
    w, z, _ = long_run
    first = LONG.noise_recursion().first
    exact = np.tensordot(exact_sums(w), np.array(LONG.weights), (1, 0)) + w
    assert np.abs(exact - LEVELS / first * z).max() <= 0.5 + 1e-6
    # And so it is the inverse times white noise, by the coefficients of C themselves.
    mixed = signal.fftconvolve(w, LONG.array[:, None], axes=0)[:STEPS]
    np.testing.assert_allclose(mixed, LEVELS * z, atol=0.5 * first + 0.01)


def test_sums_are_far_more_exact_than_the_resolution(long_run):
    """Over 10^10 coordinate-steps 1e-10 of sensitivity (proofs/buffered.md, section 3); 0.1 in float32."""
    w, _, sums = long_run
    exact = exact_sums(w)
    off, single = mean_error(sums, exact), mean_error(exact_sums(w, np.float32), exact)
    moved = 2 * np.sqrt(1e10) / (LEVELS / LONG.noise_recursion().first)
    assert off < 1e-8 and off * moved < 1e-9
    assert single * moved > 0.05
    # What the page proves, from what the sums may reach at all.
    lost = 2.0**-32 * units(LONG) + 3 * 2.0**-53 * np.abs(exact).max(axis=(0, 2)).astype(float)
    assert off <= np.dot(LONG.weights, lost / (1 - np.array(LONG.decays)))


@pytest.mark.parametrize("buffer", [0, 1])
def test_no_sum_leaves_its_32_bits(buffer):
    """Normals as large as they can be, with the signs that make one sum the largest, at the most levels."""
    strategy = BufferedToeplitz((0.99, 0.5), (0.2, 0.3), 40)
    recursion, levels = strategy.noise_recursion(), noise.max_levels(strategy, 40)
    inverse = signal.lfilter([1.0], strategy.array, np.eye(40)[0])
    signs = np.sign(signal.lfilter([1.0], [1.0, -strategy.decays[buffer]], inverse))[::-1]
    sums, ring = np.zeros(2), jnp.zeros((4, 1), jnp.int32)
    with jax.enable_x64(True):
        solve, renewed, _ = noise._stream_of(strategy).at(levels, jnp.int32(0))

        @jax.jit
        def step(ring, normal):
            (drawn,) = solve(normal, ring)
            return renewed(ring, drawn), drawn

        for sign in signs:
            ring, drawn = step(ring, jnp.full(1, sign * LARGEST))
            sums = np.array(strategy.decays) * sums + np.asarray(drawn, float)
    assert abs(sums[buffer]) == pytest.approx(levels * LARGEST * recursion.reach[buffer], rel=1e-6)
    kept = sums_of(ring, strategy, levels)[:, 0]
    np.testing.assert_allclose(kept.astype(float), sums, rtol=1e-12)
