"""Sums of independent lattice variables by Fourier transforms, with a bound on their rounding error.

The caller tilts masses and weights so that the error, which is relative to their 2-norms, is small where the
mean comes from (proofs/composed_losses.md, section 4).
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy

UNIT = 2.0**-52
# Relative perturbation of a product of spectra up to which its error is expanded to first order.
_MAX_PERTURBATION = 0.05


@dataclass(frozen=True, eq=False)
class Variable:
    """One independent variable: masses, (cells,) float64 of at least 0, at the first of `points` places."""

    masses: np.ndarray
    points: int

    @functools.cached_property
    def spectrum(self) -> np.ndarray:
        """Transform, kept for other sums."""
        return np.asarray(scipy.fft.rfft(self.masses, self.points))

    @functools.cached_property
    def size(self) -> float:
        """Sum of the masses."""
        return float(self.masses.sum())

    @functools.cached_property
    def norm(self) -> float:
        """2-norm of the masses."""
        return float(np.linalg.norm(self.masses))


Factors: TypeAlias = list[tuple[Variable, int]]  # independent variables of a sum, and copies of each


def rounding_error(factors: Factors, weights_norm: float, points: int) -> float:
    """Return a bound on the rounding error of `sums([factors], points) @ weights`.

    `weights_norm` is the 2-norm of the weights, `points` a power of two. Infinity where first-order terms do
    not bound the error.
    """
    unit = (7 * math.log2(points) + 32) * UNIT
    log_size, relative, smallest = 0.0, 0.0, math.inf
    for one, count in factors:
        if not count:
            continue
        if one.size == 0:
            return 0.0
        norm = one.norm / one.size
        log_size += count * math.log(one.size)
        relative += count * norm
        smallest = min(smallest, norm)
    if not relative * unit * math.sqrt(points) <= _MAX_PERTURBATION:
        return math.inf
    found = 1.1 * unit * math.exp(min(log_size, 700.0)) * (relative + 3 * smallest) * weights_norm
    return found if math.isfinite(found) else math.inf


def sums(products: list[Factors], points: int) -> np.ndarray:
    """Return the (points,) masses of the sum modulo `points`, added over the products."""
    total = np.zeros(points // 2 + 1, complex)
    for factors in products:
        powers = (repeated(one.spectrum, count) for one, count in factors if count)
        total += functools.reduce(operator.mul, powers, 1.0)
    return np.asarray(scipy.fft.irfft(total, points))


def repeated(base, exponent: int, times: Callable[[Any, Any], Any] = operator.mul) -> Any:
    """Return the product of `exponent` >= 1 copies, by squaring: `exponent - 1` roundings at most."""
    found = None
    while True:
        if exponent & 1:
            found = base if found is None else times(found, base)
        exponent >>= 1
        if not exponent:
            return found
        base = times(base, base)


def tilted(masses: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return `masses e^exponents`, where one may be 0 and the other exceed float64."""
    with np.errstate(divide="ignore"):
        return np.exp(np.log(masses) + exponents)


def log_sum(exponents: np.ndarray, masses: np.ndarray) -> float:
    """Return `ln sum masses e^exponents`; minus infinity where all masses are 0."""
    used = masses != 0  # NaN, too
    if not used.any():
        return -math.inf
    top = float(exponents[used].max())
    total = float((masses[used] * np.exp(exponents[used] - top)).sum())
    return top + math.log(total)
