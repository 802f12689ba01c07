"""The add direction, H(Q, P) = E_Q (1 - e^epsilon f)_+ with f = P/Q: zero, or a half-space proposal.

Proofs are in proofs/add_direction.md. With P0 = P(x = 0) and f = P0 + (1 - P0) f_1,

    (1 - e^epsilon f)_+ = M_0 (1 - e^kappa f_1)_+,   M_0 = 1 - e^epsilon P0,

so it is zero as soon as M_0 <= 0. Otherwise ln f_1 is a convex function of the scores and lies above each
of its tangents. A tangent depends on one Gaussian coordinate t of the noise, and

    (1 - e^kappa f_1)_+ <= (1 - e^{slope (t - edge)})_+,

whose mean M under Q is small where the tangent is good. The proposal draws t from (nearly) the right-hand
side times the normal density, and the rest of the noise freely.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_ndtr, logsumexp

from jaxacct.kernels import randomness, threefry
from jaxacct.kernels.programs import compiled
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms, loss_of_scores
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.add_direction.plain_bounded import log_remainder_scale
from jaxacct.proposals.base import Draws, Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.statistics.hockey_stick import Direction
from jaxacct.statistics.lines import BudgetLine, Item
from jaxacct.strategies.stationary import max_amplitude

SPEC = ProposalSpec("half-space", ())
CELLS = 2048  # of the table of t; the scale exceeds the exact mean of the bound by about a percent
_TAIL = 2.0**-40  # probability, relative to the scale, of the t that the table leaves out
_MIN_REMAINDER = 1e-4  # (f - P0) / f at a tangent point; below it f - P0 loses too many digits
_LOWERED = 1e-8  # relative lowering of a tangent, far above float64 rounding


class Minorant(NamedTuple):
    """`ln((1 - P0) f_1) >= constant + <weights, zeta> / sigma` at scores `sigma zeta` of pure noise.

    Attributes:
      constant: natural log.
      weights: (iterations,) float64 m >= 0, the mean participation of a tilted distribution.
      norm: |C m|, so that `<m, zeta> / norm` is standard normal under Q.
    """

    constant: float
    weights: np.ndarray
    norm: float


def tangent(mechanism: Mechanism, noise: np.ndarray) -> Minorant | None:
    """Return the tangent of `ln(f - P0)` at normalised noise scores `noise`, (iterations,) float64.

    None where `f - P0` is lost to rounding there. `noise = ||c_i||^2 / (2 sigma)` is f = 1: Jensen's
    inequality. The constant is lowered by 1e-8 of the size of its parts, which covers float64 rounding.
    """
    sigma = mechanism.noise_multiplier
    # ln f_1 of the lower bound where C is not banded; one number where all columns have one norm.
    lowered = mechanism.strategy.half_square_norms() + float(mechanism.cross_terms)
    excess = noise / sigma - lowered / sigma**2
    with jax.enable_x64(True):
        norms = column_norms(mechanism.scheme, mechanism.strategy) / sigma**2
        loss, gradient = loss_and_gradient(mechanism.scheme, excess, norms)
        loss, gradient = float(loss), np.asarray(gradient, np.float64)
    remainder = -math.expm1(min(mechanism.scheme.log_probability_of_none() - loss, 0.0))
    if not (math.isfinite(loss) and np.all(np.isfinite(gradient)) and remainder > _MIN_REMAINDER):
        return None
    weights = np.maximum(gradient, 0.0) / remainder
    norm = math.sqrt(max(weights @ mechanism.strategy.gram(weights), 0.0))
    if norm == 0:
        return None
    parts = (loss, math.log(remainder), -(weights @ excess), -(weights * lowered).sum() / sigma**2)
    constant = float(sum(parts) - _LOWERED * (1 + sum(map(abs, parts))))
    return Minorant(constant, weights, norm)


@compiled(static=1)
def loss_and_gradient(scheme, excess, norms):
    """Return (ln P/Q, its gradient by the log-ratios `excess`)."""
    return jax.value_and_grad(scheme.log_likelihood_ratios)(excess, norms)


def jensen(mechanism: Mechanism, tangent_at: Callable = tangent) -> Minorant | None:
    """Return the tangent at f = 1: Jensen's inequality."""
    sigma, n = mechanism.noise_multiplier, mechanism.scheme.iterations
    return tangent_at(mechanism, np.broadcast_to(mechanism.strategy.half_square_norms() / sigma, n))


