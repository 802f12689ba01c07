"""Every public accountant at extreme arguments: a sound number, infinity, or one clear ValueError, at once.

Each row of `TABLE` has the values that every argument takes beside a base call; then all are at their first
or last, and every two at opposite ends.
"""

import itertools
import math
import time

import mpmath
import numpy as np
import pytest

from jaxacct import individual
from jaxacct.accountants import tradeoff
from jaxacct.cli.commands import tradeoff as command
from jaxacct.cli.usage import parse
from jaxacct.individual import filters
from tests.oracles.composed_losses import gaussian
from tests.oracles.settings import slow
from tests.refusals import refused

ANY = (0.0, 5e-324, 1e-300, 1e-160, 1e-30, 1e-9, 1.0, 40.0, 1e9, 1e30, 1e154, 1e200, 1.7e308)
DELTA = (5e-324, 1e-300, 1e-16, 1e-5, 0.5, 1 - 2.0**-53)
SHARE = (0.0, 5e-324, 1e-20, 2.0**-32, 0.5, 1 - 2.0**-53, 1.0)
COUNT = (1, 2, 1000, 10**9, 2**31, 2**50, 2**60)
RUN = dict(
    stepsize=ANY, noise_std=ANY, grad_sensitivity=ANY, strong_convexity=ANY, smoothness=ANY, diameter=ANY
)
SIZES = dict(
    dataset_size=(1, 12, 10**6, 2**50),
    num_microbatches=(1, 2, 12, 1000),
    microbatch_size=(1, 2, 12, 2**50),
    num_epochs=COUNT,
    group_size=(1, 3, 12, 10**6),
    sampling=("shuffling", "subsampling"),
)
CURVES = (
    tradeoff.Gaussian(1.0),
    tradeoff.Gaussian(math.inf),
    tradeoff.Gaussian(1e200),
    tradeoff.EpsilonDelta(800.0, 0.0),
    tradeoff.EpsilonDelta(math.inf, 0.0),
    tradeoff.EpsilonDelta(1.0, 1.0),
    tradeoff.Subsampled(tradeoff.Gaussian(1e200), 1e-300),
    tradeoff.Subsampled(tradeoff.Gaussian(1.0), 0.0),
    tradeoff.GaussianMixture(np.array([1.0, 1e200]), np.array([0.5, 0.5])),
    tradeoff.Best((tradeoff.Gaussian(1.0), tradeoff.EpsilonDelta(1.0, 1e-6))),
    tradeoff.GaussianMixture(np.array([0.0]), np.array([0.5]), 0.5),
    tradeoff.GaussianMixture(np.array([math.inf, 1.0]), np.array([0.25, 0.75])),
)
# The curve itself, groups of three sizes, one of which is too large, and no step.
CHANGES = (
    lambda f: f,
    lambda f: f.group(3),
    lambda f: f.group(1000),
    lambda f: f.group(10**6),
    lambda f: f.power(0),
)


def asked(make):
    """All that a curve or a bound answers."""

    def call(ask, **arguments):
        found = make(**arguments)
        return getattr(found, ask[0])(*ask[1:]) if ask else found

    return call


