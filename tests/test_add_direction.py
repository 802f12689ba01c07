"""The add direction against enumeration, quadrature and the PLD accountant (PROPOSALS_ADD.md)."""

import math

import jax
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate
from scipy.special import log_ndtr, ndtr, ndtri

from jaxacct import add_direction, extrapolation, hockey_stick, scores
from jaxacct.mechanism import Mechanism
from jaxacct.schemes import BallsInBins, BMinSep, CyclicPoisson, Poisson
from jaxacct.toeplitz import BandedToeplitz
from tests.oracles import enumeration, settings

FALSE_ALARM = 1e-6  # of every statistical assertion below; keys are fixed


def make(scheme, bands, sigma):
    coefficients = 0.8 ** np.arange(bands)
    return Mechanism(scheme, BandedToeplitz(tuple(coefficients / np.linalg.norm(coefficients))), sigma)


def noise_and_log_ratio(mechanism, outputs):
    """Normalised scores and ln P/Q of outputs on the extended horizon, all in dense float64."""
    scheme, c, sigma = mechanism.scheme, mechanism.strategy.array, mechanism.noise_multiplier
    dense = enumeration.strategy_matrix(c, outputs.shape[1], scheme.iterations)
    return outputs @ dense / sigma, enumeration.log_ratio(scheme, c, sigma, outputs)


def random_outputs(mechanism, num, scale, seed=0):
    rows = mechanism.scheme.iterations + mechanism.strategy.bands - 1
    generator = np.random.default_rng(seed)
    return mechanism.noise_multiplier * scale * generator.standard_normal((num, rows))


def width(mean, num):
    """Bernstein: a mean of `num` terms in [0, 1] is further off than this with probability FALSE_ALARM."""
    log_term = math.log(2 / FALSE_ALARM)
    return math.sqrt(2 * log_term * mean * (1 - mean) / num) + 2 * log_term / (3 * num)


def draw_terms(proposal, epsilon, blocks, seed=0):
    draws = proposal.draw(jax.random.key(seed), 0, blocks)
    raw = hockey_stick.weighted_terms(draws, "add", epsilon) * math.exp(-proposal.log_scale)
    assert raw.max() <= 1 + 1e-5
    return raw, draws


def pld_add(n, p, sigma, epsilon, interval):
    """(optimistic, pessimistic) H(Q, P) of Poisson sampling."""
    both = []
    for pessimistic in (False, True):
        one = privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            sampling_prob=p,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
        )
        both.append(one.self_compose(n)._pmf_add.get_delta_for_epsilon(epsilon))
    return tuple(both)


# --- Exact zero ---


@pytest.mark.parametrize(("scheme", "bands"), settings.SMALL, ids=settings.IDS)
def test_probability_of_none(scheme, bands):
    none = enumeration.pattern_law(scheme).get((0,) * scheme.iterations, 0.0)
    if none == 0:
        assert add_direction.log_probability_of_none(scheme) == -math.inf
    else:
        assert add_direction.log_probability_of_none(scheme) == pytest.approx(math.log(none), abs=1e-12)


def test_probability_of_none_of_every_phase_length():
    for n in range(1, 10):
        for b in range(1, 12):
            for scheme in (
                BMinSep(n, b, 0.3),
                BMinSep(n, b, 1.0),
                CyclicPoisson(n, b, 0.6),
                BallsInBins(n, b),
            ):
                none = enumeration.pattern_law(scheme).get((0,) * n, 0.0)
                found = math.exp(add_direction.log_probability_of_none(scheme))
                assert found == pytest.approx(none, abs=1e-14)


@pytest.mark.parametrize("scheme", [Poisson(3, 0.2), BMinSep(6, 3, 0.2), BallsInBins(3, 5)])
def test_zero_at_minus_log_none_and_positive_below(scheme):
    mechanism = make(scheme, 1, 0.7)
    edge = -add_direction.log_probability_of_none(scheme)
    for epsilon in (edge + 1e-9, edge + 1, 50.0):
        (zero,) = add_direction.add_candidates(mechanism, epsilon)
        assert add_direction.add_is_zero(mechanism, epsilon) and zero.log_scale == -math.inf
    below = edge - 0.05
    assert not add_direction.add_is_zero(mechanism, below)
    assert all(c.log_scale > -math.inf for c in add_direction.add_candidates(mechanism, below))
    # Noise far down has f close to P0, hence a positive term: the divergence is positive.
    far_down = np.full((1, scheme.iterations), -30.0)
    assert noise_and_log_ratio(mechanism, far_down)[1][0] < -below


