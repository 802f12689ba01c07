"""Truncated b-min-sep: distributions, tables and likelihoods against enumeration; the pair dominates."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation
from scipy import stats

import jaxacct as ja
from jaxacct.accountants.analytic import best_accountant
from jaxacct.kernels.binomial import Arrays, Level, alias_tables, binomial_of_words, binomial_tables
from jaxacct.proposals.base import plain
from jaxacct.schemes.truncation.truncated_batch_sizes import _words
from tests.commands import exit_code
from tests.draws import draws_of
from tests.oracles import enumeration, tuples
from tests.oracles.chi_square import FALSE_ALARM, chi_square_p_value
from tests.refusals import refused
from train.batches.sampler import Sampler

# (scheme, bands): cold and warm, n < b, n not a multiple of b, p = 1, mean at the maximum.
SMALL = [
    (ja.TruncatedBMinSep(7, 3, 0.3, 3, 12), 3),
    (ja.TruncatedBMinSep(6, 2, 0.4, 5, 10, False), 2),
    (ja.TruncatedBMinSep(3, 4, 0.5, 4, 9), 4),
    (ja.TruncatedBMinSep(5, 2, 1.0, 6, 11), 2),
]


def count_distribution(
    scheme, batch_sizes, when_truncated: int, when_whole: int
) -> dict[tuple[int, ...], float]:
    """Corollary D.2 word for word, given batch sizes: the distribution of x (2, 1) or y (-1, 0)."""
    distribution: dict[tuple[int, ...], float] = {}
    for pattern, weight in enumeration.pattern_distribution(scheme.untruncated).items():
        truncated = [i for i, x in enumerate(pattern) if x and batch_sizes[i] >= scheme.max_batch_size]
        for kept in itertools.product((0, 1), repeat=len(truncated)):
            counts, chance = [when_whole * x for x in pattern], weight
            for step, stays in zip(truncated, kept, strict=True):
                keep = scheme.max_batch_size / (batch_sizes[step] + 1)
                counts[step], chance = when_truncated * stays, chance * (keep if stays else 1 - keep)
            distribution[tuple(counts)] = distribution.get(tuple(counts), 0.0) + chance
    return distribution


def given_sizes(scheme, delta) -> float:
    """The mean over all batch sizes of the others of `delta`, a function of the pair given those."""
    sizes = enumeration.sums_of(enumeration.pattern_distribution(scheme.untruncated), scheme.dataset_size - 1)
    return sum(
        w * delta(count_distribution(scheme, r, 2, 1), count_distribution(scheme, r, -1, 0))
        for r, w in sizes.items()
    )


def exact_log_likelihoods(scheme, dense, sigma, outputs, batch_sizes) -> tuple[float, float]:
    """(ln P/R, ln Q/R) of one sample by summing over all counts, R the centred Gaussian."""
    laws = (count_distribution(scheme, batch_sizes, *counts) for counts in ((2, 1), (-1, 0)))
    return tuple(float(enumeration.log_mixture(law, dense, sigma, outputs[None])[0]) for law in laws)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("p", [0.2, 1.0])
@pytest.mark.parametrize("b", [1, 4])
def test_both_likelihoods_against_enumeration(b, p, warm, x64):
    """P/R and Q/R each, so that no error cancels in their ratio; n = 8 and n = 3, below b = 4."""
    rng, sigma = np.random.default_rng(b), 0.7
    for n in (8, 3) if b == 4 else (8,):
        # From a cold start p = 1 puts everyone into the first batch: nothing can be truncated.
        everyone = p == 1 and not (warm and b > 1)
        scheme = ja.TruncatedBMinSep(n, b, p, 10, 10 if everyone else 15, warm)
        dense = enumeration.strategy_matrix(rng.random(b) + 0.1, n, n)
        norms = (dense**2).sum(axis=0)
        sizes = rng.integers(0, 20, (6, n)).astype(np.int32)
        sizes[0], sizes[1] = 0, 19
        log_likelihoods = jax.jit(scheme.log_likelihoods)
        for y, r in zip(rng.normal(size=(6, n)), sizes, strict=True):
            ratios, half = (y @ dense - norms / 2) / sigma**2, norms / (2 * sigma**2)
            ours = log_likelihoods(ratios, half, r)
            if scheme.can_truncate:
                exact = exact_log_likelihoods(scheme, dense, sigma, y, r)
                np.testing.assert_allclose(ours, exact, rtol=1e-9, atol=1e-12)
            if (r < 10).all() or not scheme.can_truncate:
                assert ours[1] == 0


def table_distributions(arrays, at: int):
    """(number of trials, {value: probability}) of every table, added up in integers from its cells."""
    unit = 1
    for place, level in reversed(list(enumerate(arrays.levels))):
        digits, size = level.cells.shape[1:]
        capacity = 2**62 // size
        for digit in range(digits):
            lowest = int(level.lowest[at, min(digit, level.lowest.shape[1] - 1)])
            distribution: dict[int, int] = {}
            for cell in range(size):
                packed, low = (int(part[at, digit, cell]) for part in (level.cells, level.low))
                limit = (packed // size << 30) + low
                for value, weight in ((cell, limit), (packed % size, capacity - limit)):
                    distribution[lowest + value] = distribution.get(lowest + value, 0) + weight
            yield digit * unit + (int(arrays.first[at]) if place == 0 else 0), distribution
        unit *= digits


@pytest.mark.parametrize("p", [0.07, 0.5, 0.25, 0.999])
def test_tables_have_the_exact_distribution(p):
    """The distribution of every table, added up from its cells, is the binomial's to the stated error.

    p = 1/2 and 1/4 make cells that hold exactly their capacity; the digits' trials add up to the window's.
    """
    windows = (0, 5), (300, 1000)
    arrays, relative, variation = binomial_tables(windows, (p / 2, p))
    most = [0, 0]
    for at, chance in enumerate((p / 2, p)):
        trials: dict[int, list[int]] = {}
        for count, distribution in table_distributions(arrays, at):
            assert sum(distribution.values()) == 2**62
            exact = stats.binom.pmf(np.array(list(distribution)), count, chance)
            drawn = np.array([float(weight) for weight in distribution.values()]) / 2.0**62
            assert np.all(np.abs(drawn - exact) <= exact * (relative + 1e-11) + variation)
            trials.setdefault(len(trials), []).append(count)
            most[at] = max(most[at], count)
    assert most[0] <= 2 * 1024 and most[1] >= 300


def test_windows_are_left_with_the_probability_that_is_booked():
    """Of the production case, whose first sizes have a window each; and the errors reserved stay the same."""
    scheme = ja.TruncatedBMinSep.from_batch_size(
        dataset_size=14_745_600, batch_size=1793, iterations=7200, min_separation=256, max_batch_size=2048
    )
    others, rate = scheme.dataset_size - 1, scheme.untruncated.participation_rate
    left = [(scheme.side_information._pool_window, 1 - 255 * rate, 7200)]
    left += [(window, 1 - t * rate, 1) for t, window in enumerate(scheme.side_information._first_windows)]
    outside = sum(
        times * (stats.binom.cdf(low - 1, others, chance) + stats.binom.sf(high, others, chance))
        for (low, high), chance, times in left
    )
    assert outside < 2.0**-64
    assert scheme.side_information.error() == pytest.approx((3.84610344313025e-09, 5.964744215040951e-13))
    cold = ja.TruncatedBMinSep(51, 8, 0.4, 17_000, 40_055, False)
    assert cold.side_information.error() == pytest.approx(
        (1.0436451703388949e-10, 1.6848230709881618e-14), rel=1e-9, abs=0
    )


def test_a_tie_is_settled_by_the_low_words():
    """One cell whose threshold is 5 2^30 + 7: words of 5 depend on the 30 bits below, no other word does."""
    level = Level(np.array([[[5 << 1 | 1, 0]]], np.uint32), np.array([[[7, 0]]], np.uint32), np.array([[0]]))
    arrays = Arrays(np.array([0]), (level,))
    words = np.array([4, 5, 5, 5, 6], np.uint32)
    low = np.array([2**32 - 1, 6 << 2, 7 << 2, 0, 0], np.uint32)
    drawn = jax.jit(lambda one, two: binomial_of_words(([one], [two]), jnp.zeros(5, jnp.int32), arrays))
    assert drawn(words, low).tolist() == [0, 0, 1, 0, 1]


def batch_size_runs(scheme, runs: int, seed: int) -> np.ndarray:
    """(runs, iterations): sizes of the others' batches, by sampling every example, step by step."""
    rng = np.random.default_rng(seed)
    others, b, p = scheme.dataset_size - 1, scheme.min_separation, scheme.sampling_probability
    locked_out = np.zeros((runs, others), int)
    if scheme.warm_start and b > 1:
        busy = rng.random((runs, others)) < (b - 1) * p / (1 + (b - 1) * p)
        locked_out = np.where(busy, rng.integers(1, b, (runs, others)), 0)
    sizes = []
    for _ in range(scheme.iterations):
        joins = (locked_out == 0) & (rng.random((runs, others)) < p)
        sizes.append(joins.sum(axis=1))
        locked_out = np.where(joins, b - 1, np.maximum(locked_out - 1, 0))
    return np.stack(sizes, axis=1)


