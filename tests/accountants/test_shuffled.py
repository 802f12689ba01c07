"""What shuffling is worth: bounds on either side, against quadrature and published figures."""

import numpy as np
import pytest

from jaxacct.accountants import shuffled
from jaxacct.accountants.gaussian import gaussian_delta


@pytest.mark.parametrize(
    ("steps", "sigma", "expected"),
    [(1000, 0.5, (10.0, 10.0, 3.13)), (1000, 0.7, (6.65, 6.53, 0.58)), (1000, 1.0, (4.38, 2.88, 0.14))],
)
def test_epsilons_of_three_samplers(steps, sigma, expected):
    """Of a computation that shares no code with this one; the order of the three always holds."""
    found = shuffled.compare_epsilons(steps, 1, sigma, 1e-5)
    values = found.unamplified, found.shuffled_at_least, found.redrawn_at_most
    assert values == pytest.approx(expected, abs=6e-3)
    assert found.redrawn_at_most < found.shuffled_at_least <= found.unamplified


def test_the_lower_bound_is_below_quadrature():
    """Two steps in the plane: mixtures of two Gaussians each, by the rectangle rule."""
    sigma, line = 0.8, np.linspace(-7, 9, 1601)
    x, y = np.meshgrid(line, line, indexing="ij")

    def density(mean):
        near, far = (
            np.exp(-((x - mean) ** 2 + y**2) / (2 * sigma**2)),
            np.exp(-((y - mean) ** 2 + x**2) / (2 * sigma**2)),
        )
        return (near + far) / (4 * np.pi * sigma**2)

    for epsilon in (0.5, 1.5):
        terms = np.maximum(density(2.0) - np.exp(epsilon) * density(1.0), 0)
        exact = float(terms.sum() * (line[1] - line[0]) ** 2)
        assert 0.7 * exact < shuffled.shuffled_delta_lower(2, sigma, epsilon) <= exact * (1 + 1e-6)


def test_one_step_is_the_gaussian_mechanism():
    for epsilon in (0.0, 1.0, 3.0):
        exact = gaussian_delta(epsilon, 0.9, 1.0)
        assert exact * (1 - 1e-4) <= shuffled.shuffled_delta_lower(1, 0.9, epsilon) <= exact


def test_noise_and_epsilons_agree():
    noise = shuffled.compare_noise_multipliers(200, 1, 4.0, 1e-5)
    assert noise.redrawn_at_most < noise.shuffled_at_least < noise.unamplified
    at_least = shuffled.compare_epsilons(200, 1, noise.shuffled_at_least, 1e-5)
    assert at_least.shuffled_at_least == pytest.approx(4.0, rel=2e-3)
    at_most = shuffled.compare_epsilons(200, 1, noise.redrawn_at_most, 1e-5)
    assert at_most.redrawn_at_most <= 4.0 * (1 + 1e-3)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 1.0, 1e-5), "steps"),
        ((9, 0, 1.0, 1e-5), "epochs"),
        ((9, 1, -1.0, 1e-5), "noise"),
        ((9, 1, 1.0, 2.0), "delta"),
    ],
)
def test_bad_input(arguments, name):
    with pytest.raises(ValueError, match=name):
        shuffled.compare_epsilons(*arguments)
