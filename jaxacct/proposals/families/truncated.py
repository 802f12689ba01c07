"""Two replicas with independent truncation, for batches truncated to a maximum size, in both directions.

The pair with independent truncation dominates that of truncated b-min-sep (`schemes.truncation`).
Its truncated steps K and its outputs are drawn together from a distribution R with a density proportional to

    remove:  pi(K) (1 - p)^{-|K|} R0(y) f_P(y | K)^2        add:  pi(K) R0(y) f_Q(y | K)^2

R0 the centred Gaussian, f_P and f_Q the likelihoods of P and Q over it, pi the distribution of K. f_Q is at
least the probability that the example is sampled at no truncated step, which is `(1 - p)^{|K|}` or P(x = 0)
at least, and f_P is at least P(x = 0). So a weighted term never exceeds that of two replicas at an epsilon
lowered by the log of such a floor (proofs/truncated_batches.md, theorem 4).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.proposals.families.replicas import log_scale
from jaxacct.schemes.replicas import table as replicas
from jaxacct.schemes.truncation.independent_truncation import IndependentTruncation
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies import Strategy

REPLICAS = 2
# Below this number of plain samples these are not considered: a few minutes of two cores at n = 1000.
_FEW_SAMPLES = 1_000_000
_SPEC = ProposalSpec("truncated", ())


class Replicas(NamedTuple):
    """Mechanism of two replicas whose steps are truncated independently."""

    scheme: IndependentTruncation
    strategy: Strategy
    noise_multiplier: float


def build(setting: Setting) -> Proposal:
    """Return two replicas with independent truncation for a setting; ValueError without tables."""
    mechanism, direction = setting.mechanism, setting.direction
    truncation = _checked_truncation(mechanism)
    none = truncation.untruncated.log_probability_of_none()
    if direction == Direction.ADD:
        of_two = _replicas(mechanism, dataclasses.replace(truncation, counts=(0, 1)))
        log_z, log_tilt, lowered = 0.0, 0.0, none
    else:
        of_two, log_z, log_tilt, lowered = _remove_distribution(mechanism, truncation, none)
    log_z += replicas.log_normalizer(of_two)

    def tables():
        chances = np.round(np.array(of_two.scheme.chances) * 2.0**32)
        words = jnp.asarray(np.minimum(chances, 2.0**32 - 1), jnp.uint32)
        arrays = {"pairs": replicas.tables(of_two), "chances": words}
        return {"log_z": jnp.float32(log_z), "log_tilt": jnp.float32(log_tilt), "arrays": arrays}

    # `lowered` is ln of the floor of the other side's likelihood.
    if not math.isfinite(log_z - lowered):
        raise ValueError(f"{_SPEC} overflow at noise multiplier {mechanism.noise_multiplier:g}")
    logs = abs(log_z) + log_tilt * truncation.iterations - none
    relative, variation = replicas.errors(of_two)

    def scale_at(other: float) -> float:
        return log_scale(log_z, REPLICAS, other + lowered)

    return Proposal(
        spec=_SPEC,
        direction=setting.direction,
        mechanism=mechanism,
        log_scale=scale_at(setting.epsilon),
        draw_block=_DRAW[direction],
        tables=tables,
        relative_error=relative,
        # Truncation of steps without a participation is drawn by 32 bits each.
        total_variation=variation + truncation.iterations * 2.0**-32,
        replicas=REPLICAS,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=lambda delta_v: truncated_lines(mechanism, float(delta_v), logs, truncation.beyond),
        log_normalizer=log_z,
        of_a_bound=True,
    )


def _checked_truncation(mechanism: Mechanism) -> IndependentTruncation:
    """Return the independent truncation of a mechanism."""
    truncation = mechanism.scheme.independent_truncation
    if truncation is None:
        raise ValueError(f"scheme must truncate batches itself, got {mechanism.scheme.name}")
    if not mechanism.is_stationary:
        raise ValueError(f"{_SPEC} needs a Toeplitz matrix with at most min_separation bands")
    if not replicas.fits(_replicas(mechanism, truncation)):
        raise ValueError(f"iterations must be fewer for the tables of {_SPEC}, got {truncation.iterations}")
    return truncation


def _replicas(mechanism: Mechanism, truncation: IndependentTruncation) -> Replicas:
    return Replicas(truncation, mechanism.strategy, mechanism.noise_multiplier)


def _remove_distribution(mechanism: Mechanism, truncation: IndependentTruncation, none: float):
    """Return (replicas that are drawn, ln of the tilt's sum, ln tilt of a truncated step, ln floor of f_Q).

    With the floor `(1 - p)^{|K|}` of f_Q, which tilts K, or with P(x = 0): the smaller scale.
    """
    p = truncation.untruncated.sampling_probability
    found = [(_replicas(mechanism, truncation), 0.0, 0.0, none)]
    if p < 1:
        log_tilt, chances = -math.log1p(-p), np.array(truncation.chances)
        sums = np.log1p(chances * math.expm1(log_tilt))
        tilted = np.minimum(chances * np.exp(log_tilt - sums), 1.0)
        of_two = _replicas(mechanism, dataclasses.replace(truncation, chances=tuple(tilted.tolist())))
        found.append((of_two, math.fsum(sums) * (1 + 1e-12), log_tilt, 0.0))
    return min(
        found,
        key=lambda distribution: replicas.log_normalizer(distribution[0]) + distribution[1] - distribution[3],
    )


@functools.lru_cache(maxsize=512)
def truncated_lines(
    mechanism: Mechanism,
    delta_v: float,
    log_parts: float,
    beyond: float,
) -> tuple[BudgetLine, ...]:
    """Return the budget items for weights `ln Z + (1 - m) ln f` of m = `REPLICAS` replicas.

    f is P/R or Q/R alone; the reserved nats hold for both together, so for either. `log_parts` are the sizes
    of the other summands of the log of a weight, and `beyond` is the probability that the sizes of the
    others' batches are not covered.
    """
    size, share, errors = rounding.bounded(
        mechanism, REPLICAS, lambda share: rounding.sizes(mechanism, delta_v, REPLICAS, share)
    )
    normals, transform, recurrence = errors
    logs = log_parts + REPLICAS * size.largest
    weight = (REPLICAS - 1) * (normals + transform + recurrence) + 4 * rounding.UNIT * logs
    source = "proofs/truncated_batches.md, section "
    return (
        *rounding.common_lines(mechanism, errors, size.beyond + size.above),
        BudgetLine(Item.MORE_ELIGIBLE, "delta", beyond, source + "3"),
        rounding.relative_line(Item.WEIGHTS, weight, source + "5"),
        *rounding.draw_lines(REPLICAS * share),
    )


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposal where the scheme truncates batches and plain sampling would take long.

    Plain samples are of the pair itself, and the bound costs noise: 3 % for batches of 80 truncated at the
    mean, at a delta of 0.02 (proofs/truncated_batches.md, section 3).
    """
    mechanism = setting.mechanism
    if mechanism.scheme.independent_truncation is None or not mechanism.is_stationary:
        return []
    if samples_needed is not None and samples_needed(plain(mechanism, setting.direction)) <= _FEW_SAMPLES:
        return []
    try:
        return [build(setting)]
    except ValueError:
        return []


def _draw(key, scheme, strategy, sigma, tables, dtype, direction: Direction) -> Draws:
    """Draw outputs shifted by the replicas' counts, down in the add direction."""
    truncation, sign = scheme.independent_truncation, direction.sign
    if direction == Direction.ADD:
        truncation = dataclasses.replace(truncation, counts=(0, 1))
    normals_key, counts_key = jax.random.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    is_truncated, counts = truncation.draw(counts_key, tables["arrays"], size)
    drawn = strategy.scores_from_normals(normals, n, sigma, sign * counts.astype(dtype))
    half_norms = jnp.asarray(column_norms(truncation.untruncated, strategy), drawn.dtype)
    variance = jnp.asarray(sigma, drawn.dtype) ** 2
    ratios = (drawn - lax.broadcast_to_rank(half_norms, 2)) / variance
    log_p, log_q = truncation.log_likelihoods(ratios, half_norms / variance, is_truncated)
    if direction == Direction.ADD:
        return Draws(log_p - log_q, tables["log_z"] - log_q)
    tilt = tables["log_tilt"] * is_truncated.sum(axis=1).astype(dtype)
    return Draws(log_p - log_q, tables["log_z"] - log_p - tilt)


_DRAW = {direction: functools.partial(_draw, direction=direction) for direction in Direction}