def edge_and_slope(mechanism: Mechanism, kappa: float, minorant: Minorant) -> tuple[float, float]:
    """Return (edge, slope): a term is at most `M_0 (1 - e^{slope (t - edge)})_+`, t along C m.

    `kappa` is `epsilon - ln M_0`.
    """
    slope = minorant.norm / mechanism.noise_multiplier
    return -(kappa + minorant.constant) / slope, slope


def log_half_space_mean(edge: float, slope: float) -> float:
    """Return `ln E (1 - e^{slope (t - edge)})_+` for standard normal t, float64 (for the choice only)."""
    above = slope**2 / 2 - slope * edge + log_ndtr(edge - slope) - log_ndtr(edge)
    return float(log_ndtr(edge) + math.log(max(-math.expm1(min(above, 0.0)), 1e-300)))


@functools.lru_cache(maxsize=64)  # seventy tangents, requested again by the verification of the choice
def best_minorant(mechanism: Mechanism, epsilon: float) -> Minorant | None:
    """Return the tangent with the smallest mean bound: Jensen's, or at points down along the last gradient.

    The best half-space touches {L <= -epsilon} at its point nearest to 0, where the gradient points back to
    0; alternating the distance and the direction approaches it. Any tangent is valid.
    """
    return search_minorant(mechanism, epsilon - log_remainder_scale(mechanism, epsilon))


def search_minorant(mechanism: Mechanism, kappa: float, tangent_at: Callable = tangent) -> Minorant | None:
    """Search like `best_minorant`, among the `tangent_at` normalised noise scores."""

    def log_mean(minorant):
        if minorant is None:
            return math.inf
        return log_half_space_mean(*edge_and_slope(mechanism, kappa, minorant))

    best = jensen(mechanism, tangent_at)
    for _ in range(3):
        if best is None:
            return None
        along = mechanism.strategy.gram(best.weights) / best.norm
        low, high = 0.0, 16.0
        for _ in range(2):
            distances = np.linspace(low, high, 13)
            found = [tangent_at(mechanism, -distance * along) for distance in distances]
            costs = [log_mean(minorant) for minorant in found]
            at = int(np.argmin(costs))
            low, high = distances[max(at - 1, 0)], distances[min(at + 1, 12)]
            best = min(best, found[at], key=log_mean)
    return best


def half_space_proposal(mechanism: Mechanism, epsilon: float, minorant: Minorant) -> Proposal:
    """Return the proposal of one minorant. `epsilon` must be below -ln P(x = 0)."""
    remainder = log_remainder_scale(mechanism, epsilon)
    log_scale, tail, cells = coordinate_table(*edge_and_slope(mechanism, epsilon - remainder, minorant))
    return proposal_along(mechanism, minorant, log_scale + remainder, tail, cells)


def proposal_along(
    mechanism: Mechanism,
    minorant: Minorant,
    log_scale: float,
    tail: float,
    cells: dict,
    spec: ProposalSpec = SPEC,
    draw_block: Callable[..., Draws] | None = None,
    more_lines: Callable[[tuple[BudgetLine, ...]], tuple[BudgetLine, ...]] = tuple,
) -> Proposal:
    """Return a proposal whose coordinate along `C m` has the distribution of `cells` (`coordinate_table`).

    Args:
      mechanism: the mechanism.
      minorant: gives the direction m.
      log_scale: ln M.
      tail: part of the bound that the distribution leaves out, over M.
      cells: of `place_cells`.
      spec: of the proposal.
      draw_block: of the proposal, from `draw_in_half_space`; by default with the losses of `loss_of_scores`.
      more_lines: function of `coordinate_lines` that returns the budget items.
    """
    n = mechanism.scheme.iterations
    # Rounding of the coordinate: a tree of log2(n) additions, products, weights and the shift itself.
    roundings = (math.ceil(math.log2(n)) if n > 1 else 0) + 6
    tables = cells | {
        "weights": jnp.asarray(minorant.weights / minorant.norm, jnp.float32),
        "along": jnp.asarray(mechanism.strategy.gram(minorant.weights) / minorant.norm, jnp.float32),
        "rounding": jnp.float32(roundings * 2.0**-24),
    }
    # The coordinate along C m is replaced: the old one is a normal of the draw, the new one from the table.
    push = float(np.abs(np.asarray(cells["upper"])).max() + cells["width"]) + 12

    def lines(delta_v):
        relative_norm = float(np.linalg.norm(minorant.weights)) / minorant.norm
        return coordinate_lines(mechanism, float(delta_v), push, relative_norm)

    found = Proposal(
        spec=spec,
        direction=Direction.ADD,
        mechanism=mechanism,
        log_scale=log_scale,
        draw_block=_half_space if draw_block is None else draw_block,
        tables=lambda: tables,
        relative_error=2.0**-20,
        total_variation=tail,
        replicas=1,
        push=push,
        left_out=0.0,
        lowest=0.0,
        profile=None,
        rounding_lines=lambda delta_v: more_lines(lines(delta_v)),
    )
    if not mechanism.scheme.overlap_bound(mechanism.strategy) > 0:
        return found

    def below() -> Proposal:
        return dataclasses.replace(found, draw_block=_from_below, rounding_lines=lines, below=None)

    return dataclasses.replace(found, below=below)


