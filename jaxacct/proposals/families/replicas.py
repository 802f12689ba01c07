"""Replica proposals (remove direction): m attracting participation vectors, drawn in pairs.

Let f = P/Q, `X_ij = <C x_i, C x_j> / sigma^2`, and let m vectors meet in a round-robin tournament of m - 1
rounds. By Jensen's inequality e to the sum of all X_ij is at most the mean over rounds of e to m - 1 times
the sum over that round's pairs. The pairs of one round are independent: two replicas at the noise multiplier
`sigma / sqrt(m - 1)`, of normalizer Z_2. So vectors are drawn pair by pair (`Scheme.replicas`), outputs are
`N(C (x_1 + .. + x_m), sigma^2 I)`, and a draw has the weight `Z f^{1-m} factor`, `Z = Z_2^{m/2}` and

    factor = e^{sum over i < j of X_ij} / mean over rounds of e^{(m - 1) sum over its pairs of X_ij}  <=  1,

which is 1 for m = 2 (proofs/proposals.md). A weighted term never exceeds
`Z (1/(m-1)) ((m-1)/m)^m e^{(1-m) epsilon}`.

* *Units of k examples* that are drawn independently: f_1 is the likelihood ratio of one of them, and k of the
  m > k vectors are the user's own. Their overlap is subtracted: a weight is `Z f_1^{k-m} factor e^{- their
  overlap}`, and m / k replaces m in the scale, as `f <= f_1^k` (proofs/shared_examples.md, theorem 7).
* *An inflated sampling probability*, for a unit that rarely participates: g is the likelihood ratio at
  `times` the probability, of which the vectors are drawn, P0 and P0' the probabilities of no participation,
  c a lower bound on the ratio of the probabilities of any other vector. Then `g >= P0' + c (f - P0)`, a draw
  has the weight `Z f / g^m factor`, and a term is at most `Z (1 / (c (m - 1))) ((m - 1) / m)^m A^{1 - m}`,
  `A = P0' + c (e^epsilon - P0)` (proofs/proposals.md, section 2.6).
* *A composed mechanism* of privacy profile g: without its tail phi it has `w g(t) <= phi w + Z e^{(1-m)
  epsilon} sup_t e^{(m-1) t} (g(t) - phi)_+`, and `E[phi w] = phi` is a budget item (proofs/composition.md).
* *Replace-one*: the term has another loss of the same outputs, whose scale is that of zero-out at a smaller
  epsilon (`proposals.families.mirrored`, proofs/adjacency.md, section 3).
* *C that is not banded*, m = 2: Z and f are bounded from above and a weight has one more factor, at most 1
  (`proposals.families.overlaps`, proofs/non_banded.md).

m = 1 is P itself with losses of pairs of a user's examples (proofs/shared_examples.md, theorem 10).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxacct.kernels import randomness
from jaxacct.likelihood.loss import loss_by_pairs, loss_of_scores, losses_of_mirrored
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals import base
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.proposals.families.overlaps import log_factor_of_overlaps, overlap_arrays
from jaxacct.proposals.families.pair_weights import log_factor, one_of, shared_events
from jaxacct.schemes.replicas.base import log_attractions
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies.stationary import adds_windows

ORDERS = (2, 4, 6, 8, 12, 16, 24, 32, 48)  # of vectors; few, so that similar noises share programs
# Target of -ln P0' for the inflation factor, and the largest factor.
_TARGET_COUNT, _MAX_TIMES = 0.5, 32
_LOWERED = 1e-9  # relative, of A and c; far above float64 rounding


def log_normalizer(mechanism: Mechanism, m: int = 2) -> float:
    """Return ln Z of m vectors, an upper bound on `ln E_Q f^m`; infinite without draws of two."""
    of_pair = sharper(mechanism, m)
    module = of_pair.scheme.replicas(of_pair)
    return math.inf if module is None else m / 2 * module.log_normalizer(of_pair)


def sharper(one: Mechanism, m: int) -> Mechanism:
    """Return the mechanism where two replicas attract each other m - 1 times as much."""
    return dataclasses.replace(one, noise_multiplier=one.noise_multiplier / math.sqrt(m - 1))


def log_scale(log_normalizer: float, m: float, epsilon: float) -> float:
    """Return the Renyi bound on ln delta(epsilon) of order m > 1, natural logs."""
    return log_normalizer - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * epsilon


def build(setting: Setting, m: int, times: int = 1) -> Proposal | None:
    """Return the proposal of m vectors at `times` the sampling probability; None where there is none."""
    mechanism = setting.mechanism
    if (m, times) == (1, 1):
        # It has no reserve for what is composed (proofs/composition.md, theorem 2).
        is_open = mechanism.scheme.pair_bound is not None and setting.composed is None
        return plain_by_pairs(mechanism) if is_open else None
    is_own = times == 1 and mechanism.scheme.parts is None
    one, number = (mechanism, 1) if is_own else one_of(mechanism, times)
    is_special = times > 1 or number > 1
    if m not in ORDERS or m <= number or one is None:
        return None
    composed = setting.composed
    if (mechanism.is_replace_one or composed is not None) and is_special:
        return None
    if composed is not None and composed.left_out == math.inf:  # no end is small enough to be left out
        return None
    if one.is_upper_bound and (m > 2 or is_special or mechanism.is_replace_one):
        return None
    log_z = log_normalizer(one, m)
    return _proposal(setting, one, number, m, times, log_z) if math.isfinite(log_z) else None


def _proposal(setting: Setting, one: Mechanism, number: int, m: int, times: int, log_z: float) -> Proposal:
    mechanism, of_pair = setting.mechanism, sharper(one, m)
    module: Any = of_pair.scheme.replicas(of_pair)
    relative, variation = module.errors(of_pair)
    composed, pairs, floor, left_out = setting.composed, m // 2, 0.0, 0.0
    if mechanism.is_replace_one:
        from jaxacct.proposals.families import mirrored  # only for this adjacency

        floor, left_out = mirrored.floor(mechanism)
    lowest, largest = -floor, 0.0
    if composed is not None:
        left_out = composed.left_out + composed.exchanged(setting.epsilon, mechanism.scheme)
        # Terms are positive where t = epsilon - L is below the end.
        lowest, largest = max(0.0, composed.end), composed.log_max(m - 1)
    lines = None
    if times > 1 or number > 1:
        from jaxacct.proposals.families import replica_lines  # only for these

        lines = functools.partial(replica_lines.pair_lines, mechanism, m, log_z)
        if times > 1:
            lines = functools.partial(replica_lines.inflated_lines, mechanism, times, m, log_z)

    def scale_at(epsilon: float) -> float:
        if composed is not None:
            return log_z + (1 - m) * epsilon + largest
        if times > 1:
            return _log_inflated_scale(mechanism, log_z, m, times, epsilon)
        return log_scale(log_z, m / number, epsilon + floor)

    def log_weight_at(losses):
        return log_z - losses

    def tables() -> dict:
        arrays = {"log_z": jnp.float32(log_z), "arrays": module.tables(of_pair)}
        if one.is_upper_bound:
            return arrays | overlap_arrays(mechanism)
        return arrays | {"attractions": jnp.asarray(log_attractions(one), jnp.float32)} if m > 2 else arrays

    by_pairs = mechanism.scheme.pair_bound is not None
    is_function_of_loss = m == 2 and one is mechanism and not (one.is_upper_bound or one.is_replace_one)
    drawer = functools.partial(_drawer, module, m, times, mechanism.is_replace_one, by_pairs)
    found = Proposal(
        spec=ProposalSpec("replicas", (m,) if times == 1 else (m, times)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=scale_at(setting.epsilon),
        draw_block=_overlapping_drawer(module) if one.is_upper_bound else drawer(),
        tables=tables,
        relative_error=math.expm1(pairs * math.log1p(relative)),
        total_variation=pairs * variation,
        replicas=-(-m // number),
        left_out=left_out,
        lowest=lowest,
        profile=None if composed is None else composed.above_floor,
        scale_at=scale_at,
        rounding_lines=lines,
        log_normalizer=log_z,
        log_weight_at=log_weight_at if is_function_of_loss else None,
        # Approximately. The likelihood of two examples has a state for each remaining lockout of one.
        cost=max(1.0, m / 4) + (mechanism.scheme.min_separation / 4 if by_pairs else 0),
    )
    if m == 2:
        return found
    return dataclasses.replace(found, rounded_down=dataclasses.replace(found, draw_block=drawer(side=-1)))


def _log_inflated_scale(mechanism: Mechanism, log_z: float, m: int, times: int, epsilon: float) -> float:
    inflated, log_ratio = mechanism.scheme.inflated(times)  # pyrefly: ignore[not-iterable]
    none, inflated_none = (math.exp(s.log_probability_of_none()) for s in (mechanism.scheme, inflated))
    ratio = math.exp(log_ratio) * (1 - _LOWERED)
    min_likelihood = (inflated_none + ratio * (math.exp(min(epsilon, 700.0)) - none)) * (1 - _LOWERED)
    return log_z - math.log(ratio * (m - 1)) + m * math.log((m - 1) / m) + (1 - m) * math.log(min_likelihood)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return those worth considering: up to the smallest scale, or to one that needs few samples.

    Those of one inflation factor are included where the others need more.
    """

    def at(times: int) -> list[Proposal]:
        return in_order((build(setting, m, times) for m in ORDERS), samples_needed)

    found, scheme = at(1), setting.mechanism.scheme
    needs_few = samples_needed is not None and any(samples_needed(proposal) <= 0 for proposal in found)
    none = -scheme.log_probability_of_none()
    if 0 < none <= _TARGET_COUNT / 2 and not needs_few:
        found += at(min(round(_TARGET_COUNT / none), _MAX_TIMES))
    if scheme.pair_bound is not None and setting.composed is None:
        found.append(plain_by_pairs(setting.mechanism))
    return found


