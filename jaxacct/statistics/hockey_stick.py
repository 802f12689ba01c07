"""Hockey-stick terms of privacy losses, and histograms of them.

A direction's divergence is `E_target[g(t)]` with `t = epsilon - L` (remove) or `t = epsilon + L` (add).
For the mechanism alone `g(t) = (1 - e^t)_+`; composed with another mechanism it is that one's privacy
profile (see `jaxacct.accountants.composition`).
"""

import math

import numpy as np

from jaxacct.statistics.direction import Direction


class NonFiniteLossError(ArithmeticError):
    """A privacy loss was NaN or infinite: nothing may be averaged, so the run stops."""


def exponent(loss: np.ndarray, direction: str, epsilon: float) -> np.ndarray:
    """`t` of float64 losses (num,), natural log. Raises NonFiniteLossError."""
    if not np.all(np.isfinite(loss)):
        raise NonFiniteLossError(
            f"{np.sum(~np.isfinite(loss))} of {loss.size} privacy losses are not finite: nothing certified"
        )
    return epsilon - Direction(direction).sign * loss


def hockey_stick(t: np.ndarray) -> np.ndarray:
    """`(1 - e^t)_+` in float64."""
    return -np.expm1(np.minimum(t, 0.0))


def weighted_terms(draws, direction: str, epsilon: float, profile=hockey_stick) -> np.ndarray:
    """`w g(t)` of a proposal's draws, (num,) float64: its mean is the divergence."""
    values = profile(exponent(draws.loss, direction, epsilon))
    # `values > 0` is false for NaN, which would then count as 0, the safest-looking value there is.
    if np.isnan(values).any() or np.isnan(draws.log_weight).any():
        raise NonFiniteLossError("a term or its weight is not a number; nothing was certified")
    with np.errstate(over="ignore", invalid="ignore"):
        weighted = np.where(values > 0, np.exp(draws.log_weight) * values, 0.0)
    if not np.all(np.isfinite(weighted)):
        raise NonFiniteLossError("a weighted term is not finite; nothing was certified")
    return weighted


# Histogram of losses: bins of 1/32, the first and the last open. A loss is reported as its bin's upper
# edge in the remove direction and as its lower edge in the add direction: pessimistic both times.
LOSS_BIN_WIDTH = 1 / 32
_LOSS_BINS = 4096


def bin_losses(loss: np.ndarray) -> np.ndarray:
    """Counts of float64 losses in `len(LOSS_EDGES) - 1` bins, int64."""
    if not np.all(np.isfinite(loss)):
        raise NonFiniteLossError("a privacy loss is not finite; nothing was certified")
    index = np.floor(loss / LOSS_BIN_WIDTH).astype(np.int64) + _LOSS_BINS // 2
    return np.bincount(np.clip(index, 0, _LOSS_BINS - 1), minlength=_LOSS_BINS)


def loss_bounds(direction: str) -> np.ndarray:
    """The pessimistic loss of each bin, (bins,) float64; infinite for the open end it must cover."""
    lower = (np.arange(_LOSS_BINS) - _LOSS_BINS // 2) * LOSS_BIN_WIDTH
    if direction == Direction.REMOVE:
        bounds = lower + LOSS_BIN_WIDTH
        bounds[-1] = np.inf
    else:
        bounds = lower
        bounds[0] = -np.inf
    return bounds


def finite_margin(margin: float) -> float:
    """Return the margin; `NonFiniteLossError` for NaN, infinity or a negative number."""
    if not 0 <= margin < math.inf:
        raise NonFiniteLossError(f"the margin for rounding is {margin!r}: nothing can be certified")
    return margin