def coordinate_lines(
    mechanism: Mechanism, delta_v: float, push: float, relative_norm: float
) -> tuple[BudgetLine, ...]:
    """Return the budget items for losses whose coordinate along `C m` was replaced.

    An error e of the scores is in the old coordinate, too, as `<m, e> / |C m|`, and returns along `C^T C m /
    |C m|`. Its projection on participations x', where `|C x'| <= |x'|` if columns do not overlap, is at most
    `relative_norm = |m| / |C m|` times that of e (proofs/add_direction.md, section 3). Otherwise C increases
    |x'| by at most its norm.
    """
    if mechanism.scheme.examples_overlap or float(np.max(mechanism.cross_terms)) > 0:
        relative_norm *= max(1.0, max_amplitude(mechanism.strategy, mechanism.scheme.iterations))
    normals, scores, *others = rounding.loss_lines(mechanism, delta_v, Direction.ADD, 1, push)
    again = relative_norm * (normals.amount + scores.amount)
    source = "proofs/add_direction.md, section 3"
    return normals, scores, BudgetLine(Item.COORDINATE, "epsilon", again, source), *others


def coordinate_table(edge: float, slope: float) -> tuple[float, float, dict]:
    """Return a piecewise constant density r of t < edge: `phi(t) (1 - e^{slope (t - edge)}) <= scale r(t)`.

    Cells have equal width and probabilities that are multiples of 2^-32, so the drawn distribution is exactly
    the one whose density is used, and the scale is a maximum over cells, not an integral. The largest value
    in a cell bounds the normal density by its upper end and the other factor by its lower end. Returns (ln
    scale, probability left out below the last cell over the scale, arrays of the cells).
    """
    log_mean = log_half_space_mean(edge, slope)
    # phi(edge - depth) / phi(min(edge, 0)) decreases at least like a normal; 14 more than suffices.
    depth = max(edge, 0.0) + 14.0
    while depth > 1e-6 and log_ndtr(edge - 0.9 * depth) < log_mean + math.log(_TAIL):
        depth *= 0.9
    width = depth / CELLS
    upper = edge - width * np.arange(CELLS)
    lower = upper - width
    nearest = np.clip(0.0, lower, upper)
    log_peak = (
        -(nearest**2) / 2
        - math.log(2 * math.pi) / 2
        + np.log(-np.expm1(-slope * width * np.arange(1, CELLS + 1)))
    )
    log_scale, cells = place_cells(upper, width, log_peak)
    return log_scale, math.exp(log_ndtr(edge - depth) - log_scale), cells


def place_cells(upper: np.ndarray, width: float, log_peak: np.ndarray) -> tuple[float, dict]:
    """Return (ln scale, arrays) of cells of one width below `upper`, drawn approximately like e^log_peak.

    `log_peak` bounds ln of the normal density times the bound on the terms, anywhere in the cell.
    """
    ideal = np.exp(log_peak - logsumexp(log_peak))
    counts = np.floor(ideal * (2.0**32 - CELLS)).astype(np.int64) + 1
    counts[np.argmax(counts)] += 2**32 - counts.sum()
    log_density = np.log(counts) - 32 * math.log(2) - math.log(width)
    log_scale = float(np.max(log_peak - log_density)) + 1e-12
    base = -(upper**2) / 2 - math.log(2 * math.pi) / 2 - log_density
    return log_scale, {
        "last": jnp.asarray(np.cumsum(counts) - 1, jnp.uint32),
        "upper": jnp.asarray(upper, jnp.float32),
        # Rounded up, so that a weight is at least the exact one.
        "log_weight": jnp.asarray(base + 4 * 2.0**-24 * (1 + np.abs(base)), jnp.float32),
        "width": jnp.float32(width),
    }


