"""The add direction against enumeration, quadrature and the PLD accountant (proofs/add_direction.md)."""

import math

import jax
import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import log_ndtr, ndtr

from jaxacct.kernels import randomness, threefry
from jaxacct.proposals.add_direction import half_space as add_direction
from jaxacct.proposals.add_direction import plain_bounded
from jaxacct.proposals.base import plain
from jaxacct.schemes import BallsInBins, BMinSep, CyclicPoisson, Poisson
from jaxacct.statistics import hockey_stick
from tests.draws import block_keys
from tests.oracles import enumeration, settings
from tests.oracles.add_direction import FALSE_ALARM, exact_two_steps, make, pld_add, width
from tests.proposals_by_name import family_candidates


def noise_and_log_ratio(mechanism, outputs):
    """Normalised scores and ln P/Q of outputs on the extended horizon, all in dense float64."""
    scheme, c, sigma = mechanism.scheme, mechanism.strategy.array, mechanism.noise_multiplier
    dense = enumeration.strategy_matrix(c, outputs.shape[1], scheme.iterations)
    return outputs @ dense / sigma, enumeration.log_ratio(scheme, c, sigma, outputs)


def random_outputs(mechanism, num, scale, seed=0):
    rows = mechanism.scheme.iterations + mechanism.strategy.bands - 1
    generator = np.random.default_rng(seed)
    return mechanism.noise_multiplier * scale * generator.standard_normal((num, rows))


def draw_terms(proposal, epsilon, blocks, seed=0):
    draws = proposal.draw(jax.random.key(seed), 0, blocks)
    raw = hockey_stick.weighted_terms(draws, "add", epsilon) * math.exp(-proposal.log_scale)
    assert raw.max() <= 1 + 1e-5
    return raw, draws


# --- Exact zero ---


def bounded_candidates(mechanism, epsilon):
    """Samples of Q with a bound on their terms, and the half-space."""
    families = "plain-bounded", "half-space"
    return [one for family in families for one in family_candidates(family, mechanism, epsilon)]


@pytest.mark.parametrize(("scheme", "bands"), settings.SMALL, ids=settings.IDS)
def test_probability_of_none(scheme, bands):
    none = enumeration.pattern_distribution(scheme).get((0,) * scheme.iterations, 0.0)
    if none == 0:
        assert scheme.log_probability_of_none() == -math.inf
    else:
        assert scheme.log_probability_of_none() == pytest.approx(math.log(none), abs=1e-12)


def test_probability_of_none_of_every_phase_length():
    for n in range(1, 10):
        for b in range(1, 12):
            for scheme in (
                BMinSep(n, b, 0.3),
                BMinSep(n, b, 1.0),
                CyclicPoisson(n, b, 0.6),
                BallsInBins(n, b),
            ):
                none = enumeration.pattern_distribution(scheme).get((0,) * n, 0.0)
                found = math.exp(scheme.log_probability_of_none())
                assert none - 1e-13 <= found <= none * (1 + 1e-15)  # rounded down


@pytest.mark.parametrize("scheme", [Poisson(3, 0.2), BMinSep(6, 3, 0.2), BallsInBins(3, 5)])
def test_zero_at_minus_log_none_and_positive_below(scheme):
    mechanism = make(scheme, 1, 0.7)
    edge = -scheme.log_probability_of_none()
    for epsilon in (edge + 1e-9, edge + 1, 50.0):
        (zero,) = bounded_candidates(mechanism, epsilon)
        assert plain_bounded.add_is_zero(mechanism, epsilon) and zero.log_scale == -math.inf
    below = edge - 0.05
    assert not plain_bounded.add_is_zero(mechanism, below)
    assert all(c.log_scale > -math.inf for c in bounded_candidates(mechanism, below))
    # Noise far down has f close to P0, hence a positive term: the divergence is positive.
    far_down = np.full((1, scheme.iterations), -30.0)
    assert noise_and_log_ratio(mechanism, far_down)[1][0] < -below


