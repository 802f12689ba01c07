"""Sums over patterns with one participation an epoch, in logarithms.

An epoch has M steps and participations are at least b steps apart. After a participation at the place s the
first eligible place of the next epoch is `j = max(0, s - (M - b))`. With `h = M - b` the place t is drawn
with the probabilities

    K_j(t) = rho^{t - j} / (h + 1)  for j <= t < b - 1,   rho^{b - 1 - j} / (h + 1)  for b - 1 <= t < M,

`rho = h / (h + 1)`: every eligible step has the hazard 1 / (h + 1) until the last h + 1 steps, among which
the place is uniform. The places of every epoch are then uniform (proofs/fixed_counts.md, section 7). With G
the mean over what follows, `G_j = e^{r_j} G' / (h + 1) + rho G_{j+1}` is a sum over one epoch.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.recurrence import SOFTPLUS_ROUNDINGS, compensated_step, tree_sum


def log_survival(epoch_steps: int, separation: int) -> float:
    """Return ln rho, of no participation at an eligible step before the last ones; -inf for b = M."""
    return math.log1p(-1 / (epoch_steps - separation + 1)) if separation < epoch_steps else -math.inf


def log_mean_over_places(log_ratios, epoch_steps: int, separation: int):
    """Return ln of the mean over all patterns of e to the sum of their log-ratios, (num_samples,).

    `log_ratios` are (n, num_samples), `epoch_steps` is M (the last epoch may end early), `separation` in 1 ..
    M - 1.
    """
    (n, samples), M, b = log_ratios.shape, epoch_steps, separation
    epochs = -(-n // M)
    # A participation after the last step is none.
    ratios = jnp.pad(log_ratios, ((0, epochs * M - n), (0, 0))).reshape(epochs, M, samples)

    def one_epoch(after, ratios):
        return _log_means(_with_what_follows(ratios, after), b), None

    nothing_follows = jnp.zeros((b, samples), log_ratios.dtype)
    after, _ = lax.scan(one_epoch, nothing_follows, ratios[1:], reverse=True)
    return _log_mean(_with_what_follows(ratios[0], after))


def _with_what_follows(ratios, after):
    """Return (M, num_samples): log-ratios plus `after`, by the first eligible place after each place."""
    any_place = jnp.broadcast_to(after[:1], (len(ratios) - len(after), after.shape[1]))
    return ratios + jnp.concatenate([any_place, after])


def _log_means(values, separation: int):
    """Return (b, num_samples): ln of the means of e to (M, num_samples) `values`, by first eligible place."""
    M, b = len(values), separation
    last = _log_mean(values[b - 1 :])
    if b == 1:
        return last[None]
    # g_j = ln G_j - (b - 1 - j) ln rho never decreases from one place to the one before it.
    steps_before_last = np.arange(b - 1, 0, -1)
    offsets = steps_before_last * log_survival(M, b)
    inputs = -(offsets - log_survival(M, b)) - math.log(M - b)

    def step(carry, given):
        value, log_input = given
        g, lost = carry
        g, lost = compensated_step(g, lost, log_input, value)
        return (g, lost), g

    given = values[: b - 1], jnp.asarray(inputs, values.dtype)
    _, g = lax.scan(step, (last, jnp.zeros_like(last)), given, reverse=True)
    return jnp.concatenate([g + jnp.asarray(offsets, values.dtype)[:, None], last[None]])


def _log_mean(values):
    """Return ln of the mean of e to `values` over the first axis."""
    top = lax.stop_gradient(values.max(axis=0))
    return top + jnp.log(tree_sum(jnp.exp(values - top[None]), axis=0)) - math.log(len(values))


def rounding_bound(
    epochs: int, epoch_steps: int, separation: int, max_ratio: float, ratio_error: float
) -> float:
    """Return a bound on the float32 error of `log_mean_over_places` (proofs/fixed_counts.md, section 8).

    `max_ratio` is the largest |log-ratio| of one participation, `ratio_error` that of one log-ratio in
    units of 2^-24.
    """
    largest = epochs * max_ratio  # |ln of a mean|
    offset = -(separation - 1) * log_survival(epoch_steps, separation)
    depth = math.ceil(math.log2(epoch_steps))
    increments = (SOFTPLUS_ROUNDINGS + 3) * (2 * largest + offset)
    argument = 7 * largest + 6 * offset + 8 * depth + 12
    return 2.0**-24 * epochs * (ratio_error + increments + argument + 4 * largest + 2 * offset)


__all__ = ["log_mean_over_places", "log_survival", "rounding_bound"]
