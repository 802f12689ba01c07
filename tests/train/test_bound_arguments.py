"""What a folder's run is bound to: every argument of `fit`, earlier losses, and the machine."""

import dataclasses
import inspect
import itertools
import json
import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.refusals import refused
from tests.train import test_batch_clipping
from tests.train.runs import KEYS, PARAMS, ROWS, crashed, data, flat, loss, plan, run
from train import training
from train.clipping import grid
from train.individual import IndividualAccounting
from train.options import TrainOptions
from train.procedures import bandmf
from train.run import folder, machine

pytestmark = pytest.mark.usefixtures("shared_programs")

OTHER_KEYS = (9, 9, 9, 9), KEYS[1] + 1
# Argument of `fit` -> a change that a call in the folder of another run may not make, and how it is refused.
BOUND = {
    "plan": (dict(plan=plan(dataset_size=ROWS, sigma=1.1)), "another plan"),
    "model": (dict(model={"w": jnp.zeros((3, 1)), "b": jnp.zeros(())}), "one number|another program"),
    "loss": (dict(loss=lambda p, e: 2 * loss(p, e)), "another loss"),
    "data": (dict(data=data() | {"y": np.ones(ROWS, np.float32)}), "other data"),
    "optimizer": (dict(optimizer=optax.sgd(0.1)), "another optimizer"),
    "clip_norm": (dict(clip_norm=2.0), "another clip_norm"),
    "inner": (dict(inner=optax.sgd(0.1)), "inner must not be given"),  # bound below, for its kind of plan
    "microbatch_size": (dict(microbatch_size=1), "another program"),
    "normalize": (dict(normalize=True), "another normalize"),
    "noise_memory": (dict(noise_memory="recompute"), "noise_memory must be 'keep'"),  # bound in test_redrawn
    "mesh": (dict(mesh=jax.make_mesh((1,), ("data",))), "another layout"),
    "graph": (dict(graph="papers"), "graph"),  # its bytes are data: below
    "individual": (dict(individual=IndividualAccounting()), "individual needs a plan"),  # bound below
    "wrt": (dict(wrt=nnx.Param), "wrt must not be given"),  # of modules: bound in test_fine_tuning
    "loss_key": (dict(loss_key=1, loss=lambda p, e, key: loss(p, e)), "another frozen part"),
    "skip_padding": (dict(skip_padding=False), "another program"),
    "clipping": (dict(clipping="ghost"), "another clipping"),
    "average": (dict(average=0.9), "another optimizer"),
    "batches": (dict(batches=[np.arange(3)]), "batches must not be given"),
}
# Argument of `fit` -> a change that such a call may make, which changes neither run nor statement.
ELASTIC = "mesh", "microbatch_size", "skip_padding"
HARMLESS: dict[str, dict[str, Any]] = {
    "out": dict(),
    "evaluate": dict(evaluate=lambda params: {"size": 0.0}),
    "steps": dict(),  # see `test_a_run_ends_earlier_or_goes_on_later`
    "checkpoint_every": dict(checkpoint_every=5),
    "progress": dict(progress=lambda *seen: None),
    "keys": dict(keys=OTHER_KEYS),
    "verify": dict(verify=False),
    "prefetch": dict(prefetch=0),
    "callback": dict(callback=lambda step, seen: None),
    "elastic": dict(elastic=True),
}


def test_every_argument_is_bound_or_harmless():
    """Fails for a new argument until a line above says which it is."""
    options = {field.name for field in dataclasses.fields(TrainOptions)}
    arguments = (set(inspect.signature(training.fit).parameters) | options) - {"options"}
    assert arguments == BOUND.keys() | HARMLESS.keys() and not BOUND.keys() & HARMLESS.keys()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of twelve steps that crashed after eight, of which nothing was shown."""
    folder = tmp_path_factory.mktemp("begun")
    crashed(9, out=folder, checkpoint_every=4)
    return folder


@pytest.fixture(scope="module")
def finished(begun, tmp_path_factory):
    """That run, ended in a copy of its folder; its result."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(begun, folder)
    return folder, run(out=folder)


def test_a_bound_argument_is_refused(finished):
    folder, _ = finished
    before = (folder / "result.json").read_bytes(), (folder / "run.json").read_bytes()
    for change, words in BOUND.values():
        refused(words, run, out=folder, **change)
        assert before == ((folder / "result.json").read_bytes(), (folder / "run.json").read_bytes())


def elsewhere(monkeypatch, version="9") -> None:
    """As if this were another machine, with this release of JAX."""
    monkeypatch.setattr(machine, "versions", lambda: {"jax": version, "numpy": "9"})


