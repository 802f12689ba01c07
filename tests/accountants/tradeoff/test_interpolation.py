"""Shifted interpolation: the paper's numbers, exact processes, best shifts by another solver, conditions."""

import math

import numpy as np
import pytest
from scipy import optimize, special

from jaxacct.accountants.tradeoff import (
    calibrate_noise,
    composition_gdp,
    contraction_factor,
    exponential_mechanism_gdp,
    gdp_epsilon,
    langevin_gdp,
    noisy_cgd_gdp,
    noisy_cgd_gdp_lower_bound,
    noisy_gd_gdp,
    projected_langevin_gdp,
    rdp_to_epsilon,
    shifted_interpolation_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import convex_mu, window_mu
from jaxacct.accountants.tradeoff.last_iterate.renyi import METHODS
from tests.oracles.constrained_lower_bound import constrained_gdp_lower_bound
from tests.oracles.earlier_renyi import ye_shokri_cyclic_rho, ye_shokri_full_rho

FIGURE_1 = dict(
    stepsize=0.05, noise_std=1.0, grad_sensitivity=1.0, num_examples=10, strong_convexity=1.0, smoothness=10.0
)
MNIST = dict(batches_per_epoch=40, batch_size=1500, stepsize=0.05, noise_std=0.01)
MNIST |= dict(grad_sensitivity=10.0, smoothness=32.5)


def gd(c, t, S=0.1, **change):
    """Noisy gradient descent with this contraction and sensitivity."""
    run = dict(stepsize=1 - c, grad_sensitivity=S, noise_std=1.0, num_examples=1, strong_convexity=1.0)
    return noisy_gd_gdp(steps=t, smoothness=1.0, **run | change)


def exact_mu(contractions, shifts, noise):
    """Of the linear processes `x <- c x + s + noise`, which attain the bound when c and s are constant."""
    mean = variance = 0.0
    for c, s, z in zip(contractions, shifts, np.broadcast_to(noise, len(contractions)), strict=True):
        mean, variance = c * mean + s, c * c * variance + z * z
    return mean / math.sqrt(variance)


def test_noisy_gd_is_attained():
    assert gd(0.99, 100).mu == pytest.approx(0.961, abs=5e-4)
    bound = noisy_gd_gdp(steps=160, **FIGURE_1)
    assert bound.mu == pytest.approx(0.62432948600, rel=1e-10)
    assert bound.exact and bound.terms.kind == "exact" and bound.theorem == "theorem 4.2"
    assert exact_mu([0.95] * 160, [0.05 * 0.1] * 160, 0.05) == pytest.approx(bound.mu, rel=1e-12)
    assert gd(0.95, 1).mu == pytest.approx(0.1, rel=1e-14)
    assert gd(1 - 1e-12, 400).mu == pytest.approx(0.1 * 20, rel=1e-8)
    beyond = noisy_gd_gdp(steps=160, **FIGURE_1 | {"stepsize": 0.19})
    assert not beyond.exact and beyond.terms.kind == "certified"


def test_renyi_conversions():
    for rho, balle, asoodeh, mironov in (
        (0.7167, 5.822, 6.056, 6.462),
        (1.1306, 7.610, 7.894, 8.346),
        (1.7470, 9.878, 10.218, 10.716),
    ):
        found = [rdp_to_epsilon(rho, 1e-5, name) for name in ("balle", "asoodeh", "mironov")]
        np.testing.assert_allclose(found, [balle, asoodeh, mironov], atol=1.1e-3)
        assert rdp_to_epsilon(rho, 1e-5) == min(rdp_to_epsilon(rho, 1e-5, name) for name in METHODS)
    rho = ye_shokri_cyclic_rho(epochs=50, batches_per_epoch=40, contraction=0.9999, batch_sensitivity=2 / 3)
    assert rho == pytest.approx(0.7167, abs=5e-5)
    for mu in (0.1, 1.0, 3.0):  # never below the exact value of the Gaussian itself
        assert all(rdp_to_epsilon(mu**2 / 2, 1e-6, name) >= gdp_epsilon(1e-6, mu) for name in METHODS)


def test_convex_cyclic_and_its_printed_crossing():
    run = dict(stepsize=0.04, noise_std=3.0, grad_sensitivity=0.25, smoothness=1.0)
    bound = noisy_cgd_gdp(epochs=500, batches_per_epoch=10, batch_size=1, diameter=1.0, **run)
    assert bound.mu == pytest.approx(math.sqrt(2.5625) / 3, rel=1e-12) and bound.theorem == "theorem 4.6"
    # Table 10 prints 31 as the epochs from which theorem 4.6 beats composition; it is 41 (errata).
    best = min(convex_mu(w, 10, 0.25 / 3, 1 / 0.12) for w in range(1, 400))
    assert next(E for E in range(1, 400) if composition_gdp(0.25 / 3, E) >= best) == 41
    assert composition_gdp(0.25 / 3, 31) < best


def test_hull_gives_the_theorems():
    c, s, t = 0.9, 0.3, 25
    found = shifted_interpolation_gdp([c] * t, s, 1.0)
    k = np.arange(1, t + 1)
    np.testing.assert_allclose(found.shifts, c ** (t - k) * (1 + c) * s / (1 + c**t), rtol=1e-10)
    z = (1 - c**k) * (1 - c ** (t - k)) * s / ((1 + c**t) * (1 - c))
    np.testing.assert_allclose(found.gaps[1:], z, atol=1e-12)
    assert found.gaps[0] == 0 and found.lambdas[-1] == pytest.approx(1)
    convex = shifted_interpolation_gdp([1.0] * 48, 0.07 * 0.3, 0.07 * 8, 1.0)
    assert convex.mu == pytest.approx(0.5175533, abs=6e-8)
    eta = 0.05 / np.sqrt(1 + np.arange(100) / 10)
    assert shifted_interpolation_gdp(1 - eta, eta, 10 * eta).mu == pytest.approx(0.947665, abs=1e-6)
    short = [shifted_interpolation_gdp([0.95] * w, 0.05, 0.5, 0.3).mu for w in range(1, 40)]
    assert min(short) == pytest.approx(0.4459844, abs=6e-8) and int(np.argmin(short)) + 1 == 7
    assert gd(0.95, 400, 1.0, noise_std=10.0, diameter=0.3).mu == pytest.approx(0.4459844, abs=6e-8)
    assert gd(0.95, 400, 1.0, noise_std=10.0, diameter=5.0).theorem == "theorem 4.2"
    long = shifted_interpolation_gdp([0.95] * 20000, 0.1, 1.0)
    assert long.mu == pytest.approx(0.1 * math.sqrt(1.95 / 0.05), rel=1e-9) and long.gaps[-1] < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_hull_against_a_general_solver(seed):
    """The best shifts by SLSQP on the same constraints; the hull is never worse; its shifts are feasible."""
    rng = np.random.default_rng(seed)
    t = 7
    c, s = rng.uniform(0.5, 1.2, t), rng.uniform(0, 1, t) * (rng.random(t) < 0.7)
    noise, gap = rng.uniform(0.5, 2, t), float(rng.uniform(0, 1.5) * (seed % 2))
    found = shifted_interpolation_gdp(c, s, noise, gap)

    def gaps(a):
        z, all_ = gap, []
        for k in range(t):
            z = c[k] * z + s[k] - a[k]
            all_.append(z)
        return np.array(all_)

    np.testing.assert_allclose(gaps(found.shifts), found.gaps[1:], atol=1e-9)
    assert (found.shifts >= -1e-12).all() and (found.gaps >= 0).all() and abs(found.gaps[-1]) < 1e-9
    best = optimize.minimize(
        lambda a: np.sum((a / noise) ** 2),
        np.maximum(found.shifts, 0) + 0.01,
        jac=lambda a: 2 * a / noise**2,
        bounds=[(0, None)] * t,
        constraints=[
            {"type": "ineq", "fun": lambda a: gaps(a)[:-1]},
            {"type": "eq", "fun": lambda a: gaps(a)[-1]},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.mu == pytest.approx(math.sqrt(best.fun), rel=1e-5)
    if gap == 0:  # the bound holds for the process that drifts as far as it can
        assert found.mu >= exact_mu(c, s, noise) - 1e-12


def test_langevin_and_exponential_mechanism():
    run = dict(stepsize=0.1, lipschitz=1.0, strong_convexity=1.0, smoothness=1.0)
    found = [langevin_gdp(steps=t, **run) for t in (1, 10, None)]
    np.testing.assert_allclose(found, [0.2236068, 0.6773378, 0.9746794], rtol=1e-6)
    np.testing.assert_allclose(found[1], exact_mu([0.9] * 10, [0.1] * 10, math.sqrt(0.2)), rtol=1e-12)
    assert langevin_gdp(steps=None, **run | {"stepsize": 1e-9}) == pytest.approx(1.0)
    assert exponential_mechanism_gdp(lipschitz=3.0, strong_convexity=4.0) == 1.5
    assert exponential_mechanism_gdp(lipschitz=2.0, diameter=8.0) == 8.0
    for diameter in (0.01, 0.93, 1.0, 7.3):
        found = projected_langevin_gdp(stepsize=0.1, lipschitz=1.0, diameter=diameter, smoothness=1.0)
        assert found <= math.sqrt(4 * diameter + 0.2) * (1 + 1e-12)


@pytest.mark.parametrize("product", [1e-3, 0.05, 0.5, 2.0])
def test_losses_of_a_bounded_range_are_gaussian(product):
    """No threshold between the densities e^(-L x) and e^(L x) beats mu, and one needs half of it."""
    x = np.linspace(1e-4, 1 - 1e-4, 2001)
    p = np.expm1(-product * x) / math.expm1(-product)
    q = np.expm1(product * x) / math.expm1(product)
    needed = float(np.max(special.ndtri(p) - special.ndtri(q)))
    mu = exponential_mechanism_gdp(lipschitz=2.0, diameter=product / 2)
    assert needed <= mu <= 2.2 * needed and mu < 2 * math.sqrt(product)
    # Every test of two answers with losses in a range of 2 L D, the worst of all.
    top = 2 * product * x
    first = -np.expm1(top - 2 * product) / -math.expm1(-2 * product)
    worst = float(np.max(special.ndtri(first) - special.ndtri(first * np.exp(-top))))
    assert worst <= mu * (1 + 1e-9) and mu <= 1.5 * worst


def test_calibration():
    cyclic, full = dict(epochs=50, strong_convexity=0.002, **MNIST), dict(steps=160, **FIGURE_1)
    for method, bound, run in (("cgd", noisy_cgd_gdp, cyclic), ("gd", noisy_gd_gdp, full)):
        del run["noise_std"]
        noise = calibrate_noise(3.0, 1e-5, method=method, **run)
        assert bound(noise_std=noise, **run).epsilon(1e-5) <= 3.0
        assert bound(noise_std=noise * (1 - 1e-8), **run).epsilon(1e-5) > 3.0
    assert calibrate_noise(2.556836, 1e-5, method="gd", **full) == pytest.approx(1.0, rel=1e-6)


def test_contraction():
    assert contraction_factor(0.05, 1.0, 10.0) == pytest.approx(0.95, rel=1e-15)
    assert contraction_factor(0.19, 1.0, 10.0) == pytest.approx(0.9)
    assert contraction_factor(0.2, 0.0, 10.0) == 1.0 and contraction_factor(1.0, 1.0, 1.0) == 0.0
    assert gd(0.0, 7, 0.3).mu == pytest.approx(0.3)


def walk(steps, drift, noise, width, cells=400):
    """(P(at most 0), P(above 0)) of the projected walk from the middle of `[-width/2, width/2]`.

    Probabilities of cells are carried exactly from their middles: a walk whose place is rounded to the middle
    of its cell at every step. Two end cells of no width hold what is projected.
    """
    from scipy import stats

    edges = np.linspace(-width / 2, width / 2, cells + 1)
    middles = np.concatenate([[-width / 2], (edges[1:] + edges[:-1]) / 2, [width / 2]])
    kernels = {}
    for shift in {drift(step) for step in range(steps)}:
        below = stats.norm.cdf(edges, middles[:, None] + shift, noise)
        kernels[shift] = np.concatenate([below[:, :1], np.diff(below), 1 - below[:, -1:]], axis=1)
    distribution = np.zeros(cells + 2)
    distribution[1 + cells // 2 - 1 : 1 + cells // 2 + 1] = 0.5  # about 0
    for step in range(steps):
        distribution = distribution @ kernels[drift(step)]
    return distribution[: 1 + cells // 2].sum(), distribution[1 + cells // 2 :].sum()


@pytest.mark.parametrize(("n", "cycle"), [(1, 1), (4, 4)])
def test_lower_bound_against_the_exact_walk(n, cycle):
    """The event of the proof, with its real probabilities, shows a mu between the two bounds."""
    run = dict(stepsize=1.0, noise_std=1.0, grad_sensitivity=0.25 * n, num_examples=n, diameter=20.0)
    for steps in (40, 80, 160):
        lower = constrained_gdp_lower_bound(steps=steps, batches_per_epoch=cycle, **run)

        def drift(step):
            return 0.25 * cycle * (step % cycle == cycle - 1)

        none = walk(steps, lambda step: 0.0, 1.0, 20.0)
        down = walk(steps, drift, 1.0, 20.0)[0]
        assert none[1] == pytest.approx(0.5, abs=1e-9)
        seen = -special.ndtri(down)
        if cycle == 1:
            upper = noisy_gd_gdp(steps=steps, smoothness=1.0, **run)
        else:
            epochs_of = dict(epochs=steps // cycle, batches_per_epoch=cycle, batch_size=1)
            upper = noisy_cgd_gdp(**epochs_of, smoothness=1.0, **run)
        assert 0 < lower < seen < upper.mu, steps


def test_figure_1():
    table = {
        10: (0.312866, 1.185331, 1.29292, 1.77533, 1.199370),
        20: (0.429149, 1.681210, 1.82910, 2.44012, 1.760057),
        40: (0.548795, 2.211901, 2.40164, 3.17703, 2.594383),
        80: (0.614270, 2.510470, 2.72329, 3.78484, 3.848610),
        160: (0.624329, 2.556836, 2.77321, 4.06108, 5.759482),
    }
    for t, expected in table.items():
        bound = noisy_gd_gdp(steps=t, **FIGURE_1)
        rho = ye_shokri_full_rho(steps=t, contraction=0.95, slower=0.975, sensitivity=0.1)
        by_renyi = [rdp_to_epsilon(each, 1e-5) for each in (bound.mu**2 / 2, rho)]
        found = (bound.mu, bound.epsilon(1e-5), *by_renyi, gdp_epsilon(1e-5, bound.compared["composition"]))
        np.testing.assert_allclose(found, expected, rtol=6e-6)


def test_convex_with_diameter():
    run = dict(
        stepsize=0.2, noise_std=8.0, grad_sensitivity=0.25, num_examples=1, smoothness=1.0, diameter=1.0
    )
    bound = noisy_gd_gdp(steps=1000, **run)
    assert bound.mu == pytest.approx(5**0.5 / 8, rel=1e-12) and bound.theorem == "theorem 4.3"
    assert noisy_gd_gdp(steps=79, **run).theorem == "composition"
    assert noisy_gd_gdp(steps=81, **run).theorem == "theorem 4.3"
    other = noisy_gd_gdp(steps=1000, **run | {"stepsize": 0.07, "grad_sensitivity": 0.3})
    assert other.window == 48 and other.mu == pytest.approx(0.5175533, abs=6e-8)
    printed = math.sqrt(3 * 0.3 / 0.07 + 0.09 * math.ceil(1 / 0.021)) / 8
    assert printed == pytest.approx(0.5180665, abs=6e-8) and other.mu < printed
    free = noisy_gd_gdp(steps=50, **run | {"diameter": None})
    assert free.theorem == "composition" and "composition is all" in free.note


def test_mnist_cyclic():
    expected = {
        (0.002, 50): (0.992491397, 4.339159),
        (0.002, 100): (1.235338799, 5.601272),
        (0.002, 200): (1.592973651, 7.578945),
        (0.004, 50): (0.988858528, 4.320787),
        (0.004, 100): (1.217453916, 5.506060),
        (0.004, 200): (1.506123979, 7.085874),
    }
    for (decay, epochs), (mu, epsilon) in expected.items():
        bound = noisy_cgd_gdp(epochs=epochs, strong_convexity=decay, **MNIST)
        assert bound.mu == pytest.approx(mu, rel=1e-9)
        assert bound.epsilon(1e-5) == pytest.approx(epsilon, rel=2e-7)
        assert noisy_cgd_gdp_lower_bound(epochs=epochs, strong_convexity=decay, **MNIST) <= bound.mu
    found = [gdp_epsilon(1e-5, composition_gdp(2 / 3, epochs)) for epochs in (50, 100, 200)]
    np.testing.assert_allclose(found, [30.506280, 49.883712, 83.830591], rtol=1e-7)
    low = noisy_cgd_gdp_lower_bound(epochs=50, strong_convexity=0.002, **MNIST)
    assert low == pytest.approx(0.7455695504, rel=1e-9)
    s = np.zeros(2000)
    s[39::40] = 2 / 3
    assert low == pytest.approx(exact_mu([0.9999] * 2000, s, 1.0), rel=1e-9)


def test_best_shifts_by_batch():
    run = dict(epochs=50, strong_convexity=0.002, **MNIST)
    for index, mu in {1: 0.7427, 10: 0.7449, 20: 0.7495, 30: 0.7622, 39: 0.8734, 40: 0.9925}.items():
        assert noisy_cgd_gdp(batch_index=index, **run).mu == pytest.approx(mu, abs=6e-5)
    assert noisy_cgd_gdp(**run).compared["theorem 4.5 as c tends to 1"] == pytest.approx(0.9944289, rel=1e-6)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_windows_of_the_closed_forms_are_feasible(window):
    """Theorem 4.6 and the windows of theorem 4.2 are the taut string itself, so no gap is ever negative."""
    cycle, S, D = 5, 0.2, 1.7
    one = [S] + [0.0] * (cycle - 1)
    found = shifted_interpolation_gdp([1.0] * (cycle * window), one * window, 1.0, D).mu
    assert math.hypot(found, S) == pytest.approx(convex_mu(window, cycle, S, D), rel=1e-12)
    for c in (0.5, 0.9, 0.999):
        found = shifted_interpolation_gdp([c] * window, S, 1.0, D).mu
        assert found == pytest.approx(window_mu(window, S, D, c), rel=1e-9)
    found = shifted_interpolation_gdp([1.0] * window, S, 1.0, D).mu
    assert found == pytest.approx(window_mu(window, S, D, 1.0), rel=1e-12)


def test_schedules_go_through_the_hull():
    """Step sizes that fall: above the exact process, below composition; constant ones give theorem 4.2."""
    eta = 0.05 / np.sqrt(1 + np.arange(100) / 10)
    bound = shifted_interpolation_gdp(1 - eta, eta, 10 * eta).mu
    assert exact_mu(1 - eta, eta, 10 * eta) * (1 - 1e-12) <= bound < 1
    flat = shifted_interpolation_gdp(np.full(100, 0.95), 0.05, 0.5).mu
    assert flat == pytest.approx(gd(0.95, 100, 1.0, noise_std=10.0).mu, rel=1e-10)


def test_limits_and_order():
    for t in (1, 2, 10, 1000):
        for c in (1e-9, 0.3, 0.9, 1 - 1e-9):
            assert 0.1 * (1 - 1e-12) <= gd(c, t).mu <= 0.1 * math.sqrt(t) * (1 + 1e-12)
    assert gd(0.9, 5).mu < gd(0.9, 6).mu < gd(0.95, 6).mu
    assert gd(0.9, 10**9).mu == pytest.approx(0.1 * math.sqrt(1.9 / 0.1), rel=1e-12)
    small = noisy_cgd_gdp(epochs=1, strong_convexity=0.002, **MNIST)
    assert small.mu == pytest.approx(2 / 3) and small.exact
    base = dict(epochs=5, strong_convexity=0.002, **MNIST)
    mu = noisy_cgd_gdp(**base).mu
    assert mu < noisy_cgd_gdp(**base | {"epochs": 6}).mu
    assert noisy_cgd_gdp(**base | {"noise_std": 0.02}).mu == pytest.approx(mu / 2)


def test_the_constants_of_the_lower_bound():
    """C.16: with c0 = 1/5, from t = Dn / (eta L) on, c1 = 0.92; theorem 4.3 is tight to a factor of 2.3."""
    eta, n, D = 0.1, 20, 2.0
    for L in (1.0, 3.0):
        for X in (5.0, 20.0, 200.0):
            sigma = math.sqrt(L * D / (eta * n * X))
            first = math.ceil(D * n / (eta * L))
            for steps in (first, 30 * first):
                run = dict(steps=steps, stepsize=eta, noise_std=sigma, grad_sensitivity=L)
                run |= dict(num_examples=n, diameter=D)
                lower = constrained_gdp_lower_bound(**run)
                assert 0.92 * math.sqrt(X) <= lower
                upper = noisy_gd_gdp(smoothness=1.0, **run).mu
                assert lower <= upper * (1 + 1e-12) and upper < 2.3 * lower
    assert constrained_gdp_lower_bound(**run | {"noise_std": 1e3}) == 0.0
