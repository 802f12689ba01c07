"""Any number of replicas, drawn in pairs (remove direction; proofs/proposals.md, section 2.7).

Tables of more than two replicas grow fast. Let `X_ij = <C x_i, C x_j> / sigma^2` and let m players meet in a
round-robin tournament of m - 1 rounds. By Jensen's inequality e to the sum of all X_ij is at most the mean
over rounds of e to m - 1 times the sum over that round's pairs. The pairs of one round are
independent: two replicas at the noise multiplier `sigma / sqrt(m - 1)`, of normalizer Z_2. So vectors are
drawn pair by pair, outputs are `N(C (x_1 + .. + x_m), sigma^2 I)`, and a draw has the weight
`Z_2^{m/2} f^{1-m} factor`, with

    factor = e^{sum over i < j of X_ij} / mean over rounds of e^{(m - 1) sum over its pairs of X_ij}  <=  1,

so a term is at most that of m replicas with `Z_2^{m/2}` for their Z_m.

Where a user has k examples that are drawn independently, f_1 is the likelihood ratio of one of them, and k of
the m > k vectors are the user's own. Their overlap is subtracted: a weight is `Z_2^{m/2} f_1^{k-m} factor
e^{- their overlap}`, and m / k replaces m in the scale, as `f <= f_1^k`
(proofs/shared_examples.md, theorem 7). Losses of such users are those of pairs of examples where more do not
fit (theorem 10).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_by_pairs, loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.proposals.families.example_replicas import candidates as example_candidates
from jaxacct.proposals.families.example_replicas import example_replica_lines
from jaxacct.proposals.families.inflated import candidates as inflated_candidates
from jaxacct.proposals.families.overlaps import overlap_variation
from jaxacct.proposals.families.pair_weights import log_factor, shared_events, shared_rows
from jaxacct.proposals.families.replicas import candidates as replica_candidates
from jaxacct.proposals.families.replicas import checked_replicas, log_normalizer, log_scale, max_replicas
from jaxacct.schemes.replicas.base import log_attractions
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies.stationary import adds_windows

# Few numbers, so that similar noise multipliers share a program.
NUMBERS = (4, 6, 8, 12, 16, 24, 32, 48)
# Odds of a participation up to which float32 tables resolve rare outcomes (`replicas.b_min_sep.errors`).
_MAX_ODDS = 4.0
_FAMILY = "pairs"


def pair_proposal(mechanism: Mechanism, m: int, epsilon: float, by_pairs: bool | None = None) -> Proposal:
    """Return the proposal of m replicas drawn in pairs, with the scale at `epsilon`.

    `m` is in `NUMBERS`, above the number of examples; losses are those of pairs of examples for `by_pairs`,
    by default where possible. ValueError for another m, a scheme without replicas, or a normalizer that
    overflows.
    """
    one, number = _one(mechanism)
    if m not in NUMBERS or m <= number:
        raise ValueError(f"m must be one of {NUMBERS} above {number}, got {m!r}")
    # So few would count as windows, which round less than the transform that adds them.
    if number == 1 and adds_windows(one.scheme, one.strategy, m):
        raise ValueError("participations must be more for replicas in pairs")
    if one.is_upper_bound:
        raise ValueError(
            "strategy must be banded within min_separation, so that it has columns that do not overlap"
        )
    by_pairs = mechanism.scheme.pair_bound is not None if by_pairs is None else by_pairs
    drawn = checked_replicas(_sharper(one, m), 2)
    lines = pair_lines_by_pairs if by_pairs else pair_lines
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

    loss_of = loss_by_pairs if by_pairs else loss_of_scores
    found = Proposal(
        spec=ProposalSpec(_FAMILY, (m, int(by_pairs))),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(epsilon),
        draw_block=_drawer(drawn.module, m, loss_of),
        tables=tables,
        relative_error=math.expm1(pairs * math.log1p(drawn.relative_error)),
        total_variation=variation,
        replicas=-(-m // number),
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=(None if number == 1 else lambda delta_v: lines(mechanism, float(delta_v), m, log_z)),
        log_normalizer=log_z,
    )
    down = dataclasses.replace(found, draw_block=_drawer(drawn.module, m, loss_of, -1))
    return dataclasses.replace(found, rounded_down=down)


def pair_lines(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """Return the budget items for replicas in pairs, of weights `ln Z - (replicas - number) L_1` and less.

    Those of `example_replica_lines`, whose weights have more of both losses. Given the outputs, a user's own
    vectors have another distribution here than there, so outputs at which they are rare are reserved, too.
    """
    own = (rounding.DELTA_SHARE * delta_v) ** 2
    line = BudgetLine(Item.OWN_RARE_OUTPUTS, "delta", own, rounding.SOURCE + "7")
    return (*example_replica_lines(mechanism, delta_v, replicas, log_normalizer), line)


def pair_lines_by_pairs(
    mechanism: Mechanism, delta_v: float, replicas: int, log_normalizer: float
) -> tuple[BudgetLine, ...]:
    """Return `pair_lines` for losses of pairs of examples (shared_examples.md, theorem 10)."""
    assert mechanism.scheme.parts is not None
    lines = pair_lines(mechanism, delta_v, replicas, log_normalizer)
    return _by_pairs(mechanism, delta_v, lines, -(-replicas // mechanism.scheme.parts[1]))


def plain_lines_by_pairs(mechanism: Mechanism, delta_v: float) -> tuple[BudgetLine, ...]:
    """Return the budget items for plain samples of the remove direction with such losses."""
    return _by_pairs(mechanism, delta_v, rounding.loss_lines(mechanism, delta_v), 1)


def _by_pairs(mechanism, delta_v, lines: tuple[BudgetLine, ...], as_units: int) -> tuple[BudgetLine, ...]:
    """Return the items of the loss by pairs of examples, from `lines`, those of the loss of all examples.

    Errors of scores change it at most as much. The recurrence is that of two examples, whose likelihood ratio
    is at most the square of that of one. The outputs contain `as_units` of the unit's participation vectors.
    """
    scheme = mechanism.scheme
    pairs, left = divmod(scheme.parts[1], 2)
    size = rounding.sizes(mechanism, delta_v, as_units, 0.0)
    size = dataclasses.replace(size, largest=2 * size.largest)
    # The overlap of two counts this many times.
    sharing = mechanism.noise_multiplier / math.sqrt(scheme.parts[1] - 1 + left)
    two = Mechanism(scheme.pair_bound.two, mechanism.strategy, sharing)
    amount = pairs * rounding.interacting_error(two, size, rounding.max_unit_participations(two.scheme))
    alone = next(line.amount for line in lines if line.item is Item.RATIO)
    by_pairs = BudgetLine(Item.RATIO, "epsilon", amount + alone, rounding.SOURCE + "7")
    return tuple(by_pairs if line.item is Item.RATIO else line for line in lines)


def plain_by_pairs(mechanism: Mechanism) -> Proposal:
    """Plain sampling with losses by pairs of examples."""
    return dataclasses.replace(
        plain(mechanism, Direction.REMOVE),
        spec=ProposalSpec(_FAMILY, (1, 1)),
        draw_block=_plain_by_pairs,
        rounding_lines=lambda delta_v: plain_lines_by_pairs(mechanism, float(delta_v)),
    )


def build(setting: Setting, m: int, by_pairs: int) -> Proposal:
    """Return `pair_proposal`, or `plain_by_pairs` for m = 1."""
    if by_pairs not in (0, 1) or (by_pairs and setting.mechanism.scheme.pair_bound is None):
        raise ValueError(f"by_pairs must be 0, or 1 where losses are by pairs of examples, got {by_pairs}")
    if (m, by_pairs) == (1, 1):
        return plain_by_pairs(setting.mechanism)
    return pair_proposal(setting.mechanism, m, setting.epsilon, bool(by_pairs))


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return `pair_candidates`, and plain sampling with losses by pairs where the scheme has those."""
    plain_ones = (
        [plain_by_pairs(setting.mechanism)] if setting.mechanism.scheme.pair_bound is not None else []
    )
    return pair_candidates(setting, samples_needed) + plain_ones