def _half_space(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    noise, log_weight = draw_in_half_space(key, scheme, strategy, tables, dtype)
    return Draws(loss_of_scores(scheme, strategy, sigma * noise, sigma, Direction.ADD), log_weight)


def _from_below(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    """Draw with losses of examples without overlap: at least the exact ones, increasing in every score."""
    noise, log_weight = draw_in_half_space(key, scheme, strategy, tables, dtype, -1)
    return Draws(loss_of_scores(scheme, strategy, sigma * noise, sigma), log_weight)


def draw_in_half_space(key, scheme, strategy, tables, dtype, side: int = 1):
    """Return noise scores of a block of `proposal_along`, (BLOCK_SIZE, iterations), and ln of weights.

    Scores are lowered by the rounding of the coordinate: losses must increase in every score, or be bounded
    by such losses. Weights are rounded up. With `side` -1 scores are raised and weights rounded down.
    """
    noise_key, cell_key, place_key = threefry.split(key, 3)
    size, n = randomness.BLOCK_SIZE, scheme.iterations
    noise = strategy.noise_scores(noise_key, n, size, dtype)
    cells, places = threefry.bits_32_each((cell_key, place_key), (size, 2 * size))
    cell = jnp.searchsorted(tables["last"], cells)
    place = randomness.uniform_64(place_key, (size,), dtype, threefry.drawn(places))
    below = tables["width"].astype(dtype) * place
    upper = tables["upper"][cell].astype(dtype)
    # ln phi(t) from its value at the upper end of the cell: no cancellation.
    log_weight = tables["log_weight"][cell].astype(dtype) + below * (upper - below / 2)
    if side < 0:  # the table's rounding up, and all rounding here
        sizes = 1 + jnp.abs(tables["log_weight"][cell]) + jnp.abs(upper * below) + below**2
        log_weight = log_weight - 16 * 2.0**-24 * sizes.astype(dtype)
    products = tables["weights"].astype(dtype)[None] * noise
    slack = tables["rounding"].astype(dtype) * (jnp.abs(products).sum(axis=1) + jnp.abs(upper) + below + 1)
    # L increases in every score, so lowering the coordinate by its error bound covers that error.
    shift = upper - below - halving_sum(products) - side * slack
    return noise + shift[:, None] * tables["along"].astype(dtype)[None], log_weight


def halving_sum(values):
    """Sum over the last axis by halving: the rounding error grows with the logarithm of its length."""
    size = 1 << max(values.shape[-1] - 1, 0).bit_length()
    values = jnp.pad(values, ((0, 0), (0, size - values.shape[-1])))
    while size > 1:
        size //= 2
        values = values[:, :size] + values[:, size:]
    return values[:, 0]


def candidates(setting: Setting, samples_needed: SamplesNeeded) -> list[Proposal]:
    """Return the half-space where its bound is below those of other samples of Q.

    Where noise 0 already has L <= -epsilon no half-space excludes it, and none is tried.
    """
    del samples_needed
    found = build(setting)
    smallest = min(log_remainder_scale(setting.mechanism, setting.epsilon), 0.0)
    return [] if found is None or not found.log_scale < smallest - 1e-3 else [found]


def build(setting: Setting) -> Proposal | None:
    """Return the half-space of the best tangent for a setting, if any."""
    mechanism, epsilon = setting.mechanism, setting.epsilon
    if mechanism.scheme.side_information is not None or not mechanism.strategy.is_toeplitz:
        return None
    log_scale = log_remainder_scale(mechanism, epsilon)
    if log_scale == -math.inf:
        return None
    at_zero = tangent(mechanism, np.zeros(mechanism.scheme.iterations))
    if at_zero is None or not at_zero.constant + epsilon - log_scale > 0:
        return None
    minorant = best_minorant(mechanism, epsilon)
    return None if minorant is None else half_space_proposal(mechanism, epsilon, minorant)