@pytest.mark.parametrize(
    "scheme",
    [
        ja.TruncatedBMinSep(4, 2, 0.4, 3, 5),
        ja.TruncatedBMinSep(3, 3, 0.5, 3, 5, False),
        ja.TruncatedBMinSep(2, 4, 0.5, 2, 5),  # no step after the first b - 1
    ],
    ids=str,
)
def test_batch_sizes_have_the_distribution_of_sampling_everyone(scheme, key):
    """Two samples of whole runs: chi-square of homogeneity, false alarm 1e-6."""
    ours = np.asarray(jax.jit(scheme.side_information.draw, static_argnums=1)(key, 60_000))
    naive = batch_size_runs(scheme, 60_000, 1)
    # Each run as one number, of at most five others a step.
    _, code = np.unique(np.concatenate([ours, naive]) @ 6 ** np.arange(ours.shape[1]), return_inverse=True)
    table = np.stack([np.bincount(part, minlength=code.max() + 1) for part in np.split(code.reshape(-1), 2)])
    table = table[:, table.sum(axis=0) > 20]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("scheme", [scheme for scheme, _ in SMALL[:2]])
def test_counts_given_batch_sizes(scheme, direction, key):
    """Chi-square against corollary D.2, false alarm 1e-6."""
    most = scheme.max_batch_size
    sizes = np.arange(scheme.iterations) % 3 * 2 + most - 2  # some below the maximum, some above
    tiled = np.tile(sizes.astype(np.int32), (40_000, 1))
    drawn = jax.jit(scheme.draw_counts, static_argnums=(1, 2))(key, 40_000, direction, tiled)
    distribution = count_distribution(scheme, sizes, *((2, 1) if direction == "remove" else (-1, 0)))
    assert chi_square_p_value(np.asarray(drawn).astype(int), distribution) > FALSE_ALARM