def _plain_by_pairs(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    """Draw from P itself."""
    del tables
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    counts = scheme.draw_participation(counts_key, size).astype(dtype)
    loss = loss_by_pairs(scheme, strategy, strategy.scores_from_normals(normals, n, sigma, counts), sigma)
    return Draws(loss, jnp.zeros_like(loss))


def _one(mechanism: Mechanism) -> tuple[Mechanism, int]:
    """Return (mechanism whose replicas are drawn, number of its vectors whose sum is a unit's counts)."""
    if mechanism.scheme.parts is None:
        return mechanism, 1
    one, number = mechanism.scheme.parts
    return Mechanism(one, mechanism.strategy, mechanism.noise_multiplier), number


def _sharper(one: Mechanism, m: int) -> Mechanism:
    """Return the mechanism where two replicas attract each other m - 1 times as much."""
    return Mechanism(one.scheme, one.strategy, one.noise_multiplier / math.sqrt(m - 1))


def pair_candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the fastest candidate, where other replicas are not cheap already.

    Without `samples_needed`, all orders up to the one with the smallest scale.
    """
    mechanism, epsilon = setting.mechanism, setting.epsilon
    one, number = _one(mechanism)
    if one.scheme.side_information is not None or not one.is_stationary or max_replicas(one) < 2:
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
        if not (_is_resolved(sharper) and math.isfinite(log_normalizer(sharper, 2))):
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
    """Return how many plain samples take as long as one, approximately (n = 1000 and 1500, one core)."""
    one, number = _one(proposal.mechanism)
    vectors = (0.5 if _by_positions(one.scheme.replicas) else 2.0) * proposal.replicas * number
    # The likelihood of two examples has a state for each remaining lockout of one.
    return vectors + (one.scheme.min_separation / 4 if proposal.spec.parameters[1] else 0)


def _by_positions(module) -> bool:
    """Return whether a module of replicas gives participations as a few steps."""
    return hasattr(module, "draw_positions_with_one")


def _is_resolved(sharper: Mechanism) -> bool:
    """Return whether float32 tables resolve both a participation and none under this attraction."""
    p = getattr(sharper.scheme, "sampling_probability", 1.0)
    return p == 1 or p * math.exp(min(600.0, float(log_attractions(sharper).max()))) <= _MAX_ODDS


@functools.cache  # one function each, so that nothing compiles twice
def _drawer(module, m: int, loss_of=loss_of_scores, side: int = 1) -> Callable[..., Draws]:
    """Return the drawer with a bound on the loss, and weights rounded up (`side` 1) or down (-1)."""
    draw = functools.partial(_draw_positions if _by_positions(module) else _draw_vectors, module)

    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        one, number = (scheme, 1) if scheme.parts is None else scheme.parts
        normals_key, counts_key = threefry.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        counts, shared = draw(counts_key, one, tables, m, size)
        drawn = strategy.scores_from_normals(normals, n, sigma, counts.astype(dtype))
        loss = others = loss_of(scheme, strategy, drawn, sigma)
        if number > 1:
            others = loss_of_scores(one, strategy, drawn, sigma)
        factor = log_factor(shared, number, one.max_participations, side)
        return Draws(loss, tables["log_z"] - (m - number) * others + factor.astype(dtype))

    return draw_block


def _draw_vectors(module, key, one, tables, m: int, size: int):
    """Return (sums of m vectors, (size, iterations) float32; `shared_rows`)."""
    both, first, _ = module.draw_with_one(key, one, tables["arrays"], m // 2 * size)
    vectors = jnp.stack([first, both - first]).reshape(2, m // 2, size, one.iterations)
    vectors = vectors.swapaxes(0, 1).reshape(m, size, one.iterations)
    shared = shared_rows(vectors, tables["attractions"], one.max_participations)
    return vectors.sum(axis=0), shared


def _draw_positions(module, key, one, tables, m: int, size: int):
    """Return the same from positions, in a fourth of the time."""
    drawn = module.draw_positions_with_one(key, one, tables["arrays"], m // 2 * size)
    # All pairs of a sample in one row.
    positions, counts, first = (
        part.reshape(m // 2, size, -1).swapaxes(0, 1).reshape(size, -1) for part in drawn
    )
    rows = jnp.arange(size)[:, None]
    sums = jnp.zeros((size, one.iterations), jnp.float32).at[rows, positions].add(counts, mode="drop")
    shared = shared_events(positions, first, counts - first, tables["attractions"], m, one.iterations)
    return sums, shared
