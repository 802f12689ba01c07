"""Replica proposals for the remove direction (proofs/proposals.md): m attracting participation vectors.

`R_m` has density `Q f^m / Z_m`, `f = P/Q`. It is a mixture: pick `x_1 .. x_m` with probability proportional
to `prod p(x_i) exp( sum_{i<j} <C x_i, C x_j> / sigma^2 )`, then `y ~ N(C (x_1 + .. + x_m), sigma^2 I)`. A
draw has weight `Z_m f^{1-m}`, and the weighted term never exceeds
`M_m = Z_m (1/(m-1)) ((m-1)/m)^m e^{(1-m) epsilon}`.

For replace-one the term is `(1 - e^{epsilon - L})_+` with another loss L of the same outputs, whose scale is
that of zero-out at a smaller epsilon (`proposals.families.mirrored`, proofs/adjacency.md, section 3).

Where C is not banded, Z_m and f are bounded from above and a weight has one more factor, at most 1
(`proposals.overlaps`, proofs/non_banded.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.table import counts_at
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import loss_of_scores, losses_of_mirrored
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, draw_block_at
from jaxacct.proposals.families.overlaps import log_factor, overlap_arrays, overlap_variation
from jaxacct.schemes.replicas.base import MIN_ENTRY
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies.stationary import adds_windows


def _module(mechanism: Mechanism):
    module = mechanism.scheme.replicas
    if module is None:
        raise ValueError(f"scheme must have replicas, {mechanism.scheme.name} has none")
    return module


def counts_drawn_by(module) -> Callable[..., Any]:
    """Return the `draw_counts` of a replica module."""
    if hasattr(module, "draw_with_one"):
        return getattr(module, "draw_counts", lambda *arguments: module.draw_with_one(*arguments)[0])

    def draw_counts(key, scheme, arrays, num_samples: int):
        positions, counts, _ = module.draw_positions_with_one(key, scheme, arrays, num_samples)
        return counts_at(positions, counts, scheme.iterations)

    return draw_counts


def _positions_drawn_by(module) -> Callable[..., Any] | None:
    """Return the draw of (positions, counts) of a module that draws a few steps."""
    if hasattr(module, "draw_positions"):
        return module.draw_positions
    if not hasattr(module, "draw_positions_with_one"):
        return None
    return lambda *arguments: module.draw_positions_with_one(*arguments)[:2]


def max_replicas(mechanism: Mechanism) -> int:
    """Return the largest order that has tables; 1 where C is not Toeplitz, or the scheme has none."""
    if mechanism.scheme.replicas is None or not mechanism.strategy.is_toeplitz:
        return 1
    if mechanism.is_replace_one and mechanism.is_upper_bound:
        return 1
    return _module(mechanism).max_replicas(mechanism)


def table_samples(mechanism: Mechanism, m: int) -> float:
    """Return how many samples are drawn in the time that the tables of m replicas take, approximately."""
    return _module(mechanism).table_samples(mechanism, m)


def log_normalizer(mechanism: Mechanism, m: int) -> float:
    """Return ln Z_m = ln E_Q f^m on the rows of the strategy, or an upper bound if C is not banded."""
    return _module(mechanism).log_normalizer(mechanism, m)


def log_scale(log_normalizer: float, m: float, epsilon: float) -> float:
    """Return ln M_m: the Renyi bound on ln delta(epsilon) of order m > 1, natural logs."""
    return log_normalizer - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * epsilon


@dataclass(frozen=True)
class Replicas:
    """Replicas of a mechanism for which there are tables: fields shared by proposals that draw them."""

    mechanism: Mechanism
    m: int
    module: Any
    log_normalizer: float
    relative_error: float
    total_variation: float

    def tables(self) -> dict:
        """Return the tables of `draw_block`: ln Z_m and m in float32, and the arrays of the module."""
        arrays = self.module.tables(self.mechanism, self.m)
        known = {"log_z": jnp.float32(self.log_normalizer), "m": jnp.float32(self.m), "arrays": arrays}
        return known | overlap_arrays(self.mechanism, self.m) if self.mechanism.is_upper_bound else known


def checked_replicas(mechanism: Mechanism, m: int, least: int = 2) -> Replicas:
    """Return `Replicas` of order m, at least `least`; ValueError without tables, or where Z_m overflows."""
    module = _module(mechanism)
    if not least <= m <= max_replicas(mechanism):
        raise ValueError(f"m must be in {least}..{max_replicas(mechanism)} for this scheme, got {m}")
    log_z = module.log_normalizer(mechanism, m)
    if not math.isfinite(log_z):
        raise ValueError(
            f"m = {m} replicas have no tables at noise multiplier {mechanism.noise_multiplier:g}: their "
            f"numbers are beyond float64, below {MIN_ENTRY:g} of their unit, or too inexact in float32"
        )
    relative_error, total_variation = module.errors(mechanism, m)
    if mechanism.is_upper_bound:
        total_variation += overlap_variation(mechanism, m)
    return Replicas(mechanism, m, module, log_z, relative_error, total_variation)


def replica_proposal(mechanism: Mechanism, m: int, epsilon: float) -> Proposal:
    """Return the proposal R_m, m >= 2, with its scale at `epsilon`; ValueError as `checked_replicas`."""
    drawn = checked_replicas(mechanism, m)
    log_z = drawn.log_normalizer
    log_floor, left_out = _floor(mechanism) if mechanism.is_replace_one else (0.0, 0.0)
    return Proposal(
        spec=ProposalSpec("replicas", (m,)),
        direction=Direction.REMOVE,
        mechanism=mechanism,
        log_scale=log_scale(log_z, m, epsilon + log_floor),
        draw_block=_drawer_of(drawn),
        tables=drawn.tables,
        relative_error=drawn.relative_error,
        total_variation=drawn.total_variation,
        replicas=m,
        left_out=left_out,
        lowest=-log_floor,
        profile=None,
        scale_at=lambda other: log_scale(log_z, m, other + log_floor),
        log_normalizer=log_z,
        log_weight_at=_log_weight_at(drawn),
    )


def _log_weight_at(drawn: Replicas) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return ln w of losses; None for replace-one and overlapping columns."""
    mechanism = drawn.mechanism
    if mechanism.is_replace_one or mechanism.is_upper_bound:
        return None
    return lambda losses: drawn.log_normalizer + (1 - drawn.m) * losses