def test_no_term_exceeds_the_remainder_scale():
    for scheme, bands in settings.SMALL:
        mechanism, epsilon = make(scheme, bands, 0.6), 0.1
        log_scale = add_direction.log_remainder_scale(mechanism, epsilon)
        _, loss = noise_and_log_ratio(mechanism, random_outputs(mechanism, 2000, 3.0) - 1.0)
        if log_scale > -math.inf:
            assert np.all(hockey_stick.hockey_stick(epsilon + loss) <= math.exp(log_scale) * (1 + 1e-12))


# --- Minorants ---


@pytest.mark.parametrize("sigma", [0.4, 1.0, 4.0])
@pytest.mark.parametrize(("scheme", "bands"), settings.SMALL, ids=settings.IDS)
def test_tangents_are_minorants(scheme, bands, sigma):
    mechanism = make(scheme, bands, sigma)
    n, log_none = scheme.iterations, add_direction.log_probability_of_none(scheme)
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
    remainder = -math.expm1(add_direction.log_probability_of_none(mechanism.scheme))
    mu = mechanism.scheme.participation_probabilities() / remainder
    np.testing.assert_allclose(minorant.weights, mu, rtol=1e-10)
    dense = enumeration.strategy_matrix(mechanism.strategy.array, 14, 12)
    assert minorant.norm == pytest.approx(np.linalg.norm(dense @ mu))
    assert minorant.constant == pytest.approx(math.log(remainder) - mu.sum() / (2 * 1.3**2), abs=1e-6)


def test_half_space_bounds_every_term():
    for scheme, bands in settings.SMALL:
        for sigma, epsilon in ((0.5, 0.1), (2.0, 0.05), (2.0, 0.5)):
            mechanism = make(scheme, bands, sigma)
            log_scale = add_direction.log_remainder_scale(mechanism, epsilon)
            if log_scale == -math.inf:
                continue
            minorant = add_direction.best_minorant(mechanism, epsilon)
            edge, slope = add_direction.edge_and_slope(mechanism, epsilon, minorant)
            noise, loss = noise_and_log_ratio(mechanism, random_outputs(mechanism, 3000, 2.0))
            t = noise @ minorant.weights / minorant.norm
            bound = math.exp(log_scale) * hockey_stick.hockey_stick(slope * (t - edge))
            assert np.all(hockey_stick.hockey_stick(epsilon + loss) <= bound + 1e-12)


def test_best_minorant_is_no_worse_than_jensen():
    mechanism = make(BMinSep(60, 5, 0.1), 5, 3.0)
    jensen = add_direction.tangent(mechanism, np.full(60, 0.5 / 3.0))
    best = add_direction.best_minorant(mechanism, 0.4)
    means = [
        add_direction.log_half_space_mean(*add_direction.edge_and_slope(mechanism, 0.4, m))
        for m in (best, jensen)
    ]
    assert means[0] < means[1]


# --- The one-coordinate law ---


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


def test_weights_average_to_the_probability_of_the_half_space():
    mechanism, epsilon = make(Poisson(10, 0.1), 1, 2.0), 0.3
    minorant = add_direction.best_minorant(mechanism, epsilon)
    edge, slope = add_direction.edge_and_slope(mechanism, epsilon, minorant)
    proposal = add_direction.half_space_proposal(mechanism, epsilon, minorant)
    _, draws = draw_terms(proposal, epsilon, 800)
    weights = np.exp(draws.log_weight)
    # Every draw lies in the half-space. Weights are bounded by their largest value in any cell.
    cells = add_direction.coordinate_table(edge, slope)[2]
    most = math.exp(float(np.max(np.asarray(cells["log_weight"])))) * 1.01
    mean = ndtr(edge)
    assert weights.max() <= most
    second_moment = 4 * mean * math.log(2048)  # of w / M, as r >= phi (1 - e^{slope (t - edge)}) / M
    log_term = math.log(2 / FALSE_ALARM)
    allowed = math.sqrt(2 * log_term * second_moment / weights.size) + 2 * log_term * most / weights.size
    assert abs(weights.mean() - mean) <= allowed
    assert allowed < 0.5 * mean


# --- Deltas ---


def exact_two_steps(mechanism, epsilon, shift=(0.0, 0.0)):
    """H(Q, P) for two steps by the trapezoid rule over the two scores; Q pushed down by `shift`."""
    scheme, c, sigma = mechanism.scheme, mechanism.strategy.array, mechanism.noise_multiplier
    rho = float(np.dot(c[:-1], c[1:]))
    grid = np.linspace(-8, 8, 1601)
    u, v = np.meshgrid(grid, grid, indexing="ij")
    noise = (u - shift[0], rho * u + math.sqrt(1 - rho**2) * v - shift[1])
    ratio = sum(
        weight * np.exp(sum(x * (z / sigma - 0.5 / sigma**2) for x, z in zip(pattern, noise, strict=True)))
        for pattern, weight in enumeration.pattern_law(scheme).items()
    )
    density = np.exp(-(u**2 + v**2) / 2) / (2 * math.pi) * (grid[1] - grid[0]) ** 2
    return float(np.sum(density * np.maximum(1 - math.exp(epsilon) * ratio, 0)))