def pair_delta(others, p, most, sigma, epsilon, direction) -> float:
    """Exact delta of the dominating pair at n = 1, the batch size seen; to 1e-7."""
    total = 0.0
    for r in range(others + 1):
        keep = most / (r + 1)
        pair = ({1: p, 0: 1 - p}, {0: 1.0})
        if r >= most:
            pair = ({2: p * keep, 0: 1 - p * keep}, {-1: p * keep, 0: 1 - p * keep})
        delta = tuples.divergence(*pair, sigma, epsilon, direction, points=20_001)
        total += stats.binom.pmf(r, others, p) * float(delta)
    return total


def truncated_sums(scheme, most: int, gradients) -> dict[tuple[float, ...], float]:
    """Distribution of gradient sums of batches of at most `most`; `gradients[k][i]` of example k, step i.

    Over all vectors of all examples and every subset that is kept; one that is left out stays ineligible.
    """
    patterns, distribution = enumeration.pattern_distribution(scheme), {}
    for sampled in itertools.product(patterns.items(), repeat=len(gradients)):
        chance = np.prod([weight for _, weight in sampled])
        per_step = []
        for i in range(scheme.iterations):
            batch = [g[i] for g, (x, _) in zip(gradients, sampled, strict=True) if x[i]]
            subsets = list(itertools.combinations(batch, min(most, len(batch))))
            per_step.append([(sum(kept), 1 / len(subsets)) for kept in subsets])
        for choice in itertools.product(*per_step):
            sums = tuple(float(total) for total, _ in choice)
            weight = chance * np.prod([one for _, one in choice])
            distribution[sums] = distribution.get(sums, 0.0) + weight
    return distribution


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("warm", [True, False])
def test_the_pair_dominates_two_correlated_steps(warm, direction):
    """Two steps, two bands, two others, gradients of +-1 a step; D' has the example zeroed or absent."""
    scheme, sigma, epsilon = ja.TruncatedBMinSep(2, 2, 0.5 if warm else 0.33, 1, 3, warm), 0.8, 0.4
    dense = enumeration.strategy_matrix(ja.BandedToeplitz.square_root(2).coefficients, 2, 2)

    def delta(with_it, without):
        return tuples.divergence(with_it, without, sigma, epsilon, direction, dense=dense, points=401)

    bound = given_sizes(scheme, delta)
    given = scheme.untruncated, scheme.max_batch_size
    worst, signs = 0.0, list(itertools.product((-1.0, 1.0), repeat=2))
    for others in itertools.combinations_with_replacement(signs, 2):
        zeroed, absent = (truncated_sums(*given, part) for part in ([(0.0, 0.0), *others], others))
        # The first gradient is 1 without loss, by symmetry.
        for gradient in ((1.0, 1.0), (1.0, -1.0)):
            with_it = truncated_sums(*given, [gradient, *others])
            worst = max(worst, delta(with_it, zeroed), delta(with_it, absent))
    assert 0 < worst <= bound + 1e-5


