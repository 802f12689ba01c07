"""Mean participation vector of an example of b-min-sep, given the outputs.

Given log-ratios r, participation vectors have the distribution `p(x) e^{<x, r>} / f(r)`, in which a free
example participates at step i with the odds `e^{c + r_i} f_{i+b} / f_{i+1}` (`kernels.recurrence`). A
backward pass computes these odds, a forward pass the probability of being free. All terms are positive, so
means have a relative error of some roundings a step, however small they are (proofs/rounding.md, section 7).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels.programs import number
from jaxacct.kernels.recurrence import compensated_step


def mean_participation(log_ratios, *, log_p: float, log_q: float, block: int, start_log_weights=None):
    """Return (ln of the likelihood ratio, mean participation vector of one example) given the outputs.

    `log_ratios` are (n, num_samples), as for `recurrence.blocked_log_recurrence`, p is below 1, and
    `start_log_weights`, (block,), ln of the probabilities of being first free at step 1, 2, .., b; None is
    step 1. Returns (num_samples,) and (n, num_samples).

    Source: arXiv 2602.09338, eq. (1), and its derivative.
    """
    n, num_samples = log_ratios.shape
    num_blocks, dtype = -(-n // block), log_ratios.dtype
    # A padded step has r = 0 and reads f = 1, which gives f = 1.
    padded = jnp.pad(log_ratios, [(0, num_blocks * block - n), (0, 0)]).reshape(num_blocks, block, -1)
    shift = number(log_p - block * log_q, dtype)

    def back(carry, given):
        g, lost = carry
        ratio, ahead = given
        log_odds = ratio + shift + (ahead - g) - lost
        g, lost = compensated_step(g, lost, ratio + shift, ahead)
        return (g, lost), (g, log_odds)

    def block_back(carry, ratios):
        following, lost = carry
        (_, lost), (values, log_odds) = lax.scan(
            back, (following[0], lost), (ratios, following), reverse=True
        )
        return (values, lost), log_odds

    ends = jnp.asarray(np.arange(block) * log_q, dtype)[:, None]
    end = jnp.broadcast_to(ends, (block, num_samples)), jnp.zeros(num_samples, dtype)
    (first, _), log_odds = lax.scan(block_back, end, padded, reverse=True)
    offsets = (num_blocks * block - np.arange(block)) * log_q  # ln f - g
    values = first + jnp.asarray(offsets, dtype)[:, None]
    if start_log_weights is None:
        loss = values[0]
        free = jnp.zeros((block, num_samples), dtype).at[0].set(1.0)
    else:
        terms = values + jnp.asarray(start_log_weights, dtype)[:, None]
        loss = jax.nn.logsumexp(terms, axis=0)
        free = jax.nn.softmax(terms, axis=0)

    def forth(stays, given):
        log_odds, released = given
        small = jnp.exp(-jnp.abs(log_odds))
        large = 1 / (1 + small)
        small = small * large
        free = stays + released
        return free * jnp.where(log_odds >= 0, small, large), free * jnp.where(log_odds >= 0, large, small)

    def block_forth(carry, log_odds):
        stays, taking = lax.scan(forth, carry[0], (log_odds, carry[1]))
        # A participant is free again b steps later.
        return (stays, taking), taking

    _, means = lax.scan(block_forth, (jnp.zeros(num_samples, dtype), free), log_odds)
    return loss, means.reshape(-1, num_samples)[:n]
