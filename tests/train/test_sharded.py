"""Parameters sharded over a mesh: the bits of one device, noise of a device's own numbers, runs that resume.

Each test runs in a process of its own that has eight virtual devices; in CI all in one, which takes ten
seconds to begin.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.report.run_card import digest_of_files
from jaxacct.schemes import BMinSep
from tests.refusals import refused
from tests.train.clipping.test_by_device import in_process, small_sums
from tests.train.noise.test_redrawn import INVERSE, KEY
from tests.train.runs import plan
from train import TrainOptions, fit
from train.clipping.grid import Grid, GridSum
from train.clipping.per_example import clipped_gradient_sum
from train.clipping.rows_apart import programs_in
from train.models.saving import write_model
from train.noise.normals import Cut, normals_of
from train.optimizers import privatize
from train.procedures import by_device
from train.procedures.step import make_step

P = PartitionSpec
LAYOUTS = (2, 4), (4, 2), (8, 1), (1, 8)
SPECS = {"a": P(None, "model"), "b": P("model"), "c": P(("data", "model"))}
ROWS = 16


def test_normals_of_parts_are_those_of_the_array():
    """Runs of whole blocks, of parts of one, of more than one that begin anywhere, and single numbers."""
    shapes = [(16, 24), (8, 3), (4, 6, 8), (6, 40), (5, 4), (9,), ()]
    whole = normals_of(KEY, 3, shapes)
    splits = [(2, 1), (4, 1), (2, 3, 2), (1, 2), (1, 4), (3,), ()]
    for places in ((0,) * 3, (1, 2, 1)):
        cuts = []
        for shape, split in zip(shapes, splits, strict=True):
            part = tuple(size // number for size, number in zip(shape, split, strict=True))
            at = tuple(place % number for place, number in zip(places, split, strict=False))
            cuts.append(Cut(shape, part, tuple(a * b for a, b in zip(at, part, strict=True))))
        drawn = jax.jit(lambda key, cuts=cuts: normals_of(key, 3, cuts))(KEY)
        for cut, own, array in zip(cuts, drawn, whole, strict=True):
            where = tuple(slice(a, a + n) for a, n in zip(cut.begin, cut.shape, strict=True))
            np.testing.assert_array_equal(own, array[where])


def mesh_of(layout, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(layout), ("data", "model"), axis_types=(kind,) * 2)


def setting():
    """(parameters, batch, mask) of a small classifier."""
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(16, 24)), "b": rng.normal(size=(24, 8)), "c": np.zeros(24)}
    batch = {"x": np.float32(rng.normal(size=(ROWS, 16))), "y": rng.integers(0, 8, ROWS).astype(np.int32)}
    return jax.tree.map(np.float32, params), batch, np.arange(ROWS) != 3


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["a"] + params["c"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["b"], example["y"])


def placed(mesh, params):
    return {name: jax.device_put(each, NamedSharding(mesh, SPECS[name])) for name, each in params.items()}


def of_four_bands(**options):
    mechanism = Mechanism(BMinSep(12, 4, 0.2), INVERSE, 1.0)
    return privatize(mechanism, clip_norm=1.0, expected_batch_size=8, key=KEY, **options)


def after_three(clipping: str, mesh=None, *, cut: bool = True, memory: str = "keep"):
    """The state after three steps, of four bands; one program for all of them, sharded as the parameters."""
    params, batch, mask = setting()
    private = of_four_bands(noise_memory=memory)
    if mesh is not None:
        rows = NamedSharding(mesh, P(mesh.axis_names))
        batch, mask = jax.device_put((batch, mask), rows)
        params = placed(mesh, params) if cut else params
    step = make_step(loss, private, optax.adam(0.01), clipping=clipping, mesh=mesh, microbatch_size=2)
    state = step.init(jax.tree.map(jnp.asarray, params))
    for _ in range(3):
        state, _ = step(state, batch, mask)
    assert step._jitted._cache_size() == 1
    if mesh is not None and cut:
        for tree in (state.params, state.opt_state[0].mu, state.noise.recent):
            for name, leaf in tree.items():
                cut = [axis for _, axes in by_device.cut_axes(SPECS[name]) for axis in axes]
                number = np.prod([mesh.shape[axis] for axis in cut])
                assert leaf.addressable_shards[0].data.size * number == leaf.size
    return jax.device_get(state)


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def every_layout(clippings, layouts=LAYOUTS):
    """With gradients of examples the bits of one device; with ghost clipping those of whole parameters on as
    many, as the budget for rounding counts devices. In the last layout axes are explicit.
    """
    *kept, other = layouts
    for clipping in clippings:
        whole = None if clipping == "per_example" else mesh_of((8, 1))
        expected = after_three(clipping, whole, cut=False)
        for layout in kept:
            same(after_three(clipping, mesh_of(layout)), expected)
        explicit = mesh_of(other, AxisType.Explicit)
        with jax.set_mesh(explicit):
            redrawn = after_three(clipping, explicit, memory="recompute")
        same((redrawn.params, redrawn.opt_state), (expected.params, expected.opt_state))


LAYERS, WIDTH = 4, 16


def deep_loss(params, example):
    """Of layers that are scanned and computed again, two matrices each: the second is turned in use."""

    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"].T, None

    x, _ = jax.lax.scan(layer, example["x"][None], params)
    return jnp.square(x).sum() * (1 + example["y"])


def deep_step(mesh, specs: dict[str, PartitionSpec], micro: int = 2):
    """(step, state, batch, mask) of ghost clipping, one piece a device or two."""
    _, batch, mask = setting()
    rng = np.random.default_rng(1)
    shapes = {"up": (LAYERS, 16, WIDTH), "down": (LAYERS, 16, WIDTH)}
    params = {name: jnp.float32(rng.normal(size=shape) / 8) for name, shape in shapes.items()}
    params = {name: jax.device_put(each, NamedSharding(mesh, specs[name])) for name, each in params.items()}
    batch, mask = jax.device_put((batch, mask), NamedSharding(mesh, P(mesh.axis_names)))
    options = dict(clipping="ghost", mesh=mesh, microbatch_size=micro)
    step = make_step(deep_loss, of_four_bands(), optax.sgd(0.01), **options)
    return step, step.init(params), batch, mask


DEEP = {"up": P(None, None, "model"), "down": P(None, "model")}


def a_layer_at_a_time():
    """No device has more than one layer of the parameters gathered, or of the sum before it is scattered.

    Nor has it a sum of its own over several pieces of its rows.
    """
    for micro in (1, 2):
        step, state, batch, mask = deep_step(mesh_of((2, 4)), DEEP, micro)
        program = step.trace(state, batch, mask).jaxpr.jaxpr
        (inside, _) = [eqn.params["jaxpr"] for eqn in equations(program) if eqn.primitive.name == "shard_map"]
        gathers = [eqn for eqn in equations(inside) if eqn.primitive.name == "all_gather"]
        scatters = [eqn for eqn in equations(inside) if eqn.primitive.name == "reduce_scatter"]
        assert {eqn.outvars[0].aval.size for eqn in gathers} == {16 * WIDTH}
        assert {eqn.invars[0].aval.size for eqn in scatters} == {16 * WIDTH} and len(scatters) == len(DEEP)
        wide = [var.aval for eqn in equations(inside) for var in eqn.outvars if var.aval.dtype == np.float64]
        assert max(array.size for array in wide) == LAYERS * 16 * WIDTH // 4


def equations(jaxpr):
    """All equations of a program, and of those that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_in(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def layers_have_the_bits_of_whole_ones():
    """Also where scanned axes are cut: then an array is gathered before its scan."""
    for micro in (1, 2):
        found = []
        for layout, specs in (
            ((8, 1), DEEP),
            ((2, 4), DEEP),
            ((2, 4), {"up": P("model"), "down": P("data")}),
        ):
            step, state, batch, mask = deep_step(mesh_of(layout), specs, micro)
            for _ in range(2):
                state, _ = step(state, batch, mask)
            found.append(jax.device_get((state.params, state.noise)))
        same(found[1], found[0])
        same(found[2], found[0])


def own_numbers_alone():
    """No device draws more than its share, which an eighth of each array here is."""
    mesh, size = mesh_of((2, 4)), 2**14
    spec = P(None, ("data", "model"))

    def drawn(key):
        return normals_of(key, 0, [by_device.own_cut((2**7, 2**7), spec, mesh)])

    with jax.enable_x64(True):
        run = jax.shard_map(drawn, mesh=mesh, in_specs=P(), out_specs=[spec], check_vma=False)
        (inside,) = [eqn for eqn in jax.make_jaxpr(run)(KEY).jaxpr.eqns if eqn.primitive.name == "shard_map"]
    arrays = [var.aval for eqn in equations(inside.params["jaxpr"]) for var in eqn.outvars]
    largest = max(array.size for array in arrays if getattr(array, "dtype", None) == np.float64)
    assert size // 8 <= largest < size // 4


def one_flaw_counts_on_all():
    """A total that is infinite in the part of one device: no other part is released."""
    mesh = mesh_of((2, 4))
    over = by_device.Across(mesh.axis_names, (P("model"),), 2.0**-6)

    def of_each(total):
        return GridSum.of([over.added(0, total)], Grid(1.0, 20), over).whole

    parts = dict(in_specs=P(), out_specs=[P("model")], check_vma=False)
    run = jax.jit(jax.shard_map(of_each, mesh=mesh, **parts))
    with jax.enable_x64(True):
        for flaw, number in ((0.0, 0), (np.inf, 8), (2.0**48, 8)):
            (found,) = run(jnp.zeros(8).at[5].set(flaw))
            assert np.isnan(found).sum() == number


def sums_of_devices_have_no_order():
    """What devices add up are multiples of a unit: floats of other sums would depend on who adds first."""
    mesh, unit = mesh_of((2, 4)), 2.0**-20
    over = by_device.Across(mesh.axis_names, (P("model"),), unit)

    def of_each(parts):
        return over.added(0, parts * (1 + jax.lax.axis_index(mesh.axis_names)))

    run = jax.jit(jax.shard_map(of_each, mesh=mesh, in_specs=P(), out_specs=P("model"), check_vma=False))
    with jax.enable_x64(True):
        found = np.asarray(run(np.arange(1, 9) / 9.5))
    expected = sum(np.round(np.arange(1, 9) / 9.5 * i / unit) * unit for i in range(1, 9))
    np.testing.assert_array_equal(found, expected)
    assert np.all(found != 36 * (np.arange(1, 9) / 9.5))


def runs_resume():
    """On the same layout with the same bits, on another one with other noise; with nnx's own annotations."""
    _, batch, _ = setting()
    data = {name: np.concatenate([rows] * 4) for name, rows in batch.items()}
    covered = plan("poisson", dataset_size=64, iterations=6, rate=0.2)

    def trained(layout, out, steps=6, **options):
        params, mesh = setting()[0], mesh_of(layout)
        given = dict(mesh=mesh, steps=steps, keys=((1, 2, 3, 4), KEY), checkpoint_every=2, progress=False)
        options = TrainOptions(**given, clipping="per_example", microbatch_size=2, **options)
        return fit(covered, placed(mesh, params), loss, data, optax.adam(0.1), out=out, options=options)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        whole = trained((2, 4), folder / "whole")
        trained((2, 4), folder / "part", 3)
        with jax.set_mesh(mesh_of((2, 4), AxisType.Explicit)):  # which no program of a run sees
            resumed = trained((2, 4), folder / "part")
        same(resumed.params, whole.params)
        trained((2, 4), folder / "moved", 3)
        refused(r"holds a run with another .*layout|elastic continues", trained, (4, 2), folder / "moved")
        with pytest.warns(UserWarning, match="continues elsewhere from step 3"):
            moved = trained((4, 2), folder / "moved", elastic=True)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.any(a != b), moved.params, whole.params)))
        # The files of a model, whose digest is in the run's card, do not depend on devices.
        write_model(folder / "placed", placed(mesh_of((4, 2)), whole.params))
        one, other = (digest_of_files(folder / name / "model") for name in ("placed", "whole"))
        assert one == other
        assert moved.params["a"].sharding.mesh.shape["data"] == 4


