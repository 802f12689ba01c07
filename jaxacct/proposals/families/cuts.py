"""Two replicas with independent cuts: few samples for batches cut to a maximum size, in both directions.

The pair with independent cuts dominates that of truncated b-min-sep (`schemes.independent_cuts`). Its cuts K
and its outputs are drawn together from a law R with a density proportional to

    remove:  pi(K) (1 - p)^{-|K|} R0(y) f_P(y | K)^2        add:  pi(K) R0(y) f_Q(y | K)^2

R0 the centred Gaussian, f_P and f_Q the likelihoods of P and Q over it, pi the law of the cuts. f_Q is at
least the probability that the example is sampled at no step that is cut, which is `(1 - p)^{|K|}` or P(x = 0)
at least, and f_P is at least P(x = 0). So a weighted term never exceeds that of two replicas at an epsilon
lowered by the log of such a floor (proofs/truncated_batches.md, theorem 4).
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness, threefry
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting, plain
from jaxacct.proposals.families.replicas import log_scale
from jaxacct.schemes.independent_cuts import IndependentCuts
from jaxacct.schemes.replicas import cuts as replicas
from jaxacct.statistics.hockey_stick import Direction

_REPLICAS = 2
_CHEAP = 1_000_000  # plain draws, a few minutes of two cores at n = 1000
_SPEC = ProposalSpec("truncated", ())


def cut_proposal(mechanism: Mechanism, direction: str, epsilon: float) -> Proposal:
    """Two replicas with independent cuts, with the scale at `epsilon` (natural log).

    Raises:
      ValueError: for a scheme that cuts nothing, tables that do not fit, or a normalizer that overflows.
    """
    cuts = mechanism.scheme.independent_cuts
    if cuts is None:
        raise ValueError(f"scheme must cut batches itself, was {mechanism.scheme.name}")
    if not mechanism.is_stationary:
        raise ValueError(f"{_SPEC} needs a Toeplitz matrix with at most min_separation bands")
    uncut = Mechanism(cuts.uncut, mechanism.strategy, mechanism.noise_multiplier)
    if not replicas.fits(uncut):
        raise ValueError(f"iterations must be fewer for the tables of {_SPEC}, was {cuts.uncut.iterations}")
    none = cuts.uncut.log_probability_of_none()
    if direction == Direction.ADD:
        labelled, log_z, log_tilt = replicas.Labelled(uncut, cuts.chances, (0, 1)), 0.0, 0.0
        lowered = none
    else:
        labelled, log_z, log_tilt, lowered = _remove_law(uncut, cuts, none)
    log_z += replicas.log_normalizer(labelled)
    if not math.isfinite(log_z - lowered):
        raise ValueError(f"{_SPEC} overflow at noise multiplier {mechanism.noise_multiplier:g}")

    def scale_at(other: float) -> float:
        return log_scale(log_z, _REPLICAS, other + lowered)

    def tables():
        arrays = replicas.tables(labelled)
        return {"log_z": jnp.float32(log_z), "log_tilt": jnp.float32(log_tilt), "arrays": arrays}

    logs = abs(log_z) + log_tilt * cuts.uncut.iterations
    return Proposal(
        spec=_SPEC,
        direction=Direction(direction),
        mechanism=mechanism,
        log_scale=scale_at(epsilon),
        draw_block={Direction.REMOVE: _draw_remove, Direction.ADD: _draw_add}[Direction(direction)],
        tables=tables,
        relative_error=0.0,
        total_variation=replicas.total_variation(uncut),
        replicas=_REPLICAS,
        push=0.0,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        scale_at=scale_at,
        rounding_lines=lambda delta_v: rounding.cut_lines(
            mechanism, float(delta_v), direction, _REPLICAS, logs - none, cuts.beyond
        ),
        log_normalizer=log_z,
        of_a_bound=True,
    )


def _remove_law(uncut: Mechanism, cuts: IndependentCuts, none: float):
    """(what is drawn, ln of what the tilt sums to, ln of the tilt of a cut, ln of the floor left of f_Q).

    With the floor `(1 - p)^{|K|}` of f_Q, which is a tilt of the cuts, or with P(x = 0): what is less.
    """
    plain = replicas.Labelled(uncut, cuts.chances, (1, 2))
    p, found = cuts.uncut.sampling_probability, [(plain, 0.0, 0.0, none)]
    if p < 1:
        log_tilt, chances = -math.log1p(-p), np.array(cuts.chances)
        sums = np.log1p(chances * math.expm1(log_tilt))
        tilted = np.minimum(chances * np.exp(log_tilt - sums), 1.0)
        labelled = replicas.Labelled(uncut, tuple(tilted.tolist()), (1, 2))
        found.append((labelled, math.fsum(sums) * (1 + 1e-12), log_tilt, 0.0))
    return min(found, key=lambda law: replicas.log_normalizer(law[0]) + law[1] - law[3])


def build(setting: Setting) -> Proposal:
    """Return `cut_proposal` for a setting; ValueError as there."""
    return cut_proposal(setting.mechanism, setting.direction, setting.epsilon)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposal where the scheme truncates batches and plain sampling would take long."""
    return offered(build, setting, samples_needed)


def offered(
    make: Callable[[Setting], Proposal], setting: Setting, samples_needed: SamplesNeeded
) -> list[Proposal]:
    """What `make` gives for cut batches where plain draws would take long; nothing where it cannot.

    Those are of the pair itself, and the bound costs noise: 3 % for batches of 80 cut at the mean, at a delta
    of 0.02 (proofs/truncated_batches.md, section 3).
    """
    mechanism = setting.mechanism
    if mechanism.scheme.independent_cuts is None or not mechanism.is_stationary:
        return []
    if samples_needed is not None and samples_needed(plain(mechanism, setting.direction)) <= _CHEAP:
        return []
    try:
        return [make(setting)]
    except ValueError:
        return []


def _draw_remove(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    log_p, log_q, cut = _draw(key, scheme, strategy, sigma, tables, dtype, 1)
    log_weight = tables["log_z"] - log_p - tables["log_tilt"] * cut.sum(axis=1).astype(dtype)
    return Draws(log_p - log_q, log_weight)


def _draw_add(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    log_p, log_q, _ = _draw(key, scheme, strategy, sigma, tables, dtype, -1)
    return Draws(log_p - log_q, tables["log_z"] - log_q)


def _draw(key, scheme, strategy, sigma, tables, dtype, sign: int):
    """`(ln P/R, ln Q/R, cut)` of one block, the outputs shifted by `sign` times the replicas' counts."""
    cuts = scheme.independent_cuts
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    cut, counts = replicas.draw(counts_key, cuts.uncut, tables["arrays"], size)
    drawn = strategy.scores_from_normals(normals, n, sigma, sign * counts.astype(dtype))
    halves = jnp.asarray(column_norms(cuts.uncut, strategy), drawn.dtype)
    variance = jnp.asarray(sigma, drawn.dtype) ** 2
    ratios = (drawn - lax.broadcast_to_rank(halves, 2)) / variance
    log_p, log_q = cuts.log_likelihoods(ratios, halves / variance, cut)
    return log_p, log_q, cut
