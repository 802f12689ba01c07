"""Samplers, likelihoods and strategies under jit, without it, and with arguments on a device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from jaxacct import BandedToeplitz, Mechanism, privacy_loss
from tests.conformance import test_schemes, test_strategies
from tests.oracles import enumeration

SCHEMES = [(name, test_schemes.MEMBERS[name][0]) for name in ("b-min-sep", "balanced-min-sep")]
STRATEGIES = [(name, test_strategies.MEMBERS[name][0]) for name in ("banded-toeplitz", "banded-inverse")]
WORDS, ROWS, N = np.array([20, 26], np.uint32), 16, test_strategies.N
each_way = chex.variants(with_jit=True, without_jit=True)


def counts_of(scheme, words):
    """Drawn counts of a unit, (ROWS, iterations)."""
    side = test_schemes.typical_side(scheme, ROWS)
    drawn = scheme.draw_counts(jax.random.wrap_key_data(words), ROWS, "remove", side)
    assert drawn is not None
    return drawn


def noise_of(strategy, words):
    """Scores of pure noise, (4, N)."""
    normals = strategy.draw_normals(jax.random.wrap_key_data(words), N, 4, jnp.float32)
    return strategy.scores_from_normals(normals, N, 1.0)


class TestVariants(chex.TestCase):
    @each_way
    @parameterized.named_parameters(*SCHEMES)
    def test_samplers(self, scheme):
        """The same counts, all of them of positive probability."""
        counts = self.variant(functools.partial(counts_of, scheme))(WORDS)
        chex.assert_shape(counts, (ROWS, scheme.iterations))
        chex.assert_type(counts, jnp.float32)
        chex.assert_trees_all_equal(counts, jax.jit(counts_of, static_argnums=0)(scheme, WORDS))
        patterns, _ = test_schemes.distribution(scheme)
        assert set(map(tuple, np.asarray(counts).tolist())) <= set(map(tuple, patterns.tolist()))

    @each_way
    @parameterized.named_parameters(*SCHEMES)
    def test_likelihoods(self, scheme):
        strategy, side = (
            BandedToeplitz.square_root(scheme.min_separation),
            test_schemes.typical_side(scheme, 3),
        )
        outputs = np.random.default_rng(2).normal(0.5, 1.5, (3, scheme.iterations)).astype(np.float32)
        loss = self.variant(lambda outputs: privacy_loss(Mechanism(scheme, strategy, 0.9), outputs, side))
        one = getattr(scheme, "untruncated", scheme)
        exact = enumeration.log_ratio(one, strategy.coefficients, 0.9, outputs.astype(float))
        chex.assert_trees_all_close(loss(outputs), np.float32(exact), rtol=2e-5, atol=2e-5)

    @each_way
    @parameterized.named_parameters(*STRATEGIES)
    def test_strategies(self, strategy):
        noise = self.variant(functools.partial(noise_of, strategy))(WORDS)
        expected = jax.jit(noise_of, static_argnums=0)(strategy, WORDS)
        chex.assert_trees_all_close(noise, expected, rtol=1e-5, atol=1e-5)
        signal = self.variant(strategy.signal_scores)(np.float32(test_strategies.X))
        matrix = test_strategies.extended(strategy)
        chex.assert_trees_all_close(signal, np.float32(test_strategies.X @ matrix.T @ matrix), atol=1e-5)
