"""What momentum, weight decay and schedules make of noise: against optax itself and dense linear algebra."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

from jaxacct import BandedInverse, BandedToeplitz, BMinSep, prefix_sum_error
from jaxacct.strategies import Dense, Workload, by_name, workload_error, workload_named
from jaxacct.strategies.workload import PREFIX_SUM, name_of
from tests.oracles import enumeration
from tests.refusals import refused

N = 12
WARM = optax.warmup_cosine_decay_schedule(0.0, 0.4, 3, N)
WORKLOADS = [
    Workload(),
    Workload(0.3, momentum=0.9),
    Workload(0.3, weight_decay=0.2),
    Workload(0.5, momentum=0.8, weight_decay=0.1),
    Workload(WARM),
    Workload(WARM, momentum=0.9, weight_decay=0.05),
    Workload(0.5, momentum=0.8, weight_decay=0.1, last=True),
    Workload(WARM, momentum=0.9, last=True),
]


def dense(workload: Workload, strategy, n: int = N) -> float:
    matrix = enumeration.strategy_matrix(strategy.array, n, n)
    squares = np.square(workload.matrix(n) @ np.linalg.inv(matrix)).sum(axis=1)
    return float(squares[-1] if workload.last else squares.mean())


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.usefixtures("default_promotion")
def test_matrix_is_what_optax_does(workload, x64):
    """Each coordinate gets noise at one step only, and its iterates are a column of A."""
    optimizer = optax.chain(
        optax.add_decayed_weights(workload.weight_decay),
        optax.sgd(workload.learning_rate, momentum=workload.momentum or None),
    )
    parameters = jnp.zeros(N)
    state, rows = optimizer.init(parameters), []
    for noise in np.eye(N):
        updates, state = optimizer.update(jnp.asarray(noise), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        rows.append(-np.asarray(parameters))
    np.testing.assert_allclose(workload.matrix(N), rows, atol=1e-6)


def test_error_against_dense():
    for workload in WORKLOADS:
        banded = BandedToeplitz.square_root(4)
        for strategy in (banded, BandedInverse.bisr(iterations=N, bands=3)):
            found = workload_error(strategy, iterations=N, noise_multiplier=1.5, workload=workload)
            assert found == pytest.approx(dense(workload, strategy) * 1.5**2, rel=1e-10)
        full = Dense(enumeration.strategy_matrix(banded.array, N, N))
        assert full.unit_workload_error(N, workload) == pytest.approx(dense(workload, banded), rel=1e-10)
        if workload == Workload():
            given = dict(iterations=N, noise_multiplier=1.5)
            error = workload_error(banded, **given, workload=workload)
            assert error == pytest.approx(prefix_sum_error(banded, **given), rel=1e-12)


def test_search_has_the_error_and_its_gradient():
    for bands in [1, 4, N]:
        for workload in WORKLOADS:
            point = np.random.default_rng(0).normal(size=bands)
            error_of = workload.error_of(N, bands)
            value, gradient = error_of(point)
            assert value == pytest.approx(workload.error(np.append(point, np.zeros(N - bands))), rel=1e-9)
            for k in range(bands):
                step = 1e-5 * np.eye(bands)[k]
                slope = (error_of(point + step)[0] - error_of(point - step)[0]) / 2e-5
                assert gradient[k] == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("workload", WORKLOADS[1:])
def test_optimal_for_a_workload(workload):
    """Better than the optimum for prefix sums, and as good as a search without our gradients."""
    schedule = dict(iterations=N, bands=3, min_separation=4, participations=3)
    banded = [BandedToeplitz.optimal(**schedule, workload=w) for w in (workload, Workload())]
    inverse = [BandedInverse.optimal(**schedule, workload=w) for w in (workload, Workload())]

    def banded_loss(strategy):
        return dense(workload, strategy)

    def inverse_loss(strategy):
        return dense(workload, strategy) * strategy.squared_sensitivity(N, 4, 3)

    for loss, (best, other) in ((banded_loss, banded), (inverse_loss, inverse)):
        assert loss(best) < loss(other)
    blind = scipy.optimize.minimize(
        lambda tail: banded_loss(BandedToeplitz((1.0, *np.maximum(tail, 0)))),
        [0.5, 0.4],
        method="Nelder-Mead",
    )
    assert banded_loss(banded[0]) <= blind.fun * (1 + 1e-6)
    grid = np.linspace(-0.9, 0, 13)
    least = min(
        inverse_loss(BandedInverse((1.0, a, b), N)) for a, b in itertools.product(grid, grid) if a + b >= -1
    )
    assert inverse_loss(inverse[0]) <= least * (1 + 1e-9)


def test_bad_workload():
    for arguments, message in [
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"learning_rate": "x"}, "learning_rate must be"),
        ({"momentum": 1.0}, r"momentum must be from 0 to below 1, got 1\.0"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"momentum": True}, "momentum must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number of at least 0, got nan"),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"last": 1}, "last must be True or False"),
    ]:
        refused(message, Workload, **arguments)
    for schedule in (lambda t: -1.0, lambda t: 0.0, lambda t: float("nan"), lambda t: "x"):
        refused("learning_rate must", Workload(schedule).rates, 3)


def test_a_schedule_without_a_hash_is_refused():
    @dataclasses.dataclass
    class Schedule:
        def __call__(self, step):
            return 1.0

    refused("learning_rate must be a number or a function", lambda: Workload(Schedule()))


def test_what_is_no_workload_is_refused():
    line = r"workload must be a jaxacct\.strategies\.Workload"
    schedule = dict(iterations=4, bands=2, min_separation=2, participations=1)
    for bad in ("sgd", 0.9, None):
        refused(line, BandedInverse.optimal, iterations=4, bands=2, workload=bad)
        refused(line, BandedToeplitz.optimal, **schedule, workload=bad)
        sizes = dict(iterations=3, noise_multiplier=1.0)
        refused(line, workload_error, BandedToeplitz.identity(), **sizes, workload=bad)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("cosine", optax.cosine_decay_schedule(1.0, N)),
        ("linear", optax.linear_schedule(1.0, 0.0, N)),
        ("warmup:3", optax.linear_schedule(0.0, 1.0, 3)),
        ("cosine,warmup:3,learning-rate:0.4", WARM),
    ],
)
def test_schedules_by_name_are_those_of_optax(name, schedule):
    named = workload_named(name, N)
    np.testing.assert_allclose(named.rates(N), [float(schedule(t)) for t in range(N)], atol=1e-7)
    assert workload_named(name, N) == named and hash(workload_named(name, N)) == hash(named)


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        (PREFIX_SUM, Workload()),
        ("momentum:0.9", Workload(momentum=0.9)),
        ("momentum:0.5, weight-decay:1e-3,learning-rate:0.1", Workload(0.1, 0.5, 1e-3)),
        ("last-iterate", Workload(last=True)),
        ("momentum:0.9,last-iterate", Workload(momentum=0.9, last=True)),
        ("weight-decay:0.25,linear,warmup:2,learning-rate:2.0", None),
    ],
)
def test_names_and_workloads_go_together(name, workload):
    named = workload_named(name, N)
    assert workload is None or named == workload
    assert workload_named(str(name_of(named)), N) == named
    assert name_of(Workload(WARM)) is None  # of another make: no name stands for it


def test_names_that_are_none():
    for name, message in [
        ("", "got ''"),
        ("momentum", "must have momentum with a number"),
        ("momentum:1.0", "momentum must be from 0 to below 1"),
        ("momentum:nan", "momentum with a number"),
        ("momentum:0.9,momentum:0.9", "twice"),
        ("cosine,linear", "twice"),
        ("cosine:3", "got 'cosine:3'"),
        ("last-iterate:1", "got 'last-iterate:1'"),
        ("last-iterate,last-iterate", "twice"),
        ("shape:cosine", "got 'shape:cosine'"),
        ("warmup:12", "warmup must be below iterations 12"),
        ("warmup:1.5", "warmup must be a number of steps"),
        ("learning-rate:0", "learning_rate must be"),
        ("prefix-sum,momentum:0.5", "got 'prefix-sum'"),
        (3, "got 3"),
    ]:
        refused(message, workload_named, name, N)


def test_an_optimised_matrix_by_name_is_made_for_the_workload():
    scheme, workload = BMinSep(N, 3, 0.2), workload_named("momentum:0.9", N)
    made = by_name("optimal", 3, scheme, workload)
    assert made == BandedToeplitz.optimal(
        iterations=N, bands=3, min_separation=3, participations=4, workload=workload
    )
    assert made != by_name("optimal", 3, scheme)
    for name in ("square-root", "bisr"):
        refused("workload must not be given together with strategy", by_name, name, 3, scheme, workload)


def test_the_last_iterate_has_the_maximal_error_at_a_constant_rate():
    for workload in WORKLOADS[:4]:
        squares = np.square(workload.matrix(N) @ np.linalg.inv(enumeration.strategy_matrix([0.8, 0.6], N, N)))
        found = BandedToeplitz((0.8, 0.6)).unit_workload_error(N, dataclasses.replace(workload, last=True))
        assert found == pytest.approx(squares.sum(axis=1).max(), rel=1e-12)


def test_closed_forms():
    """Prefix sums; geometric sums of momentum; powers of what decay leaves; rates as weights of columns."""
    lower = np.tril(np.ones((N, N)))
    lag = np.subtract.outer(np.arange(N), np.arange(N))
    np.testing.assert_array_equal(Workload().matrix(N), lower)
    powers = np.where(lag >= 0, 1 - 0.9 ** (lag + 1.0), 0) / (1 - 0.9)
    np.testing.assert_allclose(WORKLOADS[1].matrix(N), 0.3 * powers, rtol=1e-12)
    left = 0.3 * (1 - 0.3 * 0.2) ** np.maximum(lag, 0) * lower
    np.testing.assert_allclose(WORKLOADS[2].matrix(N), left, rtol=1e-12)
    np.testing.assert_allclose(WORKLOADS[4].matrix(N), lower * WORKLOADS[4].rates(N), rtol=1e-12)