def test_without_truncation_it_is_b_min_sep(key, x64):
    truncated, whole = ja.TruncatedBMinSep(20, 4, 0.1, 50, 50), ja.BMinSep(20, 4, 0.1)
    strategy, rng = ja.BandedToeplitz.square_root(3), np.random.default_rng(0)
    outputs, sizes = rng.normal(size=(9, 20)), rng.integers(0, 50, (9, 20))
    ours = ja.privacy_loss(ja.Mechanism(truncated, strategy, 0.8), outputs, sizes)
    np.testing.assert_array_equal(ours, ja.privacy_loss(ja.Mechanism(whole, strategy, 0.8), outputs))
    assert best_accountant(ja.Mechanism(truncated, strategy, 2.0), 1.0) == best_accountant(
        ja.Mechanism(whole, strategy, 2.0), 1.0
    )
    np.testing.assert_allclose(truncated.expected_batch_sizes(50), whole.expected_batch_sizes(50), rtol=1e-12)
    unbounded = dataclasses.replace(truncated, max_batch_size=2**40)  # more than an array of sizes can hold
    draw_counts = jax.jit(unbounded.draw_counts, static_argnums=(1, 2))
    counts = draw_counts(key, len(sizes), "remove", jnp.asarray(sizes, jnp.int32))
    assert set(np.unique(counts)) <= {0, 1} and counts.any()
    assert not draw_counts(key, len(sizes), "add", jnp.asarray(sizes, jnp.int32)).any()


