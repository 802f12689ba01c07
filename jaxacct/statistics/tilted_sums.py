"""Sums of independent lattice variables by Fourier transforms, with a bound on their rounding error.

The caller tilts masses and weights so that the error, which is relative to their 2-norms, is small where the
mean comes from (proofs/composed_losses.md, section 4).
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy

UNIT = 2.0**-52
# Relative perturbation of a product of spectra up to which its error is expanded to first order.
_MAX_PERTURBATION = 0.05


class Factor(NamedTuple):
    """One independent variable, `count` copies of it."""

    masses: np.ndarray
    """(cells,) float64, at least 0, at the first places of the lattice."""
    count: int


def rounding_error(factors: list[Factor], weights_norm: float, points: int) -> float:
    """Return a bound on the rounding error of `sums(factors, points) @ weights`.

    `weights_norm` is the 2-norm of the weights, `points` a power of two. Infinity where first-order terms do
    not bound the error.
    """
    unit = (7 * math.log2(points) + 32) * UNIT
    used = [factor for factor in factors if factor.count]
    log_size, relative, smallest = 0.0, 0.0, math.inf
    for masses, count in used:
        size = float(masses.sum())
        if size == 0:
            return 0.0
        norm = float(np.linalg.norm(masses)) / size
        log_size += count * math.log(size)
        relative += count * norm
        smallest = min(smallest, norm)
    if not relative * unit * math.sqrt(points) <= _MAX_PERTURBATION:
        return math.inf
    found = 1.1 * unit * math.exp(min(log_size, 700.0)) * (relative + 3 * smallest) * weights_norm
    return found if math.isfinite(found) else math.inf


def sums(products: list[list[Factor]], points: int) -> np.ndarray:
    """Return the (points,) masses of the sum modulo `points`, added over the products."""

    @functools.cache
    def spectrum(i: int, j: int) -> np.ndarray:
        masses = products[i][j].masses
        for k in range(i):
            for m, other in enumerate(products[k]):
                if other.masses is masses:
                    return spectrum(k, m)
        return np.asarray(scipy.fft.rfft(masses, points))

    total = np.zeros(points // 2 + 1, complex)
    for i, factors in enumerate(products):
        product: np.ndarray | None = None
        for j, factor in enumerate(factors):
            if factor.count:
                one = repeated(spectrum(i, j), factor.count)
                product = one if product is None else product * one
        total += 1.0 if product is None else product
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
