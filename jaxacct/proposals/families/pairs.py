"""Any number of replicas, drawn two by two (remove direction; proofs/proposals.md, section 2.7).

Tables of more than two replicas grow fast. Let `X_ij = <C x_i, C x_j> / sigma^2` and let m players meet in a
tournament of m - 1 rounds, everybody everybody once. By Jensen's inequality e to the sum of all X_ij is at
most the mean over rounds of e to m - 1 times the sum of those who meet. The pairs of one round are
independent: two replicas at the noise multiplier `sigma / sqrt(m - 1)`, of normalizer Z_2. So vectors are
drawn pair by pair, outputs are `N(C (x_1 + .. + x_m), sigma^2 I)`, and a draw has the weight
`Z_2^{m/2} f^{1-m} factor`, with

    factor = e^{sum over i < j of X_ij} / mean over rounds of e^{(m - 1) sum over who meets of X_ij}  <=  1,

so a term is at most that of m replicas with `Z_2^{m/2}` for their Z_m.

Where a user has k examples that are drawn independently, f_1 is the likelihood ratio of one of them, and k of
the m > k vectors are the user's own. What these share is taken off: a weight is `Z_2^{m/2} f_1^{k-m} factor
e^{- what they share}`, and m / k takes the place of m in the scale, as `f <= f_1^k`
(proofs/shared_examples.md, theorem 7). Losses of such users are those of pairs of examples where more do not
fit (theorem 10), and of theorem 9 from below, of the same draws.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.programs import any_left
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_by_pairs, loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.proposals.families.busier import candidates as inflated_candidates
from jaxacct.proposals.families.mean_overlaps import (
    drawn_scores,
    loss_from_below,
    plain_from_below,
    with_the_law_of_means,
)
from jaxacct.proposals.families.overlaps import overlap_variation
from jaxacct.proposals.families.powers import candidates as example_candidates
from jaxacct.proposals.families.replicas import candidates as replica_candidates
from jaxacct.proposals.families.replicas import checked_replicas, log_normalizer, log_scale, most_replicas
from jaxacct.schemes.replicas.b_min_sep import log_attractions
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies.stationary import adds_windows

# Few numbers, so that noise multipliers that are alike are drawn for by one program.
NUMBERS = (4, 6, 8, 12, 16, 24, 32, 48)
# Odds of taking part up to which float32 tables tell rare outcomes apart (`replicas.b_min_sep.errors`).
_LARGEST_ODDS = 4.0
_UNIT = 2.0**-24
_FAMILY = "pairs"


def pair_proposal(mechanism: Mechanism, m: int, epsilon: float, by_pairs: bool | None = None) -> Proposal:
    """m replicas drawn two by two, with the scale at `epsilon`; m is in `NUMBERS`, above that of examples.

    Args:
      by_pairs: whether losses are those of pairs of examples; None where they can be.

    Raises:
      ValueError: for another m, a scheme without replicas, or a normalizer that overflows.
    """
    one, number = _one(mechanism)
    if m not in NUMBERS or m <= number:
        raise ValueError(f"m must be one of {NUMBERS} above {number}, was {m!r}")
    # So few would be booked as windows, which round less than the transform that they are added by.
    if number == 1 and adds_windows(one.scheme, one.strategy, m):
        raise ValueError("participations must be more for replicas in pairs")
    if one.is_upper_bound:
        raise ValueError(
            "strategy must be banded within min_separation, so that it has columns that do not overlap"
        )
    by_pairs = mechanism.scheme.bounds_by_pairs if by_pairs is None else by_pairs
    drawn = checked_replicas(_sharper(one, m), 2)
    lines = rounding.pair_lines_by_pairs if by_pairs else rounding.pair_lines
    pairs = m // 2
    log_z = pairs * drawn.log_normalizer
    variation = pairs * (drawn.total_variation + overlap_variation(drawn.mechanism, 2))

    def scale_at(other: float) -> float:
        return log_scale(log_z, m / number, other)

    def tables():
        return {
            "log_z": jnp.float32(log_z),
            "arrays": drawn.tables()["arrays"],
            "attractions": jnp.asarray(log_attractions(one), jnp.float32),
        }

    found = Proposal(
        spec=ProposalSpec(_FAMILY, (m, int(by_pairs))),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(epsilon),
        draw_block=_drawer(drawn.module, m, loss_by_pairs if by_pairs else loss_of_scores),
        tables=tables,
        relative_error=math.expm1(pairs * math.log1p(drawn.relative_error)),
        total_variation=variation,
        replicas=-(-m // number),
        push=0.0,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=(None if number == 1 else lambda delta_v: lines(mechanism, float(delta_v), m, log_z)),
        log_normalizer=log_z,
    )
    bounded = mechanism.is_upper_bound

    # Weights are rounded up, by more than other replicas' are off, so lower ends have draws of their own.
    def below() -> Proposal:
        drawer = _drawer(drawn.module, m, loss_from_below if bounded else loss_of_scores, -1)
        of_losses = lines_from_below if bounded else found.rounding_lines
        return dataclasses.replace(found, draw_block=drawer, rounding_lines=of_losses, below=None)

    def lines_from_below(delta_v):
        return with_the_law_of_means(mechanism, rounding.pair_lines(mechanism, float(delta_v), m, log_z))

    return dataclasses.replace(found, below=below)


def plain_by_pairs(mechanism: Mechanism) -> Proposal:
    """Plain sampling with losses by pairs of examples."""
    return dataclasses.replace(
        plain(mechanism, Direction.REMOVE),
        spec=ProposalSpec(_FAMILY, (1, 1)),
        draw_block=_plain_by_pairs,
        rounding_lines=lambda delta_v: rounding.plain_lines_by_pairs(mechanism, float(delta_v)),
        below=lambda: plain_from_below(mechanism, Direction.REMOVE),
    )


def build(setting: Setting, m: int, by_pairs: int) -> Proposal:
    """Return `pair_proposal`, or `plain_by_pairs` for m = 1.

    Raises:
      ValueError: as `pair_proposal`, or where losses are not by pairs of examples for `by_pairs` = 1.
    """
    if by_pairs not in (0, 1) or (by_pairs and not setting.mechanism.scheme.bounds_by_pairs):
        raise ValueError(f"by_pairs must be 0, or 1 where losses are by pairs of examples, was {by_pairs}")
    if (m, by_pairs) == (1, 1):
        return plain_by_pairs(setting.mechanism)
    return pair_proposal(setting.mechanism, m, setting.epsilon, bool(by_pairs))


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return `pair_candidates`, and plain sampling with losses by pairs where the scheme has those."""
    plain_ones = [plain_by_pairs(setting.mechanism)] if setting.mechanism.scheme.bounds_by_pairs else []
    return pair_candidates(setting, samples_needed) + plain_ones


