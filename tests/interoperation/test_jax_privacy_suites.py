"""What the test suites of jax-privacy assert of its samplers, matrices and noise, asserted of ours.

Its wheels hold no tests, so the facts are stated here; where a function of the peer is the reference, it is
called as installed. Cases of the suites of its head (8967688) that do not pass through adapters:

- Samplers that have a scheme: 22 of 68, all refused. No examples, no participation, a cap below the mean
  batch, parts of equal size, capped cycles of several parts.
- Toeplitz matrices: 25 of 157. 18 have negative entries, which no strategy here may have; the others are of
  messages and options of the peer.
- Sensitivities: 12 of 63. 5 have negative entries or none on the diagonal, 6 are of messages and refusals of
  the peer, and a bound for a matrix that is not Toeplitz is 12 % above the truth for participation in every
  step.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy.matrix_factorization import buffered_toeplitz, sensitivity, toeplitz
from scipy import stats

from jaxacct import BalancedMinSep, BallsInBins, BMinSep, CyclicPoisson, Mechanism, Poisson, TruncatedBMinSep
from jaxacct.strategies import BandedInverse, BandedToeplitz, BufferedToeplitz, Dense, Toeplitz, Workload
from jaxacct.strategies.worst_pattern import Patterns, squared_sensitivity
from tests.oracles.enumeration import max_square_norm, strategy_matrix
from train.batches.sampler import Sampler
from train.clipping.grid import GridSum
from train.noise import recursion
from train.optimizers import privatize

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_promotion")]
LAST, KEY = Workload(last=True), np.arange(8, dtype=np.uint32)

# -- Samplers -------------------------------------------------------------------------------------------


def batches(scheme, size=100, largest=None, seed=0) -> list[np.ndarray]:
    """All batches of a run, which are of distinct examples."""
    source = Sampler(scheme, size, largest or size, key=(seed, 1, 2, 3))
    found = [source.next() for _ in range(scheme.iterations)]
    for batch in found:
        assert batch.dtype == np.int64 and np.unique(batch).size == batch.size
        assert batch.size == 0 or (0 <= batch.min() and batch.max() < size)
    return found


@pytest.mark.parametrize("iterations", [10, 20, 21])
@pytest.mark.parametrize("certain", [CyclicPoisson, BallsInBins])
def test_a_cycle_is_a_partition_that_repeats(certain, iterations):
    run = (iterations, 10, 1.0) if certain is CyclicPoisson else (iterations, 10)
    found = [np.sort(batch) for batch in batches(certain(*run))]
    np.testing.assert_array_equal(np.sort(np.concatenate(found[:10])), np.arange(100))
    for step in range(10, iterations):
        np.testing.assert_array_equal(found[step], found[step - 10])


def test_members_of_a_part_stay_in_it():
    found = batches(CyclicPoisson(999, 3, 0.09))
    parts = [set(np.concatenate(found[start::3]).tolist()) for start in range(3)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(parts, 2))
    assert set.union(*parts) == set(range(100))


@pytest.mark.parametrize(("participations", "iterations", "size"), [(1, 10, 10), (3, 20, 100), (5, 5, 10)])
def test_an_allocation_has_every_example_as_often_as_it_says(participations, iterations, size):
    found = batches(BalancedMinSep(iterations, 1, participations), size)
    np.testing.assert_array_equal(np.bincount(np.concatenate(found), minlength=size), participations)


@pytest.mark.parametrize(
    ("scheme", "largest"),
    [
        *((BMinSep(1000, b, 0.1, warm), None) for b in (2, 4) for warm in (True, False)),
        (TruncatedBMinSep(1000, 4, 0.1, 10, 100), 10),
        (TruncatedBMinSep(1000, 1, 0.04, 5, 100), 5),
    ],
)
def test_participations_are_apart_and_batches_below_the_cap(scheme, largest):
    found, last = batches(scheme, largest=largest), np.full(100, -1000)
    for step, batch in enumerate(found):
        assert np.all(step - last[batch] >= scheme.min_separation)
        last[batch] = step
    sizes = np.array([batch.size for batch in found])
    assert sizes.max() <= (largest or 100)
    assert np.bincount(np.concatenate(found), minlength=100).max() <= 2 * 1000 * 0.1


def test_certain_batches_two_steps_apart():
    cold, warm = (batches(BMinSep(10, 2, 1.0, start), 1000) for start in (False, True))
    assert (cold[0].size, cold[1].size) == (1000, 0)
    assert warm[0].size + warm[1].size == 1000 and 400 < warm[0].size < 600
    for found in (cold, warm):
        for step in range(2, 10):
            np.testing.assert_array_equal(np.sort(found[step]), np.sort(found[step - 2]))


def test_batches_are_a_function_of_the_key():
    for scheme in (CyclicPoisson(5, 3, 0.3), BalancedMinSep(10, 1, 2), Poisson(5, 0.01)):
        one, again, other = (batches(scheme, 50, seed=seed) for seed in (0, 0, 1))
        assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# -- Matrices -------------------------------------------------------------------------------------------

COLUMNS = [[1.0], [1.0, 0.5], [1.0, 1.0, 1.0], [2.0, 1.2, 0.3, 0.3, 0.1], np.linspace(1.0, 0.001, 13)]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("n", [1, 5, 11, 40])
def test_sensitivities_are_those_of_the_peer(column, n, x64):
    """Columns that never rise: exactly; of banded matrices the dynamic program of the peer, too."""
    column = np.asarray(column)[:n]
    ours, dense = Toeplitz(tuple(column)), Dense(strategy_matrix(column, n, n))
    for separation, k in itertools.product({1, min(2, n), min(5, n), n}, (1, 3, n)):
        theirs = float(toeplitz.minsep_sensitivity_squared(column, separation, k, n))
        assert ours.squared_sensitivity(n, separation, k) * ours.given_norm**2 == pytest.approx(theirs)
        if column.size <= separation:
            banded = sensitivity.get_sensitivity_banded(dense.matrix, separation, k)
            assert squared_sensitivity(dense, Patterns(n, separation, k)) == pytest.approx(float(banded) ** 2)


def test_a_column_that_rises_has_an_upper_bound():
    column, n = np.array([1.0, 0.5, 0.8]), 6
    for separation, k in itertools.product((1, 2, 3), (1, 2, 3)):
        largest = max_square_norm(strategy_matrix(column, n, n), Patterns(n, separation, k))
        ours = Toeplitz(tuple(column))
        assert ours.squared_sensitivity(n, separation, k) * ours.given_norm**2 >= largest * (1 - 1e-12)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("n", [1, 13, 40])
def test_errors_are_the_mean_and_the_last_of_those_of_the_peer(column, n, x64):
    column = np.asarray(column)[:n]
    ours = Toeplitz(tuple(column))
    theirs = np.asarray(toeplitz.per_query_error(strategy_coef=ours.array, n=n))
    assert ours.unit_workload_error(n, Workload()) == pytest.approx(theirs.mean(), rel=1e-10)
    assert ours.unit_workload_error(n, LAST) == pytest.approx(theirs.max(), rel=1e-10)


@pytest.mark.parametrize(("n", "bands"), [(16, 16), (100, 7), (200, 15)])
def test_the_maximal_error_is_no_larger_than_that_of_the_peers_optimum(n, bands, x64):
    options = dict(iterations=n, min_separation=bands, participations=1, workload=LAST)
    ours = BandedToeplitz.optimal(bands=bands, **options)
    theirs = toeplitz.optimize_banded_toeplitz(n, bands, reduction_fn=jnp.max)
    peer = BandedToeplitz(tuple(np.maximum(np.asarray(theirs), 0.0).tolist()))
    assert ours.unit_workload_error(n, LAST) <= peer.unit_workload_error(n, LAST) * (1 + 1e-6)
    if bands < n:
        wider = BandedToeplitz.optimal(bands=bands + 1, **options | {"min_separation": bands + 1})
        assert wider.unit_workload_error(n, LAST) <= ours.unit_workload_error(n, LAST)


@pytest.mark.parametrize(
    ("n", "k", "error"), [(128, 1, "max"), (1000, 1, "max"), (200, 4, "max"), (200, 4, "mean")]
)
def test_buffers_are_no_worse_than_those_of_the_peer(n, k, error, x64):
    work = LAST if error == "max" else Workload()
    run = dict(iterations=n, min_separation=n // k, participations=k)
    theirs = buffered_toeplitz.optimize(
        n=n, min_sep=n // k, max_participations=k, error=error, min_buffers=3, max_buffers=3
    )
    peer = BufferedToeplitz(
        tuple(np.asarray(theirs.buf_decay).tolist()), tuple(np.asarray(theirs.output_scale).tolist()), n
    )
    ours = BufferedToeplitz.optimal(buffers=3, workload=work, **run)
    errors = [s.unit_workload_error(n, work) * s.squared_sensitivity(n, n // k, k) for s in (ours, peer)]
    assert errors[0] <= errors[1] * (1 + 1e-5)


# Mean error x squared sensitivity by the head of jax-privacy; n = 128, 8 bands of the inverse.
@pytest.mark.parametrize(
    ("k", "momentum", "peer"),
    [
        (1, 0.0, 6.13136), (1, 0.9, 204.8194), (2, 0.0, 12.54794), (2, 0.9, 453.1722), (4, 0.0, 28.60789),
        (4, 0.9, 1167.05), (8, 0.0, 73.10859), (8, 0.9, 3441.323), (16, 0.0, 209.563), (16, 0.9, 12013.26),
    ],
)  # fmt: skip
def test_banded_inverses_are_near_those_of_the_peer_and_better_than_bisr(k, momentum, peer):
    """Its C has entries below 0 for k of 8 and more, which ours may not: 0.2 % at most."""
    work, run = Workload(momentum=momentum), dict(iterations=128, min_separation=128 // k, participations=k)
    made = BandedInverse.optimal(bands=8, workload=work, **run), BandedInverse.bisr(iterations=128, bands=8)
    ours, bisr = (s.unit_workload_error(128, work) * s.squared_sensitivity(128, 128 // k, k) for s in made)
    assert ours <= 1.002 * peer and ours < bisr


# -- Noise ----------------------------------------------------------------------------------------------


def drawn(strategy, steps, params, key=KEY) -> np.ndarray:
    """(steps, parameters) of noise of standard deviation 1 before correlation."""
    levels, state = 2.0**18, recursion.init(strategy, params, key)
    rows = []
    for _ in range(steps):
        noise, state = recursion.draw(strategy, levels, state, params)
        rows.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(noise)]) / levels)
    return np.array(rows)


def test_noise_is_normal_of_its_size():
    values = drawn(BandedToeplitz.identity(), 3, jnp.zeros(512)).ravel()
    assert stats.kstest(values, stats.norm(scale=1.0).cdf).pvalue > 1e-6
    for other in (2 / 3, 3 / 2):
        assert stats.kstest(values, stats.norm(scale=other).cdf).pvalue < 1e-6


def test_no_number_of_noise_is_drawn_twice():
    params = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    both = [drawn(BandedToeplitz.identity(), 3, params, key) for key in (KEY, KEY + 1)]
    assert np.unique(np.concatenate(both)).size == 2 * 3 * 8


@pytest.mark.parametrize(
    ("strategy", "inverse"),
    [
        (BandedToeplitz.square_root(4), lambda s: toeplitz.inverse_as_streaming_matrix(jnp.array(s.array))),
        (
            BufferedToeplitz((0.9, 0.5), (0.3, 0.2), 12),
            lambda s: buffered_toeplitz.BufferedToeplitz.build(
                s.decays, s.weights
            ).inverse_as_streaming_matrix(),
        ),
    ],
)
def test_streamed_noise_is_that_of_the_peers_matrix(strategy, inverse, x64):
    """As of the matrix product, from the noise of one band of the same key, up to the grid."""
    white = drawn(BandedToeplitz.identity(), 12, jnp.zeros(5))
    scale = getattr(strategy, "given_norm", 1.0) if isinstance(strategy, BufferedToeplitz) else 1.0
    theirs = np.asarray(inverse(strategy) @ jnp.asarray(white)) * scale
    np.testing.assert_allclose(drawn(strategy, 12, jnp.zeros(5)), theirs, atol=1e-4)


@pytest.mark.parametrize("bands", [1, 4])
def test_a_privatizer_is_a_pure_transformation_of_optax(bands):
    mechanism = Mechanism(BMinSep(100, bands, 0.01), BandedToeplitz.square_root(bands), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY)
    params = {"a": jnp.zeros((2,), jnp.float32), "b": jnp.zeros((3, 2), jnp.float32)}
    total = GridSum.of(params, private.grid)
    chained = optax.chain(private, optax.adamw(0.1))
    state = chained.init(params)
    for step in (chained.update, jax.jit(chained.update)):
        updates, after = step(total, state, params)
        again, _ = step(total, state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, again)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(
            lambda x: (x.shape, x.dtype), params
        )
        assert all(math.isfinite(float(jnp.abs(leaf).max())) for leaf in jax.tree.leaves(updates))
