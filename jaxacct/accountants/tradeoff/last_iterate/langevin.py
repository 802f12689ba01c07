"""Langevin Monte Carlo and the exponential mechanism (arXiv 2403.00278, section 5).

LMC is noisy gradient descent with n = 1 and noise sqrt(2 / eta), so its bounds are those of section 4.1. The
printed proposition 5.1 simplifies constants; these are exact for the strongly convex case.
"""

import math

from jaxacct.accountants.tradeoff.last_iterate.contraction import contraction_factor
from jaxacct.common import validate as _validate


def langevin_gdp(
    *, steps: int | None, stepsize: float, lipschitz: float, strong_convexity: float, smoothness: float
) -> float:
    """Return mu of `X <- X - eta grad F(X) + N(0, 2 eta I)`, F - F' being `lipschitz`-Lipschitz; exact.

    `L sqrt((2 - eta m)/(2 m) (1 - c^t)/(1 + c^t))`, `c = 1 - eta m`, with `steps` t (None for the stationary
    distribution), `stepsize` eta, `strong_convexity` m above 0 and `smoothness` M.

    Raises:
      ValueError: bad arguments, or a step size above 2/(M + m).
    """
    L = _validate.scale("lipschitz", lipschitz)
    m = _validate.scale("strong_convexity", strong_convexity)
    contraction_factor(stepsize, m, smoothness)
    if stepsize > 2 / (smoothness + m):
        raise ValueError(f"stepsize must be at most 2/(M + m) = {2 / (smoothness + m):g}, got {stepsize:g}")
    ratio = 1.0  # (1 - c^t) / (1 + c^t) = tanh(-t ln(c) / 2)
    if steps is not None and stepsize * m < 1:
        t = _validate.positive_integer("steps", steps)
        ratio = math.tanh(-t * math.log1p(-stepsize * m) / 2)
    return L * math.sqrt((2 - stepsize * m) / (2 * m) * ratio)


def exponential_mechanism_gdp(
    *, lipschitz: float, strong_convexity: float | None = None, diameter: float | None = None
) -> float:
    """Return mu of sampling from exp(-F): `L / sqrt(m)`, or `min(2 sqrt(L D), sqrt(pi/2) L D)`.

    The first (F - F' L-Lipschitz, corollary 5.2) is attained; the others (F, F' L-Lipschitz) are for convex F
    on a set of diameter D: corollary 5.4, and the range of F - F' (proofs/shifted_interpolation.md).
    """
    L = _validate.scale("lipschitz", lipschitz)
    if (strong_convexity is None) == (diameter is None):
        raise ValueError("strong_convexity or diameter must be given, and not both")
    if strong_convexity is not None:
        return L / math.sqrt(_validate.scale("strong_convexity", strong_convexity))
    product = L * _validate.scale("diameter", diameter)
    return min(2 * math.sqrt(product), math.sqrt(math.pi / 2) * product)


def projected_langevin_gdp(*, stepsize: float, lipschitz: float, diameter: float, smoothness: float) -> float:
    """Return mu of the stationary distribution of projected LMC, at most `sqrt(4 L D + 2 eta L^2)`.

    eta is at most 2/M, F and F' are L-Lipschitz on a set of diameter D (corollary 5.4). The best window is
    D / (2 eta L) steps of sensitivity 2 eta L, rounded to the better side.
    """
    L = _validate.scale("lipschitz", lipschitz)
    D = _validate.scale("diameter", diameter)
    contraction_factor(stepsize, 0.0, smoothness)
    s = 2 * stepsize * L
    windows = {max(1, math.floor(D / s)), max(1, math.ceil(D / s))}
    return min((s + D / w) * math.sqrt(w) for w in windows) / math.sqrt(2 * stepsize)
