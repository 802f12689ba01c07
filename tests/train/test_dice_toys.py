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
    assert np.abs(x[185:] - 2.5).max() < 2e-5 and e[-1] == pytest.approx(-0.5, abs=2e-5)


def biased(c):
    """Gradients of the paper's example B.1: Huber losses at -1 (C' times) and C' (once), C' = ceil(c) + 1."""
    knee = int(np.ceil(c)) + 1
    centres = np.float32([-1.0] * knee + [float(knee)])
    return lambda x: (x - centres).clip(-knee, knee), knee


def test_the_example_of_the_paper():
    """Clipped SGD stops at -(C' - C) / C', not where the paper says; DiceSGD at the minimum 0."""
    c, (gradients, knee) = 2.0, biased(2.0)
    x = 0.5
    for _ in range(4000):
        x -= 0.05 * float(gradients(x).clip(-c, c).mean())
    assert x == pytest.approx(-(knee - c) / knee, abs=1e-3)
    xs, es = path(gradients, 0.5, 6000, rate=0.05, batch_size=knee + 1, c1=c, c2=c)
    assert abs(xs[-1]) < 1e-4 and es[-1] == pytest.approx(-0.25, abs=1e-3)


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
