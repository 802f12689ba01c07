"""Pairs of participation vectors of every registered scheme, at sizes that enumeration cannot do.

Two identities hold for any distribution of single vectors. With A = <C x, C x'> and pairs drawn in proportion
to p(x) p(x') e^(A / sigma^2), Z_2 the normalizer, the mean of A is d ln Z_2 / d(1 / sigma^2); and under the
weights Z_2 e^(-A / sigma^2) each vector has its distribution p again, so its mean participations. A pair that
is lost, moved or drawn too often changes one of them.
"""

import math

import jax
import numpy as np
import pytest
from scipy import signal, stats

from jaxacct import BandedToeplitz, CustomScheme, Mechanism, Toeplitz
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.schemes import SCHEMES
from jaxacct.schemes.protocol.numbers import Numbers
from jaxacct.schemes.replicas.base import log_attractions, log_lift
from tests.schemes.test_table import balanced

FALSE_ALARM, GROUPS = 1e-6, 8
# (steps, steps in which a unit participates once, separation, bands)
SHAPES = {
    "many": (90, 2.0, 1, 1),
    "separated": (120, 30.0, 12, 8),
    "thinned": (60, 7.0, 4, 4),
    "once": (40, 60.0, 4, 4),
    "overlapping": (60, 12.0, 3, 6),
}


def scheme_of(name, steps, cycle, separation):
    kind = SCHEMES[name]
    if name == CustomScheme.name:  # the table of `BalancedMinSep`
        return balanced(steps, separation, math.ceil(steps / cycle))
    given = {"examples_per_user": 2} if "examples_per_user" in kind.options else {}
    takes = {"min_separation": separation} if "separation" in kind.options else {}
    cycle *= 3 if given else 1  # there is less room for users
    sizes = {"dataset_size": 3600, "batch_size": 3600 / cycle}
    return kind.from_numbers(Numbers(steps, separation, **sizes | takes | given))


def mechanism_of(name, shape, attraction=0.5):
    """The mechanism of a shape, with ln Z_2 of about `attraction`; None where it has no pairs."""
    steps, cycle, separation, bands = shape
    scheme = scheme_of(name, steps, cycle, separation)
    strategy = BandedToeplitz.square_root(bands)
    if bands > scheme.min_separation:
        overlapping = Toeplitz(strategy.coefficients)
        try:
            overlapping.check(scheme)
        except ValueError:  # its participations never overlap
            return None
        strategy = overlapping
    if scheme.replicas(Mechanism(scheme, strategy, 1.0)) is None:
        return None
    low, high = -6.0, 6.0  # of ln sigma
    for _ in range(14):
        log_z = log_normalizer(Mechanism(scheme, strategy, math.exp((low + high) / 2)))
        low, high = ((low + high) / 2, high) if log_z > attraction else (low, (low + high) / 2)
    mechanism = Mechanism(scheme, strategy, math.exp(high))
    return mechanism if log_normalizer(mechanism) < 1.1 * attraction else None


def drawn(mechanism, num, key):
    """The sums of two vectors and the first of them, (num, n), and lifts."""
    scheme, module = mechanism.scheme, mechanism.scheme.replicas(mechanism)
    arrays = module.tables(mechanism)
    parts = jax.jit(lambda k: module.draw_with_one(k, scheme, arrays, num))(key)
    return [np.asarray(part, float) for part in parts]


def overlaps(mechanism, x, y):
    """<C x, C y> / sigma^2 without participations `min_separation` apart or more, (num,)."""
    near = log_attractions(mechanism)[-1]
    near = near[: max(1, mechanism.scheme.min_separation)]
    return (x * signal.oaconvolve(y, np.append(near[:0:-1], near)[None], mode="same", axes=1)).sum(axis=1)


def slope(mechanism):
    """d ln Z_2 / d ln(1 / sigma^2)."""
    step, found = 1e-4, []
    for sign in (1, -1):
        sigma = mechanism.noise_multiplier * math.exp(-sign * step / 2)
        found.append(log_normalizer(Mechanism(mechanism.scheme, mechanism.strategy, sigma)))
    return (found[0] - found[1]) / (2 * step)


def assert_means(values, expected, tests):
    """The means of (num, k) values are the expected ones, up to sampling errors and float32's 1e-5."""
    values = np.asarray(values).reshape(len(values), -1)
    deviation = abs(values.mean(axis=0) - expected) - 1e-5 * abs(values).mean(axis=0)
    spread = values.std(axis=0) / math.sqrt(len(values)) + 1e-12
    assert (deviation / spread).max() < stats.norm.isf(FALSE_ALARM / 2 / tests), deviation / spread


def marginals(scheme):
    """Mean participations at each step of the vectors that are drawn."""
    weights = scheme.count_weights() if hasattr(scheme, "count_weights") else np.ones(1)
    return np.arange(1, len(weights) + 1) @ weights * scheme.participation_probabilities()


def check(mechanism, num, key):
    """Both identities, separations and the greatest number of participations."""
    scheme, n = mechanism.scheme, mechanism.scheme.iterations
    sums, first, lifts = drawn(mechanism, num, key)
    others = sums - first
    attraction = overlaps(mechanism, first, others) + lifts * log_lift(mechanism)
    assert_means(attraction, slope(mechanism), 20)
    for vector in (first, others):
        assert vector.min() >= 0 and (vector > 0).sum(axis=1).max() <= scheme.max_participations
        rows, steps = np.nonzero(vector)
        assert (np.diff(steps)[np.diff(rows) == 0] >= scheme.min_separation).all()
    weights = np.exp(log_normalizer(mechanism) - attraction)[:, None]
    edges = np.linspace(0, n, GROUPS + 1).astype(int)[:-1]
    found = np.add.reduceat((first + others) / 2, edges, axis=1)
    expected = np.add.reduceat(marginals(scheme), edges)
    assert_means(weights * np.append(found, np.ones((num, 1)), axis=1), np.append(expected, 1.0), 20)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, "separated")
        for name in ("b-min-sep", "cyclic-poisson", "epochwise-allocation", "multi-attribution")
    ]
    + [("custom", shape) for shape in ("many", "overlapping")],
)
def test_identities_of_pairs(name, shape, key):
    mechanism = mechanism_of(name, SHAPES[shape])
    if mechanism is None:
        assert shape == "overlapping"
        return
    check(mechanism, 10_000, key)


HAVE_REPLICAS = [
    name for name in SCHEMES if name not in ("independent-attribution", "truncated-b-min-sep", "fixed-order")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", HAVE_REPLICAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_identities_at_the_largest_sizes(name, shape, key):
    """Twice the steps, and in the other shapes twice the separation, too, as long as there are tables."""
    found, (steps, cycle, separation, bands) = None, SHAPES[shape]
    while steps <= 1000:
        mechanism = mechanism_of(name, (steps, cycle, separation, bands))
        if mechanism is None:
            break
        found, steps = mechanism, 2 * steps
    if found is None:
        assert shape == "overlapping"
        return
    check(found, 50_000, key)