def test_a_bound_argument_is_refused_elsewhere(begun, monkeypatch):
    """Attack: in a copy of the folder the same noise would be added to another sum, and both published."""
    elsewhere(monkeypatch)
    for name in BOUND.keys() - {*ELASTIC}:
        change, words = BOUND[name]
        refused(words, run, out=begun, elastic=True, **change)


@pytest.mark.parametrize("name", ELASTIC)
def test_what_elastic_lists_may_change_elsewhere(name, begun, finished, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path / "run")
    elsewhere(monkeypatch)
    with pytest.warns(UserWarning, match="continues elsewhere from step 8 .versions"):
        moved = run(out=tmp_path / "run", elastic=True, **BOUND[name][0])
    assert np.isfinite(flat(moved.params)).all() and (flat(moved.params) != flat(finished[1].params)).all()


def test_a_copy_that_goes_on_elsewhere_has_noise_of_its_own(begun, tmp_path, monkeypatch):
    """Attack: the original and the copy release other sums, here by rounding; one noise would cancel.

    Also where the copy was interrupted before its first checkpoint there.
    """
    found = []
    for place, crashes in (("1", False), ("1", True), ("2", False)):
        copy = tmp_path / f"{place}{crashes}"
        shutil.copytree(begun, copy)
        elsewhere(monkeypatch, place)
        with pytest.warns(UserWarning, match="noise of another key"):
            if crashes:
                crashed(2, out=copy, checkpoint_every=4, elastic=True)
            found.append(flat(run(out=copy, checkpoint_every=4, elastic=not crashes).params))
    one, again, other = found
    np.testing.assert_array_equal(one, again)
    monkeypatch.undo()
    home = tmp_path / "home"
    shutil.copytree(begun, home)
    back = flat(run(out=home, checkpoint_every=4).params)
    # Noise of four steps, and of the momentum that it leaves: rounding is a thousandth of that.
    assert min(np.abs(a - b).max() for a, b in itertools.combinations((one, other, back), 2)) > 1e-3


@pytest.mark.parametrize("steps", [12, 8])
def test_harmless_arguments_change_nothing(steps, finished, tmp_path):
    """All at once: of a run that has ended, and of one that goes on from step 8."""
    folder, whole = finished
    shutil.copytree(folder, tmp_path / "run")
    if steps == 8:
        shutil.rmtree(tmp_path / "run/checkpoints/12")
    changes = {name: value for change in HARMLESS.values() for name, value in change.items()}
    other_values = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
    again = run(out=tmp_path / "run", model=other_values, **changes)
    np.testing.assert_array_equal(flat(again.params), flat(whole.params))
    assert again.statement == whole.statement


def test_the_inner_optimizer_is_bound(tmp_path):
    rounds = test_batch_clipping.plan(dataset_size=ROWS, microbatch_size=30, num_epochs=1)
    run(plan=rounds, out=tmp_path, inner=optax.sgd(0.1))
    for inner in (None, optax.sgd(0.2)):
        refused("another loss", run, plan=rounds, out=tmp_path, inner=inner)


def test_a_run_that_began_unverified_is_verified_when_that_is_asked_for(tmp_path, monkeypatch):
    """Once a folder: not again where it was verified, and before more steps where it was not."""
    asked = []
    monkeypatch.setattr(bandmf, "_verify", lambda *_: asked.append(1))
    crashed(9, out=tmp_path, checkpoint_every=4, verify=False)
    assert not asked

    def refuse(*_):
        raise ValueError("plan could not be verified")

    with monkeypatch.context() as patch:
        patch.setattr(bandmf, "_verify", refuse)
        refused("could not be verified", run, out=tmp_path)
    assert not (tmp_path / "result.json").exists()
    run(out=tmp_path)
    run(out=tmp_path)
    assert asked == [1]


MOVED = {
    "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "processor": lambda patch: patch.setattr(os, "sched_getaffinity", lambda _: range(61)),
}


@pytest.mark.parametrize("name", MOVED)
def test_another_processor_or_compiler_is_elsewhere(name, finished, tmp_path, monkeypatch):
    folder, whole = finished
    out = shutil.copytree(folder, tmp_path / "run")
    MOVED[name](monkeypatch)
    refused(f"another {name}: .*elastic continues all the same, with other last bits$", run, out=out)
    with pytest.warns(UserWarning, match=f"continues elsewhere from step 12 .{name}"):
        again = run(out=out, elastic=True)
    np.testing.assert_array_equal(flat(again.params), flat(whole.params))


