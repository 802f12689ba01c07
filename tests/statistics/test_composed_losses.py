"""Composed privacy losses: at least the truth, and near it, at every delta (proofs/composed_losses.md)."""

import dataclasses
import fractions
import functools
import math

import mpmath
import numpy as np
import pytest
import scipy

from jaxacct import BandedToeplitz, CalibrationOptions, Mechanism, NotCertifiedError, Poisson, calibrate
from jaxacct.accountants import analytic
from jaxacct.accountants.composition import composed_delta
from jaxacct.accountants.event_pairs import discrete_laplace, laplace
from jaxacct.individual import subsampled_gaussian_delta
from jaxacct.statistics import composed_losses
from jaxacct.statistics.composed_losses import Part, chord_masses, divergence_bound, divergence_table
from jaxacct.statistics.gaussian_mixtures import Mixture, sampled_antipodal, sampled_gaussian
from jaxacct.statistics.loss_curves import ChordCurve, LossCurve, Restricted, Values
from jaxacct.statistics.tilted_sums import UNIT, Variable, rounding_error, sums
from tests.oracles.composed_losses import REFERENCES, antipodal, gaussian, sampled
from tests.refusals import refused

IDENTITY = BandedToeplitz.identity()
MARGIN = 1.02


def sums_of(parts, epsilon):
    return composed_losses.Sums.of(composed_losses.Rough.of(parts), epsilon)


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_with_sampling_it_is_above_60_digit_references(reference):
    curves = sampled_gaussian(reference.sigma, reference.q)
    bound = divergence_bound([Part(curves[not reference.remove], reference.steps)], reference.epsilon)
    exact = float(reference.delta)
    assert exact * (1 - 1e-11) <= bound <= MARGIN * exact


def by_cut(reference, share, monkeypatch):
    """The bound with large losses apart, with its remainder, at a cut of this share of epsilon."""
    monkeypatch.setattr(composed_losses, "_CUTS", np.array([share]))
    curve = sampled_gaussian(reference.sigma, reference.q)[not reference.remove]
    above = Restricted(curve, share * reference.epsilon, above=True)
    bound = composed_losses._by_largest_losses([Part(curve, reference.steps)], reference.epsilon)
    return bound, (reference.steps * above.total) ** 2 / 2


@pytest.mark.parametrize("reference", REFERENCES[::3], ids=str)
def test_large_losses_apart_are_above_60_digit_references(reference, monkeypatch):
    for share in (0.02, 0.2, 0.7):
        assert by_cut(reference, share, monkeypatch)[0] >= float(reference.delta) * (1 - 1e-11)


def test_each_number_of_large_losses_is_counted(monkeypatch):
    """Some per cent of this delta need a large loss: without it the bound is too small."""
    reference, shares = REFERENCES[4], (0.15, 0.2, 0.25)
    for share in shares:
        bound, remainder = by_cut(reference, share, monkeypatch)
        exact = float(reference.delta)
        assert bound - remainder <= MARGIN * exact and bound >= exact
    curve = sampled_gaussian(reference.sigma, reference.q)[0]
    small = Part(Restricted(curve, shares[1] * reference.epsilon, above=False), reference.steps)
    assert sums_of([small], reference.epsilon).bound(reference.epsilon) < 0.97 * float(reference.delta)


@pytest.mark.parametrize("cut", [-0.4, 0.0, 0.3, 1.5])
def test_two_steps_are_the_sum_over_who_is_large(cut):
    """At q = 1, where the composition has a closed form: none, either or both losses above the cut."""
    curve, epsilon = sampled_gaussian(1.0, 1.0)[0], 0.8
    small, large = (Restricted(curve, cut, above=above) for above in (False, True))
    cases = ([Part(small, 2)], [Part(small, 1), Part(large, 1)], [Part(large, 2)])
    found = [sums_of(case, epsilon).bound(epsilon) for case in cases]
    exact = float(gaussian(epsilon, mpmath.sqrt(2)))
    assert exact <= found[0] + 2 * found[1] + found[2] <= 1.005 * exact
    assert large.total == pytest.approx(scipy.special.ndtr(0.5 - cut), rel=2e-3)  # of the pair that dominates


def settings_at_random(seed):
    """(q, sigma, share of the largest loss): q from 1e-6 to 1, sigma from 0.01 to 1e4."""
    rng = np.random.default_rng(seed)
    parts = 10 ** rng.uniform(-6, 0, 16), 10 ** rng.uniform(-2, 4, 16), rng.random(16)
    return zip(*(part.tolist() for part in parts), strict=True)


