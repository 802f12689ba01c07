"""Programs serve every sampling probability and coefficient; what is not passed to them is never shared.

Compilers whose sums and comparisons are not those of the rounding margins are refused.
"""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import BandedToeplitz, Mechanism
from jaxacct.kernels import programs
from jaxacct.proposals.base import draw_blocks, plain
from jaxacct.schemes import BMinSep, CyclicPoisson, MultiAttribution, Poisson, TruncatedBMinSep
from jaxacct.schemes.users.independent_attribution import IndependentAttribution
from tests.oracles.settings import slow
from tests.refusals import refused
from tests.stored_plans import whole

_SCHEMES = {
    "poisson": lambda p: Poisson(6, p),
    "cyclic-poisson": lambda p: CyclicPoisson(6, 2, p),
    "b-min-sep": lambda p: BMinSep(6, 2, p),
    "b-min-sep, cold": lambda p: BMinSep(6, 2, p, False),
    "multi-attribution": lambda p: MultiAttribution(6, 2, p, 2),
    "independent-attribution": lambda p: IndependentAttribution(6, 2, p, 2),
    "truncated-b-min-sep": lambda p: TruncatedBMinSep(6, 2, p, max_batch_size=20, dataset_size=60),
}


def arguments_of(mechanism, direction) -> tuple:
    """(what is fixed in the program that draws a mechanism, two keys, the tables)."""
    proposal = plain(mechanism, direction)
    fixed = proposal.draw_block, mechanism.scheme, mechanism.strategy, jnp.dtype("float32")
    return fixed, jax.random.split(jax.random.key(0), 2), proposal.tables()


def program_of(mechanism, direction) -> str:
    """What is given to the compiler to draw a mechanism."""
    fixed, keys, tables = arguments_of(mechanism, direction)
    return draw_blocks.lower(*fixed, mechanism.noise_multiplier, tables, keys).as_text()


IN_CI = ("b-min-sep", "remove"), ("poisson", "remove")


@pytest.mark.parametrize(
    ("scheme", "direction"),
    [
        *IN_CI,
        slow("truncated-b-min-sep", "add"),
        *(
            slow(scheme, direction)
            for scheme in list(_SCHEMES)[:-1]
            for direction in ("remove", "add")
            if (scheme, direction) not in IN_CI
        ),
    ],
)
def test_another_probability_and_other_coefficients_make_the_same_program(scheme, direction):
    """So that JAX's cache has it: 0.011 and 0.012, square-root and flat coefficients.

    What is drawn of the add direction, normals and a loss of theirs, is in the other program too, but for
    batches that are truncated.
    """
    make, bands = _SCHEMES[scheme], 1 if scheme == "poisson" else 2
    first = program_of(Mechanism(make(0.011), BandedToeplitz.square_root(bands), 1.0), direction)
    assert first == program_of(Mechanism(make(0.012), BandedToeplitz((1.0, 1.0)[:bands]), 2.0), direction)


def test_a_number_that_is_not_passed_is_part_of_the_program():
    """The attack: a scheme's number as a literal must not be taken for another scheme's."""

    chex.clear_trace_counter()

    @programs.compiled(static=1)
    @chex.assert_max_traces(n=2)
    def scaled(factor, x):
        return factor * x + programs.number(factor)

    x = jnp.ones(2)
    assert scaled(2.0, x).tolist() == [4.0, 4.0]
    assert scaled(3.0, x).tolist() == [6.0, 6.0]
    assert scaled(2.0, x).tolist() == [4.0, 4.0]


def test_programs_are_kept_by_kind_of_array_and_precision():
    chex.clear_trace_counter()

    @programs.compiled(static=1)
    @chex.assert_max_traces(n=3)
    def total(weights, x):
        return (jnp.broadcast_to(jnp.asarray(weights, x.dtype), x.shape) * x).sum()

    weights = (1.0, 2.0)
    assert float(total(weights, np.ones(2, np.float32))) == 3
    assert float(total(weights, np.full(2, 2, np.float32))) == 6
    assert total(weights, np.ones((3, 2), np.float32)) == 9
    with jax.enable_x64(True):
        exact = total(weights, np.full(2, 1 / 3))
        assert exact.dtype == np.float64 and exact == 1 / 3 + 2 / 3
    assert float(jax.vmap(lambda row: total(weights, row))(jnp.ones((2, 2)))[1]) == 3
    assert jax.grad(lambda row: total(weights, row))(jnp.ones(2)).tolist() == [1, 2]
    total.clear_cache()
    with pytest.raises(AssertionError, match="traced > 3 times"):
        total(weights, np.ones(2, np.float32))