def test_bad_input(capsys):
    line = r"max_batch_size .* must be at least the largest expected batch size 50"
    refused(line, ja.TruncatedBMinSep, 5, 1, 0.5, 49, 100)
    refused("max_batch_size must be an integer", ja.TruncatedBMinSep, 5, 1, 0.5, 0, 100)
    refused("dataset_size must be below", ja.TruncatedBMinSep, 5, 1, 1e-9, 100, 2**31)
    scheme, identity = ja.TruncatedBMinSep(5, 1, 0.1, 20, 100), ja.BandedToeplitz.identity()
    mechanism, outputs = ja.Mechanism(scheme, identity, 1.0), np.zeros(5)
    refused("batch_sizes must be given", ja.privacy_loss, mechanism, outputs)
    refused(r"batch_sizes must have the shape \(5,\)", ja.privacy_loss, mechanism, outputs, np.zeros(4))
    for size in (2.0**40, 2**31, -1, 1.5, np.nan, 1j):
        line, sizes = "batch_sizes must be whole numbers from 0 to 2147483647, got", [0, 1, 2, 3, size]
        refused(line, ja.privacy_loss, mechanism, outputs, np.array(sizes))
    whole = ja.Mechanism(scheme.untruncated, identity, 1.0)
    refused("batch_sizes must be given", ja.privacy_loss, whole, outputs, np.zeros(5))
    target = dict(epsilon=1.0, delta=1e-2)
    line = "dataset_size must be the scheme's 100, got 99"
    refused(line, ja.calibrate, scheme, identity, **target, dataset_size=99)
    sizes = dict(dataset_size=100, max_batch_size=20)
    refused("max_batch_size must not be given", ja.calibrate, scheme, identity, **target, **sizes)
    refused("must be the scheme's", Sampler, scheme, 100, 21)
    arguments = (
        "calibrate --iterations 9 --dataset-size 9 --batch-size 2 --epsilon 1 --delta .1 --truncate-to 3"
    )
    assert exit_code(*arguments.split()) == 2
    assert "truncate_to does not apply to b-min-sep" in capsys.readouterr().err


@pytest.mark.parametrize(("n", "b", "bands", "warm"), [(64, 8, 2, True), (30, 40, 1, False)])
def test_jax_privacy_on_the_same_outputs_and_batch_sizes(n, b, bands, warm, x64):
    """At most two bands, where the peer's last columns are right (`tests/project/test_errata.py`)."""
    scheme = ja.TruncatedBMinSep(n, b, 0.05, 60, 1000, warm)
    strategy, rng = ja.BandedToeplitz.square_root(bands), np.random.default_rng(b)
    outputs, sizes = rng.normal(size=(5, n)), rng.integers(40, 80, (5, n)).astype(np.int32)
    peer = batch_selection.BMinSepSampling(
        sampling_prob=0.05, iterations=n, min_sep=b, warm_start=warm, truncated_batch_size=60
    )
    theirs = sample_generation.compute_privacy_loss(peer, outputs.T, 0.8, strategy.array, aux=sizes.T)
    ours = ja.privacy_loss(ja.Mechanism(scheme, strategy, 0.8), outputs, sizes)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("window", "p"), [((3, 9), 0.97), ((60_000, 70_001), 0.003), ((500, 40_000), 0.5)])