def test_no_term_exceeds_the_remainder_scale():
    for scheme, bands in settings.SMALL:
        mechanism, epsilon = make(scheme, bands, 0.6), 0.1
        log_scale = plain_bounded.log_remainder_scale(mechanism, epsilon)
        _, loss = noise_and_log_ratio(mechanism, random_outputs(mechanism, 2000, 3.0) - 1.0)
        if log_scale > -math.inf:
            assert np.all(hockey_stick.hockey_stick(epsilon + loss) <= math.exp(log_scale) * (1 + 1e-12))


# --- Minorants ---

# One of each kind: each is a program of its own.
FEW = settings.few_in_ci({0, 4, 7, 9, 10, 13, 15, 19})


@pytest.mark.parametrize("sigma", [0.4, 2.0])
@pytest.mark.parametrize(("scheme", "bands"), FEW)
def test_tangents_are_minorants(scheme, bands, sigma):
    mechanism = make(scheme, bands, sigma)
    n, log_none = scheme.iterations, scheme.log_probability_of_none()
    points = [np.full(n, 0.5 / sigma), np.zeros(n)]  # f = 1 (Jensen) and no noise
    points += list(np.random.default_rng(1).normal(-1, 1.5, (4, n)))
    found = [add_direction.tangent(mechanism, point) for point in points]
    assert found[0] is not None
    for scale in (0.5, 1.0, 3.0, 10.0):
        noise, loss = noise_and_log_ratio(mechanism, random_outputs(mechanism, 500, scale))
        with np.errstate(divide="ignore"):
            above_none = loss + np.log(-np.expm1(np.minimum(log_none - loss, 0.0)))
        resolved = np.isfinite(above_none) & (loss - log_none > 1e-6)
        for minorant in filter(None, found):
            line = minorant.constant + noise @ minorant.weights / sigma
            assert np.all((line <= above_none + 1e-9 * (1 + np.abs(loss)))[resolved])


def test_jensen_has_the_mean_participation_and_half_its_squared_norm():
    mechanism = make(BMinSep(12, 3, 0.3), 3, 1.3)
    minorant = add_direction.tangent(mechanism, np.full(12, 0.5 / 1.3))
    remainder = -math.expm1(mechanism.scheme.log_probability_of_none())
    mu = mechanism.scheme.participation_probabilities() / remainder
    np.testing.assert_allclose(minorant.weights, mu, rtol=1e-10)
    dense = enumeration.strategy_matrix(mechanism.strategy.array, 14, 12)
    assert minorant.norm == pytest.approx(np.linalg.norm(dense @ mu))
    assert minorant.constant == pytest.approx(math.log(remainder) - mu.sum() / (2 * 1.3**2), abs=1e-6)


@pytest.mark.parametrize(("scheme", "bands"), FEW)
def test_half_space_bounds_every_term(scheme, bands):
    for sigma, epsilon in (0.5, 0.1), (2.0, 0.05), (2.0, 0.5):
        mechanism = make(scheme, bands, sigma)
        log_scale = plain_bounded.log_remainder_scale(mechanism, epsilon)
        if log_scale == -math.inf:
            continue
        minorant = add_direction.best_minorant(mechanism, epsilon)
        edge, slope = add_direction.edge_and_slope(mechanism, epsilon - log_scale, minorant)
        noise, loss = noise_and_log_ratio(mechanism, random_outputs(mechanism, 3000, 2.0))
        t = noise @ minorant.weights / minorant.norm
        bound = math.exp(log_scale) * hockey_stick.hockey_stick(slope * (t - edge))
        assert np.all(hockey_stick.hockey_stick(epsilon + loss) <= bound + 1e-12)


def test_best_minorant_is_no_worse_than_jensen():
    mechanism = make(BMinSep(60, 5, 0.1), 5, 3.0)
    jensen = add_direction.tangent(mechanism, np.full(60, 0.5 / 3.0))
    best = add_direction.best_minorant(mechanism, 0.4)
    kappa = 0.4 - plain_bounded.log_remainder_scale(mechanism, 0.4)
    means = [
        add_direction.log_half_space_mean(*add_direction.edge_and_slope(mechanism, kappa, m))
        for m in (best, jensen)
    ]
    assert means[0] < means[1]