def test_the_same_arrays_are_another_program_in_another_precision():
    @programs.compiled(static=1)
    def widest(by, x):
        return x.astype(float) * by

    ones = np.ones(2, np.float32)
    assert widest(2.0, ones).dtype == np.float32
    with jax.enable_x64(True):
        assert widest(2.0, ones).dtype == np.float64
    assert widest(2.0, ones).dtype == np.float32


def test_the_programs_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(programs, "_KEPT", 2)

    @programs.compiled(static=1)
    def plus(number, x):
        return x + number

    for number in (1.0, 2.0, 1.0, 3.0):
        plus(number, jnp.zeros(()))
    assert [key[0] for key in plus._programs] == [(1.0,), (3.0,)]


def test_a_program_that_fails_is_not_kept():
    @programs.compiled(static=1)
    def refuses(name, x):
        raise ValueError(f"name must be another, got {name}")

    refused("name must be another, got me", refuses, "me", jnp.zeros(()))
    assert not refuses._programs


def test_programs_that_threads_call_at_once_keep_to_one_core(monkeypatch):
    """Else two Fourier transforms wait for each other forever in jaxlib 0.11: no draw would end."""
    asked, jit = [], jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda function, **options: asked.append(options) or jit(function, **options)
    )

    @programs.compiled(static=0)
    def doubled(x):
        return 2 * x

    assert doubled(jnp.float32(2)) == 4
    found = [options["compiler_options"] for options in asked if "compiler_options" in options]
    assert [options["xla_cpu_multi_thread_eigen"] for options in found] == [False]


