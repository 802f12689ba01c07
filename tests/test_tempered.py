"""A replica and the power of another: the power is dominated, terms are bounded, draws have their law."""

import dataclasses
import itertools
import json
import math
from collections import Counter

import jax
import numpy as np
import pytest
from scipy import stats

from jaxacct import BandedToeplitz, BMinSep, Budget, Mechanism, Plan, Poisson, Toeplitz, verify
from jaxacct.calibration import make_plan
from jaxacct.kernels import randomness
from jaxacct.likelihood import rounding
from jaxacct.proposals import tempered as proposals
from jaxacct.proposals.candidates import budget_lines, candidates
from jaxacct.schemes import BallsInBins
from jaxacct.schemes.replicas import tempered
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.lines import total
from jaxacct.strategies.finite_toeplitz import FiniteToeplitz
from jaxacct.strategies.stationary import adds_windows
from jaxacct.verification.target import Target
from tests.oracles import budget
from tests.oracles.enumeration import pattern_law, strategy_matrix

FALSE_ALARM = 1e-6
# (n, b, coefficients, warm, n rows alone): bands as many as the separation and fewer, n below b, last rows.
SETTINGS = [
    (6, 3, (2.0, 1.0, 0.5), True, False),
    (6, 3, (2.0, 1.0, 0.5), False, True),
    (5, 1, (1.0,), False, False),
    (5, 2, (1.0, 0.7), True, True),
    (3, 5, (1.0, 0.8, 0.6), True, False),
    (7, 4, (1.0, 0.8), True, True),
    (1, 1, (1.0,), False, False),
]
POWERS = [(0.01, 0.25), (0.4, 0.75), (0.97, 63 / 64)]  # p, s
# All settings, each with one of these; the others are slow.
CASES = [
    pytest.param(setting, *pair, marks=() if (i + j) % 3 == 1 else pytest.mark.slow)
    for i, setting in enumerate(SETTINGS)
    for j, pair in enumerate(POWERS)
]
LOW = Mechanism(BMinSep(2, 2, 0.04), Toeplitz((1.0,)), 0.2)
NAME = "a replica and the power 23/32 of another"


def mechanism_of(n, b, coefficients, warm, finite, p=0.4, sigma=0.7):
    strategy = FiniteToeplitz(coefficients, n) if finite else BandedToeplitz(coefficients)
    return Mechanism(BMinSep(n, b, p, warm), strategy, sigma)


def gram(mechanism):
    n, strategy = mechanism.scheme.iterations, mechanism.strategy
    dense = strategy_matrix(strategy.array, strategy.rows(n), n)
    return dense.T @ dense


def lags(x, b):
    """(steps since the last participation, steps until the next) of every step, b and more as b."""
    at = [i for i, joins in enumerate(x) if joins]
    lag = [min([i - j for j in at if j < i] + [b]) for i in range(len(x))]
    lead = [min([j - i for j in at if j >= i] + [b]) for i in range(len(x))]
    return np.array(lag), np.array(lead)


def tempers_of(mechanism, power, x):
    lag, lead = lags(x, mechanism.scheme.min_separation)
    return tuple(table[lag - 1, lead] for table in tempered.tempers(mechanism, power))


def pair_law(mechanism, power):
    """{(x, x'): weight} of the mixture, by enumeration; its sum is the mass of `p(x) Q a_x h`."""
    scheme, shared = mechanism.scheme, gram(mechanism) / mechanism.noise_multiplier**2
    n, b, p = scheme.iterations, scheme.min_separation, scheme.sampling_probability
    apart = [x for x in itertools.product((0, 1), repeat=n) if all(sum(x[i : i + b]) <= 1 for i in range(n))]
    found = {}
    for x, chance in pattern_law(scheme).items():
        kappa, coefficient = tempers_of(mechanism, power, x)
        for other in apart:
            barred = np.convolve(other, np.ones(b))[:n] > 0
            counts = np.array(x) + kappa * other
            exponent = (counts @ shared @ counts - np.diag(shared) @ counts) / 2
            exponent += coefficient @ other + power * (~barred).sum() * math.log1p(-p)
            found[x, other] = chance * math.exp(exponent)
    return found