EPSILON, AT = ("epsilon", 1e-5), ("delta", 1.0)
LINES = ((), EPSILON, ("epsilon", 1e-300), AT, ("delta", 1e300))
PROFILE = (*LINES[1:], ("__call__", 0.3), ("__call__", 1e-300))
TABLE = {
    "gdp_tradeoff": (tradeoff.gdp_tradeoff, dict(alpha=SHARE, mu=(*ANY, math.inf))),
    "gdp_delta": (tradeoff.gdp_delta, dict(epsilon=(*ANY, math.inf), mu=(*ANY, math.inf))),
    "gdp_epsilon": (tradeoff.gdp_epsilon, dict(delta=DELTA, mu=(*ANY, math.inf))),
    "gdp_mu": (tradeoff.gdp_mu, dict(epsilon=ANY, delta=DELTA)),
    "group_gdp": (tradeoff.group_gdp, dict(mu=ANY, g=COUNT)),
    "dp_tradeoff": (tradeoff.dp_tradeoff, dict(alpha=SHARE, epsilon=(*ANY, math.inf), delta=SHARE)),
    "subsampled f": (tradeoff.subsampled_gdp_tradeoff, dict(alpha=SHARE, mu=ANY, sampling_prob=SHARE)),
    "limit": (tradeoff.subsampled_gdp_clt, dict(p=SHARE, steps=COUNT, mu=ANY)),
    "tail lower": (tradeoff.tail_lower_tradeoff, dict(alpha=SHARE, mu=ANY, tail_mass=SHARE)),
    "tail upper": (tradeoff.tail_upper_tradeoff, dict(alpha=SHARE, mu=ANY, head_mass=SHARE)),
    "renyi": (tradeoff.rdp_to_epsilon, dict(rho=ANY, delta=DELTA, method=("best", "mironov"))),
    "curve": (asked(lambda f, change: change(f)), dict(ask=PROFILE, f=CURVES, change=CHANGES)),
    "composition": (tradeoff.composition_gdp, dict(sensitivity=ANY, steps=COUNT)),
    "gd": (asked(tradeoff.noisy_gd_gdp), dict(ask=LINES, steps=COUNT, num_examples=COUNT) | RUN),
    "cgd": (
        asked(tradeoff.noisy_cgd_gdp),
        dict(ask=LINES, epochs=COUNT, batches_per_epoch=(*COUNT, 3), batch_size=COUNT, batch_index=(None, 1))
        | RUN,
    ),
    "sgd": (
        asked(tradeoff.noisy_sgd_accountant),
        dict(ask=((), EPSILON, AT), steps=(20, 1, 1000), batch_size=COUNT, num_examples=COUNT[1:])
        | dict(window=(1, 2), noise_split=(2.0, 1 + 2.0**-52, 1e30, 1e300))
        | dict.fromkeys(RUN, (1e-30, 0.0, 1e-9, 1.0, 1e9, 1e200, 1e30)),
    ),
    "langevin": (
        tradeoff.langevin_gdp,
        dict(steps=(None, *COUNT), stepsize=ANY, lipschitz=ANY, strong_convexity=ANY, smoothness=ANY),
    ),
    "projected langevin": (
        tradeoff.projected_langevin_gdp,
        dict(stepsize=ANY, lipschitz=ANY, diameter=ANY, smoothness=ANY),
    ),
    "exponential": (tradeoff.exponential_mechanism_gdp, dict(lipschitz=ANY, strong_convexity=ANY)),
    "exponential, bounded": (tradeoff.exponential_mechanism_gdp, dict(lipschitz=ANY, diameter=ANY)),
    "logistic": (
        tradeoff.logistic_conditions,
        dict(num_classes=(2, *COUNT), feature_norm=ANY, regularization=ANY, clip_norm=(None, *ANY)),
    ),
    "pmf": (tradeoff.participation_pmf, SIZES),
    "filtered pmf": (tradeoff.filtered_participation_pmf, SIZES),
    "general": (
        asked(lambda sigma, **sizes: tradeoff.GeneralDPSGD(**sizes).curve(sigma)),
        dict(ask=(EPSILON, AT, ("__call__", 0.3)), sigma=ANY) | SIZES,
    ),
    "calibrate_sigma": (tradeoff.calibrate_sigma, dict(target_epsilon=ANY, target_delta=DELTA) | SIZES),
    "profile": (
        lambda epsilon, mu: np.exp(tradeoff.gdp_log_delta(epsilon, mu)),
        dict(mu=(*ANY, math.inf), epsilon=(*ANY, *(-x for x in ANY))),
    ),
    "individual step": (
        individual.subsampled_gaussian_delta,
        dict(
            sampling_probability=SHARE,
            sigma=ANY,
            epsilon=(*ANY, *(-x for x in ANY)),
            direction=("add", "remove"),
        ),
    ),
    "individual renyi": (
        individual.subsampled_gaussian_rdp,
        dict(sampling_probability=SHARE, sigma=(*ANY, math.inf), orders=((2,), (1024,))),
    ),
    "individual odometer": (
        asked(individual.PrivacyOdometer),
        dict(
            ask=(("spent_mu",), ("charge", 1.0), ("charge", 1e200)),
            pieces=[(x, y) for x in ANY for y in (1.0, x)],
        ),
    ),
    "filter": (individual.GDPFilter.from_epsilon_delta, dict(epsilon=ANY, delta=DELTA)),
    "renyi filter": (
        individual.IndividualRDPFilter.from_epsilon_delta,
        dict(epsilon=ANY, delta=DELTA, order=(2, 64, 2**20)),
    ),
    "grid": (
        asked(individual.SigmaGrid),
        dict(ask=(("norm_limits", 1.0, 1.0), ("encode", 1e300)), smallest=ANY, largest=ANY, num=(1, 2, 100)),
    ),
}
MIDDLE = {
    "steps": 1000,
    "epochs": 2,
    "num_examples": 1000,
    "num_epochs": 2,
    "dataset_size": 12,
    "microbatch_size": 2,
}