def test_options_for_the_compiler_are_left_out_where_set_unknown_or_refused(monkeypatch):
    @programs.compiled(static=1)
    def shifted(by, x):
        return x + programs.number(by)

    x = np.arange(2, dtype=np.float32)
    left = {"xla_cpu_prefer_vector_width", "xla_cpu_multi_thread_eigen"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    programs.compiler_options.cache_clear()
    assert set(programs.compiler_options()) == left
    # JAX refuses them inside of another program, whatever the arguments are.
    assert jax.jit(lambda: shifted(1.0, x))().tolist() == shifted(1.0, x).tolist() == [1.0, 2.0]
    assert jax.vmap(lambda _: shifted(1.0, x))(x).tolist() == [[1.0, 2.0]] * 2
    monkeypatch.setitem(programs._CPU_OPTIONS, "xla_cpu_option_of_another_release", 1)
    programs.compiler_options.cache_clear()
    assert set(programs.compiler_options()) == left
    assert shifted(2.0, x).tolist() == [2.0, 3.0]
    programs.compiler_options.cache_clear()


def halve(counts):
    """Turns until every count is zero, each sample's own number of turns, and the counts."""

    def turn(state):
        turns, own, counts = state
        return turns + 1, own + (counts > 0).astype(own.dtype), counts // 2

    start = (0, jnp.zeros_like(counts), counts)
    return jax.lax.while_loop(lambda state: programs.any_left(state[2] > 0), turn, start)


def test_blocks_run_until_the_last_is_done():
    counts = jnp.asarray([[0, 1, 2], [0, 0, 0], [900, 3, 1]])
    turns, own, left = jax.jit(jax.vmap(halve))(counts)
    np.testing.assert_array_equal(turns, [10, 10, 10])
    np.testing.assert_array_equal(own, [[0, 1, 2], [0, 0, 0], [10, 2, 1]])
    assert not left.any()
    np.testing.assert_array_equal(jax.vmap(jax.vmap(halve))(counts[:, None])[1][:, 0], own)
    assert [int(halve(row)[0]) for row in counts] == [2, 0, 10]


@pytest.mark.slow
def test_options_for_the_compiler_change_no_draw():
    """A program called alone has them, inside of another one it has not."""
    fixed, keys, _ = arguments_of(Mechanism(BMinSep(6, 2, 0.2), BandedToeplitz.square_root(2), 1.0), "remove")
    alone = draw_blocks(*fixed, 1.0, (), keys).loss
    assert alone.tolist() == jax.jit(lambda keys: draw_blocks(*fixed, 1.0, (), keys).loss)(keys).tolist()


FLAGS = {
    "sums": "--xla_cpu_enable_fast_math=true",
    "not finite": "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false "
    "--xla_cpu_fast_math_honor_infs=false",
}
CALLS = """
import sys
import jaxacct
import numpy as np
from jaxacct.core.plan import Plan
from jaxacct.verification.replay import replay
from train.training import fit

plan = Plan.load(sys.argv[1])
mechanism = plan.mechanism
pair = mechanism.scheme, mechanism.strategy
target = dict(epsilon=plan.epsilon, delta=plan.delta)
calls = {
    "verify": lambda: jaxacct.verify(mechanism, *target.values()),
    "Plan.verify": plan.verify,
    "replay": lambda: replay(plan),
    "calibrate": lambda: jaxacct.calibrate(*pair, **target),
    "calibrate at a noise": lambda: jaxacct.calibrate(*pair, **target, noise_multiplier=1.0),
    "smallest epsilon": lambda: jaxacct.calibrate(*pair, delta=plan.delta, noise_multiplier=1.0),
    "estimate_delta": lambda: jaxacct.estimate_delta(mechanism, plan.epsilon, num_samples=10),
    "estimate_epsilon": lambda: jaxacct.estimate_epsilon(mechanism, plan.delta, num_samples=10),
    "privacy_profile": lambda: jaxacct.privacy_profile(mechanism, [1.0], num_samples=10),
    "fit": lambda: fit(plan, {"w": np.zeros(1)}, lambda params, row: 0.0, np.zeros(4)),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        assert "XLA_FLAGS must not let the compiler reorder sums" in str(error), (name, error)
    else:
        raise SystemExit(f"{name} went on")
"""


@pytest.mark.parametrize("name", ["sums", pytest.param("not finite", marks=pytest.mark.slow)])
def test_nothing_is_certified_with_fast_math(name, tmp_path):
    """In a process of its own: XLA reads its flags once."""
    plan = tmp_path / "plan.json"
    whole("plain").save(plan)
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(plan)],
        env=os.environ | {"XLA_FLAGS": FLAGS[name], "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


WRONG = {
    "sums are reordered": lambda found: (np.zeros_like(found[0]), *found[1:]),
    "one remainder in 32 is lost": lambda found: (found[0] * (np.arange(32) < 31), *found[1:]),
    "the error of a sum is 0": lambda found: (found[0], np.zeros_like(found[1]), *found[2:]),
    "NaN is a number": lambda found: (*found[:2], np.zeros_like(found[2]), *found[3:]),
    "infinity is finite": lambda found: (*found[:3], np.ones_like(found[3]), *found[4:]),
    "NaN equals itself": lambda found: (*found[:4], np.zeros_like(found[4]), *found[5:]),
    "NaN is above 0": lambda found: (*found[:5], found[5] | found[4], *found[6:]),
    "a choice takes NaN for a number": lambda found: (*found[:6], np.ones_like(found[6]), *found[7:]),
    "a maximum drops NaN": lambda found: (*found[:7], np.zeros_like(found[7]), *found[8:]),
    "infinity minus infinity is a number": lambda found: (*found[:8], np.zeros_like(found[8]), found[9]),
    "the exponential of NaN is a number": lambda found: (*found[:9], np.zeros_like(found[9])),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_result_is_seen(name, monkeypatch):
    right = programs._compiled_arithmetic

    def wrong(*numbers):
        return WRONG[name]([np.asarray(each) for each in right(*numbers)])

    programs.check_arithmetic.cache_clear()
    programs.check_arithmetic()
    monkeypatch.setattr(programs, "_compiled_arithmetic", wrong)
    programs.check_arithmetic.cache_clear()
    try:
        refused("XLA_FLAGS must not let the compiler reorder sums", programs.check_arithmetic)
    finally:
        programs.check_arithmetic.cache_clear()


@pytest.mark.parametrize("row", [0, 32_767, 32_768])
def test_products_of_many_rows_are_compared_with_numpy(row, monkeypatch):
    """One wrong row is refused (jaxlib 0.10.2 has the last one wrong, proofs/errata.md)."""
    programs.check_arithmetic.__wrapped__()
    right = programs._compiled_squares

    def wrong(*given):
        return right(*given).at[row].add(1.0)

    monkeypatch.setattr(programs, "_compiled_squares", wrong)
    refused("jaxlib must compute sums of products of 32769 rows right", programs.check_arithmetic.__wrapped__)
