"""Noisy gradient descent with full batches or a fixed cycle of batches, last iterate only.

Source: arXiv 2403.00278, sections 4.1 and 4.2. A full batch is a cycle of one batch.
"""

import math
from collections.abc import Callable

import numpy as np

from jaxacct.accountants.tradeoff.last_iterate.bounds import GDPBound, least, sqrt_tanh_ratio
from jaxacct.accountants.tradeoff.last_iterate.contraction import check_run, contraction_factor
from jaxacct.accountants.tradeoff.last_iterate.hull import MAX_STEPS, shifted_interpolation_gdp
from jaxacct.common import validate as _validate

_WINDOWS = 2000  # candidates of a search


def noisy_gd_gdp(
    *,
    steps: int,
    stepsize: float,
    noise_std: float,
    grad_sensitivity: float,
    num_examples: int,
    strong_convexity: float = 0.0,
    smoothness: float,
    diameter: float | None = None,
) -> GDPBound:
    """Return the smallest valid mu of `X <- Proj(X - eta (mean gradient + noise_std N(0, I)))`, t times.

    `shifted_interpolation_gdp` has step sizes that vary.

    Args:
      steps: t.
      stepsize: eta.
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
    return noisy_cgd_gdp(
        epochs=_validate.positive_integer("steps", steps),
        batches_per_epoch=1,
        batch_size=_validate.positive_integer("num_examples", num_examples),
        stepsize=stepsize,
        noise_std=noise_std,
        grad_sensitivity=grad_sensitivity,
        strong_convexity=strong_convexity,
        smoothness=smoothness,
        diameter=diameter,
    )


def noisy_cgd_gdp(
    *,
    epochs: int,
    batches_per_epoch: int,
    batch_size: int,
    stepsize: float,
    noise_std: float,
    grad_sensitivity: float,
    strong_convexity: float = 0.0,
    smoothness: float,
    diameter: float | None = None,
    num_examples: int | None = None,
    batch_index: int | None = None,
) -> GDPBound:
    """Return the smallest valid mu of noisy cyclic gradient descent: fixed batches, never shuffled.

    E `epochs` are passes over l batches of `batch_size` b; `num_examples` n = l b may be given to be checked.
    `batch_index`, 1..l, is the place of the protected example's batch in the cycle; None for the worst case,
    the last. It must be fixed independently of the data, and the guarantee holds for examples of that batch.
    The other arguments are those of `noisy_gd_gdp`.

    Raises:
      ValueError: bad arguments, or a step size at which the step is no contraction.
    """
    E = _validate.positive_integer("epochs", epochs)
    cycle = _validate.positive_integer("batches_per_epoch", batches_per_epoch)
    b = _validate.positive_integer("batch_size", batch_size)
    n = cycle * b if num_examples is None else num_examples
    check_run(noise_std=noise_std, grad_sensitivity=grad_sensitivity, num_examples=n, diameter=diameter)
    if n != cycle * b:
        raise ValueError(f"batch_size must be num_examples / {cycle} batches, got {b} of {n}")
    if batch_index is not None and _validate.positive_integer("batch_index", batch_index) > cycle:
        raise ValueError(f"batch_index must be at most batches_per_epoch {cycle}, got {batch_index}")
    c = contraction_factor(stepsize, strong_convexity, smoothness)
    S = grad_sensitivity / (b * noise_std)
    candidates: dict[str, tuple[float, int | None]] = {}
    if c < 1 and cycle == 1:
        candidates["theorem 4.2"] = (S * sqrt_tanh_ratio(c, E), None)
    elif c < 1:
        candidates["theorem 4.5"] = (strongly_convex_mu(E, cycle, c, S), None)
    if cycle > 1:
        candidates["theorem 4.5 as c tends to 1"] = (S * math.sqrt(1 + (E - 1) / cycle), None)
    candidates["composition"] = (S * math.sqrt(E), None)
    if diameter is not None:
        scaled = diameter / (stepsize * noise_std)  # in units of one step's noise
        guess = scaled / S if S else E
        if cycle == 1:
            name = "theorem 4.3" if c == 1 else "strongly convex with diameter"
            candidates[name] = _best_window(lambda w: window_mu(w, S, scaled, c), E, guess)
        elif E > 1:
            candidates["theorem 4.6"] = _best_window(lambda w: convex_mu(w, cycle, S, scaled), E - 1, guess)
    if batch_index is not None:
        if cycle * E > MAX_STEPS:
            raise ValueError(
                f"epochs x batches_per_epoch must be at most {MAX_STEPS} with batch_index, got {cycle * E}"
            )
        s = np.zeros(cycle * E)
        s[batch_index - 1 :: cycle] = S
        mu = shifted_interpolation_gdp(np.full(cycle * E, max(c, 1e-30)), s, 1.0).mu
        candidates[f"best shifts for batch {batch_index}"] = (mu, None)
    attained: tuple[str, ...] = ()
    if diameter is None and E == 1 and batch_index in (None, cycle):
        attained = tuple(candidates)  # one Gaussian mechanism; a projection may lose some of it
    elif diameter is None and stepsize <= 2 / (smoothness + strong_convexity):
        attained = ("theorem 4.2",)
    note = ""
    if c == 1 and diameter is None:
        of_cycle = "the bound grows without limit, if slower than composition's"
        of_all = "no bound converges, composition is all there is"
        note = f"merely convex without a diameter: {of_cycle if cycle > 1 else of_all}"
    return least(candidates, exact=attained, note=note)


def strongly_convex_mu(epochs: int, batches: int, c: float, sensitivity: float) -> float:
    """Return theorem 4.5: `S sqrt(1 + c^(2l-2) (1-c^2)/(1-c^l)^2 (1-c^(l(E-1)))/(1+c^(l(E-1))))`."""
    if c == 0:
        return sensitivity
    log, rest = math.log(c), batches * (epochs - 1)
    ratio = math.expm1(2 * log) / math.expm1(batches * log) ** 2
    extra = -math.exp((2 * batches - 2) * log) * ratio * math.tanh(-rest * log / 2)
    return sensitivity * math.sqrt(1 + extra)


def window_mu(window: int, sensitivity: float, scaled_diameter: float, c: float) -> float:
    """Return mu from a gap of D that is closed over the last w steps.

    Theorem C.7, `(S + D/w) sqrt(w)`, for c = 1; `[c^w D + S (1-c^w)/(1-c)] sqrt((1-c^2)/(1-c^(2w)))` for
    c < 1 (proofs/shifted_interpolation.md).
    """
    if c == 1:
        return (sensitivity + scaled_diameter / window) * math.sqrt(window)
    if c == 0:
        return sensitivity
    decay = c**window
    lead = decay * scaled_diameter + sensitivity * -math.expm1(window * math.log(c)) / (1 - c)
    return lead * math.sqrt((1 - c * c) / -math.expm1(2 * window * math.log(c)))


def convex_mu(window: int, batches: int, sensitivity: float, scaled_diameter: float) -> float:
    """Return theorem 4.6 for the last `window` epochs: `sqrt(S^2 + (D + S w)^2 / (l w))`."""
    return math.sqrt(sensitivity**2 + (scaled_diameter + sensitivity * window) ** 2 / (batches * window))


def _best_window(mu: Callable[[int], float], most: int, guess: float) -> tuple[float, int]:
    """Return the best (mu, window) found, 1..most. Every window is valid; others could only be tighter."""
    tried = {int(w) for w in np.rint(np.geomspace(1, most, _WINDOWS))}
    tried |= {int(min(most, max(1, near))) for near in (np.floor(guess), np.ceil(guess))}
    best = min(sorted(tried), key=mu)
    return mu(best), best


def noisy_cgd_gdp_lower_bound(
    *,
    epochs: int,
    batches_per_epoch: int,
    batch_size: int,
    stepsize: float,
    noise_std: float,
    grad_sensitivity: float,
    strong_convexity: float,
    smoothness: float,
) -> float:
    """Return a lower limit of mu for strongly convex noisy CGD (theorem C.17); quadratics attain it.

    Arguments as of `noisy_cgd_gdp`; strong_convexity is above 0.
    """
    E = _validate.positive_integer("epochs", epochs)
    cycle = _validate.positive_integer("batches_per_epoch", batches_per_epoch)
    b = _validate.positive_integer("batch_size", batch_size)
    check_run(noise_std=noise_std, grad_sensitivity=grad_sensitivity, num_examples=cycle * b, diameter=None)
    m = _validate.scale("strong_convexity", strong_convexity)
    contraction_factor(stepsize, m, smoothness)
    decay = stepsize * m  # 1 - c of the quadratics (m/2)|x|^2
    S = grad_sensitivity / (b * noise_std)
    if decay >= 1:
        return S
    log = math.log1p(-decay)
    ratio = -math.expm1(2 * log) / math.expm1(cycle * log) ** 2
    return S * math.sqrt(ratio * math.tanh(-cycle * E * log / 2))
