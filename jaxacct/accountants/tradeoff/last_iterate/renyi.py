"""From Renyi to approximate differential privacy.

Each conversion of `(alpha, rho alpha)`-RDP for all alpha > 1 is minimised over alpha; the smallest result is
valid.
"""

import math

import numpy as np
import scipy

from jaxacct.common import validate as _validate

METHODS = ("mironov", "bun-steinke", "balle", "asoodeh")


def rdp_to_epsilon(rho: float, delta: float, method: str = "best") -> float:
    """Return epsilon at delta of a mechanism with `(alpha, rho alpha)`-RDP for every alpha > 1 (rho-zCDP).

    Args:
      rho: at least 0.
      delta: in (0, 1).
      method: "mironov" (arXiv 1702.07476, proposition 3), "bun-steinke" (arXiv 1605.02065, proposition 3.5),
        "balle" (arXiv 1905.09982, theorem 20), "asoodeh" (arXiv 2008.06529, lemma 1), or the smallest of all,
        "best".
    """
    rho = _validate.nonnegative_number("rho", rho)
    delta = _validate.open_probability("delta", delta)
    _validate.one_of("method", method, (*METHODS, "best"))
    if rho == 0:
        return 0.0
    if method == "best":
        return min(rdp_to_epsilon(rho, delta, one) for one in METHODS)
    log = math.log(1 / delta)
    if method in ("mironov", "bun-steinke"):  # the same number
        return rho + 2 * math.sqrt(rho * log)

    def balle(a):
        return rho * a + math.log1p(-1 / a) - math.log(a * delta) / (a - 1)

    def asoodeh(a):
        x = rho * a * (a - 1)
        # ln((e^x - 1)/(a delta) + 1), from above: the 1 is kept where it matters.
        top = x + math.log(-math.expm1(-x)) - math.log(a * delta) if x > 0 else -math.inf
        return (top + math.log1p(math.exp(-top)) if top > 0 else math.log1p(math.exp(top))) / (a - 1)

    value = balle if method == "balle" else asoodeh
    # Any alpha is valid: coarse first, then fine around the best.
    grid = [i / 20 for i in range(-160, 241)]
    best = min(grid, key=lambda t: value(1 + math.exp(t)))
    found = scipy.optimize.minimize_scalar(
        lambda t: value(1 + math.exp(t)),
        bounds=(best - 0.1, best + 0.1),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(np.maximum(0.0, np.fmin(found.fun, value(1 + math.exp(best)))))  # NaN where both are