# --- The one-coordinate distribution ---


@pytest.mark.parametrize("edge", [-12.0, -5.0, -1.0, 0.0, 2.0])
@pytest.mark.parametrize("slope", [0.01, 0.3, 2.0, 10.0])
def test_scale_of_the_table_against_quadrature(edge, slope):
    def integrand(t):
        return (
            math.exp(-(t**2) / 2 - log_ndtr(edge)) / math.sqrt(2 * math.pi) * -math.expm1(slope * (t - edge))
        )

    exact, _ = integrate.quad(integrand, edge - 14, edge, epsabs=0, epsrel=1e-10, limit=500)
    log_mean = add_direction.log_half_space_mean(edge, slope)
    assert log_mean == pytest.approx(math.log(exact) + log_ndtr(edge), abs=1e-6)
    log_scale, tail, cells = add_direction.coordinate_table(edge, slope)
    assert log_mean <= log_scale <= log_mean + 0.03
    assert tail <= 2.0**-40
    probability = np.diff(np.asarray(cells["last"], np.float64) + 1, prepend=0.0) * 2.0**-32
    assert probability.sum() == 1 and probability.min() > 0
    # The bound of the weighted term, cell by cell, at both ends of each.
    upper, cell_width = np.asarray(cells["upper"], np.float64), float(cells["width"])
    weight = np.asarray(cells["log_weight"], np.float64)
    for fraction in (1e-6, 0.5, 1.0):
        below = fraction * cell_width
        log_w = weight + below * (upper - below / 2)
        depth = (np.arange(upper.size) + fraction) * cell_width
        rounding = 5e-7 * (1 + np.abs(weight))
        assert np.all(log_w + np.log(-np.expm1(-slope * depth)) <= log_scale + rounding)


def test_a_weight_is_the_density_of_the_normal_over_that_of_its_cell():
    """Exactly, where it was drawn: cells are wide enough that half of `below^2` forgotten would show."""
    mechanism, epsilon = make(Poisson(10, 0.1), 1, 2.0), 0.3
    proposal = add_direction.half_space_proposal(
        mechanism, epsilon, add_direction.best_minorant(mechanism, epsilon)
    )
    key, tables = jax.random.key(5), proposal.tables()
    # As many blocks as other tests draw at once, of which the first is tested.
    log_weight = proposal.draw(key, 0, 16).log_weight[: randomness.BLOCK_SIZE]
    _, cell_key, place_key = threefry.split(block_keys(key, 0, 16)[0], 3)
    size, cell_width = randomness.BLOCK_SIZE, float(tables["width"])
    last = np.asarray(tables["last"], np.float64)
    cell = np.searchsorted(last, np.asarray(threefry.bits_32(cell_key, (size,)), np.float64))
    below = cell_width * np.asarray(randomness.uniform_64(place_key, (size,)), np.float64)
    assert below.max() ** 2 / 2 > 5e-6
    density = np.diff(last, prepend=-1.0)[cell] * 2.0**-32 / cell_width
    exact = stats.norm.logpdf(np.asarray(tables["upper"], np.float64)[cell] - below) - np.log(density)
    above = log_weight - exact
    slack = 2.0**-21 * (1 + np.abs(exact))
    assert np.all(above >= -slack) and np.all(above <= 4 * slack)


def test_the_coordinate_is_lowered_by_what_it_is_rounded():
    """Every score of every draw, as all grow with the loss."""
    mechanism, epsilon = make(Poisson(10, 0.1), 1, 2.0), 0.3
    minorant = add_direction.best_minorant(mechanism, epsilon)
    tables = add_direction.half_space_proposal(mechanism, epsilon, minorant).tables()
    assert tables["rounding"] > 0

    @jax.jit
    def scores(rounding):
        given = tables | {"rounding": rounding}
        key, distribution = jax.random.key(5), (mechanism.scheme, mechanism.strategy)
        return add_direction.draw_in_half_space(key, *distribution, given, np.float32)[0]

    assert np.all(scores(np.float32(0.1)) < scores(np.float32(0.0)))