def in_order(proposals: Iterable[Proposal | None], samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return proposals by m, until the scale rises, which is log-convex, or few samples are needed.

    Orders without a proposal end them, but for the first ones.
    """
    found: list[Proposal] = []
    for proposal in proposals:
        if proposal is None:
            if found:
                break
            continue
        found.append(proposal)
        if len(found) > 1 and found[-1].log_scale > found[-2].log_scale:
            break
        if samples_needed is not None and samples_needed(proposal) <= 0:
            break
    return found


@functools.cache  # one function each, so that nothing compiles twice
def _drawer(
    module, m: int, times: int, is_replace_one: bool, by_pairs: bool, side: int = 1
) -> Callable[..., Draws]:
    """Return the drawer with weights rounded up (`side` 1) or down (-1)."""

    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        one, number = (scheme, 1) if scheme.parts is None else scheme.parts
        one = one if times == 1 else scheme.inflated(times)[0]
        normals_key, counts_key = jax.random.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        drawn = module.draw_positions_with_one(counts_key, one, tables["arrays"], m // 2 * size)
        # All pairs of a sample in one row.
        positions, counts, first = (
            part.reshape(m // 2, size, -1).swapaxes(0, 1).reshape(size, -1) for part in drawn
        )
        windows = (positions, counts)
        if one is not scheme or not adds_windows(scheme, strategy, m):
            rows = jnp.arange(size)[:, None]
            sums = jnp.zeros((size, n), jnp.float32).at[rows, positions].add(counts, mode="drop")
            outputs, windows = strategy.scores_from_normals(normals, n, sigma, sums.astype(dtype)), ()
        else:
            outputs = strategy.scores_from_normals(normals, n, sigma, None)
        at = scheme, strategy, outputs, sigma
        if is_replace_one:
            loss, log_f = losses_of_mirrored(*at, Direction.REMOVE, None, *windows)
        else:
            loss = loss_by_pairs(*at) if by_pairs else loss_of_scores(*at, Direction.REMOVE, None, *windows)
            log_f = loss if one is scheme else loss_of_scores(one, strategy, outputs, sigma)
        log_weight = tables["log_z"] + (loss - m * log_f if times > 1 else (number - m) * log_f)
        if m > 2:
            shared = shared_events(positions, first, counts - first, tables["attractions"], m, n)
            factor = log_factor(shared, number, one.max_participations, side)
            log_weight = log_weight + factor.astype(dtype)
        return Draws(loss, log_weight)

    return draw_block


@functools.cache  # as above
def _overlapping_drawer(module) -> Callable[..., Draws]:
    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        drawn = {}

        def draw_counts(counts_key, size):
            drawn["counts"] = module.draw_with_one(counts_key, scheme, tables["arrays"], size)
            return drawn["counts"][0]

        loss = base.draw_block_at(key, scheme, strategy, sigma, dtype, draw_counts=draw_counts)
        factor = log_factor_of_overlaps(scheme, strategy, tables, *drawn["counts"])
        return Draws(loss, tables["log_z"] - loss + factor.astype(dtype))

    return draw_block


_DRAW_BY_PAIRS = functools.partial(  # from P itself
    base.draw_plain, direction=Direction.REMOVE, loss_of=lambda *arguments: loss_by_pairs(*arguments[:4])
)


def plain_by_pairs(mechanism: Mechanism) -> Proposal:
    """Plain sampling with losses by pairs of examples."""
    from jaxacct.proposals.families import replica_lines

    return dataclasses.replace(
        plain(mechanism, Direction.REMOVE),
        spec=ProposalSpec("replicas", (1,)),
        draw_block=_DRAW_BY_PAIRS,
        rounding_lines=functools.partial(replica_lines.plain_lines_by_pairs, mechanism),
    )