def one_step_curves(q, sigma):
    """(curve, its divergence by definition) of one sampled step, removed, added and replaced."""
    replaced = sampled_antipodal(sigma, q)
    assert replaced.losses[0] == pytest.approx(-replaced.losses[-1], rel=1e-9)
    for remove, curve in zip((True, False), sampled_gaussian(sigma, q), strict=True):
        yield curve, functools.partial(sampled, q=q, sigma=sigma, remove=remove)
    yield replaced, functools.partial(antipodal, q=q, sigma=sigma)


def test_one_step_is_above_its_definition_over_the_whole_range():
    for q, sigma, share in settings_at_random(0):
        for curve, divergence in one_step_curves(q, sigma):
            epsilon = float(min(curve.nodes()[-1], 600.0) * share)
            exact, bound = divergence(epsilon), divergence_bound([Part(curve, 1)], epsilon)
            assert exact <= bound
            assert exact < 1e-30 or q * share / sigma < 1e-7 or bound <= MARGIN * exact


# (steps, sigma, epsilon, delta): what dp-accounting's transform certified, and is false at q = 1.
FALSE_CLAIMS = [
    (100_000, 200.0, 12.2012, 1e-14),
    (100_000, 200.0, 11.8577, 1e-12),
    (100_000, 200.0, 12.1002, 1e-13),
    (10_000, 60.85, 13.0, 1e-13),
]


@pytest.mark.parametrize(("steps", "sigma", "epsilon", "delta"), FALSE_CLAIMS)
def test_false_claims_at_small_delta_are_refused(steps, sigma, epsilon, delta):
    target = dict(epsilon=epsilon, delta=delta, noise_multiplier=sigma)
    assert gaussian(epsilon, math.sqrt(steps) / sigma) > 1.2 * delta
    for accountant in ("pld", "analytic"):
        options = CalibrationOptions(accountant=accountant)
        with pytest.raises(NotCertifiedError, match="gives delta"):
            calibrate(Poisson(steps, 1.0), IDENTITY, **target, options=options)


def test_a_delta_that_cannot_be_shown_is_refused():
    mechanism = Mechanism(Poisson(4, 0.5), IDENTITY, 50.0)
    assert 1e-200 <= analytic.delta_by("pld", mechanism, 60.0) <= 1e-150
    assert analytic.delta_by("unamplified", mechanism, 300.0) == 1e-200  # 0 in float64
    given = dict(epsilon=1.0, delta=1e-250, options=CalibrationOptions(accountant="pld", grid_ratio=2.0))
    refused(r"delta must be larger for .* 1e-250", calibrate, mechanism.scheme, IDENTITY, **given)


@pytest.mark.parametrize(
    ("pair", "largest", "count"), [(laplace(3.0), 1 / 3, 1), (discrete_laplace(0.5, 2), 1.0, 3)]
)
def test_at_the_largest_loss_is_hardly_any_divergence(pair, largest, count):
    """Bounded losses end: from there on the divergence is 0, and the bound of the order of rounding."""
    part = [Part(pair[0], count)]
    epsilons = count * largest * np.array([1.0, 1.001])
    found = [divergence_bound(part, float(epsilon)) for epsilon in epsilons]
    assert max(found) < 1e-13 and found[1] == composed_losses.SMALLEST
    if count == 1:
        assert (divergence_table(part, epsilons) <= found).all()
        # P(loss = 1/scale) is 1/2, and 1 - e^-t beyond.
        below = largest * (1 - 1e-9)
        exact = -math.expm1(below - largest) / 2
        assert exact <= divergence_bound(part, below) <= exact * (1 + 1e-4)


def test_deltas_of_parts_add_up_only_where_their_epsilons_do():
    """Basic composition of different steps, against the convolution of two discrete Laplace losses."""
    pairs = (0.5, 2), (0.8, 1)
    parts = [Part(discrete_laplace(*pair)[0], 1) for pair in pairs]
    places = np.arange(-80, 81)
    weights = [np.exp(-a * np.abs(places - at)) for a, shift in pairs for at in (0, shift)]
    p1, q1, p2, q2 = (each / each.sum() for each in weights)
    p, q = np.multiply.outer(p1, p2), np.multiply.outer(q1, q2)
    for epsilon in (0.0, 0.3, 0.9, 1.3, 1.79):
        exact = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        by_parts = composed_losses._sum_of_deltas(parts, np.array([epsilon]))[0]
        assert exact - 1e-14 <= divergence_bound(parts, epsilon) <= by_parts * (1 + 1e-12)