def _floor(mechanism: Mechanism) -> tuple[float, float]:
    from jaxacct.proposals.families.mirrored import floor  # only for this adjacency

    return floor(mechanism)


def build(setting: Setting, m: int) -> Proposal:
    """Return `replica_proposal` for a setting, with its errors."""
    return replica_proposal(setting.mechanism, m, setting.epsilon)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the replica proposals worth considering, from m = 2 on; see `around_the_smallest_scale`."""
    return around_the_smallest_scale(setting.mechanism, 2, functools.partial(build, setting), samples_needed)


def around_the_smallest_scale(
    tabled: Mechanism,
    first: int,
    propose: Callable[[int], Proposal],
    samples_needed: Callable[[Proposal], float] | None,
) -> list[Proposal]:
    """Proposals of the orders around the one with the smallest scale.

    Orders are tried from `first` on while the tables of `tabled` fit and Z_m is finite. The scale is
    log-convex in m, so the first increase ends the search; so does a proposal for which all samples that it
    needs (`samples_needed`; None tries all orders) are drawn faster than the tables of one more replica are
    built.
    """
    found: list[Proposal] = []
    for m in range(first, max_replicas(tabled) + 1):
        if found and samples_needed and samples_needed(found[-1]) <= table_samples(tabled, m):
            break
        if not math.isfinite(log_normalizer(tabled, m)):
            break
        found.append(propose(m))
        if len(found) > 1 and found[-1].log_scale > found[-2].log_scale:
            break
    return found


def _drawer_of(drawn: Replicas) -> Callable[..., Draws]:
    losses_of = losses_of_mirrored if drawn.mechanism.is_replace_one else _losses
    if drawn.mechanism.is_upper_bound:
        return _overlapping_drawer(drawn.module)
    return _drawer(drawn.module, losses_of)


def _losses(*arguments):
    """(L, ln f) of zero-out, which are the same; arguments as of `loss_of_scores`."""
    loss = loss_of_scores(*arguments)
    return loss, loss


@functools.cache  # one function a module, so that nothing compiles twice
def _drawer(module, losses_of: Callable) -> Callable[..., Draws]:
    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        def drawn_by(draw):
            return lambda counts_key, size: draw(counts_key, scheme, tables["arrays"], size)

        positions = _positions_drawn_by(module)
        m = len(tables["arrays"]["hazards"]) if hasattr(module, "draw_positions") else 2
        if positions and adds_windows(scheme, strategy, m):
            draw = functools.partial(draw_block_at, draw_positions=drawn_by(positions))
        else:
            draw = functools.partial(draw_block_at, draw_counts=drawn_by(counts_drawn_by(module)))
        loss, log_f = draw(key, scheme, strategy, sigma, dtype, loss_of=losses_of)
        return Draws(loss, tables["log_z"] + (1 - tables["m"]) * log_f)

    return draw_block


@functools.cache  # as above
def _overlapping_drawer(module) -> Callable[..., Draws]:
    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        drawn = {}

        def draw_counts(counts_key, size):
            drawn["counts"] = module.draw_with_one(counts_key, scheme, tables["arrays"], size)
            return drawn["counts"][0]

        loss = draw_block_at(key, scheme, strategy, sigma, dtype, draw_counts=draw_counts)
        factor = log_factor(scheme, strategy, tables, *drawn["counts"])
        return Draws(loss, tables["log_z"] + (1 - tables["m"]) * loss + factor.astype(dtype))

    return draw_block


@functools.cache  # as above
def drawer_of_another(module, another: Callable) -> Callable[..., Draws]:
    """Return a drawer of replicas of `another(scheme)`: weight `Z_m f / g^m`, g its likelihood ratio.

    `module` is that of the other scheme; `another` must be the same function in each call for the same
    schemes.
    """

    def draw_block(key, scheme, strategy, sigma, tables, dtype) -> Draws:
        other = another(scheme)
        normals_key, counts_key = threefry.split(key)
        n, size = scheme.iterations, randomness.BLOCK_SIZE
        normals = strategy.draw_normals(normals_key, n, size, dtype)
        counts = counts_drawn_by(module)(counts_key, other, tables["arrays"], size).astype(dtype)
        drawn = strategy.scores_from_normals(normals, n, sigma, counts)
        loss = loss_of_scores(scheme, strategy, drawn, sigma)
        others = loss_of_scores(other, strategy, drawn, sigma)
        return Draws(loss, tables["log_z"] + loss - tables["m"] * others)

    return draw_block


def drawn_sizes(
    drawn: Mechanism, replicas: int, rare: float, log_rarest: float, log_max: float
) -> rounding.Size:
    """Return the sizes of the loss of `drawn`, whose replicas are drawn for the target of another mechanism.

    Two events are excluded, each of probability `rare` under the target distribution: more participations
    than are counted, of log probability `log_rarest` under `drawn` (-inf counts all), and a log-likelihood
    ratio above `log_max`.
    """
    count, most, beyond = drawn.scheme.max_participations, drawn.scheme.max_participations, 0.0
    if log_rarest > -math.inf:
        count = rounding.fewest_participations(drawn.scheme, log_rarest)
        beyond = rare if count < most else 0.0
    noise, score, ratio = rounding.magnitudes(drawn, replicas)
    of_all = count * (ratio + 1 / drawn.noise_multiplier**2)
    largest, above = (log_max, rare) if log_max < of_all else (of_all, 0.0)
    norm = replicas * math.sqrt(count)
    return rounding.Size(count, beyond, norm, largest, above, noise, score, ratio, transformed=True)


def lines_of_two(
    mechanism: Mechanism,
    delta_v: float,
    replicas: int,
    log_normalizer: float,
    drawn: rounding.Bounded,
    as_units: int,
    section: str,
    item: Item,
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z + L - replicas L'`, L' the loss of what is drawn.

    Args:
      mechanism: the mechanism of the loss L.
      delta_v: as for `rounding.loss_lines`.
      replicas: of the other mechanism.
      log_normalizer: ln Z.
      drawn: errors of L'.
      as_units: how many of the unit's participation vectors are in the outputs.
      section: of proofs/rounding.md.
      item: of the weights.
    """

    def size_of(share):
        size = rounding.sizes(mechanism, delta_v, as_units, share)
        return dataclasses.replace(size, drawn=drawn.size.drawn, transformed=True)

    size, _, errors = rounding.bounded(mechanism, as_units, size_of)
    rare = size.beyond + size.above + drawn.size.beyond + drawn.size.above
    logs = abs(log_normalizer) + size.largest * mechanism.scheme.sums.times + replicas * drawn.size.largest
    normals, transform, recurrence = errors
    weight = normals + transform + recurrence + replicas * sum(drawn.errors) + 4 * rounding.UNIT * logs
    return (
        *rounding.common_lines(mechanism, errors, rare, section),
        rounding.relative_line(item, weight, rounding.SOURCE + section),
        *rounding.draw_lines(replicas * drawn.share, section),
    )
