"""Monte Carlo variant of `participation`: samples of c^2 on the accelerator, and an upper bound on delta.

Every sample simulates the sampler itself (positions of the group's records, cut into terms and rounds), so it
also checks the exact distribution. A delta averages the exact deltas of the samples' Gaussians, in [0, 1].
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD
from jaxacct.common import validate as _validate
from jaxacct.kernels import threefry
from jaxacct.kernels.randomness import multiply_high
from jaxacct.statistics import bounds


def draw_error(run: GeneralDPSGD) -> float:
    """Return a bound on the relative error of the probability of any sample of c^2.

    Every position is one of N values of `floor(x span / 2^64)`: relative error of at most N 2^-64.
    """
    return float(np.expm1(_num_draws(run) * run.group_size * run.dataset_size * 2.0**-64))


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
    """Return samples of c^2, int32 (num_samples,), with a JAX key; sizes as of `participation_pmf`.

    Memory is of the order of `num_samples x group_size`.
    """
    _validate.positive_integer("num_samples", num_samples)
    if dataset_size >= 2**31:
        raise ValueError(f"dataset_size must be below 2^31 to be drawn, got {dataset_size}")
    run = GeneralDPSGD(dataset_size, num_microbatches, microbatch_size, num_epochs, sampling, group_size)
    if run.most() >= 2**31:
        raise ValueError(
            "num_epochs or group_size must be smaller to be drawn: c^2 may be "
            f"{run.most():.4g}, int32 ends at 2^31"
        )
    return _draw(key, run, num_samples)


def _num_draws(run: GeneralDPSGD) -> int:
    """Return how often a sample draws positions: once a permutation, or once a round."""
    return run.num_epochs * (1 if run.sampling == "shuffling" else run.rounds_per_epoch)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key, run: GeneralDPSGD, samples: int):
    def add(total, one):
        keys = jax.random.split(jax.random.fold_in(key, one), samples)
        positions = jax.vmap(lambda k: _distinct(k, run.dataset_size, run.group_size))(keys)
        return total + jax.vmap(functools.partial(_squares, run))(positions), None

    return jax.lax.scan(add, jnp.zeros(samples, jnp.int32), jnp.arange(_num_draws(run)))[0]


def _distinct(key, n: int, g: int):
    """Return g distinct positions in 0..n-1, uniform (Floyd's algorithm): O(g^2), never O(n)."""
    words = threefry.bits_32(key, (g, 2))

    def step(chosen, index):
        limit = jnp.uint32(n - g + index)  # draw from 0..limit
        place = _below(words[index], limit)
        place = jnp.where((chosen == place).any(), limit, place).astype(jnp.uint32)
        return chosen.at[index].set(place), None

    start = jnp.full(g, jnp.uint32(0xFFFFFFFF))
    return jax.lax.scan(step, start, jnp.arange(g))[0].astype(jnp.int32)


def _below(words, limit):
    """Return uniforms on 0..limit from 64 random bits: the high word of `x (limit + 1)`, error 2^-32 n."""
    span = limit + jnp.uint32(1)
    high = multiply_high(words[0], span)
    # The low product and the second word determine the carry.
    low = words[0] * span
    carry = multiply_high(words[1], span)
    return high + (low + carry < low).astype(jnp.uint32)


def _squares(run: GeneralDPSGD, positions):
    """Sum over rounds of the squared number of terms with records at these positions."""
    n, m, s = run.dataset_size, run.num_microbatches, run.microbatch_size
    inside = positions < (n if run.sampling == "shuffling" else m * s)
    terms = jnp.where(inside, positions // s, n)
    order = jnp.sort(terms)
    first = (order < n) & jnp.concatenate([jnp.array([True]), order[1:] != order[:-1]])
    rounds = order // m
    # Pairs of distinct terms in one round: sum of L^2.
    same = (rounds[:, None] == rounds[None, :]) & first[:, None] & first[None, :]
    return same.sum().astype(jnp.int32)


class MonteCarloDelta(NamedTuple):
    """Estimate of delta and an upper confidence bound. Only the bound may be released."""

    estimate: float
    upper_confidence_bound: float


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
    """Estimate delta by samples of the sampler: `(estimate, upper confidence bound)`.

    Only the bound may be released. It fails with probability at most `1 - confidence`, which must be added to
    delta (betting, `statistics.bounds`). `sigma` is the noise std over twice the clip norm; the sizes are
    those of `participation_pmf`.
    """
    arrays.nonnegative("epsilon", epsilon)
    arrays.scale("sigma", sigma)
    _validate.open_probability("confidence", confidence)
    sizes = dataset_size, num_microbatches, microbatch_size, num_epochs
    drawn = sample_participation(key, *sizes, group_size, sampling, num_samples)
    error = draw_error(GeneralDPSGD(*sizes, sampling, group_size))
    counts, times = np.unique(np.asarray(drawn), return_counts=True)
    values = np.repeat(gdp_delta(epsilon, np.sqrt(counts) / sigma), times)
    # Rounded up by more than the float64 error, as bins of terms are of exact numbers.
    terms = np.minimum(1.0, values * (1 + 1e-9))
    bound = bounds.upper_confidence_bound(bounds.bin_terms(terms), 1 - confidence)
    return MonteCarloDelta(float(values.mean()), min(1.0, bound * (1 + error)))