def log_ratios(mechanism, outputs):
    """ln a_i of score vectors `C^T y`."""
    return (outputs - np.diag(gram(mechanism)) / 2) / mechanism.noise_multiplier**2


def log_likelihood(ratios, p_log, q_log, b):
    """ln of the recurrence `g_i = q g_{i+1} + p e^{r_i} g_{i+b}`, (num,) of (num, n)."""
    num, n = ratios.shape
    ahead = np.zeros((n + b, num))
    for i in range(n - 1, -1, -1):
        ahead[i] = np.logaddexp(q_log + ahead[i + 1], p_log + ratios[:, i] + ahead[i + b])
    return ahead


def both_likelihoods(mechanism, power, x, ratios):
    """(ln f, ln f_1, ln h(x, .)) at log-ratios, in NumPy."""
    scheme = mechanism.scheme
    p, b = scheme.sampling_probability, scheme.min_separation
    every = log_likelihood(ratios, math.log(p), math.log1p(-p), b)
    loss = every[0]
    if scheme.warm_start and b > 1:
        every = np.concatenate([every, np.zeros((b, len(ratios)))])
        loss = np.logaddexp.reduce(every[:b] + scheme.start_log_weights()[:, None])
    kappa, coefficient = tempers_of(mechanism, power, x)
    log_h = log_likelihood(kappa * ratios + coefficient, 0.0, power * math.log1p(-p), b)[0]
    return loss, every[0], log_h


def outputs_for(mechanism, rng, num=400):
    """Scores that every participation vector may have had, and far ones of every sign."""
    n, sigma = mechanism.scheme.iterations, mechanism.noise_multiplier
    shared = gram(mechanism)
    noise = rng.normal(size=(num, n)) @ np.linalg.cholesky(shared).T * sigma
    counts = np.array(list(pattern_law(mechanism.scheme)))[
        rng.integers(len(pattern_law(mechanism.scheme)), size=num)
    ]
    wide = rng.normal(size=(num, n)) * sigma**2 * 10 ** rng.uniform(-1, 2, size=(num, 1))
    return np.concatenate([noise + 1.3 * counts @ shared, wide])


@pytest.mark.parametrize(("setting", "p", "power"), CASES)
def test_the_mixture_has_mass_one(setting, p, power):
    """Z is the sum over all pairs; the drawn law by its state machine is the enumerated one, to 1e-9."""
    mechanism = mechanism_of(*setting, p=p)
    weights = pair_law(mechanism, power)
    mass = sum(weights.values())
    assert tempered.log_normalizer(mechanism, power) == pytest.approx(math.log(mass), abs=1e-9)
    found = tempered._backward(mechanism, power, True)
    law = walked(mechanism, found, np.float64)
    assert law.keys() == {pair for pair, weight in weights.items() if weight > 0}
    for pair, chance in law.items():
        assert chance == pytest.approx(weights[pair] / mass, rel=1e-9)
    relative, _ = tempered.errors(mechanism, power)
    rounded = walked(mechanism, found, np.float32)
    assert all(abs(math.log(rounded[pair] / chance)) <= relative for pair, chance in law.items())


def walked(mechanism, found, dtype):
    """The law of (x, x') that draws by the hazards have, by every path; not the code that draws."""
    n, b = mechanism.scheme.iterations, mechanism.scheme.min_separation
    free, partner, settling = [part.astype(dtype).astype(float) for part in found.hazards]
    law: dict = {}

    def go(i, x, other, since, since_other, chance):
        """since: steps since x took part, b if it may now; since_other also knows x's lag then."""
        if chance <= 0:
            return
        if i == n:
            law[tuple(x), tuple(other)] = law.get((tuple(x), tuple(other)), 0.0) + chance
            return
        ago, lag = since_other
        barred, barred_other = since < b, ago < b
        after, after_other = min(since + 1, b), (min(ago + 1, b), lag)
        both = one = two = 0.0
        if not barred and not barred_other:
            one, two, both = np.diff(free[i], prepend=0.0)
        elif not barred_other:
            two = partner[i, since - 1]
        elif not barred:
            one = settling[i, lag - 1, ago - 1] if lag else 0.0
        go(i + 1, [*x, 0], [*other, 0], after, after_other, chance * (1 - both - one - two))
        # Whoever takes part after x' did is settled: x' is free when b steps are over, whatever happens.
        go(i + 1, [*x, 1], [*other, 0], min(1, b), (after_other[0], 0), chance * one)
        go(i + 1, [*x, 0], [*other, 1], after, (min(1, b), since), chance * two)
        go(i + 1, [*x, 1], [*other, 1], min(1, b), (min(1, b), 0), chance * both)

    for barred, chance in enumerate(found.starts):
        go(0, [], [], b - barred, (b, 0), chance)
    return law


