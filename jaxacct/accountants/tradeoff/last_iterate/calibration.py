"""Smallest noise at which a shifted-interpolation bound meets a target."""

import math
from collections.abc import Callable

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import noisy_cgd_gdp, noisy_gd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import noisy_sgd_accountant
from jaxacct.common import validate as _validate
from jaxacct.statistics import roots

METHODS: dict[str, Callable] = {"gd": noisy_gd_gdp, "cgd": noisy_cgd_gdp, "sgd": noisy_sgd_accountant}

_MAX_LOG = 69.0  # of noise_std, whose range is that of `_validate.scale`


def calibrate_noise(
    target_eps: float, delta: float, *, method: str, tolerance: float | None = None, **run
) -> float:
    """Return the smallest noise_std (within `tolerance`, rounded up) with epsilon(delta) <= target_eps.

    Args:
      target_eps: above 0.
      delta: in (0, 1).
      method: "gd", "cgd" or "sgd".
      tolerance: relative; 1e-10 where mu is in closed form, 1e-3 where epsilon is numerical ("sgd").
      **run: arguments of `noisy_gd_gdp`, `noisy_cgd_gdp` or `noisy_sgd_accountant` besides noise_std.
    """
    target_eps, delta = _validate.target(target_eps, delta, ("target_eps", "delta"), above_0=True)
    _validate.one_of("method", method, tuple(METHODS))
    if tolerance is not None and not 1e-12 <= _validate.positive_number("tolerance", tolerance) <= 1:
        raise ValueError(f"tolerance must be in [1e-12, 1], got {tolerance!r}")
    if "noise_std" in run:
        raise ValueError("noise_std must not be given: it is what calibrate_noise finds")
    bound = METHODS[method]
    limit = gdp_mu(target_eps, delta)
    tolerance = (1e-3 if method == "sgd" else 1e-10) if tolerance is None else tolerance

    def found(log_std: float):
        return bound(noise_std=math.exp(log_std), **run)

    if method != "sgd":  # every mu is that of noise 1 over the noise
        log_std = math.log(max(bound(noise_std=1.0, **run).mu, 1e-300) / limit)
        return _std(max(log_std, -_MAX_LOG) + tolerance, target_eps)

    def is_enough(log_std: float) -> bool:
        # A bound that is far worse in the limit is not evaluated: a composition takes seconds.
        pairs = found(log_std).by_limit()
        return any(one.delta(target_eps) <= delta for mu, one in pairs if mu <= 1.2 * pairs[0][0])

    # The central limit theorem gives a start within a few per cent of the result.
    start = _least(lambda log_std: found(log_std).by_limit()[0][0] <= limit, 0.0, 1.0, 0.01)
    start = min(start, _MAX_LOG)
    return _std(_least(is_enough, start, 0.03, tolerance), target_eps)


def _least(is_enough: Callable[[float], bool], start: float, step: float, tolerance: float) -> float:
    """Return the smallest x with `is_enough(x)`, rounded up; the search begins at `start`."""
    return roots.turn(is_enough, start, step, -_MAX_LOG, _MAX_LOG, absolute=tolerance)[1]


def _std(log_std: float, target: float) -> float:
    """Return the noise; ValueError where it is beyond the range of `_validate.scale`."""
    if log_std > _MAX_LOG:
        most = math.exp(_MAX_LOG)
        raise ValueError(
            f"target_eps must be one that noise_std of at most {most:.3g} reaches, got {target:g}"
        )
    return math.exp(log_std)


def composition_gdp(sensitivity: float, steps: int) -> float:
    """Return the baseline `S sqrt(steps)`: valid without any convexity, for every iterate released."""
    return _validate.scale_or_zero("sensitivity", sensitivity) * math.sqrt(
        _validate.positive_integer("steps", steps)
    )
