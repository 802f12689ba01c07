"""The elementary functions that the bound on rounding depends on, held to the table of proofs/rounding.md.

Float64 is the truth: NumPy's functions are good to 2^-52, far below the unit 2^-24 in which errors are
given. What is sampled is sampled densely, in every binade that losses can reach, and is no proof.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxacct.kernels import randomness
from jaxacct.kernels.recurrence import _LOG1P, SOFTPLUS_ROUNDINGS, _log1p, softplus

pytestmark = pytest.mark.optimized

UNIT = 2.0**-24
EACH = 1 << 15  # points a binade


def binades(first: int, last: int) -> np.ndarray:
    """EACH float32 in each of [2^first, 2^(first + 1)) .. up to 2^last: ends and a shuffled grid of bits."""
    rng = np.random.default_rng(0)
    step = 2**23 // EACH
    mantissas = np.arange(EACH, dtype=np.int64) * step + rng.integers(0, step, EACH)
    mantissas[0], mantissas[-1] = 0, 2**23 - 1
    exponents = np.arange(first + 127, last + 127, dtype=np.int64) << 23
    return (exponents[:, None] + mantissas).astype(np.uint32).reshape(-1).view(np.float32)


def worst(function, points, exact) -> float:
    """Largest relative error of the jitted function in units of 2^-24; NaN where a value is."""
    found = np.asarray(jax.jit(function)(points), np.float64)
    return float(np.max(np.abs(found / exact - 1))) / UNIT


def test_exponential():
    """exp on [-87, -2^-30] and 0: 1.2 million points, 4 units."""
    points = -binades(-30, 7)
    points = np.append(points[points >= -87], np.float32(0))
    assert worst(jnp.exp, points, np.exp(points.astype(np.float64))) <= 4


def test_logarithm_of_what_sums_of_exponentials_can_be():
    """log on [1, 2^31], where a log-sum-exp takes it: a million points, 4 units, and 0 at 1."""
    points = binades(0, 31)[1:]
    assert worst(jnp.log, points, np.log(points.astype(np.float64))) <= 4
    assert float(jnp.log(jnp.float32(1))) == 0


def test_logarithm_of_one_and_a_little():
    """Our polynomial on [2^-40, 1] and at 0: 1.3 million points; its coefficients are those of log1p."""
    points = np.append(binades(-40, 0), np.float32(1))
    assert worst(_log1p, points, np.log1p(points.astype(np.float64))) <= 3
    assert float(_log1p(jnp.float32(0))) == 0
    dense = points[:: 1 << 5].astype(np.float64)
    polynomial = dense * np.polynomial.polynomial.polyval(dense, _LOG1P.astype(np.float64))
    assert np.max(np.abs(polynomial / np.log1p(dense) - 1)) < UNIT


def test_softplus():
    """Both signs of 2^-30 .. 2^7, 2.4 million points, 8 units; and an absolute 2^-126 below -87."""
    points = binades(-30, 7)
    points = np.concatenate([-points[points <= 87], points, np.zeros(1, np.float32)])
    assert worst(softplus, points, np.logaddexp(0, points.astype(np.float64))) <= SOFTPLUS_ROUNDINGS
    low = -binades(6, 127)
    low = np.append(low[low < -87], np.float32(-np.inf))
    found = np.asarray(jax.jit(softplus)(low), np.float64)
    assert np.max(np.abs(found - np.exp(low.astype(np.float64)))) <= 2.0**-126


def test_square_root():
    """Every float32 in [1, 4), and so every one that is normal: two units (it is rounded correctly)."""
    points = np.arange(0x3F800000, 0x40800000, dtype=np.uint32).view(np.float32)
    for part in np.split(points, 4):
        assert worst(jnp.sqrt, part, np.sqrt(part.astype(np.float64))) <= 2


def words_near_every_edge() -> np.ndarray:
    """uint32: both ends, both sides of every power of two and of every change of branch, and a grid."""
    near = np.arange(-(1 << 10), 1 << 10, dtype=np.int64)
    edges = [0, 3 << 30, *(2**k for k in range(33)), *(3 << k for k in range(31))]
    grid = np.arange(1 << 18, dtype=np.int64) * (1 << 14) + 4321
    words = np.concatenate([(edge + near) for edge in edges] + [np.arange(1 << 16), grid])
    return np.unique(words[(words >= 0) & (words < 2**32)]).astype(np.uint32)


def test_minus_log_uniform():
    """Each binade and branch of u in (0, 1), ten values of the bits below: 3.9 million points, 8 units."""
    high = words_near_every_edge()
    lows = np.float32([2.0**-65, 2.0**-40, 2.0**-33, 2.0**-9, 3 * 2.0**-9, 0.3, 0.5, 0.75, 1 - 2.0**-9, 1.0])
    function = jax.jit(randomness.minus_log_uniform)
    for low in lows:
        if low == 1:
            high = high[high < 2**32 - 1]  # u = 1 has the logarithm 0, which is no relative error
        found = np.asarray(function(high, np.full(high.shape, low)), np.float64)
        u = (high.astype(np.float64) + np.float64(low)) * 2.0**-32
        complement = (2.0**32 - high.astype(np.float64) - np.float64(low)) * 2.0**-32
        exact = np.where(u < 0.5, -np.log(u), -np.log1p(-np.minimum(complement, 0.5)))
        assert np.max(np.abs(found / exact - 1)) <= 8 * UNIT
    assert high.size * lows.size > 3_900_000


def test_normals_from_their_bits():
    """Box and Muller in float64 from the same words: 15 units of the radius less 3.2 for the grid of angles.

    Half a million pairs; the radii and angles are formed anew from the words of JAX's own generator.
    """
    shape, key = (64, 8192), jax.random.key(5)
    draw = jax.jit(lambda key: randomness.normal_pairs(key, shape, jnp.float32))
    found = [np.asarray(part, np.float64) for part in draw(key)]
    counters = jnp.arange(2 * math.prod(shape), dtype=jnp.uint32)
    words = np.asarray(threefry_2x32(jax.random.key_data(jax.random.split(key)[0]), counters))
    high, bits = words.astype(np.uint64).reshape(2, *shape)
    index = high * 256 + (bits >> 24)
    u = (index + 0.5) / 2.0**40
    radius = np.sqrt(-2 * np.where(u < 0.5, np.log(u), np.log1p((index - 2.0**40 + 0.5) / 2.0**40)))
    assert index.min() >= randomness.RARE_RADII  # none of these took its row's word
    place = ((bits >> 2) & (2**22 - 1)) + 0.5
    angle = (place / 2.0**22 - 0.5) * np.pi / 2
    x, y = np.cos(angle), np.sin(angle)
    x, y = np.where(bits & 1, y, x), np.where(bits & 1, -x, y)
    sign = np.where(bits & 2, -1, 1)
    for ours, exact in zip(found, (x, y), strict=True):
        assert np.max(np.abs(ours - sign * radius * exact) / radius) <= (15 - 3.2) * UNIT