@pytest.mark.parametrize(("setting", "p", "power"), CASES)
def test_the_power_is_dominated_and_terms_are_bounded(setting, p, power):
    """h >= f_1^s and a term <= M at outputs of every kind and for every x; a smaller h is caught."""
    mechanism = mechanism_of(*setting, p=p)
    rng = np.random.default_rng(1)
    ratios = log_ratios(mechanism, outputs_for(mechanism, rng))
    _, log_ahead = mechanism.scheme.tempered(power)
    log_z = tempered.log_normalizer(mechanism, power)
    for x in pattern_law(mechanism.scheme):
        loss, cold, log_h = both_likelihoods(mechanism, power, x, ratios)
        assert np.all(log_h >= power * cold - 1e-12)
        assert np.all(power * loss <= power * cold + log_ahead)
        # M at every epsilon at once: sup over epsilon of term / M is w f^s c^-1 / Z.
        for epsilon in (0.5, 5.0, 20.0):
            with np.errstate(over="ignore", divide="ignore"):
                log_term = log_z - log_h + np.log(np.maximum(-np.expm1(epsilon - loss), 1e-300))
            scale = log_z + log_ahead + math.log(power**power / (1 + power) ** (1 + power)) - power * epsilon
            assert np.all(log_term[loss > epsilon] <= scale + 1e-9)


def test_an_attack_wins_with_a_smaller_constant():
    """One step: at the y where the constant is attained, h with 1 % less of it is below the power."""
    power = 0.375
    for kappa in (0.375, 0.5, 0.75, 0.96875, 1.0):
        y = np.geomspace(1e-12, 1e12, 200_001)
        raised = np.expm1(power * np.log1p(y))
        constant = math.exp(tempered.log_constant(power, kappa))
        assert np.all(raised <= constant * y**kappa * (1 + 1e-9))
        assert np.any(raised > 0.99 * constant * y**kappa)
    # Without the bar's factor q^{-b (kappa - s)}, or with a start taken for a cold one, some output wins.
    mechanism = mechanism_of(6, 3, (2.0, 1.0, 0.5), False, False, p=0.4, sigma=5.0)
    kappa, coefficient = tempers_of(mechanism, 0.25, (0,) * 6)
    assert kappa[0] > 0.25
    b, log_q = 3, math.log1p(-0.4)
    ratios = np.random.default_rng(2).normal(size=(4000, 6)) * 10
    cold = log_likelihood(ratios, math.log(0.4), log_q, b)[0]
    lowered = coefficient + b * (kappa - 0.25) * log_q
    assert np.any(log_likelihood(kappa * ratios + lowered, 0.0, 0.25 * log_q, b)[0] < 0.25 * cold - 1e-6)
    warm = mechanism_of(6, 3, (2.0, 1.0, 0.5), True, False)
    loss, cold, _ = both_likelihoods(warm, 0.25, (0,) * 6, ratios)
    assert np.any(loss > cold + 1e-3)


