"""Lower bounds on the divergence of a user with several examples, for intervals of estimates.

Where the likelihood of k independent examples is too large to compute, f is bounded from below by subtracting
the mean overlap of a participation with all others. With f_1 the likelihood ratio of one example and m its
mean participation under the distribution tilted by log-ratios r,

    ln f(r)  >=  k ln f_1(r)  -  (k (k - 1) / 2) |C m|^2 / sigma^2

by the Gibbs variational principle (proofs/shared_examples.md, theorem 9).
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import PLAIN, Draws, Proposal, plain
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies.stationary import circulant_length


def loss_from_below(scheme, strategy, scores_, sigma):
    """Return a lower bound on ln P/Q of (num_samples, iterations) scores of a user with several examples.

    By theorem 9, and by maximum overlaps where only starts are unknown, or C is not Toeplitz. Overlaps are
    rounded up; other errors have budget items (proofs/rounding.md, section 7).
    """
    if scheme.sums.probability == 1 or not strategy.is_toeplitz:
        return loss_of_scores(scheme, strategy, scores_, sigma, Direction.ADD)
    one, number = scheme.parts
    dtype, n = scores_.dtype, scheme.iterations
    unit = float(jnp.finfo(dtype).eps) / 2
    halves = lax.broadcast_to_rank(jnp.asarray(strategy.half_square_norms(), dtype), 2)
    loss, mean = one.loss_and_mean_participation((scores_ - halves) / sigma**2)
    off = unit * 8 * (rounding.fourier_roundings(circulant_length(n, strategy.bands)) + 8)
    off *= float(np.abs(strategy.array).sum()) ** 2
    square = _halving_sum(mean * strategy.signal_scores(mean)) + off * _halving_sum(mean**2)
    relative = math.expm1(unit * 12 * (n + one.min_separation + 40))
    shared = number * (number - 1) / 2 * (1 + 3 * relative) * square / sigma**2 + 1e-30
    return number * loss - shared - 8 * unit * (jnp.abs(number * loss) + shared)


def _halving_sum(values):
    """Sum over the last axis by halving: the rounding error grows with the logarithm of its length."""
    size = 1 << max(values.shape[-1] - 1, 0).bit_length()
    values = jnp.pad(values, ((0, 0), (0, size - values.shape[-1])))
    while size > 1:
        size //= 2
        values = values[:, :size] + values[:, size:]
    return values[:, 0]


def tilted_to_means(mechanism: Mechanism, lines: tuple[BudgetLine, ...]) -> tuple[BudgetLine, ...]:
    """Return `lines` of k times the loss of one example, plus the error of the mean participation.

    Means are those of a distribution that is only near the one given the outputs.
    """
    one, number = mechanism.scheme.parts  # pyrefly: ignore[not-iterable]
    # At least three times the error of ln f_1 from any step on: the odds of a participation.
    odds = 3 * sum(line.amount for line in lines if line.item is Item.RATIO) + 1e-5
    apart = (one.max_participations * math.exp(min(odds, 600.0)) + 1) * odds**2 / 2
    source = "proofs/rounding.md, section 7"
    return *lines, BudgetLine(Item.MEAN_OVERLAPS, "epsilon", number * apart, source)


def plain_from_below(mechanism: Mechanism) -> Proposal:
    """Return samples of P itself, with losses of several examples for a lower bound."""

    def lines(delta_v):
        return tilted_to_means(mechanism, rounding.loss_lines(mechanism, float(delta_v), Direction.REMOVE))

    known = plain(mechanism, Direction.REMOVE)
    return dataclasses.replace(known, draw_block=_plain_from_below, rounding_lines=lines)


def plain_draws(key, scheme, strategy, sigma, tables, dtype, loss_of) -> Draws:
    """Draw from P, with the bound `loss_of` on the loss of scores."""
    del tables
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    counts = scheme.draw_participation(counts_key, size).astype(dtype)
    loss = loss_of(scheme, strategy, strategy.scores_from_normals(normals, n, sigma, counts), sigma)
    return Draws(loss, jnp.zeros_like(loss))


_plain_from_below = functools.partial(plain_draws, loss_of=loss_from_below)


def from_below(proposal: Proposal) -> Proposal | None:
    """Return the proposal of the same distribution whose terms have a mean of at most the divergence.

    Where the likelihood ratio f of a user with several examples is only known to lie between two bounds,
    f_low <= f <= F, terms with F bound the divergence from above and terms with f_low from below:
    `H(P, Q) = E_P (1 - alpha / f)_+ >= E_P (1 - alpha / f_low)_+`.

    A distribution and its weights are valid for any function of the outputs, and its scale, which bounds the
    exact terms, bounds the smaller ones (proofs/shared_examples.md, theorem 11). Intervals of estimates use
    it. The given proposal is returned where its losses are exact and its weights are rounded up by less than
    is reserved; None without a lower bound.
    """
    mechanism = proposal.mechanism
    if proposal.of_a_bound:
        return None
    if proposal.below is not None:
        return proposal.below()
    if not mechanism.is_upper_bound:
        return proposal
    return plain_from_below(mechanism) if mechanism.scheme.parts and proposal.spec == PLAIN else None
