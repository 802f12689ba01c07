"""Add direction of a user with several examples: their mean overlaps, instead of the maximum ones.

Where the likelihood of k independent examples is too large to compute, f is bounded from below by subtracting
the maximum overlap of a participation with all others, `Mechanism.cross_terms`, which is large. The mean
overlap is
small: with f_1 the likelihood ratio of one example and m its mean participation under the
distribution tilted by log-ratios r_0,

    ln f(r)  >=  k (ln f_1(r_0) + <m, r - r_0>)  -  (k (k - 1) / 2) |C m|^2 / sigma^2

for all r, by the Gibbs variational principle (proofs/shared_examples.md, theorem 8). At one r_0 it is linear
in r, so `(1 - e^epsilon f)_+` is at most that of a half-space, whose mean is known. At r_0 = r, computed for
every sample of that half-space, it is nearly exact (theorem 9).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms, loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.add_direction.half_space import (
    Minorant,
    coordinate_table,
    draw_in_half_space,
    edge_and_slope,
    halving_sum,
    loss_and_gradient,
    proposal_along,
    search_minorant,
)
from jaxacct.proposals.add_direction.plain_bounded import add_is_zero, log_remainder_scale
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies.stationary import circulant_length

# Variants: a half-space with the mean overlaps of every sample, one with the largest overlaps, samples of Q.
_EVERY, _LARGEST, _PLAIN = (ProposalSpec("mean-overlaps", (variant,)) for variant in range(3))
_LOWERED = 1e-8  # relative lowering of a tangent, far above float64 rounding


def mean_overlap_tangent(mechanism: Mechanism, noise: np.ndarray) -> Minorant | None:
    """Return the bound of theorem 8 on ln f at normalised noise scores `noise`, (iterations,) float64.

    The constant is lowered by 1e-8 of the size of its parts, which covers float64 rounding; None where it
    cannot be computed.
    """
    assert mechanism.scheme.parts is not None  # of several examples
    one, number = mechanism.scheme.parts
    sigma, strategy = mechanism.noise_multiplier, mechanism.strategy
    halves = strategy.half_square_norms()
    excess = noise / sigma - halves / sigma**2
    with jax.enable_x64(True):
        norms = column_norms(one, strategy) / sigma**2
        loss, gradient = loss_and_gradient(one, excess, norms)
        loss, gradient = float(loss), np.asarray(gradient, np.float64)
    if not (math.isfinite(loss) and np.all(np.isfinite(gradient))):
        return None
    mean = np.maximum(gradient, 0.0)
    square = max(float(mean @ strategy.gram(mean)), 0.0)
    if square == 0:
        return None
    shared = number * (number - 1) / 2 * square / sigma**2
    parts = (number * loss, -number * (mean @ excess), -number * (mean * halves).sum() / sigma**2, -shared)
    constant = float(sum(parts) - _LOWERED * (1 + sum(map(abs, parts))))
    return Minorant(constant, number * mean, number * math.sqrt(square))


def mean_overlap_proposal(mechanism: Mechanism, epsilon: float) -> Proposal | None:
    """Return the half-space with the smallest mean that was found; None where all contain noise 0."""
    best = search_minorant(mechanism, epsilon, mean_overlap_tangent)
    if best is None or epsilon + best.constant <= 0:
        return None  # noise 0 would be in the half-space
    table = coordinate_table(*edge_and_slope(mechanism, epsilon, best))
    # Where every eligible example participates, only the starts are random.
    if mechanism.scheme.sums.probability == 1:
        return proposal_along(mechanism, best, *table, _LARGEST)
    lines = functools.partial(tilted_to_means, mechanism)
    return proposal_along(mechanism, best, *table, _EVERY, _draw, lines)


def _draw(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    noise, log_weight = draw_in_half_space(key, scheme, strategy, tables, dtype)
    return Draws(loss_of_mean_overlaps(scheme, strategy, noise, sigma), log_weight)


def loss_of_mean_overlaps(scheme, strategy, noise, sigma):
    """Return a lower bound on ln P/Q, by theorem 9, from normalised scores of independent examples.

    Overlaps are rounded up; other errors have budget items (proofs/rounding.md, section 7).
    """
    return _loss_of_mean_overlaps(scheme, strategy, sigma * noise, sigma)


def loss_from_below(scheme, strategy, scores_, sigma):
    """Return a lower bound on ln P/Q of (num_samples, iterations) scores of a user with several examples.

    By theorem 9, and by maximum overlaps where samples have no means.
    """
    if has_means(scheme, strategy):
        return _loss_of_mean_overlaps(scheme, strategy, scores_, sigma)
    return loss_of_scores(scheme, strategy, scores_, sigma, Direction.ADD)


def has_means(scheme, strategy) -> bool:
    """Return whether the mean participations of every sample are computed.

    They are not where only starts are unknown, or C is not Toeplitz.
    """
    return scheme.sums.probability < 1 and strategy.is_toeplitz


def _loss_of_mean_overlaps(scheme, strategy, scores_, sigma):
    one, number = scheme.parts
    dtype, n = scores_.dtype, scheme.iterations
    unit = float(jnp.finfo(dtype).eps) / 2
    halves = lax.broadcast_to_rank(jnp.asarray(strategy.half_square_norms(), dtype), 2)
    loss, mean = one.loss_and_mean_participation((scores_ - halves) / sigma**2)
    off = unit * 8 * (rounding.fourier_roundings(circulant_length(n, strategy.bands)) + 8)
    off *= float(np.abs(strategy.array).sum()) ** 2
    square = halving_sum(mean * strategy.signal_scores(mean)) + off * halving_sum(mean**2)
    relative = math.expm1(unit * 12 * (n + one.min_separation + 40))
    shared = number * (number - 1) / 2 * (1 + 3 * relative) * square / sigma**2 + 1e-30
    return number * loss - shared - 8 * unit * (jnp.abs(number * loss) + shared)


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


def plain_proposal(mechanism: Mechanism, epsilon: float) -> Proposal:
    """Return samples of Q itself with the losses of theorem 9; `epsilon` below -ln P(x = 0)."""
    return dataclasses.replace(
        plain(mechanism, Direction.ADD),
        spec=_PLAIN,
        log_scale=log_remainder_scale(mechanism, epsilon),
        draw_block=_draw_plain,
        rounding_lines=lambda delta_v: tilted_to_means(
            mechanism, rounding.loss_lines(mechanism, float(delta_v), Direction.ADD)
        ),
        below=lambda: plain_from_below(mechanism, Direction.ADD),
    )


def plain_from_below(mechanism: Mechanism, direction: str) -> Proposal:
    """Return samples of the target itself, with losses of several examples for a lower bound.

    Losses are those of examples without overlap in the add direction, of theorem 9 in the other.
    """
    known = plain(mechanism, direction)

    def lines(delta_v):
        found = rounding.loss_lines(mechanism, float(delta_v), known.direction)
        return tilted_to_means(mechanism, found) if direction == Direction.REMOVE else found

    draw_block = _remove_from_below if direction == Direction.REMOVE else _add_from_below
    return dataclasses.replace(known, draw_block=draw_block, rounding_lines=lines)


def plain_draws(key, scheme, strategy, sigma, tables, dtype, loss_of, participates: bool = False) -> Draws:
    """Draw from P if the unit `participates`, else from Q, with the bound `loss_of` on the loss of scores."""
    del tables
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    counts = scheme.draw_participation(counts_key, size).astype(dtype) if participates else None
    loss = loss_of(scheme, strategy, strategy.scores_from_normals(normals, n, sigma, counts), sigma)
    return Draws(loss, jnp.zeros_like(loss))


_draw_plain = functools.partial(plain_draws, loss_of=loss_from_below)
_remove_from_below = functools.partial(plain_draws, loss_of=loss_from_below, participates=True)
_add_from_below = functools.partial(plain_draws, loss_of=loss_of_scores)


def build(setting: Setting, variant: int) -> Proposal | None:
    """Return the candidate of a variant, if any."""
    return next((one for one in candidates(setting, None) if one.spec.parameters == (variant,)), None)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the candidate where the likelihood of several examples is bounded; none elsewhere.

    Where noise 0 is in every half-space, samples of Q itself.
    """
    del samples_needed  # without a half-space samples of Q itself
    mechanism, epsilon = setting.mechanism, setting.epsilon
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if scheme.parts is None or not strategy.is_toeplitz or not scheme.overlap_bound(strategy) > 0:
        return []
    if scheme.log_probability_of_none() > -math.inf and add_is_zero(mechanism, epsilon):
        return []
    found = mean_overlap_proposal(mechanism, epsilon)
    if found is not None:
        return [found]
    return [plain_proposal(mechanism, epsilon)] if has_means(scheme, strategy) else []


def from_below(proposal: Proposal) -> Proposal | None:
    """Return the proposal of the same distribution whose terms have a mean of at most the divergence.

    Where the likelihood ratio f of a user with several examples is only known to lie between two bounds,
    f_low <= f <= F, terms with one bound the divergence from above and with the other from below:

        H(P, Q) = E_P (1 - alpha / f)_+  >=  E_P (1 - alpha / f_low)_+ ,
        H(Q, P) = E_Q (1 - alpha f)_+    >=  E_Q (1 - alpha F)_+ .

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
    # Samples of the target itself, whose scale is not below that of the terms.
    is_plain = proposal.spec.family in ("plain", "plain-bounded") and proposal.log_scale > -math.inf
    return plain_from_below(mechanism, proposal.direction) if mechanism.scheme.parts and is_plain else None
