"""Numbers for arXiv 2209.15596 that were computed by other means, beside those of the other files."""

import numpy as np
import pytest

from jaxacct.individual import (
    FourierAccountant,
    SigmaGrid,
    gdp_epsilon,
    rdp_to_epsilon,
    subsampled_gaussian_rdp,
)

E2 = dict(sampling_probability=0.005, half_width=10.0)  # the MNIST setting: sigma 2, 10,000 steps


def test_how_many_steps_fit():
    """At epsilon 0.8 exactly: 478 Gaussian steps, 405 Renyi ones; the tabular setting by Renyi."""
    steps = np.arange(300, 600)
    assert steps[gdp_epsilon(1e-5, np.sqrt(steps) / 100) <= 0.8].max() == 478
    orders = np.linspace(1.5, 60, 4000)
    renyi = np.array([rdp_to_epsilon(orders * k / 2e4, orders, 1e-5)[0] for k in (405, 406)])
    assert renyi[0] <= 0.8 < renyi[1]
    rho = 50 / 10.614652581338738**2 / 2
    assert rdp_to_epsilon(orders * rho, orders, 1e-5)[0] == pytest.approx(2.98221, abs=1e-5)


def test_steps_within_a_budget_by_both_accountants():
    """9924 and 2745 steps by loss distributions, 8390 and 2284 by Renyi, at epsilon 1 and 0.5."""
    accountant = FourierAccountant(sigmas=(2.0,), num_points=2**18, **E2)
    found = accountant.epsilon(1e-5, [[9924], [10_000], [2745], [2790]])
    assert 1 - 2e-4 <= found[0] <= 1 + 3e-4 < found[1] and 0.5 - 2e-4 <= found[2] <= 0.5 + 3e-4 < found[3]
    whole = np.arange(2, 64)
    costs = subsampled_gaussian_rdp(0.005, 2.0, whole)
    for most, epsilon in ((8390, 1.0), (2284, 0.5)):
        assert rdp_to_epsilon(most * costs, whole, 1e-5)[0] <= epsilon * 1.0005
        assert rdp_to_epsilon(1.002 * most * costs, whole, 1e-5)[0] > epsilon
    assert rdp_to_epsilon(10_000 * costs, whole, 1e-6)[0] == pytest.approx(1.240926, rel=1e-3)


@pytest.mark.parametrize(
    ("sigma", "at_zero", "epsilon"),
    [
        (30.0, 0.00665079, 0.047993),
        pytest.param(60.0, 0.00332476, 0.022218, marks=pytest.mark.slow),
        pytest.param(100.0, 0.00199479, 0.012516, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_bucket_still_costs(sigma, at_zero, epsilon):
    """A tiny gradient is charged as `largest` for 10,000 steps; only 0 is free."""
    accountant = FourierAccountant(0.005, (sigma, np.inf), 2.0, 2**19)
    assert accountant.delta(0.0, [[10_000, 0]])[0] == pytest.approx(at_zero, rel=2e-3)
    found = accountant.epsilon(1e-5, [[10_000, 0], [0, 10_000]])
    assert epsilon - 1e-6 <= found[0] <= epsilon + 2e-4 and found[1] == 0


def test_mixed_histories_and_their_buckets():
    """Exact noise, then rounded down to the paper's uniform grid of 100 points in [2, 30]: never less."""
    grid = SigmaGrid(2.0, 30.0, 100, "uniform", zero_bucket=False)
    histories = [
        ({2.0: 2000, 4.0: 3000, 20.0: 5000}, 0.495937, 0.496704),
        ({2.5: 1000, 3.3: 2000, 7.7: 3000, 45.0: 4000}, 0.353100, 0.381881),
        ({2.0 / 0.8: 10_000}, 0.764485, 0.852880),
        ({2.0 / 0.3: 10_000}, 0.251221, 0.257243),
    ]
    for history, exact, bucketed in histories:
        sigmas, counts = tuple(history), list(history.values())
        found = FourierAccountant(sigmas=sigmas, num_points=2**18, **E2).epsilon(1e-5, [counts])[0]
        assert exact - 1e-4 <= found <= exact + 1e-3
        below = tuple(float(s) for s in grid.edges[grid.encode(sigmas)])
        rounded = FourierAccountant(sigmas=below, num_points=2**18, **E2).epsilon(1e-5, [counts])[0]
        assert bucketed - 1e-4 <= rounded <= bucketed + 1e-3 and rounded >= found
