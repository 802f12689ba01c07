"""Noisy SGD with fixed-size batches drawn without replacement, last iterate only (arXiv 2403.00278).

Section 4.3: every window and every split of the noise gives a valid bound, and so does plain composition; the
smallest at the requested delta (or epsilon) is returned by name. The central limit theorem only guides the
search.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy

from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff, compose
from jaxacct.accountants.tradeoff.curves.parametric import Best, Subsampled
from jaxacct.accountants.tradeoff.curves.subsampling import subsampled_gdp_clt
from jaxacct.accountants.tradeoff.curves.terms import Terms, last_iterate
from jaxacct.accountants.tradeoff.last_iterate.bounds import ByCurve
from jaxacct.accountants.tradeoff.last_iterate.contraction import check_run, contraction_factor
from jaxacct.common import validate as _validate


@dataclass(frozen=True)
class TradeoffBound(ByCurve):
    """Valid trade-off function, `G(gaussian_mu)` composed with subsampled Gaussians.

    Attributes:
      gaussian_mu: of the Gaussian part.
      subsampled: `(p, mu, count)` of the parts `C_p(G(mu))`.
      theorem: source of the bound.
      window: steps after which the shifting begins, None for composition.
      noise_split: `alpha` of `1/alpha^2 + 1/beta^2 = 1`, None for composition.
    """

    gaussian_mu: float
    subsampled: tuple[tuple[float, float, int], ...]
    theorem: str
    window: int | None = None
    noise_split: float | None = None
    terms: Terms = field(default_factory=lambda: last_iterate("certified"))

    @functools.cached_property
    def curve(self) -> TradeOff:  # pyrefly: ignore[bad-override]
        """Trade-off function; the pessimistic side where it is numerical."""
        parts: list[tuple[TradeOff, int]] = [(Gaussian(self.gaussian_mu), 1)]
        for p, mu, count in self.subsampled:
            parts.append((Gaussian(mu) if p == 1 else Subsampled(Gaussian(mu), p), count))
        return compose(parts)

    def clt_mu(self) -> float:
        """Return the mu of the central limit theorem: an approximation, possibly too small."""
        return float(_clt_mus([self])[0])


@dataclass(frozen=True)
class BestTradeoffBound(ByCurve):
    """Several valid bounds; each query returns the smallest result.

    Attributes:
      bounds: composition first.
      note: a limitation of the result.
    """

    bounds: tuple[TradeoffBound, ...]
    note: str = ""
    terms: Terms = field(default_factory=lambda: last_iterate("certified"))

    def epsilons(self, delta: float) -> dict[str, float]:
        """Return epsilon at delta by theorem."""
        found: dict[str, float] = {}
        for bound in self.bounds:
            found[bound.theorem] = min(found.get(bound.theorem, math.inf), bound.epsilon(delta))
        return found

    def best(self, delta: float) -> TradeoffBound:
        """Return the bound with the smallest epsilon at delta."""
        return min(self.bounds, key=lambda bound: bound.epsilon(delta))

    @property
    def curve(self) -> TradeOff:
        return Best(tuple(bound.curve for bound in self.bounds))

    def by_limit(self) -> list[tuple[float, TradeoffBound]]:
        """Return (mu of the central limit theorem, bound), the smallest first; infinite on overflow."""
        with np.errstate(over="ignore", invalid="ignore"):
            pairs = [(one.clt_mu(), one) for one in self.bounds]
        return sorted(((math.inf if math.isnan(mu) else mu, one) for mu, one in pairs), key=lambda p: p[0])

    def holds(self, epsilon: float, delta: float) -> bool:
        """Return whether a bound shows (epsilon, delta); the likeliest is evaluated first."""
        return any(one.delta(epsilon) <= delta for _, one in self.by_limit())

    def tradeoff(self, alpha):
        """Return the type II error at level alpha, rounded down."""
        return functools.reduce(np.maximum, [bound.tradeoff(alpha) for bound in self.bounds])

    def clt_mu(self) -> float:
        """Return the smallest mu of the central limit theorem: an approximation."""
        return min(bound.clt_mu() for bound in self.bounds)


def noisy_sgd_accountant(
    *,
    steps: int,
    batch_size: int,
    num_examples: int,
    stepsize: float,
    noise_std: float,
    grad_sensitivity: float,
    strong_convexity: float = 0.0,
    smoothness: float,
    diameter: float | None = None,
    window: int | None = None,
    noise_split: float | None = None,
) -> BestTradeoffBound:
    """Return every valid bound for noisy SGD; free parameters that are not given are chosen.

    A batch is a uniform subset of `batch_size` b examples without replacement, independent each step (not
    Poisson). The gap is closed over `window` steps, w = t - tau in 1..t. `noise_split` is alpha > 1; the
    other part of the noise is beta, `1/alpha^2 + 1/beta^2 = 1`. The other arguments are those of
    `noisy_gd_gdp`.

    Raises:
      ValueError: bad arguments, or a step size at which the step is no contraction.
    """
    t = _validate.positive_integer("steps", steps)
    b = _validate.positive_integer("batch_size", batch_size)
    check_run(
        noise_std=noise_std, grad_sensitivity=grad_sensitivity, num_examples=num_examples, diameter=diameter
    )
    if b > num_examples:
        raise ValueError(f"batch_size must be at most num_examples {num_examples}, got {b}")
    if window is not None and _validate.positive_integer("window", window) > t:
        raise ValueError(f"window must be at most steps {t}, got {window}")
    if noise_split is not None and not _validate.scale("noise_split", noise_split) > 1:
        raise ValueError(f"noise_split must be above 1, got {noise_split!r}")
    c = contraction_factor(stepsize, strong_convexity, smoothness)
    p, S = b / num_examples, grad_sensitivity / (b * noise_std)
    bounds = [TradeoffBound(0.0, ((p, S, t),), "composition")]
    if t > 1 and S > 0:
        if c < 1:
            make = functools.partial(contracting_bound, steps=t, c=c, p=p, sensitivity=S)
            bounds.append(_choose(make, t - 1, window, noise_split))
        if diameter is not None:
            scaled = diameter / (stepsize * noise_std)
            make = functools.partial(constrained_bound, p=p, sensitivity=S, scaled_diameter=scaled)
            bounds.append(_choose(make, t, window, noise_split))
    note = (
        "merely convex without a diameter: composition is all there is" if c == 1 and diameter is None else ""
    )
    return BestTradeoffBound(tuple(bounds), note)


def contracting_bound(
    window: int, noise_split: float, *, steps: int, c: float, p: float, sensitivity: float
) -> TradeoffBound:
    """Return theorem 4.9: `G(2 al S (c^(w+1) - c^t)/(1-c)) x C_p(G(2 be S)) x C_p(G(2 S))^w`, w = t - tau.

    Here tau >= 1. At tau = 0 the printed argument of the Gaussian is negative; tau = 1, which is never worse,
    replaces it.
    """
    w = min(window, steps - 1)
    beta = other_split(noise_split)
    # (c^(w+1) - c^t) / (1 - c), without its cancellation as c tends to 1.
    left = c ** (w + 1) * -math.expm1((steps - w - 1) * math.log(c)) / (1 - c) if c > 0 else 0.0
    if left <= 0:
        noise_split, beta = math.inf, 1.0  # no gap is left: all noise goes to the last step
    mu = 0.0 if left <= 0 else 2 * noise_split * sensitivity * left
    parts = ((p, 2 * beta * sensitivity, 1), (p, 2 * sensitivity, w))
    return TradeoffBound(mu, parts, "theorem 4.9", w, noise_split)


def other_split(noise_split: float) -> float:
    """Return beta of `1/alpha^2 + 1/beta^2 = 1`, alpha above 1; without cancellation near 1."""
    return noise_split / math.sqrt((noise_split - 1) * (noise_split + 1))


def constrained_bound(
    window: int, noise_split: float, *, p: float, sensitivity: float, scaled_diameter: float
) -> TradeoffBound:
    """Return theorem 4.10: `G(al D / sqrt(w)) x C_p(G(2 be S))^w`, D in units of one step's noise."""
    beta = other_split(noise_split)
    mu = noise_split * scaled_diameter / math.sqrt(window)
    return TradeoffBound(mu, ((p, 2 * beta * sensitivity, window),), "theorem 4.10", window, noise_split)


