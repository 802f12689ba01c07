"""One process for every sampler: the table against its recursion, enumeration, and its own draws.

Statistical tests have a false-alarm probability of 1e-6 each, with fixed keys.
"""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import jaxacct as ja
from jaxacct.core.plan import Plan
from jaxacct.kernels import exponentials
from jaxacct.kernels.table import draw_counts
from jaxacct.proposals.base import plain
from jaxacct.schemes.replicas import table as pairs
from jaxacct.schemes.table import SamplingTable
from tests.conformance.test_schemes import MEMBERS
from tests.draws import trained
from tests.oracles import enumeration
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.oracles.settings import slow, slow_but

# Of those of `MEMBERS` CI has three: lockouts by step and starts, counts that are thinned, turns.
CUSTOM = slow_but({1, 2, 3}, MEMBERS["custom"])
NORMAL_TAIL = 4.9  # standard deviations that a normal number exceeds with probability 1e-6


def balanced(n, b, k):
    """With j participations left, j of the columns that are left."""
    most = math.ceil(k)
    left, i = np.arange(most + 1), np.arange(n)[:, None]
    join = np.clip(left / np.maximum(n - i - np.maximum(left - 1, 0) * (b - 1), 1), 0, 1)
    return ja.CustomScheme(join, b, keep=k / most)


