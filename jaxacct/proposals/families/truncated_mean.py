"""Two replicas with independent truncation for many participations: a mean bound replaces the floor.

As `families.truncated`, but the other side's likelihood is bounded from below by Jensen's inequality rather
than by the probability of no participation. With mu the mean participation and K the truncated steps,

    ln f_Q >= - m_Q,   m_Q = sum over K of mu_i (s_i / sigma^2 + ||c_i||^2 / (2 sigma^2)),      and the same
    for f_P,

linear in the scores s. So the distribution R has a density proportional to `pi(K) R0(y) f_P^2 e^{m_Q}`
(remove) or `pi(K) R0(y) f_Q^2 e^{m_P}` (add). Its samples have the weight `Z / (f_P e^{m_Q})`, and a term is
at most `Z / (4 alpha)`. R is a mixture as there, its outputs shifted by v as well: mu at the steps of K, or
once at every step and again at those of K. The overlap of v with participations and with itself is replaced
by an upper bound, which is a factor of each participation and of each truncated step, and every sample has
one more factor for that, at most 1 (proofs/truncated_batches.md, theorem 5).
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.recurrence import tree_sum
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.truncated import (
    checked_truncation,
    offered,
    proposal_of_truncation,
    truncated_lines,
)
from jaxacct.schemes.replicas import cuts as replicas
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies.stationary import circulant_length

_SPEC = ProposalSpec("truncated-mean", ())
# How often v has mu at every step, and how much more at a truncated step.
_TIMES = {Direction.REMOVE: (0, 1), Direction.ADD: (1, 1)}


def build(setting: Setting) -> Proposal:
    """Return two replicas and the mean with independent truncation; ValueError as `truncated.build`."""
    mechanism, direction = setting.mechanism, setting.direction
    cuts, uncut = checked_truncation(mechanism, _SPEC)
    strategy, variance, n = mechanism.strategy, mechanism.noise_multiplier**2, cuts.uncut.iterations
    once, more = _TIMES[direction]
    # Float32 numbers, as the draws have no others.
    mean = cuts.uncut.participation_probabilities().astype(np.float32).astype(np.float64)
    shared = strategy.gram(mean)
    times = once + more
    sizes = times * float(mean.sum()), times * math.sqrt(max(float(mean @ shared), float(mean @ mean)))
    halves = np.broadcast_to(strategy.half_square_norms(), n)
    of_cut = mean * ((once * more + more**2 / 2) * shared + (times**2 - once**2) * halves) / variance
    of_all = once**2 * float(mean @ (shared / 2 + halves)) / variance
    chances = np.array(cuts.chances)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.log1p(chances * np.expm1(of_cut))
        tilted = np.minimum(chances * np.exp(of_cut - sums), 1.0)
    labelled = replicas.Labelled(
        uncut,
        tuple(tilted.tolist()),
        (1, 2) if direction == Direction.REMOVE else (0, 1),
        tuple((times * shared / variance).tolist()),
    )
    log_z = replicas.log_normalizer(labelled) + (math.fsum(sums) + of_all) * (1 + 1e-9) + 1e-9

    def tables():
        known = {"mean": mean, "shared": shared, "margin": _of_transforms(strategy, n, sizes[1])}
        return {
            "log_z": jnp.float32(log_z),
            "arrays": replicas.tables(labelled),
        } | {name: jnp.asarray(part, jnp.float32) for name, part in known.items()}

    return proposal_of_truncation(
        _SPEC,
        setting,
        log_z=log_z,
        lowered=0.0,
        draw_block=_DRAW[direction],
        tables=tables,
        lines=lambda delta_v: truncated_lines(mechanism, delta_v, direction, abs(log_z), cuts.beyond, sizes),
    )


def _of_transforms(strategy, n: int, length: float) -> float:
    """Return a bound on |error of C^T C v| in float32, v of that length: four transforms, their spectra."""
    relative = 4 * rounding.fourier_roundings(circulant_length(n, strategy.bands)) + 40
    return relative * rounding.UNIT * float(np.abs(strategy.array).sum()) ** 2 * length * 1.01


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposal where `truncated.candidates` has the one with a floor and this one can be built."""
    return offered(build, setting, samples_needed)


def _draw(key, scheme, strategy, sigma, tables, dtype, direction: Direction) -> Draws:
    cuts, sign = scheme.independent_cuts, direction.sign
    normals_key, counts_key = threefry.split(key)
    n, size = scheme.iterations, randomness.BLOCK_SIZE
    normals = strategy.draw_normals(normals_key, n, size, dtype)
    cut, counts = replicas.draw(counts_key, cuts.uncut, tables["arrays"], size)
    once, more = _TIMES[direction]
    mean = tables["mean"][None]
    # Minus the log-ratio of a participation of the other side: 1 or 2 under P, 0 or -1 under Q.
    k = once + more * cut.astype(mean.dtype)
    moved = (mean * k).astype(dtype)
    drawn = strategy.scores_from_normals(normals, n, sigma, sign * (counts.astype(dtype) + moved))
    halves = jnp.asarray(column_norms(cuts.uncut, strategy), drawn.dtype)
    variance = jnp.asarray(sigma, drawn.dtype) ** 2
    ratios = (drawn - lax.broadcast_to_rank(halves, 2)) / variance
    log_p, log_q = cuts.log_likelihoods(ratios, halves / variance, cut)
    half_norms = lax.broadcast_to_rank(halves / variance, 2)
    linear = tree_sum(mean * k * (sign * (ratios + half_norms) + k * half_norms), axis=1)
    log_f = log_p if direction == Direction.REMOVE else log_q
    factor = log_factor(strategy, tables, cut, counts, moved, direction) / variance
    return Draws(log_p - log_q, tables["log_z"] - log_f - linear + factor.astype(dtype))


_DRAW = {direction: functools.partial(_draw, direction=direction) for direction in Direction}


def log_factor(strategy, tables, cut, counts, moved, direction: Direction):
    """Return ln of a sample's factor times sigma^2, (num_samples,) float32, rounded up and at most 0.

    `cut` and `counts` are of the replicas, `moved` is v.
    """
    once, more = _TIMES[direction]
    seen = strategy.signal_scores(moved)
    exact = tree_sum((counts + moved / 2) * seen, axis=1)
    shared = tables["shared"][None]
    own = tables["mean"][None] * shared
    at_most = (once + more) * counts * shared + own * (
        once**2 / 2 + (once * more + more**2 / 2) * cut.astype(own.dtype)
    )
    at_most = tree_sum(at_most, axis=1)
    # At least that of counts + v / 2, which includes the errors of C^T C v.
    length = jnp.sqrt(tree_sum(counts**2, axis=1)) + jnp.sqrt(tree_sum(moved**2, axis=1)) / 2
    rounded = (math.log2(counts.shape[1]) + 20) * rounding.UNIT * 2 * at_most
    return jnp.minimum(exact - at_most + rounded + length * tables["margin"] * 1.01, 0.0)