def test_draws_follow_the_enumerated_law():
    """(x, x') by chi-square, warm start, attraction before, after and at one step; less is noticed."""
    mechanism, power, num = mechanism_of(5, 2, (1.0, 0.7), True, False, p=0.3, sigma=1.0), 0.5, 100_000
    weights = pair_law(mechanism, power)
    mass = sum(weights.values())
    arrays = tempered.tables(mechanism, power)
    draw = jax.jit(tempered.draw_pair, static_argnums=(1, 3))
    pair = [np.asarray(part, int) for part in draw(jax.random.key(5), mechanism.scheme, arrays, num)]
    drawn: dict = {}
    for key in map(tuple, np.concatenate(pair, axis=1)):
        drawn[key] = drawn.get(key, 0) + 1
    expected = {(*x, *other): num * weight / mass for (x, other), weight in weights.items()}
    assert drawn.keys() <= {key for key, mean in expected.items() if mean > 0}

    def p_value(expected):
        often = max(expected, key=lambda key: expected[key])
        # Rare pairs are one cell, or of the most frequent one's where they are rare together.
        rare = [key for key, mean in expected.items() if mean < 10]
        cell = dict.fromkeys(rare, "rare" if sum(expected[key] for key in rare) >= 10 else often)
        seen, means = Counter(), Counter()
        for key, mean in expected.items():
            seen[cell.get(key, key)] += drawn.get(key, 0)
            means[cell.get(key, key)] += mean
        return stats.chi2.sf(sum((seen[key] - means[key]) ** 2 / means[key] for key in means), len(means) - 1)

    assert p_value(expected) > FALSE_ALARM
    together = {
        key: mean * (0.85 if any(map(min, key[:5], key[5:])) else 1.0) for key, mean in expected.items()
    }
    assert p_value({key: mean * num / sum(together.values()) for key, mean in together.items()}) < FALSE_ALARM
    kappa, coefficient = tempered.shifts(arrays, pair[0][:50].astype(np.float32))
    for row in range(50):
        wanted = tempers_of(mechanism, power, pair[0][row])
        np.testing.assert_array_equal(np.asarray(kappa[row], float), wanted[0])
        np.testing.assert_allclose(np.asarray(coefficient[row]), wanted[1], rtol=1e-6)


def test_the_chosen_one_is_certified_stored_and_rechecked(tmp_path):
    evidence = verify(LOW, 26.0, 4e-5, key=jax.random.key(3))
    assert evidence.accepted and evidence.remove.proposal == NAME
    predicted = evidence.remove.predicted_samples
    assert predicted["plain"] > 100 * predicted[NAME] and evidence.remove.num_samples < 20_000
    plan = make_plan(LOW, Target.at(26.0, 4e-5), evidence)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").evidence == evidence
    data = json.loads(json.dumps(plan.to_json()))
    edited = json.loads(json.dumps(data))
    edited["evidence"]["remove"]["scale"] /= 2
    with pytest.raises(ValueError, match="scale"):
        Plan.from_json(edited)
    data["evidence"]["remove"]["proposal"] = "a replica and the power 22/32 of another"
    with pytest.raises(ValueError):
        Plan.from_json(data)


def test_terms_certify_no_less_than_the_truth():
    """The interval of many draws holds the divergence; of runs at a delta 10 % below almost none is accepted.

    Where h and the power are a tenth apart, so that one is not taken for the other.
    """
    mechanism, epsilon = Mechanism(BMinSep(2, 1, 0.3), Toeplitz((1.0,)), 0.6), 1.0
    proposal = proposals.tempered_proposal(mechanism, 12, epsilon)
    key = randomness.key_from_words([1, 2])
    terms = [
        hockey_stick.weighted_terms(proposal.draw(key, first, 128), "remove", epsilon)
        for first in range(0, 512, 128)
    ]
    terms = np.concatenate(terms) / math.exp(proposal.log_scale)
    assert terms.max() <= 1 + 1e-5
    terms = np.minimum(terms, 1.0)
    exact = divergence_of_two_steps(mechanism, epsilon)
    low, high = bounds.mean_interval(bounds.bin_terms(terms), FALSE_ALARM)
    scale, slack = math.exp(proposal.log_scale), 1 + proposal.relative_error + 1e-4
    assert scale * low / slack <= exact <= scale * high * slack
    assert high < 1.05 * low
    q, runs = 0.05, np.array_split(terms, 64)
    accepted = sum(scale * bounds.mean_interval(bounds.bin_terms(run), q)[1] < 0.9 * exact for run in runs)
    assert accepted <= stats.binom.isf(FALSE_ALARM, len(runs), q)


