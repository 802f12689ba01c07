"""Which programs keep rows apart: attacks, what is computed one at a time, and every primitive of a loss.

Under vmap no row moves another, whatever it holds: of every primitive a batch has a row of NaN, infinities,
huge numbers or zeros; the others must have the same bits as without it, and as among copies of themselves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import buffer_callback, custom_partitioning, io_callback
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tests.refusals import refused
from tests.train.runs import run
from train.clipping import ghost, rows_apart
from train.clipping.ghost import choose
from train.clipping.grid import Grid
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.rows_apart import why_not

pytestmark = pytest.mark.usefixtures("default_promotion")  # programs as users write them

ONE = jax.ShapeDtypeStruct((), jnp.float32)
OTHER = jax.random.key(0, impl="rbg")


def doubled(x):
    return jax.pure_callback(lambda x: 2 * x, ONE, x)


def of_words(x):
    return x + jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,))[1].sum().astype(x.dtype)


@jax.custom_batching.custom_vmap
def by_rule(x):
    return 2 * x


by_rule.def_vmap(lambda size, batched, x: (x + x.mean(), True))


def by_own_rule(name: str):
    """A primitive that gives every row the mean of the batch."""
    mixing = Primitive(name)
    mixing.def_impl(lambda x: x)
    mixing.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[mixing] = lambda args, dims: (args[0].mean() + 0 * args[0], dims[0])
    mlir.register_lowering(mixing, mlir.lower_fun(lambda x: x, multiple_results=False))
    return mixing.bind


@custom_partitioning.custom_partitioning
def partitioned(x):
    return 2 * x


partitioned.def_partition(
    partition=lambda mesh, args, result: None,
    infer_sharding_from_operands=lambda *_: None,
    sharding_rule="->",
)


def test_what_may_receive_a_whole_batch_is_named():
    for mixes, name in [
        (doubled, "pure_callback"),
        (lambda x: io_callback(lambda x: 2 * x, ONE, x), "io_callback"),
        (lambda x: buffer_callback.buffer_callback(lambda *_: None, ONE)(x), "buffer_callback"),
        (of_words, "rng_bit_generator"),
        (lambda x: jax.lax.rng_uniform(x, 1.0, (3,)), "rng_uniform"),
        (lambda x: jax.ffi.ffi_call("unregistered", ONE)(x), "ffi_call"),
        (by_rule, "custom_vmap_call"),
        (partitioned, "custom_partitioning"),
        (by_own_rule("mixing"), "mixing"),
        (by_own_rule("add"), "add"),  # the name of one of JAX's
        (by_own_rule("scan"), "scan"),
        (lambda x: jax.vmap(lambda y: lax.psum(y, "rows"), axis_name="rows")(x[None])[0], None),
        # Not the first part of a program alone, and parts of parts.
        (lambda x: jax.lax.cond(x > 0, lambda: x, lambda: doubled(x)), "pure_callback"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(doubled)(y), x), "pure_callback"),
        (lambda x: lax.while_loop(lambda y: doubled(y) < 3, lambda y: y + 1, x), "pure_callback"),
        (jax.checkpoint(doubled), "pure_callback"),
        (lambda x: lax.reduce(x[None], 0.0, lambda a, b: a + b + doubled(b), (0,)), "pure_callback"),
        (lambda x: x[None].at[0].apply(doubled), "pure_callback"),
        (lambda x: lax.custom_linear_solve(lambda v: v, x, lambda _, b: doubled(b), symmetric=True), "pure_"),
    ]:
        found = why_not(jax.make_jaxpr(mixes)(jnp.float32(1)).jaxpr)
        assert (found is None) if name is None else (name in found and "\n" not in found)


def test_a_collective_is_refused():
    """What reads the other rows of an axis that a vmap around the whole step has named."""

    def of_row(x):
        found.append(why_not(jax.make_jaxpr(lambda x: lax.psum(x, "rows"))(x).jaxpr))
        return x

    found = []
    jax.eval_shape(jax.vmap(of_row, axis_name="rows"), jnp.ones(2))
    assert found[0].startswith("psum")


def test_keys_that_come_from_outside_are_seen():
    """Nothing in the program makes the key; it only draws with it."""
    with_key = jax.make_jaxpr(lambda key: jax.random.bits(key))
    assert "key<rbg>" in why_not(with_key(OTHER).jaxpr)
    assert why_not(with_key(jax.random.key(0, impl="threefry2x32")).jaxpr) is None


GRID = Grid(1.0, 20)
ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
MASK = np.array([True, True, False, True, True, True])
WARNING = "loss uses {}, which is not known to keep the examples of a batch apart: they are computed one at a"


def experts(params, x):
    """A mixture of two experts, each of one of two tokens."""
    return jnp.square(lax.ragged_dot(jnp.stack([x, 2 * x]), params, jnp.array([1, 1]))).sum()


def summed(loss, params, rows=ROWS, mask=MASK):
    return clipped_gradient_sum(loss, params, rows, mask, grid=GRID).total.scaled(1.0)


def of_a_loop(loss, params):
    gradients = [np.asarray(jax.grad(loss)(params, row)) for row in ROWS[MASK]]
    return sum(g / max(1.0, np.linalg.norm(g)) for g in gradients)


def test_a_mixture_of_experts_is_clipped_as_by_a_loop():
    params = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)
    with pytest.warns(UserWarning, match=WARNING.format("ragged_dot_general")):
        found = summed(experts, params)
    np.testing.assert_allclose(found, of_a_loop(experts, params), atol=1e-4)


def mixing():
    """A primitive of which a batch gives every row the sum of all rows."""
    made = Primitive("mixes")
    made.def_impl(lambda x: x)
    made.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[made] = lambda args, dims: (args[0].sum(0) + 0 * args[0], 0)
    ad.deflinear2(made, lambda cotangent, x: [cotangent])
    mlir.register_lowering(made, mlir.lower_fun(lambda x: x, multiple_results=False))
    return made


def test_rows_are_apart_whatever_the_rule_for_batches_does(monkeypatch):
    """The attack: a rule that mixes rows, of a primitive that is let through one at a time.

    Computed together, the absent third row would move the gradients of the others.
    """
    made = mixing()
    monkeypatch.setattr(rows_apart, "_alone", lambda: frozenset([made]))

    def loss(params, x):
        return (params * made.bind(x)).sum()

    with pytest.warns(UserWarning, match=WARNING.format("mixes")):
        found = summed(loss, jnp.ones(3))
    np.testing.assert_allclose(found, of_a_loop(loss, jnp.ones(3)), atol=1e-4)
    huge = ROWS.copy()
    huge[2] = 1e6
    with pytest.warns(UserWarning):
        np.testing.assert_array_equal(summed(loss, jnp.ones(3), huge), found)


def test_a_primitive_of_others_is_refused_all_the_same():
    made = mixing()
    given = lambda params, x: (params * made.bind(x)).sum(), jnp.ones(3)
    refused("loss must keep examples apart: mixes is not one of the primitives", summed, *given)


def test_a_callback_beside_it_is_refused():
    """It may keep a state from one example to the next."""

    def loss(params, x):
        seen = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x[0])
        return experts(params, x) + lax.stop_gradient(seen)

    message = r"keep examples apart: (pure_callback|ragged_dot_general) is not one"
    refused(message, summed, loss, jnp.ones((2, 3, 4)))


def test_ghost_clipping_is_not_chosen_for_it_and_refuses_it():
    params = jnp.ones((2, 3, 400))
    found = choose(experts, params, ROWS, grid=GRID)
    assert found.clipping == "per_example" and "one at a time" in found.reason
    message = "ragged_dot_general does one at a time: clipping must be 'per_exa"
    refused(message, ghost.ghost_gradient_sum, experts, params, ROWS, MASK, grid=GRID)


def test_fit_trains_a_mixture_of_experts():
    def loss(params, example):
        return experts(params["w"], example["x"]) + params["b"] - example["y"]

    params = {"w": jnp.ones((2, 3, 200)), "b": jnp.zeros(())}
    with pytest.warns(UserWarning, match=WARNING.format("ragged_dot_general")):
        found = run(model=params, loss=loss, steps=2)
    assert jnp.isfinite(found.params["w"]).all() and (found.params["w"] != 1).any()


SIZE = 4
W = np.linspace(0.5, 1.5, 16, dtype=np.float32).reshape(4, 4)  # the same for all rows


def by_element(x):
    """`x` is (4, 4) float32."""
    n, unit = x.astype(jnp.int32), 0.9 * jnp.tanh(x)
    flags, z = x > 1, lax.complex(x, W)
    unary = (
        "abs acosh asinh atan atan2 bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erfc exp exp2 expm1 "
        "floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh"
    )
    found = [getattr(lax, name)(x) for name in unary.split() if name != "atan2"]
    found += [getattr(lax, name)(unit) for name in ("acos", "asin", "atanh", "erf_inv")]
    for name in "add atan2 div max min mul nextafter pow rem sub".split():
        function = getattr(lax, name)
        found += [function(x, W), function(jnp.asarray(W), x), function(x, x.T)]
    found += [getattr(lax, name)(x, x.T) for name in "eq ge gt le lt ne".split()]
    found += [getattr(primitives, f"{name}_to_p").bind(x, x.T) for name in ("eq", "le", "lt")]
    found += [lax.clz(n), lax.population_count(n), n & 3, n | 3, n ^ 3, ~n]
    found += [n << 2, n >> 2, lax.shift_right_logical(n, 2), lax.integer_pow(x, 3), lax.stop_gradient(x)]
    found += [lax.clamp(0.0, x, 1.0), lax.clamp(x[0, 0], x, x[0, 1]), lax.conj(z), lax.real(z), lax.imag(z)]
    found += [lax.select(flags, x, x.T), lax.select_n(flags[0, 0], x, x.T)]
    found += [lax.convert_element_type(x, "int8"), lax.reduce_precision(x, 5, 10)]
    found += [primitives.stop_gradient_p.bind(x)]
    found += [primitives.add_jaxvals_p.bind(x, x.T)]
    if hasattr(primitives, "log2_p"):  # JAX 0.11: of log2, and of the derivative of tanh
        found += [jnp.log2(x), jax.grad(lambda x: jnp.tanh(x).sum())(x)]
    return found


def special(x):
    x = jnp.minimum(x[0, :2], 1e6)  # a series of 1e38 has as many terms
    found = [lax.igamma(x, x), lax.igammac(x, x), lax.igamma_grad_a(x, x)]
    return [*found, lax.zeta(x, x), lax.polygamma(x, x)]


def along_axes(x):
    n = x.astype(jnp.int32)
    found = [getattr(lax, name)(x, 0) for name in "cumlogsumexp cummax cummin cumprod cumsum".split()]
    found += [getattr(lax, name)(x, 1, jnp.int32) for name in ("argmax", "argmin")]
    found += [getattr(jnp, name)(x, 1) for name in ("max", "min", "prod", "sum")]
    found += [jnp.all(x > 0, 0), jnp.any(x > 0, 0), lax.reduce(n, 0, lax.bitwise_xor, (0,))]
    found += [*lax.sort((x, x.T), num_keys=1), lax.sort(n, dimension=0), *lax.top_k(x, 2)]
    summed = jax.vmap(lambda y: lax.psum(y, "own"), axis_name="own")(x)
    return [*found, summed, jnp.zeros(4) + lax.iota(jnp.float32, 4)]


def rearranged(x):
    found = [lax.bitcast_convert_type(x, jnp.int32), jnp.broadcast_to(x, (2, 4, 4)), jnp.concatenate([x, W])]
    found += [lax.pad(x, x[0, 0], ((1, -1, 1), (0, 2, 0))), x.reshape(2, 8), x[::-1], x[1:3, ::2], x[None, 0]]
    found += [*jnp.split(x, 2), x.T, jnp.stack([x, x]), jnp.tile(x, (2, 1))]
    found += [*jnp.unstack(x), x[:1].squeeze(0)]
    with_names = checkpoint_name(x, "x"), jax.device_put(x), jnp.array(x, copy=True)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found += [*with_names, lax.with_sharding_constraint(x, here), *lax.optimization_barrier((x, x.T))]
    if hasattr(primitives, "empty2_p"):
        found.append(primitives.empty2_p.bind(dtype=x.dtype, memory_space=jax.memory.Space.Device))
    return found


def at_places(x):
    """Places that come from the row: absurd in the bad one."""
    at, rows = x[0].astype(jnp.int32), x[:, :1].astype(jnp.int32)
    modes = ("clip", "drop", "fill", "promise_in_bounds")
    found = [
        source.at[at].get(mode=mode) for mode in modes if mode != "drop" for source in (x, jnp.asarray(W))
    ]
    found += [lax.dynamic_slice(source, (at[0], at[1]), (2, 2)) for source in (x, jnp.asarray(W))]
    found += [lax.dynamic_update_slice(x, x[:2], (at[0], 0)), lax.dynamic_update_slice(x, x[:2], (1, at[0]))]
    for mode in modes:
        target = x.at[at]
        found += [getattr(target, how)(x, mode=mode) for how in ("set", "add", "max", "min", "multiply")]
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    found += [lax.scatter_sub(x, rows, x, numbers), jnp.zeros((4, 4)).at[at].add(W)]
    return [*found, x.at[at, at].apply(jnp.sin), jnp.take_along_axis(x, rows, 1)]


def contracted(x):
    """Gradients with respect to what is the same for all rows, too: both operands are batched then."""
    image, kernel = x[None, :, :, None], jnp.asarray(np.tile(W, (2, 2, 1, 1)))

    def convolved(kernel, image, **options):
        numbers, options = ("NHWC", "HWIO", "NHWC"), {"padding": "SAME"} | options
        return lax.conv_general_dilated(image, kernel, (1, 1), dimension_numbers=numbers, **options)

    def backward(function, *args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1))(*args)

    deep, shallow = image * W[0], kernel[:, :, :1]
    found = [x @ W, W @ x, x @ x, jnp.einsum("ij,ij->i", x, W), *backward(jnp.matmul, jnp.asarray(W), x)]
    found += backward(convolved, shallow, image)
    for groups, filters in ((4, shallow), (2, kernel[:, :, :2])):
        grouped = functools.partial(convolved, feature_group_count=groups)
        found += [grouped(filters, deep), grouped(filters * x[0, 0], deep)]
        found += backward(grouped, filters, deep)[1:]
    transposed = functools.partial(convolved, lhs_dilation=(2, 2), padding=((1, 1), (1, 1)))
    found += backward(transposed, shallow, image)
    return [*found, convolved(deep[0, :2, :2, None], image)]


def windows(x):
    def pooled(start, how, padding="SAME"):
        return lambda x: lax.reduce_window(x, start, how, (2, 2), (1, 1), padding)

    kinds = (-jnp.inf, lax.max), (jnp.inf, lax.min), (0.0, lax.add, "VALID")
    most, least, mean = (pooled(*each) for each in kinds)
    found = [function(x) for function in (most, least, mean, pooled(0.0, lambda a, b: a + 2 * b))]
    gradients = [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (most, mean)]
    tangents = [jax.jvp(most, (x,), (x.T,))[1]]
    return found + gradients + tangents


def transformed(x):
    return [jnp.fft.fft(x), jnp.fft.rfft2(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.ifftn(x + 0j)]


def solved(x):
    symmetric, lower = x @ x.T + jnp.eye(4), jnp.tril(jnp.asarray(W)) + jnp.eye(4)
    la = lax.linalg
    found = [jnp.linalg.cholesky(symmetric), *jnp.linalg.qr(x), *jnp.linalg.svd(x)]
    found += [*jnp.linalg.eigh(symmetric), *la.lu(x), la.householder_product(x, x[0])]
    found += [la.tridiagonal_solve(x[0], x[1], x[2], x), jnp.linalg.solve(x, x), jnp.linalg.det(x)]
    for matrix, right in ((x, x), (lower, x), (x, jnp.asarray(W))):
        found += [jax.scipy.linalg.solve_triangular(matrix, right, lower=True)]
    return [*found, *la.tridiagonal(symmetric)]


def unsymmetric(x):
    la = lax.linalg
    return [*la.eig(x), *la.hessenberg(x), *la.schur(x)]


def drawn(x):
    key = jax.random.key(x[0, 0].astype(jnp.int32), impl="threefry2x32")
    folded = jax.random.fold_in(jax.random.clone(key), x[0, 1].astype(jnp.int32))
    words = jax.random.key_data(folded)
    again = jax.random.wrap_key_data(words, impl="threefry2x32")
    bits = primitives.threefry2x32_p.bind(words[0], words[1], words[:1], words[1:])
    found = [jax.random.normal(each, (3,)) for each in (folded, *jax.random.split(again, 2))]
    return [*found, jax.random.gamma(folded, jnp.abs(x[0, 2])), jax.random.permutation(folded, x), *bits]


@jax.custom_jvp
def by_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def by_vjp(x):
    return jnp.cos(x)


by_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), 2 * tangents[0]))
by_vjp.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (g * x,))


def of_programs(x):
    def steps(state):
        return (state[0] < state[1]) & (state[0] < 9)

    _, _, found = lax.while_loop(steps, lambda s: (s[0] + 1, s[1], s[2] * x), (0.0, x[0, 0], x))
    both = jnp.sin, jnp.cos
    found = [found, lax.cond(x[0, 0] > 1, *both, x), lax.switch(x[0, 1].astype(int), both, x)]
    found += [lax.scan(lambda y, row: (y + row, y * row), x[0], x), jax.checkpoint(jnp.sin)(x)]
    found += [by_jvp(x), by_vjp(x), jax.grad(lambda x: by_jvp(x).sum() + by_vjp(x).sum())(x)]
    found += [lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), jax.jit(jnp.exp)(x)]
    found += [lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)]
    looped = jax.checkpoint(lambda w: lax.scan(lambda y, row: (jnp.sin(y * jnp.sin(w)) + row, y), x[0], x))
    found += [jax.grad(lambda w: looped(w)[0].sum())(x[0])]
    jax.debug.callback(lambda _: None, x)
    jax.debug.print("", ordered=False)
    return found


GROUPS = [by_element, special, along_axes, rearranged, at_places, contracted]
GROUPS += [windows, transformed, solved, unsymmetric, drawn, of_programs]


def used(jaxpr) -> set:
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    found = {eqn.primitive for eqn in equations}
    inside = (inner for eqn in equations for inner in rows_apart.programs_in(eqn.params))
    return found.union(*map(used, inside))


def moved(function) -> str | None:
    """Which row moved another one, and by what; None where none did."""
    run = jax.jit(jax.vmap(function))
    batch = np.random.default_rng(0).uniform(0.5, 3, (SIZE, 4, 4)).astype(np.float32)

    def bits(batch):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(run(batch)))]

    honest = bits(batch)
    for row in (0, 2):
        alone = bits(np.broadcast_to(batch[row], batch.shape))
        for i, (a, b) in enumerate(zip(alone, honest, strict=True)):
            if a[row].tobytes() != b[row].tobytes():
                return f"result {i}: row {row} is another among copies of itself"
    for bad in (np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, 1e9):
        for at in (0, 2):
            given = batch.copy()
            given[at] = bad
            others = [row for row in range(SIZE) if row != at]
            for i, (a, b) in enumerate(zip(bits(given), honest, strict=True)):
                if a[others].tobytes() != b[others].tobytes():
                    return f"result {i}: {bad} in row {at} moved others"
    return None


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_no_row_moves_another(group):
    if group is unsymmetric and jax.default_backend() != "cpu":
        pytest.skip("JAX has eigenvalues of these on CPUs only")
    assert moved(group) is None


def test_a_loop_that_ends_for_all_rows_at_once_is_seen():
    """`betainc` iterates until every row has converged: the last bits of a row depend on the others."""
    # Another compiler may leave these bits alone.
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        assert "among copies of itself" in moved(lambda x: lax.betainc(x, x, jnp.tanh(x)))
    traced = jax.make_jaxpr(lax.betainc)(0.5, 0.5, 0.5)
    assert rows_apart.why_not(traced.jaxpr).startswith("regularized_incomplete_beta is not one of")


def test_a_value_that_is_spread_over_devices_is_seen():
    """XLA's automatic partitioner would compute the step; within a program of `jax.jit` as well."""
    mesh, single = (
        AbstractMesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2) for sizes in ((2, 1), (1, 1))
    )
    spread, alone = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("x", None))
    named = NamedSharding(single, PartitionSpec("x"))
    for sharding, found in ((spread, True), (alone, True), (named, False)):
        traced = jax.make_jaxpr(jax.jit(lambda x, to=sharding: lax.with_sharding_constraint(x, to)))(W)
        why = why_not(traced.jaxpr)
        assert (why or "").startswith("sharding_constraint would leave 2 devices") is found


def test_every_primitive_let_through_is_run():
    found = set().union(*(used(jax.make_jaxpr(group)(W).jaxpr) for group in GROUPS))
    apart, running = rows_apart._tables()
    # That one moves an array between devices: test_sharded.py has runs with it.
    assert {each.name for each in (apart | running) - found} == {"reshard"}
    assert all(rows_apart.why_not(jax.make_jaxpr(group)(W).jaxpr) is None for group in GROUPS)