PARTS = [Part(sampled_gaussian(30.0, 1.0)[0], 1000)]
TRUTH = float(gaussian(3.0, math.sqrt(1000) / 30))


@pytest.mark.parametrize("tilt", [1e-3, 0.1, 1.0, 8.0, 30.0, 1e6])
def test_any_tilt_gives_a_bound(tilt, monkeypatch):
    monkeypatch.setattr(composed_losses.Rough, "tilt_for", lambda self, epsilon: tilt)
    assert divergence_bound(PARTS, 3.0) >= TRUTH


def test_sums_beyond_the_lattice_are_added(monkeypatch):
    """The attack: places end below epsilon + 1, so that most of delta wraps around to where weights are 0."""
    lattice = sums_of(PARTS, 3.0)
    assert lattice.reserved < 1e-3 * TRUTH
    assert lattice.bound(lattice.step * (lattice.first - 3)) == math.inf
    far = dataclasses.replace(lattice)
    far.__dict__["log_scale"] = 3.0 * lattice.tilt + 201.0
    assert far.bound(3.0) == math.inf  # weights that count would be 0 in float64
    monkeypatch.setattr(composed_losses, "CUT", 1e3)
    short = sums_of(PARTS, 3.0)
    assert short.reserved > TRUTH / 2 and short.bound(3.0) >= TRUTH


def test_no_bound_where_rounding_of_exponents_may_exceed_its_share():
    """`1 + 2 relative` is below `e^relative` for a large relative error: no lattice gives a bound there."""
    lattice = sums_of(PARTS, 3.0)
    assert lattice.bound(3.0) < 1
    for rough in (0.11, 3.0, math.nan):
        lattice.__dict__["_relative"] = rough
        assert lattice.bound(3.0) == math.inf


def test_infinite_losses_add_up():
    """Steps that reveal all with probability 0.01."""
    curve = ChordCurve(np.array([0.0]), np.array([0.01]))
    exact = 1 - 0.99**20
    assert exact <= divergence_bound([Part(curve, 20)], 1.0) <= 0.2 * (1 + 1e-6)
    assert divergence_bound([Part(ChordCurve(np.array([0.0]), np.array([1.0])), 3)], 1.0) == 1.0


def test_nan_gives_the_trivial_bound():
    class Broken(LossCurve):
        def nodes(self):
            return np.linspace(-1.0, 1.0, 100)

        def at(self, losses):
            return Values(np.full(losses.size, np.nan), np.ones(losses.size), np.zeros(losses.size))

    assert composed_losses.bounded(math.nan) == composed_losses.bounded(-1.0) == 1.0
    for use in (divergence_bound, lambda parts, epsilon: divergence_table(parts, np.array([epsilon]))):
        with np.errstate(all="ignore"):
            try:
                assert use([Part(Broken(), 2)], 1.0) == 1.0
            except (ValueError, ArithmeticError):
                pass  # refused is as good


def test_the_table_is_above_the_closed_form_at_every_point():
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3, 40.0, 200)])
    table = divergence_table(PARTS, epsilons)
    exact = np.array([max(1e-200, float(gaussian(float(e), math.sqrt(1000) / 30))) for e in epsilons])
    assert np.all(table >= exact)
    near = exact > 1e-60
    assert np.all(table[near] <= 1.02 * exact[near])


def test_directions_are_composed_apart():
    curves = sampled_gaussian(0.8, 0.2)
    whole = composed_delta(((curves, 6),), 2.0)
    assert whole == max(divergence_bound([Part(curve, 6)], 2.0) for curve in curves)
    assert composed_delta(((curves[::-1], 6),), 2.0) == whole
    assert divergence_bound([Part(curves[0], 3), Part(curves[1], 3)], 2.0) < whole


