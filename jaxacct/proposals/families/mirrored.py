"""Replace-one: a lower bound on f(-y), by which replicas have bounded weights.

The loss is `L = ln f(y) - ln f(-y)`, f the likelihood ratio of zero-out. Where f(-y) >= g the term is
positive only where `f(y) > e^epsilon g`, so the weighted terms of replicas are bounded as those of zero-out
are at `epsilon + ln g` (proofs/adjacency.md, section 3).
"""

import dataclasses
import functools
import math

import numpy as np
from scipy.special import ndtri

from jaxacct.likelihood import rounding
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.add_direction.half_space import tangent
from jaxacct.statistics.lines import BudgetLine

_LEFT_OUT = 2.0**-60
"""Probability under P of the outputs where f(-y) may be below the bound."""


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
    log_none = scheme.log_probability_of_none()
    found = tangent(mechanism, np.zeros(scheme.iterations))
    if found is None:
        return log_none, 0.0
    max_count = rounding.fewest_participations(scheme, math.log(_LEFT_OUT / 2))
    signal = max_count * float(mechanism.strategy.gram(found.weights).max())
    noise = -float(ndtri(_LEFT_OUT / 2)) * sigma * found.norm
    log_rest = found.constant - (signal + noise) * (1 + 1e-9) / sigma**2
    return float(np.logaddexp(log_none, log_rest)), _LEFT_OUT


@functools.lru_cache(maxsize=512)
def loss_lines(
    mechanism: Mechanism, delta_v: float, direction: str, replicas: int = 1, push: float = 0.0
) -> tuple[BudgetLine, ...]:
    """Return the budget items of `rounding.loss_lines`, for ln f(y) and ln f(-y) together."""

    def size_of(share):
        return rounding.sizes(mechanism, delta_v, direction, replicas, push, share)

    one = rounding.bounded(mechanism, direction, replicas, size_of)
    other = rounding.bounded(
        mechanism,
        direction,
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
