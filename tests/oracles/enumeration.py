"""Enumeration over all participation vectors, in plain float64 NumPy. Imports no kernel of ours."""

import itertools
import math

import numpy as np
from scipy import special


def is_known(scheme) -> bool:
    return scheme.name in _BY_NAME


def pattern_distribution(scheme) -> dict[tuple[int, ...], float]:
    """Probability of every participation vector, walking each scheme's definition step by step."""
    return _BY_NAME[scheme.name](scheme)


def arrays(distribution) -> tuple[np.ndarray, np.ndarray]:
    """(vectors, (number, n) float64, their probabilities) of `{vector: probability}`."""
    return np.array(list(distribution), float), np.array(list(distribution.values()))


def vectors(scheme) -> tuple[np.ndarray, np.ndarray]:
    """(all participation vectors, (number, n) float64, their probabilities)."""
    return arrays(pattern_distribution(scheme))


def _by_phase(n: int, b: int, p: float):
    """One of b phases, uniformly; in each of its steps a unit joins with probability p."""
    distribution: dict[tuple[int, ...], float] = {}
    for phase in range(b):
        steps = list(range(phase, n, b))
        for joins in itertools.product((0, 1), repeat=len(steps)):
            x = [0] * n
            for step, join in zip(steps, joins, strict=True):
                x[step] = join
            weight = p ** sum(joins) * (1 - p) ** (len(joins) - sum(joins)) / b
            if weight > 0:
                distribution[tuple(x)] = distribution.get(tuple(x), 0.0) + weight
    return distribution


def _renewal(scheme, examples: int):
    """An eligible unit tosses a coin for each example; a participation is of all that show heads."""
    p, n, b = scheme.sampling_probability, scheme.iterations, scheme.min_separation
    coins = [math.comb(examples, j) * p**j * (1 - p) ** (examples - j) for j in range(examples + 1)]
    free = 1 / (1 + (b - 1) * (1 - coins[0]))
    starts = {0: free} | {s: (1 - free) / (b - 1) for s in range(1, b)} if scheme.warm_start else {0: 1.0}
    distribution: dict[tuple[int, ...], float] = {}

    def walk(x, locked_out, weight):
        if weight == 0:
            return
        if len(x) == n:
            distribution[tuple(x)] = distribution.get(tuple(x), 0.0) + weight
        elif locked_out:
            walk([*x, 0], locked_out - 1, weight)
        else:
            for j in range(examples + 1):
                walk([*x, j], b - 1 if j else 0, weight * coins[j])

    for locked_out, weight in starts.items():
        walk([], locked_out, weight)
    return distribution


def _balanced_min_sep(scheme):
    n, b, k = scheme.iterations, scheme.min_separation, math.ceil(scheme.participations)
    kept = scheme.participations / k
    patterns = [
        steps
        for steps in itertools.combinations(range(n), k)
        if all(later - step >= b for step, later in itertools.pairwise(steps))
    ]
    distribution: dict[tuple[int, ...], float] = {}
    for steps in patterns:
        for joins in itertools.product((0, 1), repeat=k):
            weight = kept ** sum(joins) * (1 - kept) ** (k - sum(joins)) / len(patterns)
            taken = {step for step, join in zip(steps, joins, strict=True) if join}
            x = tuple(int(i in taken) for i in range(n))
            if weight > 0:
                distribution[x] = distribution.get(x, 0.0) + weight
    return distribution


def _epochwise_allocation(scheme):
    """Step by step: the hazard of an eligible step by the steps that the epoch has left."""
    n, epoch, b = scheme.iterations, scheme.epoch_steps, scheme.min_separation
    distribution: dict[tuple[int, ...], float] = {}

    def walk(x, weight):
        step = len(x)
        if weight == 0:
            return
        if step == n:
            distribution[tuple(x)] = distribution.get(tuple(x), 0.0) + weight
            return
        place = step % epoch
        eligible = not any(x[step - place :]) and not any(x[max(0, step - b + 1) :])
        left = epoch - place
        most = left if step < epoch else min(left, epoch - b + 1)
        hazard = eligible / most
        walk([*x, 1], weight * hazard)
        walk([*x, 0], weight * (1 - hazard))

    walk([], 1.0)
    return distribution