def test_weights_average_to_the_probability_of_the_half_space():
    mechanism, epsilon = make(Poisson(10, 0.1), 1, 2.0), 0.3
    minorant = add_direction.best_minorant(mechanism, epsilon)
    kappa = epsilon - plain_bounded.log_remainder_scale(mechanism, epsilon)
    edge, slope = add_direction.edge_and_slope(mechanism, kappa, minorant)
    proposal = add_direction.half_space_proposal(mechanism, epsilon, minorant)
    _, draws = draw_terms(proposal, epsilon, 400)
    weights = np.exp(draws.log_weight)
    # Every draw lies in the half-space. Weights are bounded by their largest value in any cell.
    cells = add_direction.coordinate_table(edge, slope)[2]
    probability = np.diff(np.asarray(cells["last"], np.float64) + 1, prepend=0.0) * 2.0**-32
    largest = np.exp(np.asarray(cells["log_weight"], np.float64) + 3 * float(cells["width"]))
    second_moment, most, mean = probability @ largest**2, largest.max(), ndtr(edge)
    assert weights.max() <= most
    log_term = math.log(2 / FALSE_ALARM)
    allowed = math.sqrt(2 * log_term * second_moment / weights.size) + 2 * log_term * most / weights.size
    assert abs(weights.mean() - mean) <= allowed
    assert allowed < 0.2 * mean


# --- Deltas ---


@pytest.mark.parametrize(
    ("scheme", "bands", "sigma", "epsilon"),
    [
        (Poisson(2, 0.3), 1, 1.0, 0.4),
        (BMinSep(2, 2, 0.4), 2, 1.5, 0.3),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in (
                (Poisson(2, 0.9), 1, 3.0, 1.5),
                (BMinSep(2, 2, 0.4, False), 2, 1.5, 0.3),
                (BMinSep(2, 2, 1.0), 2, 2.0, 0.8),
                (CyclicPoisson(2, 2, 0.7), 2, 2.0, 0.3),
                (BallsInBins(2, 2), 2, 1.5, 1.0),
                (BallsInBins(2, 3), 2, 1.5, 0.5),
            )
        ),
    ],
)
def test_two_steps_against_quadrature(scheme, bands, sigma, epsilon):
    mechanism = make(scheme, bands, sigma)
    exact = exact_two_steps(mechanism, epsilon)
    found = bounded_candidates(mechanism, epsilon)
    assert found[-1].name == "half-space"
    for proposal in found if isinstance(scheme, Poisson) else found[-1:]:
        scale = math.exp(proposal.log_scale)
        terms, _ = draw_terms(proposal, epsilon, 400)
        assert exact <= scale
        assert abs(terms.mean() - exact / scale) <= width(exact / scale, terms.size) + 1e-4


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 2.2])
def test_one_step_is_known_exactly(epsilon):
    """n = 1: f - P0 is one exponential, so its tangent is itself and every term is 1 up to the table."""
    p, sigma = 0.9, 0.8
    mechanism = make(Poisson(1, p), 1, sigma)
    # 1 - e^eps (1 - p + p e^{z / sigma - 1 / 2 sigma^2}) is positive below z = edge.
    rest = (math.exp(-epsilon) - (1 - p)) / p
    edge = sigma * math.log(rest) + 0.5 / sigma
    alpha = math.exp(epsilon)
    exact = (1 - alpha * (1 - p)) * ndtr(edge) - alpha * p * ndtr(edge - 1 / sigma)
    minorant = add_direction.best_minorant(mechanism, epsilon)
    proposal = add_direction.half_space_proposal(mechanism, epsilon, minorant)
    assert exact <= math.exp(proposal.log_scale) <= 1.02 * exact
    terms, _ = draw_terms(proposal, epsilon, 50)
    assert abs(terms.mean() - exact / math.exp(proposal.log_scale)) <= 0.01