def _plain_by_pairs(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    del tables
    scores = drawn_scores(key, scheme, strategy, sigma, dtype, scheme.draw_participation)
    loss = loss_by_pairs(scheme, strategy, scores, sigma)
    return Draws(loss, jnp.zeros_like(loss))


def _one(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """(the mechanism whose replicas are drawn, how many of its vectors a unit's counts are the sum of)."""
    if mechanism.scheme.parts is None:
        return mechanism, 1
    one, number = mechanism.scheme.parts
    return Mechanism(one, mechanism.strategy, mechanism.noise_multiplier), number


def _sharper(one: Mechanism, m: int) -> Mechanism:
    """Where two replicas attract each other m - 1 times as much."""
    return Mechanism(one.scheme, one.strategy, one.noise_multiplier / math.sqrt(m - 1))


def pair_candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Those worth considering: where other replicas are not cheap already, the one that is drawn soonest.

    Without `samples_needed` all, up to the one with the smallest scale.
    """
    mechanism, epsilon = setting.mechanism, setting.epsilon
    one, number = _one(mechanism)
    if one.scheme.side_information is not None or not one.is_stationary or most_replicas(one) < 2:
        return []
    best = math.inf
    if samples_needed is not None:
        others = [plain(mechanism, Direction.REMOVE)]
        for family in (replica_candidates, inflated_candidates) if number == 1 else (example_candidates,):
            others += family(setting, samples_needed)
        best = min(map(samples_needed, others))
    found: list[Proposal] = []
    for m in NUMBERS:
        if m <= number or best <= 0:
            continue
        sharper = _sharper(one, m)
        if number == 1 and adds_windows(one.scheme, one.strategy, m):
            continue
        if not (_told_apart(sharper) and math.isfinite(log_normalizer(sharper, 2))):
            break
        proposal = pair_proposal(mechanism, m, epsilon)
        if found and proposal.log_scale > found[-1].log_scale:
            break
        found.append(proposal)
        if samples_needed is not None and samples_needed(proposal) <= 0:
            break
    if samples_needed is None:
        return found
    found = [p for p in found if _times(p) * samples_needed(p) < best]
    return sorted(found, key=lambda p: _times(p) * max(samples_needed(p), 1.0))[:1]


def _times(proposal: Proposal) -> float:
    """How many plain samples take as long as one, about (n = 1000 and 1500, one core)."""
    one, number = _one(proposal.mechanism)
    vectors = (0.5 if _by_positions(one.scheme.replicas) else 2.0) * proposal.replicas * number
    # The likelihood of two examples has a state for each step that one may be barred for.
    return vectors + (one.scheme.min_separation / 4 if proposal.spec.parameters[1] else 0)


def _by_positions(module) -> bool:
    """Whether a module of replicas gives participations as a few steps."""
    return hasattr(module, "draw_positions_with_one")


def _told_apart(sharper: Mechanism) -> bool:
    """Whether attraction leaves somebody and nobody taking part both likely enough for float32 tables."""
    p = getattr(sharper.scheme, "sampling_probability", 1.0)
    return p == 1 or p * math.exp(min(600.0, float(log_attractions(sharper).max()))) <= _LARGEST_ODDS


@functools.cache  # one function each, so that nothing compiles twice
def _drawer(module, m: int, loss_of=loss_of_scores, side: int = 1) -> Callable[..., Draws]:
    """Of a bound on the loss, and of weights that are rounded up (`side` 1) or down (-1)."""
    draw = functools.partial(_draw_positions if _by_positions(module) else _draw_vectors, module)

    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        one, number = (scheme, 1) if scheme.parts is None else scheme.parts
        normals_key, counts_key = threefry.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        counts, shared, fits = draw(counts_key, one, tables, m, size)
        drawn = strategy.scores_from_normals(normals, n, sigma, counts.astype(dtype))
        loss = others = loss_of(scheme, strategy, drawn, sigma)
        if number > 1:
            others = loss_of_scores(one, strategy, drawn, sigma)
        factor = log_factor(shared, number, one.max_participations, side)
        weight = tables["log_z"] - (m - number) * others + factor.astype(dtype)
        return Draws(loss, weight if fits is None else jnp.where(fits, weight, -jnp.inf))

    return draw_block


def _draw_vectors(module, key, one, tables, m: int, size: int):
    """(sums of m vectors, (size, iterations) float32; what they share as `shared_rows` has it; whether all
    vectors are ones of the scheme, (size,) bool, or None where they always are)."""
    both, first, _ = module.draw_with_one(key, one, tables["arrays"], m // 2 * size)
    vectors = jnp.stack([first, both - first]).reshape(2, m // 2, size, one.iterations)
    vectors = vectors.swapaxes(0, 1).reshape(m, size, one.iterations)
    shared = shared_rows(vectors, tables["attractions"], one.max_participations)
    return vectors.sum(axis=0), shared, None


def _draw_positions(module, key, one, tables, m: int, size: int):
    """The same from positions, in a fourth of the time."""
    fits = None
    if hasattr(module, "draw_fitting"):
        *drawn, fits = module.draw_fitting(key, one, tables["arrays"], m // 2 * size)
        fits = fits.reshape(m // 2, size).all(axis=0)
    else:
        drawn = module.draw_positions_with_one(key, one, tables["arrays"], m // 2 * size)
    # All pairs of a sample in one row.
    positions, counts, first = (
        part.reshape(m // 2, size, -1).swapaxes(0, 1).reshape(size, -1) for part in drawn
    )
    rows = jnp.arange(size)[:, None]
    sums = jnp.zeros((size, one.iterations), jnp.float32).at[rows, positions].add(counts, mode="drop")
    shared = shared_events(positions, first, counts - first, tables["attractions"], m, one.iterations)
    return sums, shared, fits


def shared_events(positions, first, second, attractions, m: int, iterations: int):
    """`shared_rows` from participations at positions, one after the other.

    A participation meets the last of every other vector; those before are b steps earlier still.

    Args:
      positions: (num_samples, slots) int32, of m / 2 pairs one after the other, as many slots for each;
        iterations and above is none.
      first, second: (num_samples, slots) float32, whether the first and the second of the pair take part.
    """
    (ends, width), (size, slots) = attractions.shape, positions.shape
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), positions.shape)
    positions, slot = jax.lax.sort((positions, slot), num_keys=1)
    first, second = (jnp.take_along_axis(part, slot, axis=1) for part in (first, second))
    pair = slot // (slots // (m // 2))
    player = jnp.arange(m, dtype=jnp.int32)[None]

    def left(state):
        return any_left((state[0] < slots) & (positions[:, jnp.minimum(state[0], slots - 1)] < iterations))

    def event(state):
        index, last, shared = state
        step, mine = positions[:, index], pair[:, index][:, None]
        step = jnp.where(step < iterations, step, -1)[:, None]
        both = (first[:, index] * second[:, index])[:, None]
        taking = jnp.where(player == 2 * mine, first[:, index][:, None], 0.0)
        taking = jnp.where(player == 2 * mine + 1, second[:, index][:, None], taking)
        taking = jnp.where(step >= 0, taking, 0.0)
        row = attractions[jnp.clip(iterations - 1 - step, 0, ends - 1)[:, 0]]
        met = jnp.take_along_axis(row, jnp.clip(step - last, 0, width - 1), axis=1)
        shared = shared + taking[:, :, None] * met[:, None, :]
        together = (
            (player == 2 * mine)[:, :, None] & (player == 2 * mine + 1)[:, None, :] & (step >= 0)[:, :, None]
        )
        shared = shared + jnp.where(together, (both * row[:, :1])[:, :, None], 0.0)
        return index + 1, jnp.where(taking > 0, step, last), shared

    begun = jnp.int32(0), jnp.full((size, m), -width, jnp.int32), jnp.zeros((size, m, m), jnp.float32)
    shared = jax.lax.while_loop(left, event, begun)[2]
    return (shared + shared.swapaxes(1, 2)).transpose(1, 2, 0)


def shared_rows(vectors, attractions, slots: int):
    """`X_ij`, what the i-th and the j-th vector share over sigma^2: (m, m, num_samples) float32.

    Participations of one vector are b steps apart or more, so a participation of another meets at most two of
    them: the first from its step on, and the last before. Sums of at most `2 slots` numbers that are not
    negative, each of a few roundings.

    Args:
      vectors: (m, num_samples, iterations) float32 counts.
      attractions: (ends, b + 1) float32, `log_attractions`.
      slots: participations of a vector at most.
    """
    (ends, width), n = attractions.shape, vectors.shape[-1]
    b = width - 1
    steps = jnp.arange(n, dtype=jnp.int32)
    edge = [(0, 0), (0, 0)]
    after = jax.lax.cummin(jnp.where(vectors > 0, steps, n + b), axis=2, reverse=True)
    after = jnp.pad(after, [*edge, (0, 1)], constant_values=n + b)
    before = jax.lax.cummax(jnp.where(vectors > 0, steps, -b), axis=2)
    before = jnp.pad(before, [*edge, (1, 0)], constant_values=-b)

    def slot(start, _):
        place = jnp.take_along_axis(after, jnp.minimum(start, n)[..., None], axis=2)[..., 0]
        return place + 1, place

    places = jax.lax.scan(slot, jnp.zeros(vectors.shape[:2], jnp.int32), length=slots)[1]
    places = jnp.moveaxis(places, 0, 2)  # (m, num_samples, slots), n and above for none
    at = jnp.minimum(places, n - 1)
    counts = jnp.where(places < n, jnp.take_along_axis(vectors, at, axis=2), 0.0)

    def with_one(one):
        later, earlier, its_counts = (part[None] for part in one)

        def met(place, of_later, lag):
            row = jnp.clip(n - 1 - of_later, 0, ends - 1)
            its = jnp.take_along_axis(its_counts, jnp.clip(place, 0, n - 1), axis=2)
            return attractions[row, jnp.minimum(lag, b)] * its

        following = jnp.take_along_axis(later, at, axis=2)
        preceding = jnp.take_along_axis(earlier, at, axis=2)
        both = met(following, following, following - at) + met(preceding, at, at - preceding)
        return (both * counts).sum(axis=2)

    return jax.lax.map(with_one, (after, before, vectors))


def log_factor(shared, number: int, slots: int, side: int = 1):
    """ln of the factor of a weight, (num_samples,) float32, above what it is exactly and at most 0.

    Args:
      shared: `shared_rows`, of pairs in the rows 2 i and 2 i + 1.
      number: how many vectors are a unit's own.
      slots: as for `shared_rows`.
      side: -1 for below what it is exactly.
    """
    m = len(shared)
    meet, own = rounds(m, number)

    def add_up(which):
        return jnp.einsum("lij,ijs->ls", jnp.asarray(which, jnp.float32), shared, precision="highest")

    # No number is negative, and zeros round nothing: 2 slots + m roundings each, and a few of the numbers.
    relative = side * (2 * slots + 2 * m + 20) * _UNIT
    aligned = (m - 1) * add_up(meet)
    total = aligned.sum(axis=0) / (m - 1)
    raised = total + relative * total
    lowered = _log_mean_exp(aligned) - relative * aligned.max(axis=0)
    sizes = 1 + total + aligned.max(axis=0)
    factor = raised - lowered
    if number > 1:
        apart = add_up(own)
        factor = factor + _log_mean_exp(-apart) + relative * apart.max(axis=0)
        sizes = sizes + apart.max(axis=0)
    return jnp.minimum(factor + side * (m + 40) * _UNIT * sizes, 0.0)


def _log_mean_exp(values):
    return jax.nn.logsumexp(values, axis=0) - math.log(len(values))


@functools.cache
def rounds(m: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """For the m - 1 rounds of a tournament of m players: who meet, and which pairs are both a unit's own.

    Player m - 1 stays, the others are 0 .. m - 2 in a circle: in round l those meet whose numbers add up to
    2 l, and l meets the one that stays. Rows 2 i and 2 i + 1 meet in round 0. A unit's own are the players
    l .. l + number - 1 of round l, so that all rounds are alike.

    Returns two (m - 1, m, m) bool arrays, true for each pair of rows once.
    """
    circle = m - 1
    player = np.array([m - 1, 0] + [p for i in range(1, m // 2) for p in (i, circle - i)])
    meet, own = np.zeros((2, circle, m, m), bool)
    for i in range(m):
        for j in range(i + 1, m):
            one, two = sorted((player[i], player[j]))
            sum_ = 2 * one if two == m - 1 else one + two
            meet[:, i, j] = (2 * np.arange(circle) - sum_) % circle == 0
            turned = np.array([(one - np.arange(circle)) % circle, (two - np.arange(circle)) % circle])
            own[:, i, j] = (turned < number).all(axis=0) & (two < m - 1)
    return meet, own


__all__ = [
    "NUMBERS",
    "log_factor",
    "pair_candidates",
    "pair_proposal",
    "rounds",
    "shared_rows",
]