def test_the_normal_distribution_function_is_as_good_as_assumed():
    """(3 + z^2) u of itself in `Mixture.beyond`, beside its argument's error; seen: 0.83 of it."""
    rng = np.random.default_rng(2)
    places = np.concatenate([rng.uniform(-37, 8, 600), rng.uniform(-3, 3, 600)])
    found = scipy.special.ndtr(places)
    with mpmath.workdps(60):
        worst = max(
            abs(mpmath.mpf(float(value)) / mpmath.ncdf(mpmath.mpf(float(z))) - 1) / ((3 + z * z) * UNIT)
            for z, value in zip(places, found, strict=True)
        )
    assert worst < 1
    mixture, z = Mixture((0.0, 1 / 0.7), (0.9, 0.1)), places[::6]
    for above in (True, False):
        for place, value, error in zip(z, *mixture.beyond(z, above), strict=True):
            with mpmath.workdps(60):
                sides = [shift - mpmath.mpf(float(place)) for shift in (0, mpmath.mpf(1 / 0.7))]
                exact = mpmath.fsum(
                    mpmath.mpf(w) * mpmath.ncdf(x if above else -x)
                    for w, x in zip((0.9, 0.1), sides, strict=True)
                )
                assert abs(mpmath.mpf(float(value)) / exact - 1) <= error