def _custom(scheme):
    """Step by step: when a unit is next eligible, and how many participations it has left."""
    n, counted = scheme.iterations, isinstance(scheme.join[0], tuple)
    lockout = [scheme.lockout] * n if isinstance(scheme.lockout, int) else scheme.lockout
    distribution: dict[tuple[int, ...], float] = {}

    def walk(x, free, left, weight):
        i = len(x)
        if weight == 0:
            return
        if i == n:
            distribution[tuple(x)] = distribution.get(tuple(x), 0.0) + weight
        elif i != free:
            walk([*x, 0], free, left, weight)
        else:
            p = scheme.join[i][left] if counted else scheme.join[i]
            again, less = i + lockout[i], left - 1 if counted else left
            walk([*x, 1], again, less, weight * p * scheme.keep)
            walk([*x, 0], again, less, weight * p * (1 - scheme.keep))
            walk([*x, 0], again if scheme.turns else i + 1, left, weight * (1 - p))

    for step, chance in enumerate([*scheme.start, 1 - math.fsum(scheme.start)]):
        free = step if step < len(scheme.start) else n
        walk([], free, len(scheme.join[0]) - 1 if counted else 0, max(chance, 0.0))
    return distribution


def sums_of(one, number: int) -> dict[tuple[int, ...], float]:
    """Distribution of the sum of so many independent vectors."""
    distribution = {(0,) * len(next(iter(one))): 1.0}
    for _ in range(number):
        more: dict[tuple[int, ...], float] = {}
        for x, weight in distribution.items():
            for y, other in one.items():
                both = tuple(a + b for a, b in zip(x, y, strict=True))
                more[both] = more.get(both, 0.0) + weight * other
        distribution = more
    return distribution


_BY_NAME = {
    "poisson": lambda scheme: _by_phase(scheme.iterations, 1, scheme.sampling_probability),
    "cyclic-poisson": lambda s: _by_phase(s.iterations, s.cycle_length, s.sampling_probability),
    "balls-in-bins": lambda scheme: _by_phase(scheme.iterations, scheme.cycle_length, 1.0),
    "b-min-sep": lambda scheme: _renewal(scheme, 1),
    "balanced-min-sep": _balanced_min_sep,
    "epochwise-allocation": _epochwise_allocation,
    "custom": _custom,
    "multi-attribution": lambda scheme: _renewal(scheme, scheme.examples_per_user),  # theorem 6.1
    "independent-attribution": lambda scheme: sums_of(_renewal(scheme, 1), scheme.examples_per_user),
}


def strategy_matrix(coefficients, rows: int, columns: int) -> np.ndarray:
    """Dense lower-triangular Toeplitz C, (rows, columns)."""
    dense = np.zeros((rows, columns))
    for j in range(columns):
        for k, value in enumerate(coefficients):
            if j + k < rows:
                dense[j + k, j] = value
    return dense


def log_mixture(distribution, dense, sigma: float, outputs: np.ndarray) -> np.ndarray:
    """ln of the density of `C x + sigma z`, C `dense`, over that of `sigma z` at (batch, rows) outputs."""
    patterns, weights = arrays(distribution)
    means = patterns @ dense.T
    exponents = (outputs @ means.T - (means**2).sum(1) / 2) / sigma**2 + np.log(weights)
    return special.logsumexp(exponents, axis=1)


def log_ratio(scheme, coefficients, sigma: float, outputs: np.ndarray) -> np.ndarray:
    """ln P/Q of (batch, rows) outputs by summing over every participation vector."""
    dense = strategy_matrix(coefficients, outputs.shape[1], scheme.iterations)
    return log_mixture(pattern_distribution(scheme), dense, sigma, outputs)


def allowed_steps(limits):
    """Yield the steps of every pattern of fixed-order batches, from the definition.

    Args:
      limits: with iterations, min_separation, participations and steps_per_epoch, or None.
    """
    epoch = limits.steps_per_epoch
    for number in range(1, min(limits.participations, limits.iterations) + 1):
        for steps in itertools.combinations(range(limits.iterations), number):
            apart = all(later - step >= limits.min_separation for step, later in itertools.pairwise(steps))
            if apart and (not epoch or len({step // epoch for step in steps}) == number):
                yield list(steps)


def max_square_norm(matrix: np.ndarray, limits) -> float:
    """The largest `||C x||^2` over all patterns of fixed-order batches."""
    return max(float(np.square(matrix[:, steps].sum(axis=1)).sum()) for steps in allowed_steps(limits))
