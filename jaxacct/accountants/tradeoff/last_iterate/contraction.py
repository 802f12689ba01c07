"""Conditions under which a gradient step is a contraction, shared by every bound of arXiv 2403.00278."""

from jaxacct.common import validate as _validate


def contraction_factor(stepsize: float, strong_convexity: float, smoothness: float) -> float:
    """Return the Lipschitz constant c of `x - eta grad f(x)` for every m-strongly convex, M-smooth f.

    `max(|1 - eta m|, |1 - eta M|)`; it must be below 1 for m > 0 (eta < 2/M) and at most 1 for m = 0
    (eta <= 2/M).

    Raises:
      ValueError: no contraction theorem applies at this step size.
    """
    eta = _validate.scale("stepsize", stepsize)
    m = _validate.scale_or_zero("strong_convexity", strong_convexity)
    M = _validate.scale("smoothness", smoothness)
    if m > M:
        raise ValueError(f"strong_convexity must be at most smoothness {M:g}, got {m:g}")
    if m > 0 and not eta * M < 2:
        raise ValueError(
            f"stepsize must be below 2/smoothness = {2 / M:g}, got {eta:g}: no contraction theorem applies"
        )
    if m == 0 and not eta * M <= 2:
        raise ValueError(
            f"stepsize must be at most 2/smoothness = {2 / M:g}, got {eta:g}: no contraction theorem applies"
        )
    if m == 0:
        return 1.0
    c = max(abs(1 - eta * m), abs(1 - eta * M))
    # Rounded up, as 1 - c matters where the step hardly contracts; any larger constant is valid, too.
    return min(1.0, c + 2.0**-52) if c else 0.0


def check_run(*, noise_std, grad_sensitivity, num_examples, diameter) -> None:
    """Check the arguments that all bounds share."""
    _validate.scale("noise_std", noise_std)
    _validate.scale_or_zero("grad_sensitivity", grad_sensitivity)
    _validate.positive_integer("num_examples", num_examples)
    if diameter is not None:
        _validate.scale("diameter", diameter)