def nested(n, b, k):
    """k of the steps of one class modulo b, which is as likely as it is long: with turns and counts."""
    most = math.ceil(k)
    left, i = np.arange(most + 1), np.arange(n)[:, None]
    join = np.clip(left / -(-(n - i) // b), 0, 1)
    return ja.CustomScheme(join, b, True, -(-(n - np.arange(b)) // b) / n, k / most)


def of(scheme):
    """The table of a scheme as a scheme of its own."""
    table = scheme.table
    return ja.CustomScheme(table.join[:, 0], table.lockout, table.turns, table.start)


# Every sampler of examples, and its table.
SAME = [
    *(
        (scheme, of(scheme))
        for scheme in (
            ja.Poisson(20, 0.3),
            ja.BMinSep(40, 4, 0.2),
            ja.BMinSep(41, 4, 0.2, False),
            ja.BMinSep(41, 4, 1.0),
            ja.BMinSep(3, 5, 0.4),
            ja.CyclicPoisson(41, 4, 0.3),
            ja.BallsInBins(41, 5),
            ja.BallsInBins(3, 5),
            ja.EpochwiseAllocation(43, 8, 3),
            ja.EpochwiseAllocation(24, 8, 8),
        )
    ),
    (ja.BalancedMinSep(40, 3, 4.5), balanced(40, 3, 4.5)),
    (ja.BalancedMinSep(30, 1, 3), balanced(30, 1, 3)),
]


@pytest.mark.parametrize(
    "lockout, turns", [(1, False), (2, False), ([1, 4, 2, 1, 7, 1, 1], False), (3, True)], ids=str
)
@pytest.mark.parametrize("num_left, starts", [slow(1, 1), (3, 3)])
def test_the_likelihood_of_every_kind_of_table_is_that_of_its_walks(lockout, turns, starts, num_left, x64):
    """The sum over all participation vectors, enumerated step by step, of e to the ratios of their steps."""
    rng = np.random.default_rng(0)
    for total, keep in ((1.0, 1.0), (0.9, 0.6)):
        join = rng.choice([0.0, 0.2, 0.7, 1.0], (7, num_left))
        join[:, 0] *= num_left == 1
        start = rng.dirichlet(np.ones(starts)) * total
        table = SamplingTable(join, np.array(lockout), turns, start, keep)
        ratios = rng.normal(0, 1.5, (7, 3))
        found = table.log_likelihood_ratios(jnp.asarray(ratios))
        given = join[:, 0].tolist() if num_left == 1 else list(map(tuple, join.tolist()))
        walks = SimpleNamespace(name="custom", iterations=7, join=given, lockout=lockout, turns=turns)
        walks.start, walks.keep = start.tolist(), keep
        patterns, weights = enumeration.vectors(walks)
        np.testing.assert_allclose(found, np.log(weights @ np.exp(patterns @ ratios)), rtol=1e-12, atol=1e-12)


def test_little_noise_is_not_certified_for_units_that_start_at_different_steps():
    """The attack: delta is about 0.5. A likelihood ratio that ignored outputs would have no loss."""
    scheme = ja.CustomScheme(np.full(8, 0.1), 1, start=[0.5, 0.5])
    with pytest.raises(ja.NotCertifiedError):
        ja.calibrate(scheme, ja.BandedToeplitz.identity(), epsilon=1.0, delta=0.01, noise_multiplier=0.1)


@pytest.mark.parametrize(
    "scheme", [ja.Poisson(10**6, 1e-5), ja.BMinSep(10**5, 64, 1e-4), ja.CyclicPoisson(10**6, 1, 0.3)], ids=str
)
def test_no_participation_is_not_said_to_be_likelier_than_it_is(scheme):
    """The attack: a divergence that is zero by the rounding of a million sums; proposals allow for 1e-12."""
    with mpmath.workdps(40):
        wait = mpmath.log1p(-mpmath.mpf(scheme.sampling_probability))
        weights = np.exp(scheme.start_log_weights()).tolist() if isinstance(scheme, ja.BMinSep) else [1.0]
        chances = [w * mpmath.exp((scheme.iterations - s) * wait) for s, w in enumerate(weights)]
        exact, found = mpmath.log(mpmath.fsum(chances)), scheme.log_probability_of_none()
        assert exact * (1 + mpmath.mpf("1e-12")) <= found <= exact


@pytest.mark.parametrize("scheme", CUSTOM, ids=str)
def test_draws_and_batches_follow_the_table(scheme, key):
    """Patterns of 20,000 samples, and of 20,000 examples in one run of batches, against enumeration."""
    draw = jax.jit(
        lambda key: (scheme.draw_participation(key, 20_000), scheme.table.draw_counts(key, 20_000))
    )
    drawn, (steps, counts) = jax.tree.map(np.asarray, draw(key))
    assert (counts[steps < scheme.iterations] > 0).all()
    batched = trained(scheme, 20_000, 5)
    assert batched.max() == 1, "an example is in a batch once"
    exact = enumeration.pattern_distribution(scheme)
    wrong = ja.CustomScheme(
        0.9 * np.asarray(scheme.join), scheme.lockout, scheme.turns, scheme.start, scheme.keep
    )
    for found in (drawn, batched):
        assert chi_square_p_value(found, exact) > FALSE_ALARM
        assert chi_square_p_value(found, enumeration.pattern_distribution(wrong)) < FALSE_ALARM


@pytest.mark.parametrize("scheme", CUSTOM, ids=str)
def test_two_replicas_against_enumeration(scheme, key):
    """ln Z_2 and the joint distribution of two patterns; the second is tilted by their overlap."""
    sigma = 0.8
    strategy = ja.BandedToeplitz.square_root(min(2, scheme.min_separation))
    mechanism = ja.Mechanism(scheme, strategy, sigma)
    if scheme.table.never and int(scheme.table.lockout.max()) < scheme.iterations:
        assert not pairs.fits(mechanism)
        return
    columns = enumeration.strategy_matrix(
        strategy.coefficients, scheme.iterations + strategy.bands, scheme.iterations
    )
    patterns, chances = enumeration.vectors(scheme)
    outputs = patterns @ columns.T
    joint = np.outer(chances, chances) * np.exp(outputs @ outputs.T / sigma**2)
    assert pairs.log_normalizer(mechanism) == pytest.approx(math.log(joint.sum()), rel=1e-10)
    arrays = pairs.tables(mechanism)
    both, one, lifts = jax.jit(lambda key, arrays: pairs.draw_with_one(key, scheme, arrays, 20_000))(
        key, arrays
    )
    np.testing.assert_array_equal(lifts, np.sum(both, axis=1))
    found = np.concatenate([one, both - one], axis=1)
    keys = [tuple(x) + tuple(y) for x in patterns.astype(int).tolist() for y in patterns.astype(int).tolist()]
    tilted, apart = (
        dict(zip(keys, (weights / weights.sum()).ravel(), strict=True))
        for weights in (joint, np.outer(chances, chances))
    )
    assert chi_square_p_value(found, tilted) > FALSE_ALARM
    if scheme.iterations > 1:
        assert chi_square_p_value(found, apart) < FALSE_ALARM


def overlap_of_pairs(scheme, sigma, key, samples):
    """(mean overlap of drawn pairs, its standard error, d ln Z_2 / d(1 / sigma^2) by differences)."""
    strategy = ja.BandedToeplitz.square_root(min(3, scheme.min_separation))
    arrays = pairs.tables(ja.Mechanism(scheme, strategy, sigma))
    both, one, _ = jax.jit(lambda key, arrays: pairs.draw_with_one(key, scheme, arrays, samples))(key, arrays)
    columns = enumeration.strategy_matrix(
        strategy.coefficients, scheme.iterations + strategy.bands, scheme.iterations
    )
    overlaps = np.sum((np.asarray(one) @ columns.T) * (np.asarray(both - one) @ columns.T), axis=1)
    h = 1e-4
    up, down = (
        pairs.log_normalizer(ja.Mechanism(scheme, strategy, (sigma**-2 + x) ** -0.5)) for x in (h, -h)
    )
    return overlaps.mean(), overlaps.std() / math.sqrt(samples), (up - down) / (2 * h)


# Many participations, rare and certain ones, counts to 60: where entries of a table in one unit underflow.
LARGE = [
    nested(120, 2, 60.0),
    nested(200, 2, 100.0),
    nested(240, 4, 60.0),
    balanced(150, 2, 48),
    of(ja.BMinSep(1000, 16, 0.02)),
    of(ja.EpochwiseAllocation(600, 10, 4)),
    of(ja.CyclicPoisson(600, 4, 0.01)),
]


@pytest.mark.parametrize("scheme", slow_but({0}, LARGE))
def test_pairs_overlap_as_their_normalizer_says(scheme, key):
    """For any table the mean overlap is d ln Z_2 / d(1 / sigma^2), and counts are those of the table."""
    mean, error, derivative = overlap_of_pairs(scheme, 2.0, key, 2000)
    assert abs(mean - derivative) < NORMAL_TAIL * error + 1e-6
    if scheme.keep == 1 and scheme.table.num_left > 1:
        drawn = np.asarray(jax.jit(lambda key: scheme.draw_participation(key, 200))(key))
        assert set(drawn.sum(axis=1)) == {scheme.max_participations}


def test_entries_far_apart_keep_their_weights(x64):
    """Nested allocation with all steps of a class is balls-in-bins, also with 60 participations."""
    strategy = ja.BandedToeplitz.identity()
    ours, theirs = ja.Mechanism(LARGE[0], strategy, 3.0), ja.Mechanism(ja.BallsInBins(120, 2), strategy, 3.0)
    exact = theirs.scheme.replicas(theirs).log_normalizer(theirs)
    assert pairs.log_normalizer(ours) == pytest.approx(exact, rel=1e-10)


def test_outcomes_too_rare_to_draw_are_refused():
    """At small noise the pairs of 60 participations differ by e^240: no draw of 64 bits resolves that."""
    mechanism = ja.Mechanism(nested(120, 4, 60.0), ja.BandedToeplitz.identity(), 0.2)
    assert pairs.log_normalizer(mechanism) == math.inf
    # An event of probability 1e-18, which float64 cannot tell from none: Z_2 is known, draws are not.
    mechanism = ja.Mechanism(ja.CustomScheme([1e-9, 1e-9, 0.5], 3), ja.BandedToeplitz.identity(), 0.15)
    assert pairs.log_normalizer(mechanism) == math.inf > pairs.log_normalizer_about(mechanism)


@pytest.mark.parametrize(
    "scheme", [of(ja.BMinSep(1000, 16, 0.02)), nested(200, 2, 60.0)], ids=["waits", "counts"]
)
def test_rounding_stays_below_its_bound(scheme):
    """Float32 against float64 over 256 samples, at the participations and losses that they have."""
    ratios = np.random.default_rng(1).normal(0.3, 1.5, (256, scheme.iterations)).astype(np.float32)
    single = np.asarray(jax.jit(scheme.log_likelihood_ratios)(jnp.asarray(ratios)), np.float64)
    with jax.enable_x64(True):
        double = np.asarray(jax.jit(scheme.log_likelihood_ratios)(jnp.asarray(ratios, jnp.float64)))
    count, largest = scheme.max_participations, float(double.max())
    bound = scheme.table.rounding_bound(count, largest, float(np.abs(ratios).max()), 0.0)
    assert 0 < np.abs(single - double).max() < bound < 1


def test_every_item_of_the_rounding_bound_counts():
    """Recomputed from the table's numbers (proofs/sampling_table.md, section 3)."""
    n, b, p, unit = 100, 4, 0.1, 2.0**-24
    scheme = of(ja.BMinSep(n, b, p))
    log_q = -math.log1p(-p)
    weight, offset = -math.log(p) - log_q, n * log_q  # weights are largest at the last step
    starts = scheme.table.start
    ends = max(abs(-(n - s) * log_q + math.log(chance)) for s, chance in enumerate(starts))

    def expected(growth, sizes, increments, starts, ends):
        local = 7.0 + 4 * (weight + 2.0) + sizes * growth
        common = 11 * increments + n * unit * growth
        return unit * (5 * local + common + starts + 21 + 4 * (growth + ends))

    found = scheme.table.rounding_bound(5, 3.0, 2.0, 7.0)
    assert found == pytest.approx(expected(3.0 + ends, 4, 3.0 + ends, b, ends), rel=1e-2)
    # The smaller bound on g is taken, and g is not monotone where participations are counted.
    most = scheme.max_participations * 2.0 + offset
    found = scheme.table.rounding_bound(5, 1e4, 2.0, 7.0)
    assert found == pytest.approx(expected(most, 4, most, b, ends), rel=1e-2)
    counted = ja.CustomScheme(np.outer(np.full(n, p), [0, 1, 1, 1]), b)
    found, most = counted.table.rounding_bound(3, 3.0, 2.0, 7.0), 3 * 2.0 + offset
    local = 7.0 + 4 * (n * log_q + math.log(p) + 2.0) + 8 * most  # with the last one all waiting ends
    of_counts = 3 * local + 11 * 2 * 4 * most + n * unit * most + 1 + 21 + 4 * (most + offset)
    assert found == pytest.approx(unit * of_counts, rel=1e-2)
    thinned = ja.CustomScheme(scheme.join, b, start=scheme.start, keep=0.5)
    more = thinned.table.rounding_bound(5, 3.0, 2.0, 7.0) - scheme.table.rounding_bound(5, 3.0, 2.0, 7.0)
    assert more == pytest.approx(unit * 5 * 14 * (2.0 + 3 * math.log(2) + 1), rel=1e-6)


def test_error_of_the_drawn_density():
    """A wait over the chance of its step, outcomes over their shares, the start over its rarest."""
    one = ja.CustomScheme([0.25, 1.0, 0.0, 0.9], 2)
    last = 2.0**-38 + 4 * 2.0**-44
    assert one.draw_errors[0] == pytest.approx(math.expm1(2 * 2.0**-38 / 0.25 + last), rel=1e-9)
    two = ja.CustomScheme([0.25, 1.0, 0.0, 0.9], 2, start=[0.5, 0.125], keep=0.75)
    each, unit = 2.0**-38 / 0.25 + (2 + 1 / 0.25) * 2.0**-51, 2.0**-51
    assert two.draw_errors[0] == pytest.approx(
        2 * each + (len(two.table.starts) + 1 / 0.125) * unit + last, rel=1e-9
    )
    assert two.draw_errors[1] == 2 * 5 * 2.0**-62
    at = ja.Mechanism(two, ja.BandedToeplitz.identity(), 1.0)
    assert plain(at, "remove").total_variation == two.draw_errors[1]


def test_exponentials_are_off_by_less_than_16_units(x64):
    """Of 2^-44: the words of -ln U against float64, whose own error is a hundredth of a unit."""
    high = np.random.default_rng(3).integers(2**20, 2**32, 200_000, dtype=np.uint32)
    high[:4096] = np.arange(2**31, 2**32, 2**19)  # ends of intervals
    low = np.random.default_rng(4).integers(0, 2**32, len(high), dtype=np.uint32)
    words = jax.jit(exponentials.exponential_words)((jnp.asarray(high), jnp.asarray(low)))
    found = np.ldexp(np.asarray(words[0], np.float64), 32 - 44) + np.ldexp(np.asarray(words[1], float), -44)
    exact = -np.log(np.ldexp(high + np.ldexp(low + 0.5, -32), -32))
    units = np.ldexp(found - exact, 44)
    assert 0 < units.min() < 8 < units.max() < 16


def test_waits_are_as_likely_as_their_hazards_say():
    """Every word of 16 bits, the others 0: the number of words of each wait is 2^16 times its probability."""
    chances = np.array([0.25, 0.0, 0.5, 0.125])
    hazards = exponentials.words_of_integers(exponentials.integers_of(chances))
    goal = exponentials.exponential_words(
        (jnp.arange(2**16, dtype=jnp.uint32) << 16, jnp.full(2**16, 2**31, jnp.uint32))
    )
    here = jnp.zeros(2**16, jnp.int32)
    steps = exponentials.first_reached(lambda at: exponentials.look_up(hazards, at + 1), goal, here, 4, 4)
    exact = chances * np.append(1.0, np.cumprod(1 - chances[:-1])) * 2**16
    counts = np.bincount(np.asarray(steps), minlength=5)
    assert np.abs(counts[:4] - exact).max() <= 1 and counts[1] == 0


def test_a_table_is_read_only_and_copied():
    join = np.array([0.5, 0.5])
    table = SamplingTable(join, np.array([1, 1]), False, np.ones(1))
    join[:] = 1.0
    assert table.join[0, 0] == 0.5
    with pytest.raises(ValueError):
        table.join[0, 0] = 1.0


def test_a_plan_of_a_table_is_stored_and_an_edited_one_refused(tmp_path):
    scheme = ja.CustomScheme([0.01, 0.02, 0.03, 0.04, 0.05, 0.05, 0.05, 0.05], 4, start=(0.75, 0.25))
    plan = ja.calibrate(
        scheme,
        ja.BandedToeplitz.square_root(2),
        epsilon=3.0,
        delta=1e-2,
        noise_multiplier=1.0,
        dataset_size=100,
    )
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan and Plan.load(path).mechanism.scheme == scheme
    text = path.read_text()
    for old, new in (("0.01", "0.04"), ('"lockout": 4', '"lockout": 5'), ("0.75", "0.5")):
        assert old in text
        (tmp_path / "edited.json").write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError):
            Plan.load(tmp_path / "edited.json")


def test_fewer_comparisons_find_the_same_steps(key):
    """Bit by bit the steps of a search among all."""
    draws = ja.EpochwiseAllocation(60, 7, 3).table.draws
    n = len(draws.lockout)
    assert draws.longest < n
    found, expected = (
        np.asarray(draw_counts(key, 2000, one)[0]) for one in (draws, draws._replace(longest=n))
    )
    np.testing.assert_array_equal(found, expected)
    assert (found < n).any()


def test_a_scheme_that_is_made_again_of_its_fields_is_the_same():
    """A plan's evidence holds a digest of the claim, with the scheme's numbers."""
    for start in np.random.default_rng(0).dirichlet(np.ones(7), 100):
        made = ja.CustomScheme([0.3] * 10, lockout=9, start=start)
        assert dataclasses.replace(made) == made


def test_a_start_too_rare_to_draw_is_a_distance():
    common, rare = (
        SamplingTable([0.3] * 10, 9, False, (start, 1 - start)).draw_errors for start in (1e-9, 1e-20)
    )
    assert common[0] > 1e-7 > rare[0] and rare[1] == common[1] + 2.0**-51


def test_every_sampler_is_a_table(x64):
    """The likelihood, the probabilities and ln Z_2 of a module are those of its table."""
    for scheme, custom in SAME:
        ratios = jnp.asarray(np.random.default_rng(0).normal(0, 2, (6, scheme.iterations)))
        ours, theirs = (jax.jit(one.log_likelihood_ratios)(ratios) for one in (custom, scheme))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(
            custom.participation_probabilities(), scheme.participation_probabilities(), rtol=1e-11
        )
        none = scheme.log_probability_of_none()
        assert custom.log_probability_of_none() == pytest.approx(none, rel=1e-12) or none == -math.inf
        assert math.isfinite(custom.log_probability_of_none()) == math.isfinite(none)
        assert custom.max_participations == scheme.max_participations
        assert custom.min_separation == min(scheme.min_separation, scheme.iterations)
        strategy = ja.BandedToeplitz.square_root(min(3, custom.min_separation))
        one, two = (ja.Mechanism(kind, strategy, 0.8) for kind in (custom, scheme))
        assert pairs.log_normalizer(one) == pytest.approx(scheme.replicas(two).log_normalizer(two), rel=1e-10)
