"""Replicas of Poisson participation: steps are independent, so any number of replicas is a product.

At each step the number k of participating replicas is Binomial(m, p) reweighted by
`e^{k (k-1) / 2 sigma^2}`, and `Z_m` is the n-th power of the total weight (also b-min-sep with b = 1).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxacct.kernels import threefry
from jaxacct.schemes.replicas.base import Attracting, log_lift


def max_replicas(mechanism: Attracting) -> int:
    """Return 64: the scale's best order is far below it wherever replicas help."""
    return 64


def table_samples(mechanism: Attracting, m: int) -> float:
    """Return 0: the tables are a few numbers."""
    return 0.0


def errors(mechanism: Attracting, m: int) -> tuple[float, float]:
    """Return (relative, total variation) errors of the distribution that `draw_counts` draws from.

    Each of m thresholds has an error of half a step of 2^-32, or of one where it would be 2^32, at each of n
    iterations; that one is counted as two.
    """
    return 0.0, mechanism.scheme.iterations * (m + 1) * 2.0**-33


@functools.lru_cache(maxsize=256)
def _distribution(mechanism: Attracting, m: int):
    k = np.arange(m + 1)
    p = mechanism.scheme.sampling_probability
    log_weights = np.log([math.comb(m, taking) for taking in k])  # of the binomial distribution, at p = 1 too
    log_weights = log_weights + scipy.special.xlogy(k, p) + scipy.special.xlog1py(m - k, -p)
    log_weights = log_weights + k * (k - 1) / 2 / mechanism.noise_multiplier**2 + k * log_lift(mechanism, m)
    log_total = scipy.special.logsumexp(log_weights)
    return log_total, np.exp(log_weights - log_total)


def log_normalizer(mechanism: Attracting, m: int) -> float:
    """Return ln Z_m, float64."""
    return float(mechanism.scheme.iterations * _distribution(mechanism, m)[0])


def tables(mechanism: Attracting, m: int) -> dict:
    """Return the arrays that `draw_counts` needs."""
    # The probability of at least k, k = 1..m, against 32 random bits; rare counts round to 2^-32 steps.
    tail = np.cumsum(_distribution(mechanism, m)[1][::-1])[::-1][1:]
    return {"tail": jnp.asarray(np.minimum(np.round(tail * 2.0**32), 2.0**32 - 1), jnp.uint32)}


def draw_counts(key, scheme, arrays, num_samples: int):
    """Draw sums of m replicas' participation vectors, (num_samples, iterations) float32."""
    bits = threefry.bits_32(key, (num_samples, scheme.iterations))
    counts = jnp.zeros(bits.shape, jnp.float32)
    return jax.lax.fori_loop(
        0,
        arrays["tail"].shape[0],
        lambda j, total: total + (bits < arrays["tail"][j]).astype(total.dtype),
        counts,
    )


def draw_with_one(key, scheme, arrays, num_samples: int):
    """Return (`draw_counts`, the participation vector of one of the m replicas, lifts), float32."""
    counts_key, one_key = threefry.split(key)
    counts = draw_counts(counts_key, scheme, arrays, num_samples)
    # Of k participants at a step each replica is one with probability k / m.
    place = threefry.integers(one_key, counts.shape, arrays["tail"].shape[0])
    return counts, (place.astype(counts.dtype) < counts).astype(jnp.float32), counts.sum(axis=1)
