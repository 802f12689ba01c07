"""Attacks on the clip norm: losses whose gradient `a b + c` is rounding alone.

It is 0 in two operations and thousands of clip norms in a fused one. A compiler that computes it once for the
check and once for the sum releases what was never clipped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxacct import BandedToeplitz, Mechanism, Poisson
from jaxacct.accountants.dice_plan import DicePlan
from tests.train.runs import fit
from train.clipping.grid import Grid
from train.optimizers import privatize
from train.procedures.batch_clipping import private_round_update
from train.procedures.dice import dice_aggregate
from train.procedures.step import CLIPPINGS, make_step
from train.procedures.stored import stored

pytestmark = pytest.mark.optimized

# As XLA compiles without the flags of `tests/conftest.py`; a version that does not know one stops.
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32} | (
    {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
)
WITHOUT_OPTIMIZATIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
KEY, ROWS, GRID = np.arange(8, dtype=np.uint32), 4, Grid(1.0, 20)
MASKS = [np.ones(ROWS, bool), *(np.arange(ROWS) != left_out for left_out in range(ROWS))]
FIRST = {"0": np.zeros(ROWS, np.float32)}  # a leaf before the others, as a constant of the program


def cancelling(width: int, rows: int = ROWS):
    generator = np.random.default_rng(width)
    a, b = (np.float32(1e5 * generator.normal(size=(rows, width))) for _ in range(2))
    return {"a": a, "b": b, "c": -(a * b)}


def linear(params, example):
    return jnp.sum(params["w"] * (example["a"] * example["b"] + example["c"]))


def compiled(function, flags=None):
    return jax.jit(function, compiler_options=AS_USERS_COMPILE if flags is None else flags)


def sum_of(kind, **options):
    """(params, rows, mask) -> the integers of "w"."""

    def total(*given):
        return CLIPPINGS[kind](linear, *given, **dict(grid=GRID, microbatch_size=ROWS) | options).total

    return total


def of_program(run, flags=None):
    """(rows, mask) -> the sum by the program of `run`, of parameters of zeros."""
    total = compiled(run, flags)
    return lambda rows, mask: total({"w": jnp.zeros(rows["a"].shape[1])}, rows, mask)


def with_constant_leaf(kind, flags=None, **options):
    total = sum_of(kind, **options)
    return of_program(lambda params, rows, mask: total(params, FIRST | rows, mask), flags)


def scanned_within_vmap(kind):
    def in_a_scan(params, rows, mask):
        return jax.lax.scan(lambda _, given: (None, sum_of(kind)(params, *given)), None, (rows, mask))[1]

    total = compiled(jax.vmap(in_a_scan, (0, None, None)))

    def found(rows, mask):
        both = jax.tree.map(lambda leaf: leaf[None], (rows, mask))
        width = rows["a"].shape[1]
        return jax.tree.map(lambda leaf: leaf[0, 0], total({"w": jnp.zeros((2, width))}, *both))

    return found


WAYS = {
    "alone": lambda kind: of_program(sum_of(kind)),
    "constant leaf": with_constant_leaf,
    "scanned within vmap": scanned_within_vmap,
    "mesh of one device": lambda kind: with_constant_leaf(kind, mesh=jax.make_mesh((1,), ("rows",))),
    "without optimizations": functools.partial(with_constant_leaf, flags=WITHOUT_OPTIMIZATIONS),
    "by microbatches": functools.partial(with_constant_leaf, microbatch_size=2),
}


def most_moved(found, rows) -> float:
    """Greatest distance in clip norms by which one of the rows moves an exact sum."""
    whole, *others = (found(rows, mask).units()["w"] for mask in MASKS)
    return max(sum(int(n) ** 2 for n in whole - other) for other in others) ** 0.5 / 2**GRID.bits


@pytest.mark.parametrize("kind", CLIPPINGS)
@pytest.mark.parametrize("way", WAYS)
def test_no_row_moves_a_sum_by_more_than_the_clip_norm(way, kind):
    assert most_moved(WAYS[way](kind), cancelling(3)) <= 1


@pytest.mark.parametrize("kind", CLIPPINGS)
def test_all_that_is_summed_comes_out_of_the_loop(kind, monkeypatch):
    def emptied(values, *_):
        return jax.tree.map(jnp.zeros_like, values)

    monkeypatch.setattr("train.clipping.sums.stored", emptied)
    for options in ({}, dict(microbatch_size=2)):
        total = jax.jit(sum_of(kind, **options))({"w": jnp.zeros(3)}, cancelling(3), MASKS[0])
        assert not np.any(total.units()["w"])


def steps_of(kind, has_unused: bool):
    """A step of SGD, whose parameters fall by the noisy sum, and its first state of parameters."""
    mechanism = Mechanism(Poisson(2, 1.0), BandedToeplitz((1.0,)), 1.0)
    private = privatize(mechanism, clip_norm=1.0, expected_batch_size=1.0, key=KEY)
    step = make_step(linear, private, optax.sgd(1.0), clipping=kind, microbatch_size=ROWS)
    unused = {"0": jnp.zeros(1)} if has_unused else {}
    return step, lambda w: step.init(unused | {"w": w})


def ensemble(kind):
    """Several members of one batch under one noise."""
    step, first = steps_of(kind, False)
    run = compiled(jax.vmap(lambda w, batch, mask: step(first(w), batch, mask)[0].params["w"]))

    def found(rows, mask):
        both = jax.tree.map(lambda leaf: np.stack([leaf, leaf[::-1]]), (rows, mask))
        return run(jnp.zeros((2, 3)), *both)[0]

    return found


def steps_in_a_scan(kind):
    """Two steps, the second of padding alone."""
    step, first = steps_of(kind, True)
    run = compiled(
        lambda batches, masks: jax.lax.scan(
            lambda state, given: (step(state, *given)[0], ()), first(jnp.zeros(3)), (batches, masks)
        )[0].params["w"]
    )

    def found(rows, mask):
        batches = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), FIRST | rows)
        return run(batches, np.stack([mask, np.zeros_like(mask)]))

    return found


def program_of_constants(kind):
    """A step of a program in which the first leaf of its batch and the state are constants."""
    step, first = steps_of(kind, True)
    run = compiled(lambda rows, mask: step(first(jnp.zeros(3)), FIRST | rows, mask)[0].params["w"])
    return lambda rows, mask: run(rows, mask)


def distance(found, rows) -> float:
    """As `most_moved`, of released numbers whose noise is the same."""
    whole, *others = (np.asarray(found(rows, mask), np.float64) for mask in MASKS)
    return max(np.linalg.norm(whole - other) for other in others)


FLOAT32 = 1e-4  # what rounding of the release to float32 adds in clip norms


STEPS = [(way, "per_example") for way in (ensemble, steps_in_a_scan, program_of_constants)]


@pytest.mark.parametrize(("way", "kind"), [*STEPS, (steps_in_a_scan, "ghost")])
def test_no_row_moves_a_step_by_more_than_the_clip_norm(way, kind):
    assert distance(way(kind), cancelling(3)) <= 1 + FLOAT32


def gradients_of(rows):
    """Gradients of examples, the first of a parameter that the loss does not use."""
    params = {"0": jnp.zeros(1), "w": jnp.zeros(rows["a"].shape[1])}
    return jax.vmap(jax.grad(linear), (None, 0))(params, rows)


@pytest.mark.parametrize("automatic", [False, True])
def test_no_row_moves_dice_aggregate_by_more_than_the_clip_norm(automatic):
    options = dict(clip_norm=1.0, error_clip_norm=0.5, noise_std=0.0, batch_size=1, key=KEY)
    rule = dice_aggregate(automatic=automatic, **options)
    first = rule.init({"0": jnp.zeros(1), "w": jnp.zeros(3)})
    run = compiled(lambda rows, mask: rule.update(gradients_of(rows), first, mask=mask)[0]["w"])
    assert distance(run, cancelling(3)) <= 1 + FLOAT32


def test_no_example_moves_a_step_of_dice_sgd_in_fit(monkeypatch):
    """Against gradients of zero, the neighbour of a `DicePlan`; a step in an epoch of one batch."""
    options = dict(dataset_size=ROWS, batch_size=ROWS, iterations=1, clip_norm=1.0, error_clip_norm=0.5)
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=AS_USERS_COMPILE))
    plan = dataclasses.replace(DicePlan.calibrate(8.0, 1e-5, **options), noise_std=1e-7, epsilon=1e18)
    params, rows = {"0": jnp.zeros(1), "w": jnp.zeros(3)}, cancelling(3)

    def trained(rows):
        run = fit(plan, params, linear, rows, optax.sgd(1.0), keys=((1, 2, 3, 4), KEY), progress=False)
        return np.asarray(run.params["w"], np.float64) * ROWS

    whole = trained(rows)
    keep = (np.arange(ROWS) != 1)[:, None]
    other = trained({name: np.where(keep, leaf, np.float32(0)) for name, leaf in rows.items()})
    assert np.linalg.norm(whole - other) <= 1 + FLOAT32


@pytest.mark.parametrize("terms", [1, ROWS])
def test_no_term_moves_a_round_by_more_than_twice_the_clip_norm(terms):
    """Batch clipping, of one term and of several; a term of zeros is the neighbour."""
    params = {"0": jnp.zeros(1), "w": jnp.zeros(3)}

    def update(params, records):
        return jax.grad(lambda p: jnp.sum(jax.vmap(linear, (None, 0))(p, records)))(params)

    @compiled
    def run(rows):
        batch = jax.tree.map(lambda leaf: leaf[:, None], rows)
        return private_round_update(KEY, params, batch, update, 1.0, 0.5)[0]["w"] * terms

    rows = cancelling(3, terms)
    whole = np.asarray(run(rows), np.float64)
    for example in range(terms):
        keep = (np.arange(terms) != example)[:, None]
        other = run({name: np.where(keep, leaf, np.float32(0)) for name, leaf in rows.items()})
        assert np.linalg.norm(whole - other) <= 1 + FLOAT32


def test_what_an_example_is_charged_is_what_it_adds():
    """Individual accounting: squares of the integers that are summed, to the last unit."""

    def admit(records, squares):
        return records + squares, squares >= 0

    def run(rows, mask):
        params, kept = {"0": np.zeros(1, np.float32), "w": np.zeros(3, np.float32)}, jnp.zeros(ROWS)
        options = dict(grid=GRID, microbatch_size=ROWS, admit=admit, records=kept)
        found = CLIPPINGS["per_example"](linear, params, FIRST | rows, mask, **options)
        return found.total, found.records

    with jax.enable_x64(True):
        program = compiled(run)
        (whole, charged), *others = (program(cancelling(3), mask) for mask in MASKS)
        for row, (other, _) in enumerate(others):
            change = whole.units()["w"] - other.units()["w"]
            assert sum(int(n) ** 2 for n in change) == charged[row] <= 4**GRID.bits


def test_stored_numbers_are_the_state_of_a_loop():
    """No compiler leaves it out, also where all but one number are constants."""

    def run(x):
        kept = stored(
            (x, jnp.ones(3)), lambda s: (s[0] < 9).all() & (s[1] < 9).all(), lambda s: (0 * s[0], 0 * s[1])
        )
        return kept[0] + kept[1]

    for function in (run, jax.vmap(run)):
        x = jnp.arange(6.0).reshape(2, 3)
        assert " while(" in compiled(function).lower(x if function is not run else x[0]).compile().as_text()
    np.testing.assert_array_equal(run(jnp.array([1.0, 2, 3])), [2, 3, 4])
    np.testing.assert_array_equal(run(jnp.array([1.0, 9, 3])), 0)
