"""The errata page: its references resolve; the entries that belong to no module of ours are shown here."""

import itertools
import math
import re
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
import scipy
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation

from tests.oracles.composed_losses import gaussian

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "jaxacct" / "proofs" / "errata.md"


def entries() -> dict[str, str]:
    """Title and text of each erratum."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_every_entry_names_tests_that_exist():
    for title in entries():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", entries()[title])
        assert named, f"{title}: no line with its test"
        for path, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


def mean_under_q(log_ratio, iterations: int, sigma: float, nodes: int = 12) -> float:
    """`E e^L(y)`, `y ~ N(0, sigma^2 I)`, by Gauss-Hermite quadrature; exact for what it is used to 1e-8."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    total = 0.0
    for chosen in itertools.product(range(nodes), repeat=iterations):
        index = list(chosen)
        total += weights[index].prod() * np.exp(log_ratio(sigma * points[index]))
    return total


def test_jax_privacy_last_columns():
    """The mean of a likelihood ratio under Q is 1; the peer's is the closed form of the errata page."""
    n, p, sigma = 3, 0.3, 0.5
    coefficients = np.full(3, 3**-0.5)
    peer = batch_selection.BMinSepSampling(sampling_prob=p, iterations=n, min_sep=3, warm_start=False)

    def theirs(outputs):
        return sample_generation.compute_privacy_loss(peer, outputs, sigma, coefficients).item()

    u, q = 1 / (6 * sigma**2), 1 - p
    printed = q**3 + p + q * p * np.exp(u) + q**2 * p * np.exp(-u)
    assert printed == pytest.approx(1.128, abs=1e-3)
    assert mean_under_q(theirs, n, sigma) == pytest.approx(printed, abs=1e-6)

    columns = np.tril(np.ones((n, n))) / np.sqrt(3)
    weights = p * q ** np.arange(n)

    def exact(outputs):
        ratios = np.exp((outputs @ columns - (columns**2).sum(axis=0) / 2) / sigma**2)
        return np.log(q**n + weights @ ratios)

    assert mean_under_q(exact, n, sigma) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bands", [1, 2, 3])
def test_jax_privacy_last_columns_of_truncated_batches(bands):
    """Where nothing is truncated that path has the other's number: wrong from three bands on."""
    n, p, sigma = 3, 0.3, 0.5
    coefficients, outputs = np.full(bands, bands**-0.5), np.array([[0.4, -0.2, 0.9]]).T
    options = dict(sampling_prob=p, iterations=n, min_sep=3, warm_start=False)
    peers = [batch_selection.BMinSepSampling(**options, truncated_batch_size=cap) for cap in (None, 5)]
    sides = None, np.zeros((n, 1), int)
    found = sample_generation.compute_privacy_loss
    losses = [found(p, outputs, sigma, coefficients, a).item() for p, a in zip(peers, sides, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    columns = sum(np.eye(n, k=-j) for j in range(bands)) * bands**-0.5
    ratios = np.exp((outputs[:, 0] @ columns - (columns**2).sum(axis=0) / 2) / sigma**2)
    exact = np.log((1 - p) ** n + p * (1 - p) ** np.arange(n) @ ratios)
    assert (losses[0] == pytest.approx(exact, rel=1e-9)) == (bands < 3)


def test_dp_accounting_composes_another_delta():
    """1e5 Gaussians are one: by the composed transform delta is another, by more than a tenth, or negative.

    By the transform of SciPy 1.17 it is below the truth here; 1.18 rounds otherwise.
    """
    sampled = dp.PoissonSampledDpEvent(1.0, dp.GaussianDpEvent(200.0))
    many = dp.pld.PLDAccountant().compose(sampled, 100_000)
    epsilons = np.linspace(11.8577, 13.0, 25)
    mu = math.sqrt(100_000) / 200
    exact = np.array([float(gaussian(epsilon, mu)) for epsilon in epsilons])
    found = np.array([many.get_delta(float(epsilon)) for epsilon in epsilons])
    assert np.any(np.abs(found / exact - 1) > 0.1)
    if tuple(map(int, scipy.__version__.split(".")[:2])) < (1, 18):
        assert np.any(found < 0.9 * exact)
