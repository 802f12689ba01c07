"""Earlier Renyi bounds for noisy gradient descent (Ye and Shokri, 2022)."""


def ye_shokri_cyclic_rho(
    *, epochs: int, batches_per_epoch: int, contraction: float, batch_sensitivity: float
) -> float:
    """Return rho of the earlier bound for noisy cyclic gradient descent (Ye and Shokri 2022, theorem 3.3).

    `(S_b^2 / 2) (1 + c^(l-2) (1-c^2) / (1-c^l)^2 (1 - c^(l (E-1))))`, printed for comparison.
    """
    c, cycle, E = contraction, batches_per_epoch, epochs
    extra = c ** (cycle - 2) * (1 - c * c) / (1 - c**cycle) ** 2 * (1 - c ** (cycle * (E - 1)))
    return batch_sensitivity**2 / 2 * (1 + extra)


def ye_shokri_full_rho(*, steps: int, contraction: float, slower: float, sensitivity: float) -> float:
    """Return rho of the bound of figure 1 (theorem D.6): `S^2 (1+c)/(1-c) (1 - slower^t)`."""
    return sensitivity**2 * (1 + contraction) / (1 - contraction) * (1 - slower**steps)
