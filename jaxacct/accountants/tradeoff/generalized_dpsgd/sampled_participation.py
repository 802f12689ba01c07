"""The Monte Carlo twin of `participation`: draws of c^2 on the accelerator, and a certified delta from them.

Every draw follows the sampler itself (positions of the group's records, cut into terms and rounds), not its
law, so it also checks the law. A delta averages the exact delta of each draw's Gaussian, which is in [0, 1].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.accountants.tradeoff.curves.terms import sampling_revealed
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import (
    GeneralDPSGD,
    MonteCarloDelta,
    upper_mean,
)
from jaxacct.common import validate as _validate
from jaxacct.kernels import threefry


def sample_participation(
    key,
    dataset_size: int,
    num_microbatches: int,
    microbatch_size: int,
    num_epochs: int,
    group_size: int,
    sampling: str,
    num_samples: int,
) -> jax.Array:
    """Draws of c^2, int32 (num_samples,).

    Args:
      key: a JAX key.
      dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling: as
        `participation_pmf`.
      num_samples: draws; memory is of the order of `num_samples x group_size`.
    """
    _validate.positive_integer("num_samples", num_samples)
    if dataset_size >= 2**31:
        raise ValueError(f"dataset_size must be below 2^31 to be drawn, was {dataset_size}")
    run = GeneralDPSGD(dataset_size, num_microbatches, microbatch_size, num_epochs, sampling, group_size)
    if run.most() >= 2**31:
        raise ValueError(
            "num_epochs or group_size must be smaller to be drawn: c^2 may be "
            f"{run.most():.4g}, int32 ends at 2^31"
        )
    rounds = run.rounds_per_epoch
    shuffled = sampling == "shuffling"
    draws = num_epochs if shuffled else num_epochs * rounds
    return _draw(
        key, dataset_size, num_microbatches, microbatch_size, draws, group_size, shuffled, num_samples
    )


@functools.partial(jax.jit, static_argnums=range(1, 8))
def _draw(key, n, m, s, draws, g, shuffled, samples):
    def add(total, one):
        keys = threefry.split_array(threefry.fold_in(key, one), samples)
        positions = jax.vmap(lambda k: _distinct(k, n, g))(keys)
        return total + jax.vmap(lambda p: _squares(p, n, m, s, shuffled))(positions), None

    return jax.lax.scan(add, jnp.zeros(samples, jnp.int32), jnp.arange(draws))[0]


def _distinct(key, n: int, g: int):
    """g different positions in 0..n-1, uniform (Floyd's algorithm): O(g^2), never O(n)."""
    words = threefry.bits_32(key, (g, 2))

    def step(chosen, index):
        limit = jnp.uint32(n - g + index)  # draw from 0..limit
        place = _below(words[index], limit)
        place = jnp.where((chosen == place).any(), limit, place).astype(jnp.uint32)
        return chosen.at[index].set(place), None

    start = jnp.full(g, jnp.uint32(0xFFFFFFFF))
    return jax.lax.scan(step, start, jnp.arange(g))[0].astype(jnp.int32)


def _below(words, limit):
    """Uniform on 0..limit from 64 random bits: the high word of `x (limit + 1)`, off by at most 2^-32 n."""
    span = limit + jnp.uint32(1)
    high = _high(words[0], span)
    # The low product and the second word decide the carry.
    low = words[0] * span
    carry = _high(words[1], span)
    return high + (low + carry < low).astype(jnp.uint32)


def _high(a, b):
    """High word of the 64-bit product of two uint32."""
    mask = jnp.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> 16, a & mask, b >> 16, b & mask
    low, left, right = a0 * b0, a1 * b0, a0 * b1
    middle = (low >> 16) + (left & mask) + (right & mask)
    return a1 * b1 + (left >> 16) + (right >> 16) + (middle >> 16)


def _squares(positions, n: int, m: int, s: int, shuffled: bool):
    """Sum over rounds of the squared number of terms hit by records at these positions."""
    g = positions.shape[0]
    inside = jnp.full(g, True) if shuffled else positions < m * s
    terms = jnp.where(inside, positions // s, n)
    order = jnp.sort(terms)
    first = (order < n) & jnp.concatenate([jnp.array([True]), order[1:] != order[:-1]])
    rounds = order // m
    # Pairs of distinct terms in one round: sum of L^2.
    same = (rounds[:, None] == rounds[None, :]) & first[:, None] & first[None, :]
    return same.sum().astype(jnp.int32)


def mc_mixture_delta(
    key,
    epsilon: float,
    sigma: float,
    dataset_size: int,
    num_microbatches: int,
    microbatch_size: int,
    num_epochs: int,
    group_size: int,
    sampling: str,
    num_samples: int,
    confidence: float = 1 - 1e-6,
) -> MonteCarloDelta:
    """Delta by draws of the sampler: `(estimate, upper confidence bound)`; only the bound may be released.

    The bound fails with probability `1 - confidence` at most, which is to be added to delta.
    """
    arrays.check("epsilon", epsilon, "at least 0", lambda e: e >= 0)
    arrays.check_scale("sigma", sigma)
    _validate.open_probability("confidence", confidence)
    drawn = sample_participation(
        key, dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling, num_samples
    )
    counts, times = np.unique(np.asarray(drawn), return_counts=True)
    deltas = np.asarray(gdp_delta(epsilon, np.sqrt(counts) / sigma))
    values = np.repeat(deltas, times)
    return MonteCarloDelta(
        float(values.mean()),
        upper_mean(values, confidence),
        float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 1.0,
        confidence,
        num_samples,
        sampling_revealed(group_size, "certified"),
    )
