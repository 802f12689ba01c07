"""Two replicas with independent cuts where participations are many: the mean in place of a floor.

As `proposals.cuts`, but the other side's likelihood is bounded from below by Jensen's inequality rather than
by the probability of no participation. With mu the mean participation and K the cuts,

    ln f_Q >= - m_Q,   m_Q = sum over K of mu_i (s_i / sigma^2 + ||c_i||^2 / (2 sigma^2)),      and f_P alike,

linear in the scores s. So the law R has a density proportional to `pi(K) R0(y) f_P^2 e^{m_Q}` (remove) or
`pi(K) R0(y) f_Q^2 e^{m_P}` (add), of which draws have the weight `Z / (f_P e^{m_Q})`, and a term is at most
`Z / (4 alpha)`. R is a mixture as before, its outputs moved by v as well: mu at the steps of K, or once at
all and again at those of K. What v shares with participations and with itself is replaced by more, which is
a factor of each participation and of each coin, and every draw has one more factor for that, at most 1
(proofs/truncated_batches.md, theorem 5).
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.recurrence import tree_sum
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.proposals.families.cuts import offered
from jaxacct.proposals.families.replicas import log_scale
from jaxacct.schemes.replicas import cuts as replicas
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.strategies.stationary import circulant_length

_REPLICAS = 2
_SPEC = ProposalSpec("truncated-mean", ())
_UNIT = 2.0**-24
# How often v has mu at every step, and once more at a step that is cut.
_TIMES = {Direction.REMOVE: (0, 1), Direction.ADD: (1, 1)}


def mean_cut_proposal(mechanism: Mechanism, direction: str, epsilon: float) -> Proposal:
    """Two replicas and the mean with independent cuts, with the scale at `epsilon` (natural log).

    Raises:
      ValueError: for a scheme that cuts nothing, tables that do not fit, or a normalizer that overflows.
    """
    cuts, strategy = mechanism.scheme.independent_cuts, mechanism.strategy
    if cuts is None:
        raise ValueError(f"scheme must cut batches itself, was {mechanism.scheme.name}")
    if not mechanism.is_stationary:
        raise ValueError(f"{_SPEC} needs a Toeplitz matrix with at most min_separation bands")
    uncut = Mechanism(cuts.uncut, strategy, mechanism.noise_multiplier)
    n, variance = cuts.uncut.iterations, mechanism.noise_multiplier**2
    if not replicas.fits(uncut):
        raise ValueError(f"iterations must be fewer for the tables of {_SPEC}, was {n}")
    once, more = _TIMES[Direction(direction)]
    # Float32 numbers, of which the draws have no others.
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
    if not math.isfinite(log_z):
        raise ValueError(f"{_SPEC} overflow at noise multiplier {mechanism.noise_multiplier:g}")

    def scale_at(other: float) -> float:
        return log_scale(log_z, _REPLICAS, other)

    def tables():
        known = {"mean": mean, "shared": shared, "margin": _of_transforms(strategy, n, sizes[1])}
        return {
            "log_z": jnp.float32(log_z),
            "arrays": replicas.tables(labelled),
        } | {name: jnp.asarray(part, jnp.float32) for name, part in known.items()}

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
            mechanism, float(delta_v), direction, _REPLICAS, abs(log_z), cuts.beyond, sizes
        ),
        log_normalizer=log_z,
        of_a_bound=True,
    )


def _of_transforms(strategy, n: int, length: float) -> float:
    """At least |error of C^T C v| in float32, v of that length: four transforms, and their spectra."""
    relative = 4 * rounding.fourier_roundings(circulant_length(n, strategy.bands)) + 40
    return relative * _UNIT * float(np.abs(strategy.array).sum()) ** 2 * length * 1.01


def build(setting: Setting) -> Proposal:
    """Return `mean_cut_proposal` for a setting; ValueError as there."""
    return mean_cut_proposal(setting.mechanism, setting.direction, setting.epsilon)


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the proposal where `cuts.candidates` has the one with a floor and this one can be built."""
    return offered(build, setting, samples_needed)


def _draw_remove(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    return _draw(key, scheme, strategy, sigma, tables, dtype, Direction.REMOVE)


def _draw_add(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    return _draw(key, scheme, strategy, sigma, tables, dtype, Direction.ADD)


def _draw(key, scheme, strategy, sigma, tables, dtype, direction: Direction) -> Draws:
    cuts, sign = scheme.independent_cuts, 1 if direction == Direction.REMOVE else -1
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


def log_factor(strategy, tables, cut, counts, moved, direction: Direction):
    """ln of a draw's factor times sigma^2, (num_samples,) float32, above what it is exactly and at most 0.

    Args:
      cut, counts: of `replicas.draw`.
      moved: v, (num_samples, iterations) float32.
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
    # At least that of counts + v / 2, which sees the errors of C^T C v.
    length = jnp.sqrt(tree_sum(counts**2, axis=1)) + jnp.sqrt(tree_sum(moved**2, axis=1)) / 2
    rounded = (math.log2(counts.shape[1]) + 20) * _UNIT * 2 * at_most
    return jnp.minimum(exact - at_most + rounded + length * tables["margin"] * 1.01, 0.0)
