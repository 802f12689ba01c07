"""The add direction: exactly zero where it is zero, one resampled coordinate elsewhere (PROPOSALS.md).

`f = P/Q` never falls below `P(x = 0)`, so `H(Q, P) = 0` for `epsilon >= -ln P(x = 0)`. Otherwise Jensen
gives `ln f >= l(y) = <C mu, y> / sigma^2 - E|Cx|^2 / 2 sigma^2`, `mu = E x`: only outputs in a half-space
count, and only the coordinate along `C mu` need be drawn from another law than the noise itself.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from jaxacct import randomness, scores
from jaxacct.mechanism import Mechanism
from jaxacct.privacy_loss import loss_of_scores
from jaxacct.proposals import Draws, Proposal
from jaxacct.schemes import BallsInBins, BMinSep, CyclicPoisson, Poisson, Scheme

_CELLS = 2048
# Probability below the drawn cells, as a share of M: what lies there is added to the mean term instead.
_UNDRAWN = 1e-7


def log_probability_of_none(scheme: Scheme) -> float:
    """Exact `ln P(x = 0)`, -inf where every example takes part for certain."""
    n = scheme.iterations
    if isinstance(scheme, Poisson):
        return _log_power(scheme.sampling_probability, n)
    if isinstance(scheme, BMinSep):
        b = scheme.min_separation
        if not scheme.warm_start:
            return _log_power(scheme.sampling_probability, n)
        steps = np.maximum(0, n - np.arange(b))  # left when an example that starts barred is released
        return _log_mean_power(scheme.sampling_probability, steps, scheme.start_log_weights())
    b = scheme.cycle_length
    rounds = np.maximum(0, -(-(n - np.arange(b)) // b))
    p = scheme.sampling_probability if isinstance(scheme, CyclicPoisson) else 1.0
    assert isinstance(scheme, (CyclicPoisson, BallsInBins))
    return _log_mean_power(p, rounds, np.full(b, -math.log(b)))


def _log_power(p: float, n: int) -> float:
    if n == 0:
        return 0.0
    return n * math.log1p(-p) if p < 1 else -math.inf


def _log_mean_power(p: float, exponents, log_weights) -> float:
    terms = np.array([_log_power(p, int(k)) for k in exponents]) + log_weights
    return float(special.logsumexp(terms))


def add_candidates(mechanism: Mechanism, epsilon: float) -> list[Proposal]:
    """Proposals for the add direction besides plain sampling, at `epsilon` (natural log)."""
    if epsilon >= -log_probability_of_none(mechanism.scheme):
        # Scale zero: nothing is ever drawn.
        return [Proposal("exactly zero", "add", mechanism, -math.inf, _draw_half_space)]
    tilted = half_space(mechanism, epsilon)
    return [tilted] if tilted is not None else []


def half_space(mechanism: Mechanism, epsilon: float) -> Proposal | None:
    """Draw the coordinate t along `C mu` from cells in proportion to a bound on `phi(t) (1 - e^{eps + l})_+`.

    The drawn density r is constant on each cell and known exactly, so the weight is `phi(t) / r(t)`, and
    `phi(t) (1 - e^{eps + l(t)})_+ / r(t)` is at most the sum of cell bounds, the scale. None where the
    half-space has no probability that float64 can hold.
    """
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    mean = scheme.participation_probabilities()
    pull = _signal(mechanism, mean)
    norm = math.sqrt(float(mean @ pull))
    slope = norm / sigma
    # Columns of one example's participations are disjoint: |Cx|^2 is their number.
    edge = (mean.sum() / (2 * sigma**2) - epsilon) / slope
    low = min(edge, 0.0) - 12.0
    cells = np.linspace(low, edge, _CELLS + 1)
    left, right = cells[:-1], cells[1:]
    # On a cell phi is largest at the end nearer 0 and (1 - e^..) at the left end.
    nearest = np.where(right < 0, right, np.maximum(left, 0.0))
    with np.errstate(divide="ignore"):
        log_bound = (
            -(nearest**2) / 2
            - math.log(2 * math.pi) / 2
            + np.log(-np.expm1(slope * (left - edge)))
            + np.log(right - left)
        )
    log_scale = float(special.logsumexp(log_bound))
    undrawn = math.exp(min(0.0, special.log_ndtr(low) - log_scale)) if math.isfinite(log_scale) else 1.0
    if not math.isfinite(log_scale) or undrawn > _UNDRAWN:
        return None
    law = np.exp(log_bound - log_scale)
    cumulative = np.cumsum(law)[:-1]
    tables = {
        "thresholds": jnp.asarray(np.minimum(np.round(cumulative * 2.0**32), 2.0**32 - 1), jnp.uint32),
        "left": jnp.asarray(left, jnp.float32),
        "width": jnp.float32(cells[1] - cells[0]),
        "log_density": jnp.asarray(
            np.maximum(log_bound - log_scale - np.log(right - left), -1e30), jnp.float32
        ),
        "mean": jnp.asarray(mean, jnp.float32),
        "pull": jnp.asarray(pull / norm, jnp.float32),
        "norm": jnp.float32(norm),
    }
    return Proposal(
        name="half-space",
        direction="add",
        mechanism=mechanism,
        log_scale=log_scale,
        draw_block=_draw_half_space,
        tables=tables,
        relative_error=1e-4,  # of weights and of t in float32
        total_variation=undrawn + _CELLS * 2.0**-32,
    )


def _signal(mechanism: Mechanism, mean: np.ndarray) -> np.ndarray:
    """`C^T C mu` on the extended horizon in float64."""
    c = mechanism.strategy.array
    autocorrelation = np.correlate(c, c, "full")
    full = np.convolve(mean, autocorrelation)
    return full[c.size - 1 : c.size - 1 + mean.size]


def _draw_half_space(key, scheme, strategy, sigma, tables, dtype) -> Draws:
    noise_key, cell_key, place_key = jax.random.split(key, 3)
    size = randomness.BLOCK_SIZE
    noise = scores.noise_scores(noise_key, strategy, scheme.iterations, size, dtype)
    bits = jax.random.bits(cell_key, (size,), jnp.uint32)
    cell = jnp.searchsorted(tables["thresholds"], bits, side="right")
    place = randomness.uniform_32(place_key, (size,), dtype)
    t = tables["left"][cell] + tables["width"] * place
    along = noise @ tables["mean"] / tables["norm"]
    moved = noise + (t - along)[:, None] * tables["pull"]
    loss = loss_of_scores(scheme, jnp.asarray(sigma, dtype) * moved, sigma)
    log_weight = -(t**2) / 2 - math.log(2 * math.pi) / 2 - tables["log_density"][cell]
    return Draws(loss, log_weight)