@pytest.mark.parametrize(
    ("scheme", "bands", "sigma", "epsilon"),
    [
        (Poisson(2, 0.3), 1, 1.0, 0.4),
        (Poisson(2, 0.9), 1, 3.0, 1.5),
        (BMinSep(2, 2, 0.4), 2, 1.5, 0.3),
        (BMinSep(2, 2, 0.4, False), 2, 1.5, 0.3),
        (BMinSep(2, 2, 1.0), 2, 2.0, 0.8),
        (CyclicPoisson(2, 2, 0.7), 2, 2.0, 0.3),
        (BallsInBins(2, 2), 2, 1.5, 1.0),
        (BallsInBins(2, 3), 2, 1.5, 0.5),
    ],
)
def test_two_steps_against_quadrature(scheme, bands, sigma, epsilon):
    mechanism = make(scheme, bands, sigma)
    exact = exact_two_steps(mechanism, epsilon)
    found = add_direction.add_candidates(mechanism, epsilon)
    assert found[-1].name == "half-space"
    for proposal in found:
        scale = math.exp(proposal.log_scale)
        terms, _ = draw_terms(proposal, epsilon, 800)
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
    (30, 0.5, 5.0, 2.0, 5e-4),
    (30, 0.5, 5.0, 3.0, 5e-4),
    (30, 0.5, 5.0, 3.5, 5e-4),
    (8, 0.8, 4.0, 3.7, 5e-4),
    (10, 0.1, 2.0, 0.5, 1e-4),
]


@pytest.mark.parametrize(("n", "p", "sigma", "epsilon", "interval"), PLD)
def test_poisson_against_the_pld_accountant(n, p, sigma, epsilon, interval):
    """Down to deltas of 2e-12 and 4e-13 from a hundred thousand draws."""
    optimistic, pessimistic = pld_add(n, p, sigma, epsilon, interval)
    mechanism = make(Poisson(n, p), 1, sigma)
    proposal = add_direction.add_candidates(mechanism, epsilon)[-1]
    assert proposal.name == "half-space"
    terms, _ = draw_terms(proposal, epsilon, 800)
    low, high = (d / math.exp(proposal.log_scale) for d in (optimistic, pessimistic))
    slack = 1e-15 / math.exp(proposal.log_scale)  # the PLD accountant truncates its tails
    assert terms.mean() <= high + width(min(high, 1.0), terms.size) + slack
    assert terms.mean() >= low - width(min(low, 1.0), terms.size) - slack


def test_several_bands_against_plain_sampling():
    mechanism, epsilon = make(BMinSep(40, 4, 0.2), 4, 3.0), 0.5
    proposal = add_direction.add_candidates(mechanism, epsilon)[-1]
    terms, _ = draw_terms(proposal, epsilon, 400)
    base = add_direction.plain(mechanism, "add")
    reference, _ = draw_terms(base, epsilon, 1500, seed=9)
    scale = math.exp(proposal.log_scale)
    assert scale < 0.1
    allowed = scale * width(terms.mean(), terms.size) + width(reference.mean(), reference.size)
    assert abs(scale * terms.mean() - reference.mean()) <= 2 * allowed


@pytest.mark.parametrize("scheme", [Poisson(500, 0.02), BMinSep(500, 8, 0.03), BallsInBins(500, 100)])
def test_one_compilation_for_every_noise_multiplier(scheme):
    from jaxacct.proposals import _draw_blocks

    before = None
    for sigma in (4.0, 5.0, 6.0):
        mechanism = make(scheme, 1, sigma)
        minorant = add_direction.best_minorant(mechanism, 0.4)
        add_direction.half_space_proposal(mechanism, 0.4, minorant).draw(jax.random.key(0), 0, 1)
        before = before or _draw_blocks._cache_size()
    assert _draw_blocks._cache_size() == before


def test_the_coordinate_is_replaced_to_within_its_stated_rounding():
    """The float32 coordinate `<m, zeta> / |C m|` against float64: the slack of `_half_space` covers it."""
    for n, bands in ((1500, 16), (7200, 4), (3, 1)):
        mechanism = make(BMinSep(n, bands, 0.01), bands, 2.0)
        minorant = add_direction.tangent(mechanism, np.full(n, 0.25))
        noise = scores.noise_scores(jax.random.key(4), mechanism.strategy, n, 256, np.float32)
        weights = np.asarray(minorant.weights / minorant.norm, np.float32)
        computed = np.asarray(add_direction._tree_sum(weights * noise), np.float64)
        exact = np.asarray(noise, np.float64) @ (minorant.weights / minorant.norm)
        size = np.abs(np.asarray(noise, np.float64) * weights).sum(1)
        assert np.all(np.abs(computed - exact) <= (math.ceil(math.log2(n)) + 6) * 2.0**-24 * size)