def calls(grid):
    """Every argument over its values beside the base, then all at their first and at their last."""
    base = {}
    for name, values in grid.items():
        usual = next((value for value in values if type(value) is float and value == 1.0), values[0])
        base[name] = usual if name == "steps" and 20 in values else MIDDLE.get(name, usual)
    yield base
    for name, values in grid.items():
        for value in values:
            yield base | {name: value}
    for end in (0, -1):
        yield {name: values[end] for name, values in grid.items()}
    for (one, ones), (two, twos) in itertools.combinations(grid.items(), 2):
        yield base | {one: ones[-1], two: twos[0]}
        yield base | {one: ones[0], two: twos[-1]}


def numbers(found):
    if found is None or isinstance(found, (str, bool)):
        return
    if isinstance(found, dict):
        found = tuple(found.values())
    elif hasattr(found, "__dataclass_fields__"):
        found = tuple(getattr(found, name) for name in found.__dataclass_fields__)
    if isinstance(found, tuple):
        for one in found:
            yield from numbers(one)
    elif not hasattr(found, "__dataclass_fields__"):
        yield np.asarray(found, float)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", TABLE)
def test_a_number_infinity_or_one_line(name):
    function, grid = TABLE[name]
    answered = 0
    for arguments in calls(grid):
        began = time.process_time()
        try:
            found = function(**arguments)
        except ValueError as error:
            message = str(error)
            assert "must" in message and "\n" not in message and len(message) < 250, (arguments, message)
        else:
            answered += 1
            for number in numbers(found):
                assert not np.isnan(number).any() and (number >= 0).all(), (arguments, found)
        assert time.process_time() - began < 3, arguments
    assert answered > 3


@pytest.mark.parametrize("number", [1e-30, 1e30])
def test_shifted_interpolation_at_every_scale(number):
    """One step of a contraction that is nearly nothing, or an expansion, is one Gaussian mechanism each."""
    for steps, contraction in itertools.product((1, 2, 5, 50), (1e-30, 1e-3, 1.0, 1e3, 1e30)):
        found = tradeoff.shifted_interpolation_gdp([contraction] * steps, [number] * steps, number)
        # The slopes s / (w z^2) of the path fall with the weights w: a straight string, (sum w)^2 / sum w^2.
        weights = [mpmath.mpf(contraction) ** k for k in range(steps)]
        exact = sum(weights) ** 2 / sum(w * w for w in weights)
        if contraction >= 1:  # every step is paid at once
            exact = mpmath.mpf(steps)
        assert exact * (1 - mpmath.mpf(2) ** -50) <= mpmath.mpf(found.mu) ** 2 <= exact * (1 + 1e-9)
        assert abs(found.gaps[-1]) <= 1e-9 * number
        again = tradeoff.shifted_interpolation_gdp([contraction] * steps, 0.0, number, number).mu
        assert 0 <= again and (steps > 1 or again == pytest.approx(contraction, rel=1e-12))
    for bad in (1e-300, 0.0, math.nan, 1e31):
        refused("contractions must be in", tradeoff.shifted_interpolation_gdp, [bad] * 5, [1] * 5, 1.0)


def test_slow_contraction_keeps_its_loss():
    """`1 - eta m` is 1 in float64 here; mu is not 0, as a difference of powers of it would say."""
    with mpmath.workdps(60):
        for product, steps in ((1e-18, 1), (1e-18, 10**9), (3e-16, 10**15), (1e-9, 10**9)):
            m = 1e-3
            c = 1 - mpmath.mpf(product)
            exact = mpmath.sqrt((2 - product) / (2 * mpmath.mpf(m)) * (1 - c**steps) / (1 + c**steps))
            found = tradeoff.langevin_gdp(
                steps=steps, stepsize=product / m, lipschitz=1.0, strong_convexity=m, smoothness=1.0
            )
            assert found == pytest.approx(float(exact), rel=1e-12)
            contraction = tradeoff.contraction_factor(product / m, m, m)
            assert contraction == 1 or mpmath.mpf(contraction) >= 1 - mpmath.mpf(product / m) * mpmath.mpf(m)


