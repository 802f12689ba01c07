"""Theorem 3.7 of arXiv 2311.14632 as printed, which is false (proofs/errata.md): no guarantee."""

import math


def paper_theorem_3_7_sigma(
    epsilon: float, delta: float, *, iterations: int, dataset_size: int, clip_norm: float, error_bound: float
) -> float:
    """Return the noise as printed in arXiv 2311.14632, theorem 3.7: **not a guarantee** (proofs/errata.md).

    `sigma_1^2 = 32 T (C1^2 + 2 C^2) ln(1/delta) / (N^2 eps^2)`; `error_bound` is the printed C, at least B
    C2.
    """
    gradient = clip_norm**2 + 2 * error_bound**2
    return math.sqrt(32 * iterations * gradient * -math.log(delta)) / (dataset_size * epsilon)


def paper_theorem_3_7_epsilon(epsilon: float, delta: float) -> float:
    """Return epsilon of the proof's own Renyi bound at the printed noise: **not a guarantee**.

    `sqrt 2 eps + eps^2 / (2 ln 1/delta)`, not eps: the last step of the proof loses a constant.
    """
    return math.sqrt(2) * epsilon + epsilon**2 / (2 * -math.log(delta))
