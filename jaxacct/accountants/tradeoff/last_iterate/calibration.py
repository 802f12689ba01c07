"""The least noise at which a shifted-interpolation bound meets a target."""

import math
from collections.abc import Callable

from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp, gdp_mu
from jaxacct.accountants.tradeoff.last_iterate.noisy_cgd import noisy_cgd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import noisy_gd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import noisy_sgd_accountant
from jaxacct.common import validate as _validate

METHODS: dict[str, Callable] = {"gd": noisy_gd_gdp, "cgd": noisy_cgd_gdp, "sgd": noisy_sgd_accountant}

_MAX_LOG = 69.0  # of noise_std, whose range is that of `_validate.scale`


def calibrate_noise(
    target_eps: float, delta: float, *, method: str, tolerance: float | None = None, **run
) -> float:
    """The least noise_std (within `tolerance`, from above) with epsilon(delta) <= target_eps.

    Args:
      target_eps: above 0.
      delta: in (0, 1).
      method: "gd", "cgd" or "sgd".
      tolerance: relative; 1e-10 where mu is in closed form, 1e-3 where epsilon is numerical ("sgd").
      run: what `noisy_gd_gdp`, `noisy_cgd_gdp` or `noisy_sgd_accountant` takes besides noise_std.
    """
    _validate.target_epsilon("target_eps", target_eps)
    _validate.open_probability("delta", delta)
    _validate.one_of("method", method, tuple(METHODS))
    if tolerance is not None and not 1e-12 <= _validate.positive_number("tolerance", tolerance) <= 1:
        raise ValueError(f"tolerance must be in [1e-12, 1], was {tolerance!r}")
    if "noise_std" in run:
        raise ValueError("noise_std must not be given: it is what calibrate_noise finds")
    bound = METHODS[method]
    limit = gdp_mu(target_eps, delta)
    tolerance = (1e-3 if method == "sgd" else 1e-10) if tolerance is None else tolerance

    def found(log_std: float):
        return bound(noise_std=math.exp(log_std), **run)

    if method != "sgd":
        return math.exp(_least(lambda log_std: found(log_std).mu <= limit, 0.0, 1.0, tolerance, target_eps))

    def good(log_std: float) -> bool:
        # A bound that is far worse in the limit is not asked: composing is what takes long.
        pairs = found(log_std).by_limit()
        return any(one.delta(target_eps) <= delta for mu, one in pairs if mu <= 1.2 * pairs[0][0])

    # The central limit theorem says where to begin, a few per cent from where it ends.
    start = _least(lambda log_std: found(log_std).by_limit()[0][0] <= limit, 0.0, 1.0, 0.01, target_eps)
    return math.exp(_least(good, start, 0.03, tolerance, target_eps))


def _least(
    good: Callable[[float], bool], start: float, step: float, tolerance: float, target: float
) -> float:
    """The least x with `good(x)`, from above, looked for around `start`; `good` stays True once it is."""
    high, up = start, step
    while not good(high):
        if high >= _MAX_LOG:
            raise ValueError(
                f"target_eps must be one that noise_std of at most {math.exp(_MAX_LOG):.3g} reaches, was "
                f"{target:g}"
            )
        high, up = min(high + up, _MAX_LOG), 2 * up
    low, down = max(high - step, -_MAX_LOG), step
    while good(low):
        if low <= -_MAX_LOG:
            return low
        down *= 2
        high, low = low, max(low - down, -_MAX_LOG)
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def composition_gdp(sensitivity: float, steps: int) -> float:
    """The baseline `S sqrt(steps)`: valid without any convexity, for every iterate released."""
    _validate.scale_or_zero("sensitivity", sensitivity)
    count = _validate.positive_integer("steps", steps)
    return float(compose_gdp([sensitivity])) * math.sqrt(count)