@pytest.mark.parametrize(
    ("curve", "oracle"),
    [
        (sampled_gaussian(1.3, 0.1)[0], lambda x: sampled(x, 0.1, 1.3, True)),
        (sampled_gaussian(1.3, 0.1)[1], lambda x: sampled(x, 0.1, 1.3, False)),
        (sampled_antipodal(1.3, 0.1), lambda x: antipodal(x, 0.1, 1.3)),
        (sampled_antipodal(0.2, 1e-3), lambda x: antipodal(x, 1e-3, 0.2)),
        (sampled_antipodal(0.7, 1.0), lambda x: antipodal(x, 1.0, 0.7)),
    ],
)
def test_corners_of_curves_are_just_above_60_digits(curve, oracle):
    some = slice(None, None, curve.losses.size // 120)
    losses, heights = curve.losses[some], curve.heights[some]
    tails = np.append(1.0, curve.at(losses).tails[:-1])
    for x, height, tail in zip(losses, heights, tails, strict=True):
        assert 0 <= float(mpmath.mpf(float(height)) - oracle(float(x))) <= 1e-11 * tail + 1e-280


def test_rounding_of_sums_is_booked():
    """Against rational arithmetic: errors of sums are below the reserve, and not far below it."""
    rng = np.random.default_rng(3)
    shares = []
    for count, other in ((1, 1), (5, 0), (40, 3)):
        first, second = (rng.random(6) ** 4 for _ in range(2))
        points = 512
        pairs = ((first, count), (second, other))
        factors = [(Variable(masses / masses.sum(), points), number) for masses, number in pairs]
        exact = [fractions.Fraction(1)]
        for one, number in factors:
            terms = [fractions.Fraction(float(mass)) for mass in one.masses]
            for _ in range(number):
                longer = [fractions.Fraction(0)] * (len(exact) + len(terms) - 1)
                for i, a in enumerate(exact):
                    for j, b in enumerate(terms):
                        longer[i + j] += a * b
                exact = longer
        found = sums([factors], points)
        padded = np.array(
            [float(fractions.Fraction(float(v)) - e) for v, e in zip(found, exact, strict=False)]
        )
        off = math.sqrt(float(padded @ padded) + float(found[len(exact) :] @ found[len(exact) :]))
        shares.append(off / rounding_error(factors, 1.0, points))
    assert max(shares) < 1 and min(shares) > 1e-4
    # Each multiplication rounds again: twice the copies, twice the error.
    few, many = (rounding_error([(Variable(np.array([0.5, 0.5]), 1024), n)], 1.0, 1024) for n in (1000, 2000))
    assert many > 1.9 * few > 0
    assert rounding_error([(Variable(np.ones(2) / 2, 2**20), 10**14)], 1.0, 2**20) == math.inf
    assert rounding_error([(Variable(np.array([0.5, np.nan]), 64), 1)], 1.0, 64) == math.inf
    assert rounding_error([(Variable(np.ones(2) / 2, 64), 1)], math.nan, 64) == math.inf


def test_chords_are_raised_by_what_deltas_may_be_off_by():
    deltas, step = np.array([0.5, 0.4, 0.35]), 0.1
    exact = chord_masses(deltas, 0 * deltas, step)
    assert exact[0] == 1.0 and exact[1] == pytest.approx(0.4 + 0.05 / math.expm1(step), rel=1e-12)
    raised = chord_masses(deltas, np.full(3, 1e-3), step)
    assert raised[1] == pytest.approx(0.401 + 0.052 / math.expm1(step), rel=1e-12)
    assert raised[-1] == 0.351
    assert np.all(np.diff(chord_masses(np.array([0.1, 0.1, 0.05]), np.zeros(3), 1.0)) <= 0)


def test_a_curve_that_is_low_by_its_stated_error_still_gives_a_bound():
    """The attack: without the error the bound on ten steps is a tenth too small."""

    class Low(LossCurve):
        exact = sampled_gaussian(1.3, 0.1)[0]

        def __init__(self, error: float):
            self.error = error

        def nodes(self):
            return self.exact.nodes()

        def at(self, losses):
            deltas, tails, _ = self.exact.at(losses)
            low = deltas - 0.01 * np.append(1.0, tails[:-1])
            return Values(np.clip(low, 0.0, 1.0), tails, np.full(losses.size, self.error))

    exact = divergence_bound([Part(Low.exact, 10)], 1.0)
    assert divergence_bound([Part(Low(0.0101), 10)], 1.0) >= exact
    assert divergence_bound([Part(Low(0.0), 10)], 1.0) < 0.9 * exact


def test_sums_beyond_the_last_place_are_booked():
    """Losses of +-a: a binomial distribution, none infinite, whose tail beyond the lattice is known."""
    a, steps = 0.05, 2000
    part = Part(discrete_laplace(a, 1)[0], steps)
    for epsilon in (2.0, 10.0, 15.0):
        lattice = sums_of([part], epsilon)
        after = lattice.step * (lattice.first + lattice.points)
        beyond = scipy.stats.binom.sf(math.floor((after / a + steps) / 2), steps, 1 / (1 + math.exp(-a)))
        assert 1e-150 < beyond <= lattice.reserved < 1e-3 * divergence_bound([part], epsilon)


def test_every_allowance_is_in_the_bound(monkeypatch):
    """Computed again: errors of transforms, sums, exponents and epsilon, each by itself."""
    lattice = sums_of([Part(sampled_gaussian(9.0, 0.2)[0], 300)], 1.0)
    epsilon, norm = 1.0, 3.0
    scale = math.exp(lattice.log_scale - lattice.tilt * epsilon)
    rounding = rounding_error(lattice._factors, 1.0, lattice.points)
    rounding += lattice.points * UNIT * float(np.linalg.norm(lattice._masses))
    assert lattice._bound(epsilon, 0.0, norm) - lattice.reserved >= 0.999 * rounding * norm * scale > 0
    (step,) = lattice.steps
    exponents = lattice.counts[0] * step.exponents(lattice.tilt, lattice.step) + abs(lattice.log_scale)
    relative = 4 * UNIT * (exponents + lattice.tilt * (lattice.step * lattice.points + epsilon))
    found = (lattice._bound(epsilon, 1e9, 0.0) - lattice.reserved) / (1e9 * scale) - 1
    assert found >= relative > 1e-11
    wrapped = []
    for unit in (0.0, 2e-6):
        monkeypatch.setattr(composed_losses, "UNIT", unit)
        wrapped.append(dataclasses.replace(lattice).reserved - 1.00001 * lattice.counts[0] * step.infinite)
    after = lattice.steep * lattice.step * (lattice.first + lattice.points)
    rounded = lattice.counts[0] * step.exponents(lattice.steep, lattice.step) + after
    assert wrapped[1] >= 0.999 * math.exp(8e-6 * rounded) * wrapped[0] > 0
    monkeypatch.setattr(composed_losses, "UNIT", UNIT)
    monkeypatch.setattr(composed_losses.Sums, "_bound", lambda self, epsilon, value, norm: epsilon)
    assert lattice.bound(epsilon) <= epsilon - 8 * UNIT * epsilon


def test_errors_of_tails_are_in_a_curve(monkeypatch):
    """Attack: both tails wrong by their stated error, each in the direction that lowers delta."""
    exact, off = sampled_gaussian(1.3, 0.1)[0], 1e-4
    beyond, log_beyond = Mixture.beyond, Mixture.log_beyond

    def less(self, z, above):
        tails, error = beyond(self, z, above)
        return tails * (1 - off), error + 1.001 * off

    def more(self, z, above):
        logs, error = log_beyond(self, z, above)
        return logs + off, error + 1.001 * off

    monkeypatch.setattr(Mixture, "beyond", less)
    monkeypatch.setattr(Mixture, "log_beyond", more)
    found = sampled_gaussian.__wrapped__(1.3, 0.1)[0]
    assert np.array_equal(found.losses, exact.losses)
    assert np.all(found.heights >= exact.heights * (1 - 1e-9)) and found.heights[9000] > exact.heights[9000]


@pytest.mark.parametrize("q", [1.0, 0.5])
def test_losses_beyond_the_integers_of_a_lattice_are_infinite(q):
    assert divergence_bound([Part(sampled_gaussian(1e-3, q)[0], 10**12)], 1e-3) == 1.0


def test_restricted_curves_add_up():
    """Of the losses up to the cut and above, at every x: the curve itself, within the stated errors."""
    for curve in sampled_gaussian(0.8, 1e-3):
        losses = np.linspace(-1e-3, 2.0, 401)
        whole = curve.at(losses)
        parts = [Restricted(curve, 0.02, above=above).at(losses) for above in (False, True)]
        off = np.abs(parts[0].deltas + parts[1].deltas - whole.deltas)
        assert np.all(off <= sum(part.error for part in parts) * np.append(1.0, whole.tails[:-1]))
        assert np.all(parts[0].deltas[losses > 0.02] == 0)


def test_rare_participation_needs_little_noise():
    """A million steps at rate 1e-5: delta comes from one large loss; rounding alone had asked for 1.64."""
    found = [
        max(divergence_bound([Part(curve, 1_000_000)], 0.1) for curve in sampled_gaussian(s, 1e-5))
        for s in (0.82, 0.84)
    ]
    assert found[1] <= 1e-10 < found[0] < 1.7e-10


@pytest.mark.parametrize("tiny", [1e-15, 1e-12, 1e-9, 1e-6])
def test_one_step_whose_probability_is_close_to_1(tiny):
    """The loss of the add direction ends at -ln(1 - q): below it the masses of both must not cancel."""
    q, sigma = 1 - tiny, math.sqrt(-1 / (2 * math.log(tiny)))
    end = -float(mpmath.log(1 - mpmath.mpf(q)))
    curve = sampled_gaussian(sigma, q)[1]
    for epsilon in end - np.array([1.0, 0.2, 0.05, 0.01, 1e-3]):
        exact = sampled(float(epsilon), q, sigma, remove=False)
        assert exact <= divergence_bound([Part(curve, 1)], float(epsilon))
        np.testing.assert_allclose(subsampled_gaussian_delta(q, sigma, epsilon, "add"), float(exact), 1e-8)


@pytest.mark.parametrize("accountant", ["pld", "analytic"])
def test_released_noise_holds_at_small_delta(accountant):
    options = CalibrationOptions(grid_ratio=1.0005, accountant=accountant)
    plan = calibrate(Poisson(10_000, 1.0), IDENTITY, epsilon=13.0, delta=1e-13, options=options)
    mu = math.sqrt(10_000) / plan.mechanism.noise_multiplier
    assert 0.97e-13 < gaussian(13.0, mu) <= plan.verdict.bound <= 1e-13


@pytest.mark.parametrize(("points", "cut"), [(64, 1e-5), (1024, 1e-5), (1024, 0.1), (2**15, 0.5)])
def test_coarse_and_short_lattices_give_bounds(points, cut, monkeypatch):
    """Large cuts: what is left out, and what wraps around, is added."""
    monkeypatch.setattr(composed_losses, "_MIN_POINTS", points)
    monkeypatch.setattr(composed_losses, "_MAX_POINTS", 2 * points)
    monkeypatch.setattr(composed_losses, "CUT", cut)
    for epsilon in np.random.default_rng(1).uniform(0.2, 6.0, 8):
        assert divergence_bound(PARTS, float(epsilon)) >= gaussian(float(epsilon), math.sqrt(1000) / 30)


def test_a_hull_of_upper_bounds_is_between_curve_and_bounds():
    rng = np.random.default_rng(4)
    curve, losses = sampled_gaussian(1.0, 0.3)[0], np.linspace(-2.0, 5.0, 300)
    exact = curve.at(losses).deltas
    bounds = np.minimum.accumulate(np.minimum(1.0, exact * np.exp(rng.exponential(0.2, 300))))
    hull = ChordCurve.below(losses, bounds).at(losses)
    assert np.all(hull.deltas >= exact * (1 - 1e-12)) and np.all(hull.deltas <= bounds * (1 + 1e-12))
    assert np.all(hull.tails >= hull.deltas) and np.all(np.diff(hull.tails) <= 1e-12)
