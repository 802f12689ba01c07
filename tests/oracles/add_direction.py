"""Both divergences by quadrature, and the width of a statistical assertion."""

import math

import numpy as np

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.strategies import BandedToeplitz
from tests.oracles import enumeration

FALSE_ALARM = 1e-6  # of every statistical assertion; keys are fixed


def make(scheme, bands, sigma):
    coefficients = 0.8 ** np.arange(bands)
    return Mechanism(scheme, BandedToeplitz(tuple(coefficients / np.linalg.norm(coefficients))), sigma)


def width(mean, num):
    """Bernstein: a mean of `num` terms in [0, 1] is further off than this with probability FALSE_ALARM."""
    log_term = math.log(2 / FALSE_ALARM)
    return math.sqrt(2 * log_term * mean * (1 - mean) / num) + 2 * log_term / (3 * num)


def exact_two_steps(mechanism, epsilon, direction="add"):
    """The divergence of one direction of two steps, by the trapezoid rule over the two scores."""
    scheme, strategy, sigma = mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier
    dense = enumeration.strategy_matrix(strategy.array, strategy.rows(2), 2)
    gram = dense.T @ dense
    (first, _), (across, second) = np.linalg.cholesky(gram)
    grid = np.linspace(-8, 8, 1001)
    u, v = np.meshgrid(grid, grid, indexing="ij")
    noise = (first * u, across * u + second * v)
    halves = np.diag(gram) / 2
    ratio = sum(
        weight
        * np.exp(sum(x * (z / sigma - h / sigma**2) for x, z, h in zip(pattern, noise, halves, strict=True)))
        for pattern, weight in enumeration.pattern_distribution(scheme).items()
    )
    density = np.exp(-(u**2 + v**2) / 2) / (2 * math.pi) * (grid[1] - grid[0]) ** 2
    alpha = math.exp(epsilon)
    terms = 1 - alpha * ratio if direction == "add" else ratio - alpha
    return float(np.sum(density * np.maximum(terms, 0)))