# --- Extrapolation by concavity ---


def test_height_of_a_term_is_concave_in_the_loss():
    """Theorem 4 needs `v -> Phi^{-1}(1 - e^v)` concave and decreasing for v < 0."""
    v = np.linspace(-30, -1e-3, 20001)
    heights = -ndtri(np.exp(v))
    assert np.all(np.diff(heights) < 0)
    assert np.all(np.diff(heights, 2) <= 1e-9)


@pytest.mark.parametrize("scheme", [Poisson(2, 0.3), BMinSep(2, 2, 0.4), BallsInBins(2, 2)])
def test_height_of_the_mean_is_concave_and_extrapolates_above(scheme):
    mechanism, epsilon = make(scheme, scheme.min_separation, 0.8), 0.35
    log_scale = add_direction.log_remainder_scale(mechanism, epsilon)
    mu = scheme.participation_probabilities()
    signal = add_direction.gram(mechanism, mu)
    along = signal / math.sqrt(mu @ signal)
    distances = np.linspace(0, 3, 7)
    means = [exact_two_steps(mechanism, epsilon, d * along) for d in distances]
    heights = ndtri(np.array(means) * math.exp(-log_scale))
    assert np.all(np.diff(heights, 2) <= 1e-6)
    for i in range(1, 6):
        line = extrapolation.at_distances(mechanism, epsilon, distances[i], distances[i + 1])
        x = [means[j] * math.exp(-log_scale) for j in (i, i + 1)]
        assert math.exp(line.log_bound(*x)) >= means[0] * (1 - 1e-6)


def test_shifted_laws_against_quadrature():
    mechanism, epsilon = make(BMinSep(2, 2, 0.4), 2, 0.8), 0.35
    mu = mechanism.scheme.participation_probabilities()
    signal = add_direction.gram(mechanism, mu)
    along = signal / math.sqrt(mu @ signal)
    line = extrapolation.at_distances(mechanism, epsilon, 0.7, 1.9)
    for law, distance in ((line.near, 0.7), (line.far, 1.9)):
        exact = exact_two_steps(mechanism, epsilon, distance * along) * math.exp(-line.log_scale)
        terms = line.terms(law.draw(jax.random.key(3), 0, 800), 0.0)
        assert abs(terms.mean() - exact) <= width(exact, terms.size) + 1e-5


@pytest.mark.parametrize(
    ("n", "p", "sigma", "epsilon", "most"),
    [(1500, 1 / 300, 1.248, 0.5, 1.2e-5), (1500, 1 / 300, 0.891, 1.0, 5e-7), (200, 0.02, 0.7, 1.5, 1e-3)],
)
def test_many_participations_against_the_pld_accountant(n, p, sigma, epsilon, most):
    """No half-space helps here; the certificate stays above the truth and resolves small deltas."""
    mechanism = make(Poisson(n, p), 1, sigma)
    # The optimistic accountant says 0 here; the pessimistic one is right to a few percent at this interval.
    _, pessimistic = pld_add(n, p, sigma, epsilon, 1e-3)
    line = extrapolation.plan_extrapolation(mechanism, epsilon, jax.random.key(1))
    found = extrapolation.certify(line, 0.0, FALSE_ALARM, jax.random.key(2), max_samples=100_000)
    assert found.num_samples <= 100_000
    assert pessimistic / 2 <= found.bound <= most


def test_extrapolation_refuses_what_it_cannot_do():
    mechanism = make(Poisson(10, 0.1), 1, 1.0)
    with pytest.raises(ValueError, match="exactly zero"):
        extrapolation.at_distances(mechanism, 5.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="0 < near < far"):
        extrapolation.at_distances(mechanism, 0.5, 2.0, 1.0)
    assert extrapolation.plan_extrapolation(mechanism, 5.0, jax.random.key(0)) is None
    line = extrapolation.at_distances(mechanism, 0.5, 1.0, 2.0)
    assert line.log_bound(1.0, 0.5) == line.log_bound(0.5, 0.0) == line.log_scale


@pytest.mark.slow
def test_certificates_are_rarely_wrong():
    """At q = 0.2 and a truth just above delta_v, 100 runs: more than 45 wrong ones has probability 1e-7."""
    mechanism, epsilon = make(Poisson(2, 0.3), 1, 1.0), 0.4
    exact = exact_two_steps(mechanism, epsilon)
    wrong = 0
    for seed in range(100):
        line = extrapolation.at_distances(mechanism, epsilon, 0.2, 2.0)
        found = extrapolation.certify(line, exact * (1 - 1e-6), 0.2, jax.random.key(seed), 20_000)
        wrong += found.bound <= exact * (1 - 1e-6)
    assert wrong <= 45