class Annotated(nnx.Module):
    def __init__(self, names, rngs):
        kernel = jax.random.normal(rngs.params(), (6, 8))
        self.kernel = nnx.Param(kernel, out_sharding=names, eager_sharding=False)

    def __call__(self, x):
        return x @ self.kernel[...]


def squares(model, x):
    return jnp.sum(model(x) ** 2) if callable(model) else jnp.sum((x @ model) ** 2)


def annotations_and_refusals():
    """`nnx.get_partition_spec` counts; what does not fit the mesh is refused before anything runs."""
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    covered, mesh = plan("poisson", dataset_size=64, iterations=2, rate=0.2), mesh_of((2, 4))

    def run(model, mesh=mesh, evaluate=None):
        options = TrainOptions(mesh=mesh, progress=False)
        return fit(covered, model, squares, x, optax.sgd(0.1), evaluate=evaluate, options=options).params

    def evaluate(params):
        return {"size": jnp.square(params["kernel"][...]).sum()}

    explicit = mesh_of((2, 4), AxisType.Explicit)
    with jax.set_mesh(explicit):  # which the caller's own programs need
        found = run(Annotated((None, "model"), nnx.Rngs(0)), explicit, evaluate)
        assert evaluate(found)["size"] > 0
    assert found["kernel"][...].sharding.spec == P(None, "model")
    private, rows = of_four_bands(), jax.device_put(x, NamedSharding(explicit, P("data")))
    automatic = "must be over automatic axes, .*, got explicit ones"
    refused(f"^updates {automatic}", private.update, GridSum([rows], True, private.grid), private.init([x]))
    given = dict(grid=private.grid, mesh=explicit)
    refused(f"^batch {automatic}", clipped_gradient_sum, squares, x[0], rows, x[:, 0] > 0, **given)
    spread = NamedSharding(mesh, P(None, "model"))
    to_others = optax.stateless(lambda updates, _: jax.lax.with_sharding_constraint(updates, spread))
    step = make_step(squares, private, to_others)
    state, one = step.init(jnp.zeros((6, 8))), "must be on one device where no mesh is given, got on 8"
    refused(f"^state {one}", step, state, x[:2], np.ones(2, bool))
    divided = Annotated(("model",), nnx.Rngs(0))
    elsewhere = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("model",)), P(None, "model"))
    cases = {
        r"be sharded over axes of mesh .*, got 'heads'": Annotated((None, "heads"), nnx.Rngs(0)),
        r"axes of mesh divide: .* cuts axis 0 of shape \(6, 8\) into 4 parts": divided,
        r"be cut by each axis of mesh once, got ": Annotated(("data", "data"), nnx.Rngs(0)),
        r"got .* over another mesh, \{'model': 4\}": jax.device_put(jnp.zeros((6, 8)), elsewhere),
    }
    for message, model in cases.items():
        refused(f"^model must .*{message}", run, model)


def small_ones():
    every_layout(["per_example"], LAYOUTS[::3])
    own_numbers_alone()
    a_layer_at_a_time()
    one_flaw_counts_on_all()
    sums_of_devices_have_no_order()
    annotations_and_refusals()
    small_sums()


def test_every_layout_gives_the_bits_of_one_device():
    """Noise in four bands kept and drawn again, Adam's state; refusals; sums over devices: one process."""
    in_process("small_ones()", "train.test_sharded")


def large_ones():
    every_layout(["per_example"], LAYOUTS[1:3])
    every_layout(["ghost"])
    layers_have_the_bits_of_whole_ones()
    runs_resume()


@pytest.mark.slow
def test_ghost_clipping_and_interrupted_runs():
    """Every layout; the same bits after an interruption, also on another layout."""
    in_process("large_ones()", "train.test_sharded")