def test_drawn_binomials(window, p, key):
    """One to four digits, lowest values of each or of all; chi-square against SciPy, false alarm 1e-6."""
    arrays = binomial_tables((window,), (p,)).arrays
    number = len(arrays.levels)

    @jax.jit
    def draw(key, trials):
        words = [_words(part, number, trials.shape) for part in jax.random.split(key)]
        return binomial_of_words(words, trials, arrays)

    trials = np.repeat([window[0], sum(window) // 2, window[1]], 50_000)
    drawn = np.asarray(draw(key, jnp.asarray(trials, jnp.int32)))
    for most, seen in zip(trials[::50_000], np.split(drawn, 3), strict=True):
        edges = np.unique(stats.binom.ppf(np.linspace(0, 1, 30)[1:-1], most, p))
        expected = np.diff(stats.binom.cdf(edges, most, p), prepend=0, append=1)
        counts = np.bincount(np.searchsorted(edges, seen), minlength=len(expected))
        enough = expected > 0
        assert counts[~enough].sum() == 0
        if enough.sum() > 1:
            assert stats.chisquare(counts[enough], 50_000 * expected[enough]).pvalue > FALSE_ALARM / 3


@pytest.mark.parametrize("kind", ["even", "dyadic", "geometric", "rough"])
def test_alias_tables_are_exact(kind):
    """Added up in integers, the cells give back every weight; dyadic ones fill cells exactly."""
    rng = np.random.default_rng(7)
    for cells in (2, 8, 64):
        widths = rng.integers(1, cells + 1, 12)
        weights = np.zeros((len(widths), cells), np.int64)
        for row, width in zip(weights, widths, strict=True):
            distribution = {
                "even": np.ones(width),
                "dyadic": 2.0 ** -rng.integers(0, 6, width),
                "geometric": 0.3 ** np.arange(width),
                "rough": rng.random(width) ** 20,
            }[kind]
            row[:width] = np.floor(distribution / distribution.sum() * 2**61).astype(np.int64)
            row[np.argmax(distribution)] += 2**62 - int(row.sum())
        capacity = 2**62 // cells
        for row, limits, alias in zip(weights, *alias_tables(weights), strict=True):
            distribution_back = [0] * cells
            for cell, (limit, other) in enumerate(zip(limits.tolist(), alias.tolist(), strict=True)):
                assert 0 <= limit <= capacity
                distribution_back[cell] += limit
                distribution_back[other] += capacity - limit
            assert distribution_back == row.tolist()


def test_batch_sizes_of_the_production_case(key):
    """Mean and variance of Binomial(|D| - 1, rate) at every step; false alarm 1e-6 in all.

    The others are independent, so that is the distribution of every single batch size, from a cold start too.
    """
    sizes = dict(dataset_size=14_745_600, batch_size=1793, min_separation=256, max_batch_size=2048)
    scheme = ja.TruncatedBMinSep.from_batch_size(iterations=300, **sizes)
    sizes = np.asarray(jax.jit(scheme.side_information.draw, static_argnums=1)(key, 2048)).astype(float)
    distribution = stats.binom(scheme.dataset_size - 1, scheme.participation_probabilities())
    z = stats.norm.isf(FALSE_ALARM / 1200)
    assert (np.abs(sizes.mean(axis=0) - distribution.mean()) / distribution.std()).max() < z / np.sqrt(2048)
    spread = sizes.var(axis=0, ddof=1) * 2047 / distribution.var()
    low, high = stats.chi2.ppf(FALSE_ALARM / 1200, 2047), stats.chi2.isf(FALSE_ALARM / 1200, 2047)
    assert low < spread.min() <= spread.max() < high


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_plain_draws_give_the_exact_delta(direction, key):
    """n = 1: the interval of the estimate holds the integral; false alarm 1e-6."""
    mechanism = ja.Mechanism(ja.TruncatedBMinSep(1, 1, 0.4, 4, 8), ja.BandedToeplitz.identity(), 0.7)
    exact = pair_delta(7, 0.4, 4, 0.7, 0.8, direction)
    draws = draws_of(plain(mechanism, direction), key, 1500)
    sign = 1 if direction == "remove" else -1
    terms = np.maximum(0.0, -np.expm1(0.8 - sign * draws.loss))
    error = terms.std() / np.sqrt(terms.size)
    assert abs(terms.mean() - exact) < stats.norm.isf(FALSE_ALARM / 2) * error
    assert plain(mechanism, direction).total_variation < 1e-15
    # Checkpoints of draws that were made of other words are refused (`run._kept`).
    assert plain(mechanism, direction).draw_metadata == {"proposal": "plain", "log_scale": 0.0, "words": 2}


def test_from_calibration_to_batches(tmp_path, key):
    """A maximum at the mean batch: certified, stored, and the trainer truncates to it."""
    scheme = ja.TruncatedBMinSep.from_batch_size(
        dataset_size=600, batch_size=30, iterations=24, min_separation=4, max_batch_size=30
    )
    strategy = ja.BandedToeplitz.square_root(3)
    target = dict(epsilon=4.0, delta=1e-2, key=key)
    plan = ja.calibrate(scheme, strategy, **target, dataset_size=600, noise_multiplier=1.1)
    assert plan.is_sampled and plan.certified
    # Cuts cost something: noise that is enough without them is not enough.
    assert ja.calibrate(scheme.untruncated, strategy, **target, noise_multiplier=0.7).certified
    with pytest.raises(ja.NotCertifiedError):
        ja.calibrate(scheme, strategy, **target, dataset_size=600, noise_multiplier=0.7)
    plan.save(tmp_path / "plan.json")
    again = ja.Plan.load(tmp_path / "plan.json")
    assert again.mechanism == plan.mechanism and again.max_batch_size == 30
    assert "truncated to uniformly random subsets" in again.statement()
    assert plan.expected_batch_size is not None and 25 < plan.expected_batch_size < 30
    sampler = Sampler.from_plan(again)
    assert max([sampler.next().size for _ in range(24)]) == 30