def test_another_generator_of_jax_is_elsewhere(begun):
    """It decides the masks of dropout, so that the same batches have other sums."""
    with jax.threefry_partitionable(False):
        refused(r"another flags: .*partitionable", run, out=begun)


def test_an_optimizer_that_calls_python_is_not_kept(tmp_path):
    """Attack: another function of the same name in a copy of the folder, as no trace holds it."""

    def halved(tree, _):
        shape = jax.eval_shape(lambda: tree)
        return jax.pure_callback(lambda tree: jax.tree.map(lambda leaf: leaf / 2, tree), shape, tree)

    optimizer = optax.chain(optax.sgd(0.05), optax.stateless(halved))
    message = r"^optimizer must be a program of JAX alone .* got pure_callback$"
    refused(message, run, optimizer=optimizer, out=tmp_path)


def test_processors_have_different_names(tmp_path):
    """By model, instructions and threads; not by its clock, its number or what the kernel measured."""
    block = (
        "processor\t: {n}\nmodel name\t: X 1\nflags\t\t: fpu {flag}\ncpu MHz\t\t: {mhz}\nmicrocode\t: 0x1\n"
    )

    def described(**fields):
        path = tmp_path / "cpuinfo"
        path.write_text(block.format(**dict(n=0, flag="avx2", mhz=1.5) | fields) + "\n" + block)
        return machine._processor(path)

    assert described() == described(n=1, mhz=2.5)
    assert described() != described(flag="avx512f")
    assert described().startswith("X 1, instruction set ")
    assert "threads" in machine._processor(tmp_path / "missing")


def test_other_versions_go_on_when_that_is_asked_for(tmp_path, monkeypatch):
    """With noise of another key, bit for bit from then on; and every reason to refuse."""
    options = dict(out=tmp_path, checkpoint_every=4)
    crashed(8, **options)
    # Nothing but the program: another model perhaps.
    refused("another program", run, **options, microbatch_size=2, elastic=True)
    elsewhere(monkeypatch)
    options |= dict(microbatch_size=2)
    refused(r"another versions: .*'9'}; its noise .*; elastic continues all the", run, **options)
    message = r"another clip_norm: 1\.0, now 2\.0; its noise must not be used twice$"
    refused(message, run, **options, clip_norm=2.0, elastic=True)
    # The second one is a release whose kept noise is in other units.
    for change in ((folder, "generator", lambda: [0.0] * 6), (grid, "_LEVELS", grid._LEVELS / 4)):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            refused("another generator of noise", run, **options, elastic=True)
    message = "continues elsewhere from step 4 .versions .* loss and optimizer, .* The guarantee"
    with pytest.warns(UserWarning, match=message):
        moved = run(**options, elastic=True, evaluate=lambda params: {"size": 0.0})
    bare = []
    whole = run(callback=lambda *each: bare.append(each))
    assert (flat(moved.params) != flat(whole.params)).all()
    assert [step for step, _ in bare] == list(range(1, 13))  # without a folder too
    assert set(bare[0][1]) == {"loss", "clipped_fraction", "median_norm", "dropped", "max_norm"}
    (earlier,) = json.loads((tmp_path / "run.json").read_text())["earlier"]
    assert earlier["until"] == 4 and earlier["versions"]["numpy"] == np.__version__
    # There it is at home now.
    np.testing.assert_array_equal(flat(run(**options).params), flat(moved.params))
    # The model of step 12 was shown; with its checkpoint gone those steps would be made twice with one noise.
    shutil.rmtree(tmp_path / "checkpoints/12")
    elsewhere(monkeypatch, "10")
    refused("has shown step 12 and has no checkpoint of it", run, **options, elastic=True)
    # Moving away what was published does not change that, nor going on at home from the checkpoint before.
    for path in ("model", "result.json", "metrics.jsonl"):
        shutil.rmtree(tmp_path / path, ignore_errors=True) or (tmp_path / path).unlink(missing_ok=True)
    refused("has shown step 12 and", run, **options, elastic=True)
    elsewhere(monkeypatch)
    crashed(9, **options)
    elsewhere(monkeypatch, "10")
    refused("has shown step 12 and", run, **options, elastic=True)


def test_folders_with_another_generator_are_refused(tmp_path):
    """A folder with another generator of noise is refused, with small differences of rounding it is not."""
    with folder.RunFolder(tmp_path) as kept:
        stored = {"plan": "p", "steps": 3, "versions": 1, "program": "a"}
        now = stored | {"devices": 1, "generator": folder.generator()}
        rounded = now | {"generator": [x * (1 + 1e-12) for x in now["generator"]]}
        assert kept._compare(now, rounded, elastic=False) is None
        other = now | {"generator": [*now["generator"][:-1], now["generator"][-1] + 1]}
        message = r"another generator of noise .a release that draws otherwise\)"
        for before in (stored, other, now | {"generator": now["generator"][:-1]}):
            refused(message, kept._compare, before, now | {"versions": 2}, elastic=True)