PLD = [
    pytest.param(30, 0.5, 5.0, 3.0, 1e-3, marks=pytest.mark.slow),
    pytest.param(30, 0.5, 5.0, 3.5, 1e-3, marks=pytest.mark.slow),
    (8, 0.8, 4.0, 3.7, 1e-3),
    (10, 0.1, 2.0, 0.5, 1e-4),
]


@pytest.mark.parametrize(("n", "p", "sigma", "epsilon", "interval"), PLD)
def test_poisson_against_the_pld_accountant(n, p, sigma, epsilon, interval):
    """Down to deltas of 2e-12 and 4e-13 from fifty thousand draws."""
    optimistic, pessimistic = pld_add(n, p, sigma, epsilon, interval)
    mechanism = make(Poisson(n, p), 1, sigma)
    proposal = bounded_candidates(mechanism, epsilon)[-1]
    assert proposal.name == "half-space"
    terms, _ = draw_terms(proposal, epsilon, 400)
    low, high = (d / math.exp(proposal.log_scale) for d in (optimistic, pessimistic))
    slack = 1e-15 / math.exp(proposal.log_scale)  # the PLD accountant truncates its tails
    assert terms.mean() <= high + width(min(high, 1.0), terms.size) + slack
    assert terms.mean() >= low - width(min(low, 1.0), terms.size) - slack


@pytest.mark.slow
def test_several_bands_against_plain_sampling():
    mechanism, epsilon = make(BMinSep(24, 4, 0.2), 4, 2.0), 0.5
    proposal = bounded_candidates(mechanism, epsilon)[-1]
    terms, _ = draw_terms(proposal, epsilon, 400)
    base = plain(mechanism, "add")
    reference, _ = draw_terms(base, epsilon, 400, seed=9)
    scale = math.exp(proposal.log_scale)
    assert scale < 0.3
    allowed = scale * width(terms.mean(), terms.size) + width(reference.mean(), reference.size)
    assert abs(scale * terms.mean() - reference.mean()) <= 2 * allowed


@pytest.mark.parametrize(
    "scheme",
    [
        BMinSep(50, 8, 0.03),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (Poisson(50, 0.02), BallsInBins(50, 10))),
    ],
)
def test_one_compilation_for_every_noise_multiplier(scheme, traced_once):
    from jaxacct.proposals.base import draw_blocks

    traced_once(draw_blocks)
    for sigma in (4.0, 5.0, 6.0):
        mechanism = make(scheme, 1, sigma)
        minorant = add_direction.best_minorant(mechanism, 0.4)
        add_direction.half_space_proposal(mechanism, 0.4, minorant).draw(jax.random.key(0), 0, 1)


def test_the_coordinate_is_replaced_to_within_its_stated_rounding():
    """The float32 coordinate `<m, zeta> / |C m|` against float64: the slack of `_half_space` covers it."""
    for n, bands in ((1500, 16), (3, 1)):
        mechanism = make(BMinSep(n, bands, 0.01), bands, 2.0)
        minorant = add_direction.tangent(mechanism, np.full(n, 0.25))
        strategy = mechanism.strategy
        draw = jax.jit(lambda key, strategy=strategy, n=n: strategy.noise_scores(key, n, 256, np.float32))
        noise = draw(jax.random.key(4))
        weights = np.asarray(minorant.weights / minorant.norm, np.float32)
        computed = np.asarray(jax.jit(add_direction.halving_sum)(weights[None] * noise), np.float64)
        exact = np.asarray(noise, np.float64) @ (minorant.weights / minorant.norm)
        size = np.abs(np.asarray(noise, np.float64) * weights).sum(1)
        assert np.all(np.abs(computed - exact) <= (math.ceil(math.log2(n)) + 6) * 2.0**-24 * size)
