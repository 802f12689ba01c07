"""Replace-one: a lower bound on f(-y), by which replicas have bounded weights.

The loss is `L = ln f(y) - ln f(-y)`, f the likelihood ratio of zero-out. Where f(-y) >= g the term is
positive only where `f(y) > e^epsilon g`, so the weighted terms of replicas are bounded as those of zero-out
are at `epsilon + ln g` (proofs/adjacency.md, section 3).
"""

import dataclasses
import functools
import math

import jax
import numpy as np
from scipy.special import ndtri

from jaxacct.kernels.programs import compiled
from jaxacct.likelihood import rounding
from jaxacct.likelihood.loss import column_norms
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.lines import BudgetLine

_LEFT_OUT = 2.0**-60  # probability under P of the outputs where f(-y) may be below the bound
_MIN_REMAINDER = 1e-4  # (f - P(x = 0)) / f at the tangent point: below it the difference loses digits
_LOWERED = 1e-8  # relative lowering of the tangent, far above float64 rounding


@compiled(static=1)
def _loss_and_gradient(scheme, excess, norms):
    """Return (ln P/Q, its gradient by the log-ratios `excess`)."""
    return jax.value_and_grad(scheme.log_likelihood_ratios)(excess, norms)


@functools.lru_cache(maxsize=64)
def floor(mechanism: Mechanism) -> tuple[float, float]:
    """Return (ln g, probability under P that f(-y) < g), natural log.

    `ln(f - P(x = 0))` is convex, so at -y it is at least its tangent at 0, `constant - <C m, y> / sigma^2`.
    Given x that product is Gaussian: `<C m, C x>` plus noise of deviation `sigma |C m|`. ValueError where
    losses are bounds, or depend on side information.
    """
    scheme, sigma = mechanism.scheme, mechanism.noise_multiplier
    if mechanism.is_upper_bound or scheme.side_information is not None:
        raise ValueError("a lower bound on the likelihood ratio needs exact losses, without side information")
    log_none, strategy = scheme.log_probability_of_none(), mechanism.strategy
    excess = np.broadcast_to(-strategy.half_square_norms() / sigma**2, scheme.iterations)
    with jax.enable_x64(True):
        loss, gradient = _loss_and_gradient(scheme, excess, column_norms(scheme, strategy) / sigma**2)
        loss, gradient = float(loss), np.asarray(gradient, np.float64)
    remainder = -math.expm1(min(log_none - loss, 0.0))
    if not (math.isfinite(loss) and np.all(np.isfinite(gradient)) and remainder > _MIN_REMAINDER):
        return log_none, 0.0
    weights = np.maximum(gradient, 0.0) / remainder
    constant = loss + math.log(remainder)
    constant -= _LOWERED * (1 + abs(loss) + abs(math.log(remainder)) + 2 * abs(float(weights @ excess)))
    max_count = rounding.fewest_participations(scheme, math.log(_LEFT_OUT / 2))
    products = strategy.gram(weights)
    signal = max_count * float(products.max())
    noise = -float(ndtri(_LEFT_OUT / 2)) * sigma * math.sqrt(max(weights @ products, 0.0))
    log_rest = constant - (signal + noise) * (1 + 1e-9) / sigma**2
    return float(np.logaddexp(log_none, log_rest)), _LEFT_OUT


@functools.lru_cache(maxsize=512)
def loss_lines(mechanism: Mechanism, delta_v: float, replicas: int = 1) -> tuple[BudgetLine, ...]:
    """Return the budget items of `rounding.loss_lines`, for ln f(y) and ln f(-y) together."""

    def size_of(share):
        return rounding.sizes(mechanism, delta_v, replicas, share)

    one = rounding.bounded(mechanism, replicas, size_of)
    other = rounding.bounded(
        mechanism,
        replicas,
        lambda share: _mirrored_size(mechanism, delta_v, size_of(share), share),
    )
    errors = tuple(map(sum, zip(one.errors, other.errors, strict=True)))
    rare = sum(bound.size.beyond + bound.size.above for bound in (one, other))
    return rounding.common_lines(mechanism, errors, rare) + rounding.draw_lines(replicas * one.share)


def _mirrored_size(mechanism: Mechanism, delta_v: float, size: rounding.Size, share: float) -> rounding.Size:
    """Return the size of f(-y), where that of f(y) is given.

    `E_P f(-y) = E e^{-<C x, C x'> / sigma^2}` of independent x and x': summands of x have a mean of p(x) at
    most, and f(-y) is at least P(x = 0), as under Q.
    """
    scheme, spent = mechanism.scheme, rounding.DELTA_SHARE * delta_v
    count = max_count = rounding.max_unit_participations(scheme)
    if share > 0 and not mechanism.is_upper_bound:
        allowed = math.log(spent) + math.log(share) + scheme.sums.log_none
        count = rounding.fewest_participations(scheme, allowed)
    largest, above = count * (size.ratio + 1 / mechanism.noise_multiplier**2), 0.0
    if -math.log(spent) < largest:
        largest, above = -math.log(spent), spent
    beyond = 0.0 if count >= max_count else spent
    return dataclasses.replace(size, count=count, beyond=beyond, largest=largest, above=above)
