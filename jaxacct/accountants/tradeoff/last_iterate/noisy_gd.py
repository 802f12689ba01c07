"""Noisy gradient descent with full batches, last iterate only (arXiv 2403.00278, section 4.1)."""

import math

import numpy as np

from jaxacct.accountants.tradeoff.last_iterate.bounds import GDPBound, least, sqrt_tanh_ratio
from jaxacct.accountants.tradeoff.last_iterate.contraction import check_run, contraction_factor, stepsizes
from jaxacct.accountants.tradeoff.last_iterate.hull import shifted_interpolation_gdp
from jaxacct.common import validate as _validate

_UNCONSTRAINED = "merely convex without a diameter: no bound converges, composition is all there is"


def noisy_gd_gdp(
    *,
    steps: int,
    stepsize,
    noise_std: float,
    grad_sensitivity: float,
    num_examples: int,
    strong_convexity: float = 0.0,
    smoothness: float,
    diameter: float | None = None,
) -> GDPBound:
    """Return the smallest valid mu of `X <- Proj(X - eta (mean gradient + noise_std N(0, I)))`, t times.

    Args:
      steps: t.
      stepsize: eta, one number or one a step.
      noise_std: per coordinate, on the mean gradient.
      grad_sensitivity: L, the largest distance of two per-example gradients at one point (twice the clip
        norm).
      num_examples: n, in both data sets.
      strong_convexity: m of every example's loss, 0 for merely convex.
      smoothness: M of every example's loss.
      diameter: of the constraint set, None without one.

    Raises:
      ValueError: bad arguments, or a step size at which the step is no contraction.
    """
    t = _validate.positive_integer("steps", steps)
    check_run(
        noise_std=noise_std, grad_sensitivity=grad_sensitivity, num_examples=num_examples, diameter=diameter
    )
    schedule = stepsizes(stepsize, t)
    S = grad_sensitivity / (num_examples * noise_std)
    if schedule is not None:
        return _scheduled(schedule, S, noise_std, strong_convexity, smoothness, diameter)
    c = contraction_factor(stepsize, strong_convexity, smoothness)
    candidates: dict[str, tuple[float, int | None]] = {}
    attained = ()
    if c < 1:
        candidates["theorem 4.2"] = (S * sqrt_tanh_ratio(c, t), None)
        if diameter is None and stepsize <= 2 / (smoothness + strong_convexity):
            attained = ("theorem 4.2",)
    candidates["composition"] = (S * math.sqrt(t), None)
    if diameter is not None:
        scaled = diameter / (stepsize * noise_std)  # in units of one step's noise
        candidates["theorem 4.3"] = _best_window(
            lambda w: convex_window_mu(w, S, scaled), t, scaled / S if S else t
        )
        if c < 1:
            candidates["strongly convex with diameter"] = _best_window(
                lambda w: contracting_window_mu(w, S, scaled, c), t, None
            )
    if t == 1 and diameter is None:
        attained = tuple(
            candidates
        )  # one Gaussian mechanism; a projection or a small set may lose some of it
    note = _UNCONSTRAINED if c == 1 and diameter is None else ""
    return least(candidates, exact=attained, note=note)


def convex_window_mu(window: int, sensitivity: float, scaled_diameter: float) -> float:
    """Return theorem C.7: `(S + D/w) sqrt(w)`, from a gap of D that is closed over the last w steps."""
    return (sensitivity + scaled_diameter / window) * math.sqrt(window)


def contracting_window_mu(window: int, sensitivity: float, scaled_diameter: float, c: float) -> float:
    """Return the same for c < 1 (our derivation): `[c^w D + S (1-c^w)/(1-c)] sqrt((1-c^2)/(1-c^(2w)))`."""
    if c == 0:
        return sensitivity
    decay = c**window
    lead = decay * scaled_diameter + sensitivity * -math.expm1(window * math.log(c)) / (1 - c)
    return lead * math.sqrt((1 - c * c) / -math.expm1(2 * window * math.log(c)))


def _best_window(mu, steps: int, guess: float | None) -> tuple[float, int]:
    """Return the best window found, 1..steps. Every window is valid; a better one would only be tighter."""
    if guess is not None:
        tried = {min(steps, max(1, round_(guess))) for round_ in (math.floor, math.ceil)}
    else:
        tried = {int(w) for w in np.unique(np.geomspace(1, steps, 200).astype(int))}
        best = min(tried, key=mu)
        near = np.linspace(max(1, best - best // 20 - 2), min(steps, best + best // 20 + 2), 400)
        tried |= {int(w) for w in np.unique(near.astype(int))}
    best = min(tried, key=mu)
    return mu(best), best


def _scheduled(schedule, S, noise_std, strong_convexity, smoothness, diameter) -> GDPBound:
    c = np.array([contraction_factor(float(eta), strong_convexity, smoothness) for eta in schedule])
    c = np.maximum(c, 1e-30)  # a larger Lipschitz constant is one, too
    t = len(schedule)
    noise, s = schedule * noise_std, schedule * noise_std * S
    candidates: dict[str, tuple[float, int | None]] = {
        "shifted interpolation, best shifts": (shifted_interpolation_gdp(c, s, noise).mu, None),
        "composition": (S * math.sqrt(t), None),
    }
    if diameter is not None:
        windows = {int(w) for w in np.unique(np.geomspace(1, t, 60).astype(int))}
        pairs = [
            (shifted_interpolation_gdp(c[-w:], s[-w:], noise[-w:], float(diameter)).mu, w) for w in windows
        ]
        candidates["shifted interpolation from the diameter"] = min(pairs)
    note = _UNCONSTRAINED if c.max() == 1 and diameter is None else ""
    return least(candidates, note=note)