@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5])
def test_epsilon_is_from_above_where_it_is_large(delta):
    """float64 has few epsilons there; the returned one has at most the requested delta."""
    for mu in (1e-6, 1.0, 50.0, 1e4, 1e8, 1e16, 1e100):
        epsilon = tradeoff.gdp_epsilon(delta, mu)
        with mpmath.workdps(60 + int(3 * max(0.0, math.log10(mu)))):
            m, e = mpmath.mpf(mu), mpmath.mpf(float(epsilon))
            near, far = e / m - m / 2, e / m + m / 2
            # e^eps Phi(-far) = phi(near) (1 - Phi(far)) / phi(far), by its series where far is large
            mills = 1 / far - 1 / far**3 + 3 / far**5
            second = mpmath.exp(e) * mpmath.ncdf(-far) if mu < 1e4 else mpmath.npdf(near) * mills
            exact = mpmath.ncdf(-near) - second
            assert exact <= delta * (1 + 1e-9)
        back = float(tradeoff.gdp_mu(float(epsilon), delta))
        assert back == pytest.approx(mu, rel=1e-6) or (epsilon == 0 and back > mu)
    assert tradeoff.gdp_epsilon(delta, 1e155) == math.inf


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (8.0, 1e-3)])
def test_filters_of_a_target_admit_no_more(epsilon, delta, dtype):
    """The largest cost that a filter admits, found by bisection on the floats, is within (epsilon, delta)."""
    import jax

    with jax.enable_x64(dtype == "float64"):
        for kind in (individual.GDPFilter, individual.IndividualGDPFilter):
            made = kind.from_epsilon_delta(epsilon, delta)
            low, high = 0.5 * made.budget_mu, 2 * made.budget_mu
            state = made.init(1)
            for _ in range(60):
                middle = (low + high) / 2
                admitted = bool(np.all(made.step(state, np.array([middle]).astype(dtype))[1]))
                low, high = (middle, high) if admitted else (low, middle)
            assert individual.gdp_delta(epsilon, float(np.array(low).astype(dtype))) <= delta
            assert low > made.budget_mu * (1 - 1e-6)
        renyi = individual.IndividualRDPFilter.from_epsilon_delta(epsilon, delta, 64)
        most = renyi.budget * (1 + filters.slack(dtype))
        assert individual.rdp_to_epsilon([most], [64], delta)[0] < epsilon


def test_one_step_in_a_small_set_is_not_exact():
    """The set may be too small for two runs to differ by the sensitivity: an upper bound, no more."""
    run = dict(steps=1, stepsize=0.1, noise_std=1.0, grad_sensitivity=1.0, smoothness=1.0, num_examples=10)
    assert tradeoff.noisy_gd_gdp(**run).exact
    small = tradeoff.noisy_gd_gdp(**run, diameter=1e-3)
    assert not small.exact and small.terms.kind == "certified" and small.mu == pytest.approx(0.1)
    cyclic = dict(epochs=1, batches_per_epoch=1, batch_size=10, stepsize=0.1, noise_std=1.0)
    cyclic |= dict(grad_sensitivity=1.0, smoothness=1.0)
    assert (
        tradeoff.noisy_cgd_gdp(**cyclic).exact and not tradeoff.noisy_cgd_gdp(**cyclic, diameter=1e-3).exact
    )


def test_sums_of_squares_fit_in_32_bits(key):
    sizes = (1000, 1000, 1, 1, 1000, "shuffling")
    assert tradeoff.sample_participation(key, *sizes, 1).tolist() == [10**6]
    with pytest.raises(ValueError, match="num_epochs or group_size must be smaller to be drawn"):
        tradeoff.sample_participation(key, 1000, 1000, 1, 4300, 1000, "shuffling", 1)


def test_what_weights_fall_short_of_1_is_lost():
    short = tradeoff.GaussianMixture(np.array([1.0]), np.array([1 - 5e-10]))
    assert short.delta(60.0) >= 4.99e-10 and short.lost == pytest.approx(5e-10, rel=1e-6)
    rounded = tradeoff.GaussianMixture(np.ones(10), np.full(10, 0.1))
    assert rounded.lost == 0 and rounded.delta(60.0) < 1e-100


@pytest.mark.parametrize("steps", [1, slow(5)])
def test_sgd_at_little_noise_says_infinity(steps, capsys):
    words = f"last-iterate sgd --num-examples 10 --steps {steps} --batch-size 2 --stepsize .1"
    words += " --grad-sensitivity 1"
    words += " --smoothness 1 --diameter 1 --noise-std 1e-6 --delta 1e-5"
    assert parse(command.app, words.split())() == 0
    assert "inf" in capsys.readouterr().out


def test_what_is_not_a_number_is_not_printed(capsys):
    for found in ({"epsilon": math.nan}, {"epsilon_by_bound": {"composition": math.nan}}):
        refused("must be a number, got NaN", command.tell, found, False)
    assert capsys.readouterr().out == ""


def test_far_gaussian_deltas_are_above_the_exact_ones():
    """Where eps / mu is rounded, ln delta moves by its square: at 1,000 by more than it is raised by."""
    generator = np.random.default_rng(0)
    for ratio in (10.0, 1000.0, 10_000.0):
        for mu, factor in zip(generator.uniform(1, 10, 20), generator.uniform(1, 2, 20), strict=True):
            epsilon = float(mu * ratio * factor)
            with mpmath.workdps(60):
                exact = mpmath.log(gaussian(epsilon, float(mu)))
                found = mpmath.mpf(float(tradeoff.gdp_log_delta(epsilon, mu)))
                assert exact <= found <= exact + 1e-10 + 2e-15 * (factor * ratio) ** 2
