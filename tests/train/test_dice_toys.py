"""DiceSGD on toy problems, on the code that trains: where it ends, how long winding up takes, what is biased.

Numbers were computed beforehand in float64 without a grid; here gradients are on one of 2^20 steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.procedures.dice import dice_sgd

KEY = np.arange(8, dtype=np.uint32)


def path(gradients, start, steps, *, rate, batch_size, c1=1.0, c2=1.0, **options):
    """((steps, ...) x, (steps, ...) e) after each step; `gradients(x)` has one row an example."""
    rule = dice_sgd(
        rate, clip_norm=c1, error_clip_norm=c2, noise_std=0.0, batch_size=batch_size, key=KEY, **options
    )
    x = jnp.asarray(start, jnp.float32)

    @jax.jit
    def run(x, state):
        def step(carry, _):
            x, state = carry
            updates, state = rule.update(gradients(x), state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), (x, state[0].error)

        return jax.lax.scan(step, (x, state), length=steps)[1]

    return jax.tree.map(np.asarray, run(x, rule.init(x)))


def four(x):
    """Of (x - centre)^2 / 2 at 0, 0, 0 and 10: the minimum is at 2.5."""
    return x - jnp.array([0.0, 0.0, 0.0, 10.0])


def test_first_steps_and_the_longest_detour():
    x, e = path(four, 0.0, 400, rate=0.1, batch_size=4)
    np.testing.assert_allclose(x[:3], [0.025, 0.148125, 0.262015625], atol=1e-5)
    np.testing.assert_allclose(e[:3], [-2.25, -3.49375, -4.70671875], atol=1e-4)
    assert x.argmax() + 1 == 65 and x.max() == pytest.approx(3.6225185, abs=1e-4)
    assert np.abs(e).max() == pytest.approx(25.6246916, abs=1e-3)
    assert np.abs(x[185:] - 2.5).max() < 2e-5


@pytest.mark.parametrize(("c2", "end", "drift"), [(0.1, 0.466667, -2.0333), (0.4, 0.866667, None)])
def test_too_small_an_error_clip(c2, end, drift):
    """Below 0.5 it stops at (1 + 4 C2) / 3, and e goes on drifting."""
    x, e = path(four, 0.0, 1000, rate=0.1, batch_size=4, c2=c2)
    assert x[-1] == pytest.approx(end, abs=1e-4)
    if drift:
        assert e[-1] - e[-2] == pytest.approx(drift, abs=1e-2)


@pytest.mark.parametrize(("c2", "settled", "lowest"), [(1.0, 7196, None), (3.0, 1419, -62.288)])
def test_winding_up(c2, settled, lowest):
    """From 100 the error grows to about R^2 / (2 eta (C1 + C2)) and has to unwind."""
    x, e = path(four, 100.0, 7400, rate=0.1, batch_size=4, c2=c2)
    away = np.nonzero(np.abs(x - 2.5) > 1e-3)[0]
    assert away[-1] + 1 == pytest.approx(settled, abs=60)
    if c2 == 1:
        assert np.abs(e).max() == pytest.approx(22939.77, rel=1e-3)
        assert np.abs(e).max() == pytest.approx(100**2 / (2 * 0.1 * 2), rel=0.1)
    else:
        assert x.min() == pytest.approx(lowest, abs=0.05)


def biased(c):
    """Gradients of the paper's example B.1: Huber losses at -1 (C' times) and C' (once), C' = ceil(c) + 1."""
    knee = int(np.ceil(c)) + 1
    centres = np.float32([-1.0] * knee + [float(knee)])
    return lambda x: (x - centres).clip(-knee, knee), knee


@pytest.mark.parametrize(("c", "stops", "error"), [(0.5, -0.75, -0.166667), (2.0, -1 / 3, -0.25)])
def test_the_example_of_the_paper(c, stops, error):
    """Clipped SGD stops at -(C' - C) / C', not where the paper says; DiceSGD at the minimum 0."""
    gradients, knee = biased(c)
    x = 0.5
    for _ in range(4000):
        x -= 0.05 * float(gradients(x).clip(-c, c).mean())
    assert x == pytest.approx(stops, abs=1e-3) == pytest.approx(-(knee - c) / knee, abs=1e-3)
    xs, es = path(gradients, 0.5, 6000, rate=0.05, batch_size=knee + 1, c1=c, c2=c)
    assert abs(xs[-1]) < 1e-4 and es[-1] == pytest.approx(error, abs=1e-3)


def test_automatic_clipping_orbits_the_minimum():
    """Normalised gradients and error: x goes round 2.5 within the stepsize's size, not into the median 0."""
    x, _ = path(four, 0.0, 4000, rate=0.01, batch_size=4, automatic=True)
    tail = x[-1000:]
    assert 2.45 < tail.min() <= tail.max() < 2.55 and tail.mean() == pytest.approx(2.5, abs=0.01)


def test_least_squares_in_three_dimensions():
    i, j = np.arange(20)[:, None], np.arange(3)
    a = np.cos(1.7 * i + 0.9 * j) + 0.3 * j
    b = np.sin(0.6 * np.arange(20)) + 8 * (np.arange(20) % 5 == 0)
    best = np.linalg.lstsq(a, b, rcond=None)[0]
    np.testing.assert_allclose(best, [7.72935638, -8.92925106, 7.11766596], rtol=1e-8)

    def gradients(x):
        return (a @ x - b)[:, None] * a

    def clipped_mean(x):
        g = gradients(x)
        return (g * np.minimum(1, 1 / np.linalg.norm(g, axis=1))[:, None]).mean(axis=0)

    x = np.zeros(3)
    for _ in range(20_000):
        x -= 0.2 * clipped_mean(x)
    np.testing.assert_allclose(x, [1.28684852, -1.58063402, 1.50176144], atol=1e-3)
    assert np.linalg.norm(gradients(x).mean(axis=0)) == pytest.approx(0.7504, abs=1e-3)
    rows, right = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    xs, es = path(lambda x: (rows @ x - right)[:, None] * rows, np.zeros(3), 60_000, rate=0.2, batch_size=20)
    assert np.linalg.norm(xs[-1] - best) < 5e-3
    assert np.linalg.norm(es[-1]) == pytest.approx(0.13370777, abs=1e-3)
    assert np.linalg.norm(clipped_mean(best)) == pytest.approx(0.13370777, abs=1e-7)


def test_with_noise_the_mean_is_right_and_the_identity_holds():
    """Poisson batches of 2 of 4, 100 chains: 2.5 on average, where clipped SGD would be at 1/3.

    Five standard errors are allowed (false alarm 1e-6). `x - eta e` moves as unclipped SGD does.
    """
    rate, sigma, size, chains, steps = 0.02, 0.5, 2, 100, 2500
    rule = dice_sgd(rate, clip_norm=1.0, error_clip_norm=1.0, noise_std=sigma, batch_size=size, key=KEY)
    one = rule.init(jnp.float32(0))

    def chain(key, coins):
        state = (one[0]._replace(key=key), *one[1:])

        def step(carry, mask):
            x, state = carry
            updates, after = rule.update(four(x), state, x, mask=mask)
            released = -updates / rate
            mean = jnp.where(mask, four(x), 0).sum() / size
            v = state[0].error + mean - after[0].error
            ideal = x - rate * state[0].error - rate * (mean + released - v)
            moved = optax.apply_updates(x, updates)
            return (moved, after), (moved, moved - rate * after[0].error - ideal)

        return jax.lax.scan(step, (jnp.float32(2.5), state), coins)[1]

    rng = np.random.default_rng(7)
    keys = jnp.asarray(rng.integers(0, 2**32, (chains, 8), dtype=np.uint32))
    coins = jnp.asarray(rng.random((chains, steps, 4)) < size / 4)
    x, gap = jax.tree.map(np.asarray, jax.jit(jax.vmap(chain))(keys, coins))
    assert np.abs(gap).max() < 1e-4
    means = x[:, steps // 2 :].mean(axis=1)
    assert abs(means.mean() - 2.5) < 5 * means.std(ddof=1) / chains**0.5 + 1e-3
    assert means.std(ddof=1) / chains**0.5 < 0.02