def divergence_of_two_steps(mechanism, epsilon):
    """Of one band, by a grid over both outputs."""
    law, sigma = pattern_law(mechanism.scheme), mechanism.noise_multiplier
    grid = np.linspace(-8 * sigma, 1 + 8 * sigma, 3001)
    spacing = grid[1] - grid[0]
    ratio = np.exp((grid - 0.5) / sigma**2)
    f = sum(weight * ratio[:, None] ** x[0] * ratio ** x[1] for x, weight in law.items())
    base = np.exp(-(grid**2) / 2 / sigma**2) / sigma / math.sqrt(2 * math.pi)
    return float((np.maximum(f - math.exp(epsilon), 0) * np.outer(base, base)).sum() * spacing**2)


def test_what_is_booked_covers_the_weights():
    """Float32 against float64 of the same scores, and lines for every part."""
    mechanism, power = mechanism_of(6, 3, (2.0, 1.0, 0.5), True, False, p=0.01, sigma=0.3), 0.5
    proposal = proposals.tempered_proposal(mechanism, 16, 15.0)
    lines = {line.name: line for line in budget_lines(proposal, 1e-5)}
    weight = math.log1p(lines["float32 weights, with the power of a replica"].amount)
    scores = outputs_for(mechanism, np.random.default_rng(3), 200)[:200]
    arrays = tempered.tables(mechanism, power)
    cold, _ = mechanism.scheme.tempered(power)
    x = np.array([[1, 0, 0, 0, 1, 0]] * 200, np.float32)
    kappa, coefficient = tempered.shifts(arrays, x)
    ratios = log_ratios(mechanism, scores).astype(np.float32)
    found = cold.log_likelihood_ratios(kappa * ratios + coefficient - math.log(cold.sampling_probability))
    exact = both_likelihoods(mechanism, power, (1, 0, 0, 0, 1, 0), log_ratios(mechanism, scores))[2]
    assert 0 < np.max(np.abs(np.asarray(found, float) - exact)) < weight < 0.01
    assert total(tuple(lines.values()), "delta") < 1e-5 / 100
    more = rounding.tempered_lines(mechanism, Mechanism(cold, mechanism.strategy, 0.3), 1e-5, 5.0, 1000.0)
    assert total(more, "relative") > math.expm1(weight)


@pytest.mark.parametrize("warm", [True, False])
def test_items_of_the_power(warm):
    """Every one against proofs/rounding.md, section 3e, recomputed as in tests/test_budget_lines.py."""
    mechanism = Mechanism(BMinSep(60, 4, 0.02, warm), BandedToeplitz.square_root(4), 0.4)
    delta_v, steps = 1e-5, 12
    found = proposals.tempered_proposal(mechanism, steps, 1.0)
    cold, sigma = mechanism.scheme.tempered(steps / 32)[0], mechanism.noise_multiplier
    every, spent, log_z = budget.most(mechanism.scheme), 1e-3 * delta_v, found.log_normalizer

    def make(tau):
        law = budget.law_of(mechanism, delta_v, "remove", 2, 0.0, tau)
        return law._replace(drawn=2 * math.sqrt(every))

    law, _, errors = budget.bounded(mechanism, "remove", 2, make)
    log_p = math.log(cold.sampling_probability)
    # What log-ratios are moved by, besides ln (1 - q^s): the largest size.
    least = tempered.tempers(mechanism, steps / 32).log_coefficient
    ratio = law.ratio + float(np.abs(least - log_p).max())
    of_h = law._replace(ratio=ratio, largest=min(log_z - math.log(spent), every * (ratio + 1 / sigma**2)))
    weight = sum(budget.errors(mechanism, of_h, "remove", 2, every)[:2])
    weight += budget.ratio_error(Mechanism(cold, mechanism.strategy, sigma), of_h, every)
    weight += 4 * budget.U * (every * (ratio - log_p) + abs(log_z) + of_h.largest)
    expected = budget.items(mechanism, errors, law.beyond + law.above + spent)
    expected["float32 weights, with the power of a replica"] = "relative", math.expm1(weight)
    lines = {line.name: (line.kind, line.amount) for line in found.rounding_lines(delta_v)}
    assert lines.keys() == expected.keys()
    for name, (kind, amount) in expected.items():
        assert lines[name] == (kind, pytest.approx(amount, rel=1e-6, abs=0)), name
    # f / f_1 is at most e^{s log_ahead}, 1 for a cold start, in scales.
    log_ahead = mechanism.scheme.tempered(steps / 32)[1]
    power = steps / 32
    scale = log_z + log_ahead - math.log(power) + (1 + power) * math.log(power / (1 + power)) - power
    assert scale < found.log_scale <= scale + 1e-8 and (log_ahead > 1e-4) == warm


