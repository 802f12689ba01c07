"""Both likelihoods of an example whose batches may be truncated, for the two pairs that have them.

`ln P/R` and `ln Q/R`, R the centred Gaussian, are two recurrences of b-min-sep with factors of their own. In
a batch without truncation they are e^r and 1, in a truncated one `kept e^{2 r - 2 h} + left` and
`kept e^{-r - 2 h} + left`, as a count k has the log-ratio `k r - (k^2 - k) h`. In linear scale both take an
exponential a step (`kernels.linear_scale`); in logarithms a logarithm or two and two exponentials each.
Logarithms remain for float64, for short runs, for GPUs, which have a kernel of their own, and for samples
outside float32's range. Rounding: proofs/rounding.md, section 3d.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxacct.kernels import linear_scale
from jaxacct.kernels.programs import any_left, samples_together
from jaxacct.kernels.recurrence import log_probabilities
from jaxacct.schemes.b_min_sep import BMinSep, serves_gpu

# With fewer steps logarithms take less time than compiling a second program.
_MIN_STEPS = 512
# Maximum ln of p (1 - p)^-b, the weight of a participation: where it is larger, terms that float32 flushes to
# zero might matter.
_MAX_SHIFT = 10.0


def log_likelihoods(
    uncut: BMinSep,
    log_ratios,
    halves,
    seen,
    chances: Callable[..., tuple],
    in_logs: Callable[..., tuple[jax.Array, jax.Array]],
):
    """Return `(ln P/R, ln Q/R)`, (num_samples,) each; in float32 within the error of logarithms.

    Args:
      uncut: sampling scheme.
      log_ratios: (iterations, num_samples) float, r.
      halves: () or (iterations, 1), h.
      seen: (iterations, num_samples), determines whether a batch is truncated; 0 for a batch that is not.
      chances: some steps of `seen` -> whether they are truncated and, where so, the probabilities of being
        kept and of being dropped.
      in_logs: log-ratios -> the same in logarithms.
    """
    p, b = uncut.sampling_probability, uncut.min_separation
    log_p, log_q = log_probabilities(p)
    if (
        log_ratios.dtype != jnp.float32
        or b == 1
        or uncut.iterations < _MIN_STEPS
        or not log_p - b * log_q <= _MAX_SHIFT
        or serves_gpu(log_ratios.dtype)
    ):
        return in_logs(log_ratios)

    def factors(r, seen, crossed):
        cut, kept, left = chances(seen)
        one = jnp.exp(r)
        at_p = jnp.where(cut, kept * (one * crossed * one) + left, one)
        return at_p, jnp.where(cut, kept * (crossed / one) + left, 1.0)

    @samples_together
    def in_linear_scale(log_ratios, seen, crossed):
        return uncut.log_likelihood_ratios_of_factors((log_ratios, seen, crossed), factors)

    # Time first in memory, too, for both uses; otherwise XLA keeps a copy of the inputs for the second.
    log_ratios = lax.optimization_barrier(log_ratios)
    found = in_linear_scale(log_ratios, seen, linear_scale.above_min(-2 * halves))
    missing = ~(jnp.isfinite(found[0]) & jnp.isfinite(found[1]))

    def again():
        return tuple(
            jnp.where(missing, new, old) for new, old in zip(in_logs(log_ratios), found, strict=True)
        )

    return lax.cond(any_left(missing), again, lambda: found)