def _choose(make, most: int, window: int | None, noise_split: float | None) -> TradeoffBound:
    """Return the best window and split by the central limit theorem; any are valid."""

    def at(log_w, log_split) -> tuple[int, float]:
        w = window if window is not None else min(most, max(1, round(math.exp(min(log_w, 50.0)))))
        return w, noise_split if noise_split is not None else 1 + math.exp(min(max(log_split, -25.0), 60.0))

    def costs(points) -> list[float]:
        with np.errstate(over="ignore"):
            return _clt_mus([make(*at(*point)) for point in points]).tolist()

    windows = np.linspace(0, math.log(most), 60) if window is None else [0.0]
    splits = np.linspace(-4, 3, 15) if noise_split is None else [0.0]
    grid = list(itertools.product(windows, splits))
    found = min((mu, *at(*point), *point) for mu, point in zip(costs(grid), grid, strict=True))
    best = found[-2:]
    if window is None or noise_split is None:
        with np.errstate(invalid="ignore"):  # of infinities, where the limit's mu overflows
            nearby = scipy.optimize.minimize(lambda x: costs([x])[0], best, method="Nelder-Mead")
        best = min(best, tuple(nearby.x), key=lambda x: costs([x])[0])
    return make(*at(*best))


def _clt_mus(bounds: Sequence[TradeoffBound]) -> np.ndarray:
    """Return `clt_mu` of bounds with equally many parts."""
    squares = np.array([bound.gaussian_mu for bound in bounds], float) ** 2
    parts = np.array([bound.subsampled for bound in bounds], float).reshape(len(bounds), -1, 3)
    for p, mu, count in parts.transpose(1, 2, 0):
        squares = squares + subsampled_gdp_clt(p, count, mu) ** 2
    return np.sqrt(squares)
