"""Noisy gradient descent over a fixed cycle of batches, last iterate only (arXiv 2403.00278, section 4.2)."""

import math

import numpy as np

from jaxacct.accountants.tradeoff.last_iterate.bounds import GDPBound, least, sqrt_tanh_ratio
from jaxacct.accountants.tradeoff.last_iterate.contraction import check_run, contraction_factor
from jaxacct.accountants.tradeoff.last_iterate.hull import MAX_STEPS, shifted_interpolation_gdp
from jaxacct.common import validate as _validate


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
    if c < 1:
        if cycle == 1:
            candidates["theorem 4.2"] = (S * sqrt_tanh_ratio(c, E), None)
        candidates["theorem 4.5"] = (strongly_convex_mu(E, cycle, c, S), None)
    candidates["theorem 4.5 as c tends to 1"] = (S * math.sqrt(1 + (E - 1) / cycle), None)
    candidates["composition"] = (S * math.sqrt(E), None)
    if diameter is not None and E > 1:
        scaled = diameter / (stepsize * noise_std)
        guess = scaled / S if S else E
        tried = {min(E - 1, max(1, round_(guess))) for round_ in (math.floor, math.ceil)}
        window = min(tried, key=lambda w: convex_mu(w, cycle, S, scaled))
        candidates["theorem 4.6"] = (convex_mu(window, cycle, S, scaled), window)
    if batch_index is not None:
        if cycle * E > MAX_STEPS:
            raise ValueError(
                f"epochs x batches_per_epoch must be at most {MAX_STEPS} with batch_index, got {cycle * E}"
            )
        s = np.zeros(cycle * E)
        s[batch_index - 1 :: cycle] = S
        mu = shifted_interpolation_gdp(np.full(cycle * E, max(c, 1e-30)), s, 1.0).mu
        candidates[f"best shifts for batch {batch_index}"] = (mu, None)
    note = ""
    if c == 1 and diameter is None:
        note = "merely convex without a diameter: the bound grows without limit, if slower than composition's"
    return least(
        candidates,
        exact=tuple(candidates) if E == 1 and batch_index in (None, cycle) and diameter is None else (),
        note=note,
    )


def strongly_convex_mu(epochs: int, batches: int, c: float, sensitivity: float) -> float:
    """Return theorem 4.5: `S sqrt(1 + c^(2l-2) (1-c^2)/(1-c^l)^2 (1-c^(l(E-1)))/(1+c^(l(E-1))))`."""
    if c == 0:
        return sensitivity * (math.sqrt(2.0) if batches == 1 and epochs > 1 else 1.0)
    log, rest = math.log(c), batches * (epochs - 1)
    ratio = math.expm1(2 * log) / math.expm1(batches * log) ** 2
    extra = -math.exp((2 * batches - 2) * log) * ratio * math.tanh(-rest * log / 2)
    return sensitivity * math.sqrt(1 + extra)


def convex_mu(window: int, batches: int, sensitivity: float, scaled_diameter: float) -> float:
    """Return theorem 4.6 for the last `window` epochs: `sqrt(S^2 + (D + S w)^2 / (l w))`."""
    return math.sqrt(sensitivity**2 + (scaled_diameter + sensitivity * window) ** 2 / (batches * window))


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
