"""ln P/Q from log-ratios by plain float64 recurrences over steps, for long runs; no kernel of ours."""

import math

import numpy as np


def log_likelihood_ratios(scheme, ratios: np.ndarray, half: float, batch_sizes=None) -> np.ndarray:
    """ln P/Q of (rows, n) log-ratios of one participation, half the squared norm of a column over sigma^2.

    Args:
      batch_sizes: (rows, n) sizes of the others' batches, for truncated b-min-sep.
    """
    ratios = np.asarray(ratios, np.float64)
    if scheme.name in ("cyclic-poisson", "balls-in-bins"):
        p, b = getattr(scheme, "sampling_probability", 1.0), scheme.cycle_length
        steps = _mixed(p, ratios)
        phases = [steps[:, phase::b].sum(axis=1) for phase in range(b)]
        return np.logaddexp.reduce(phases, axis=0) - math.log(b)
    if scheme.name == "truncated-b-min-sep":
        kept = scheme.max_batch_size / (batch_sizes + 1.0)
        truncated = batch_sizes >= scheme.max_batch_size
        both = []
        for if_truncated, whole in ((2 * ratios - 2 * half, ratios), (-ratios - 2 * half, 0.0 * ratios)):
            with np.errstate(divide="ignore"):
                mixture = np.logaddexp(
                    np.log(kept) + if_truncated, np.log(np.where(truncated, 1 - kept, 0.0))
                )
            both.append(_renewal(scheme, np.where(truncated, mixture, whole)))
        return both[0] - both[1]
    if scheme.name == "multi-attribution":
        k, p = scheme.examples_per_user, scheme.sampling_probability
        chances = np.array([math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(1, k + 1)])
        with np.errstate(divide="ignore"):
            terms = [np.log(c) + j * ratios - j * (j - 1) * half for j, c in enumerate(chances, 1)]
        together = np.logaddexp.reduce(terms, axis=0) - math.log(chances.sum())
        return _renewal(scheme, together, chances.sum())
    return _renewal(scheme, ratios)


def _mixed(p: float, ratios):
    """ln (1 - p + p e^r)."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-p), np.log(p) + ratios)


def _renewal(scheme, gains: np.ndarray, p: float | None = None) -> np.ndarray:
    """`f_i = (1 - p) f_{i+1} + p e^{gain_i} f_{i+b}`; a warm start mixes f over the first b steps."""
    p = scheme.sampling_probability if p is None else p
    b = 1 if scheme.name == "poisson" else scheme.min_separation
    rows, n = gains.shape
    values = np.zeros((n + b + 1, rows))
    with np.errstate(divide="ignore"):
        log_q, log_p = np.log1p(-p), np.log(p)
    for step in range(n - 1, -1, -1):
        values[step] = np.logaddexp(log_q + values[step + 1], log_p + gains[:, step] + values[step + b])
    if not getattr(scheme, "warm_start", False) or b == 1:
        return values[0]
    free = 1 / (1 + (b - 1) * p)
    later = np.logaddexp.reduce(values[1:b], axis=0) + math.log((1 - free) / (b - 1))
    return np.logaddexp(math.log(free) + values[0], later)


def of_two_examples(scheme, ratios: np.ndarray, products) -> np.ndarray:
    """ln P/Q of a user's two independent examples from a cold start, by the lockouts left of both.

    Args:
      products: (min_separation,) inner products of columns d steps apart over sigma^2; 0 from there on.
    """
    assert scheme.examples_per_user == 2 and not scheme.warm_start
    ratios, p, b = np.asarray(ratios, np.float64), scheme.sampling_probability, scheme.min_separation
    log_p, log_q = math.log(p), math.log1p(-p)
    values = np.zeros((b, b, len(ratios)))
    left = np.maximum(np.arange(b) - 1, 0)  # of a lockout after a step
    for step in range(ratios.shape[1] - 1, -1, -1):
        after, r = values, ratios[:, step]
        values = after[left][:, left].copy()  # where both are locked out
        for other in range(1, b):
            # One is free, the other participated b - other steps ago.
            joins = log_p + r - products[b - other] + after[b - 1, other - 1]
            values[0, other] = values[other, 0] = np.logaddexp(log_q + after[0, other - 1], joins)
        one = math.log(2) + log_p + log_q + r + after[b - 1, 0]
        both = 2 * log_p + 2 * r - products[0] + after[b - 1, b - 1]
        values[0, 0] = np.logaddexp(np.logaddexp(2 * log_q + after[0, 0], one), both)
    return values[0, 0]
