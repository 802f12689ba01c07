"""Enumeration over all participation vectors, in plain float64 NumPy. Imports no kernel of ours."""

import itertools
import math

import numpy as np


def is_known(scheme) -> bool:
    return scheme.name in _by_name()


def pattern_distribution(scheme) -> dict[tuple[int, ...], float]:
    """Probability of every participation vector, walking each scheme's definition step by step."""
    return _by_name()[scheme.name](scheme)


def _by_name() -> dict:
    return {
        "poisson": _poisson,
        "cyclic-poisson": _cyclic,
        "balls-in-bins": _balls_in_bins,
        "b-min-sep": _b_min_sep,
        "balanced-min-sep": _balanced_min_sep,
        "epochwise-allocation": _epochwise_allocation,
        "custom": _custom,
        "multi-attribution": _multi_attribution,
        "independent-attribution": _independent_attribution,
    }


def _poisson(scheme):
    p, n = scheme.sampling_probability, scheme.iterations
    distribution = {x: p ** sum(x) * (1 - p) ** (n - sum(x)) for x in itertools.product((0, 1), repeat=n)}
    return {x: w for x, w in distribution.items() if w > 0}


def _cyclic(scheme):
    p, n, b = scheme.sampling_probability, scheme.iterations, scheme.cycle_length
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


def _balls_in_bins(scheme):
    n, b = scheme.iterations, scheme.cycle_length
    distribution: dict[tuple[int, ...], float] = {}
    for phase in range(b):
        x = tuple(int(i % b == phase) for i in range(n))
        distribution[x] = distribution.get(x, 0.0) + 1 / b
    return distribution


def _b_min_sep(scheme):
    p, n, b = scheme.sampling_probability, scheme.iterations, scheme.min_separation
    starts = {0: 1.0}
    if scheme.warm_start:
        free = 1 / (1 + (b - 1) * p)
        starts = {0: free} | {s: (1 - free) / (b - 1) for s in range(1, b)}
    distribution: dict[tuple[int, ...], float] = {}

    def walk(x, locked_out, weight):
        if weight == 0:
            return
        if len(x) == n:
            distribution[tuple(x)] = distribution.get(tuple(x), 0.0) + weight
        elif locked_out:
            walk([*x, 0], locked_out - 1, weight)
        else:
            walk([*x, 1], b - 1, weight * p)
            walk([*x, 0], 0, weight * (1 - p))

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


def _multi_attribution(scheme):
    """Theorem 6.1: as b-min-sep, but participating is with 1 .. k_u of k_u coins."""
    p, n, b, k = (
        scheme.sampling_probability,
        scheme.iterations,
        scheme.min_separation,
        scheme.examples_per_user,
    )
    coins = [math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]
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
            for j in range(k + 1):
                walk([*x, j], b - 1 if j else 0, weight * coins[j])

    for locked_out, weight in starts.items():
        walk([], locked_out, weight)
    return distribution


def _independent_attribution(scheme):
    """Sums over all tuples of the vectors of single examples."""
    one, distribution = _b_min_sep(scheme), {(0,) * scheme.iterations: 1.0}
    for _ in range(scheme.examples_per_user):
        more: dict[tuple[int, ...], float] = {}
        for x, weight in distribution.items():
            for y, other in one.items():
                both = tuple(a + b for a, b in zip(x, y, strict=True))
                more[both] = more.get(both, 0.0) + weight * other
        distribution = more
    return distribution


def strategy_matrix(coefficients, rows: int, columns: int) -> np.ndarray:
    """Dense lower-triangular Toeplitz C, (rows, columns)."""
    dense = np.zeros((rows, columns))
    for j in range(columns):
        for k, value in enumerate(coefficients):
            if j + k < rows:
                dense[j + k, j] = value
    return dense


def log_ratio(scheme, coefficients, sigma: float, outputs: np.ndarray) -> np.ndarray:
    """ln P/Q of (batch, rows) outputs by summing over every participation vector."""
    distribution = pattern_distribution(scheme)
    patterns = np.array(list(distribution), float)
    log_weights = np.log(np.array(list(distribution.values())))
    dense = strategy_matrix(coefficients, outputs.shape[1], scheme.iterations)
    means = patterns @ dense.T
    exponents = (outputs @ means.T - (means**2).sum(1) / 2) / sigma**2 + log_weights
    high = exponents.max(axis=1, keepdims=True)
    return (high + np.log(np.exp(exponents - high).sum(axis=1, keepdims=True)))[:, 0]