def test_metrics_go_to_a_callback(tmp_path):
    """Each step once and in order, as in the private file."""
    seen = []
    run(out=tmp_path, callback=lambda *each: seen.append(each))
    lines = [json.loads(line) for line in (tmp_path / "private/metrics.jsonl").open()]
    assert [{"step": step, **values} for step, values in seen] == lines
    assert len(seen) == 12


DECIDING = "PJRT_NPROC NPROC ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA OPENBLAS_CORETYPE GLIBC_TUNABLES".split()


def test_whatever_changes_last_bits_is_described(monkeypatch, tmp_path):
    """With the first four, and with more devices than cores, sums of a convolution differ in low bits."""
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    before = machine.describe(1)
    assert before == machine.describe(1)
    for name in DECIDING:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert f"{name}=1" in machine.describe(1)["flags"]
    changes = (
        (jax, "local_device_count", lambda: 61, "processor"),
        (machine.scipy, "__version__", "0", "versions"),
        (machine.platform, "libc_ver", lambda: ("glibc", "0"), "versions"),
    )
    for module, name, value, changed in changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert machine.describe(1)[changed] != before[changed]
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true")
    assert "fast_math=true" in machine.describe(1)["flags"]


@pytest.mark.parametrize(
    ("found", "flags", "repeats"),
    [
        ({"cpu"}, "", True),
        ({"gpu"}, "", False),
        ({"cpu", "gpu"}, "--xla_gpu_autotune_level=0", False),
        ({"gpu"}, "--xla_gpu_deterministic_ops=true", True),
        ({"gpu"}, "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ({"tpu"}, "--xla_gpu_deterministic_ops=true", False),
    ],
)
def test_devices_whose_steps_repeat(found, flags, repeats, monkeypatch):
    assert machine.platforms(PARAMS | {"rows": np.ones(3)}) == machine.platforms(np.ones(3)) == {"cpu"}
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(machine, "platforms", lambda tree: found)
    assert machine.repeats(PARAMS) is repeats


@pytest.fixture(scope="module")
def begun_on_a_gpu(tmp_path_factory):
    """`begun`, as it is on a device whose steps do not repeat."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "platforms", lambda tree: {"gpu"})
        crashed(9, out=folder, checkpoint_every=4)
    return folder


def test_on_a_gpu_every_call_has_noise_of_its_own(begun_on_a_gpu, finished, tmp_path, monkeypatch):
    """Attack: two processes that go on from one checkpoint release sums that differ in their last bits."""
    monkeypatch.setattr(machine, "platforms", lambda tree: {"gpu"})
    found, keys = [finished[1]], set()
    for name in "one", "two", "interrupted":
        copy = tmp_path / name
        shutil.copytree(begun_on_a_gpu, copy)
        if name == "interrupted":
            crashed(2, out=copy, checkpoint_every=4)
        found.append(run(out=copy, checkpoint_every=4))
        keys.add(json.loads((copy / "run.json").read_text())["process"])
    # As in `test_a_copy_that_goes_on_elsewhere_has_noise_of_its_own`.
    pairs = itertools.combinations((flat(each.params) for each in found), 2)
    assert min(np.abs(a - b).max() for a, b in pairs) > 1e-3 and len(keys) == 3
    assert len(json.loads((copy / "run.json").read_text())["earlier"]) == 2
    # A run that has ended is what it was.
    np.testing.assert_array_equal(flat(run(out=copy).params), flat(found[-1].params))
    refused("another clip_norm", run, out=copy, clip_norm=2.0, elastic=True)
    refused("another program", run, out=copy, microbatch_size=1, elastic=True)
    # Its last steps were shown: again they would have other noise for the same batches.
    shutil.rmtree(copy / "checkpoints/12")
    refused("has shown step 12 and has no checkpoint of it", run, out=copy)
    # Elsewhere, to a processor whose steps repeat, only where that is asked for.
    monkeypatch.undo()
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "9"})
    refused("another versions", run, out=tmp_path / "two")


def test_on_a_gpu_that_repeats_a_run_goes_on_with_its_noise(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "platforms", lambda tree: {"gpu"})
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    crashed(9, out=tmp_path, checkpoint_every=4)
    np.testing.assert_array_equal(flat(run(out=tmp_path).params), flat(finished[1].params))