def test_scores_are_booked_as_they_are_drawn(monkeypatch):
    """By transforms, also where the scheme of the power takes part so rarely that others have windows."""
    mechanism = Mechanism(BMinSep(5000, 8, 1.2e-4), BandedToeplitz((1.0, 0.8, 0.6)), 0.3)
    cold, _ = mechanism.scheme.tempered(0.5)
    found = cold, mechanism.strategy
    assert adds_windows(*found, 2) and not adds_windows(mechanism.scheme, mechanism.strategy, 2)
    booked = rounding.tempered_lines.__wrapped__
    asked = mechanism, Mechanism(*found, 0.3), 1e-5, 5.0, 3.0
    lines = booked(*asked)
    monkeypatch.setattr(rounding, "adds_windows", lambda *_: False)
    assert booked(*asked) == lines


def test_where_there_is_none():
    budget = Budget.split(1e-4)
    names = [c.proposal.name for c in candidates(LOW, 26.0, "remove", budget)]
    assert names[0] == NAME and "plain" in names
    # Three replicas are better than two, plain draws are cheap, p = 1, columns that overlap, other schemes.
    quiet = dataclasses.replace(LOW, noise_multiplier=2.0)
    # None is below two replicas over their Z, so nothing is looked at where that is small.
    for steps, epsilon in itertools.product((1, 12, 31), (0.5, 3.0)):
        scale = proposals.tempered_proposal(quiet, steps, epsilon).log_scale
        assert scale >= -epsilon - math.log(4)
    needed = lambda proposal: 1e9  # noqa: E731
    assert proposals.tempered_candidates(quiet, 0.2, needed) == []
    assert proposals.tempered_candidates(LOW, 26.0, lambda proposal: 0.0) == []
    overlapping = Mechanism(Poisson(2, 0.3), Toeplitz((0.8, 0.6)), 0.3)
    certain = Mechanism(BMinSep(2, 2, 1.0), Toeplitz((1.0,)), 0.2)
    for none in (overlapping, certain, Mechanism(BallsInBins(4, 2), Toeplitz((1.0,)), 0.2)):
        assert proposals.tempered_candidates(none, 20.0) == []
        with pytest.raises(ValueError, match="mechanism must have a Toeplitz matrix banded within"):
            proposals.tempered_proposal(none, 16, 20.0)
    # So sure that 1 - q^s is no float64 number to rely on (proofs/rounding.md, section 3e).
    sure = Mechanism(BMinSep(2, 2, 1 - 1e-7), Toeplitz((1.0,)), 2.0)
    assert math.isfinite(tempered.log_normalizer(sure, 0.5)) and tempered.errors(sure, 0.5)[0] > 1e6
    assert proposals.tempered_candidates(sure, 5.0, needed) == []
    for steps in (0, 32):
        with pytest.raises(ValueError, match=r"steps must be in 1\.\.31"):
            proposals.tempered_proposal(LOW, steps, 20.0)
    assert proposals.tempered_called(LOW, 26.0, "2 replicas") is None
    with pytest.raises(ValueError, match="overflows"):
        proposals.tempered_proposal(dataclasses.replace(LOW, noise_multiplier=0.01), 31, 20.0)
