"""Runs that are killed at any file operation, or end on a full disk; checkpoints of which bytes changed.

The truth is a run that nothing stopped: what its folder shows, byte by byte.
"""

import contextlib
import random
import resource
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.runs import crashed, run
from train.run.folder import CheckpointError

pytestmark = pytest.mark.usefixtures("shared_programs")

EVALUATED = dict(checkpoint_every=4, evaluate=lambda params: {"size": float(jnp.abs(params["w"]).sum())})


def shown(folder: Path) -> dict[str, bytes]:
    """Everything but secrets, the lock, run.json and files that were never finished."""
    hidden = {"checkpoints", "secret.json", "lock", "run.json"}
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in files if path.parts[0] not in hidden and path.suffix != ".tmp"]
    return {str(path): (folder / path).read_bytes() for path in kept}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(out=folder, **EVALUATED)
    return shown(folder)


_copying: list = []  # (folder, copies, generator, share): an audit hook cannot be taken off again
_WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.chmod", "os.truncate"}


def _copy_what_a_kill_leaves(event: str, args: tuple) -> None:
    if not _copying or event not in _WRITES | {"open"}:
        return
    folder, copies, generator, share = _copying[0]
    writes = event in _WRITES or (isinstance(args[1], str) and set(args[1]) & set("wax+"))
    if not writes or not str(args[0]).startswith(str(folder)) or generator.random() >= share:
        return
    state = _copying.pop()  # not of what copying does
    copy = copies / f"{len(list(copies.iterdir())):03d}"
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # of a thread that goes on
            to = copy / path.relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.mkdir(exist_ok=True) if path.is_dir() else shutil.copyfile(path, to)
    _copying.append(state)


@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_run_ends_the_same_wherever_it_was_killed(share, truth, tmp_path):
    """From copies of its folder before some, or all, of its file operations."""
    folder, copies = tmp_path / "run", tmp_path / "copies"
    copies.mkdir()
    sys.addaudithook(_copy_what_a_kill_leaves)
    _copying.append((folder, copies, random.Random(1), share))
    try:
        run(out=folder, **EVALUATED)
    finally:
        _copying.clear()
    assert shown(folder) == truth
    found = sorted(copies.iterdir())
    assert len(found) >= 60 * share
    for copy in found:
        run(out=copy, **EVALUATED)
        assert shown(copy) == truth, copy.name


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Writes beyond it fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("size", "step"), [(0, 0), (400, 7), (1000, 11)])
def test_where_nothing_can_be_written_it_stops_and_goes_on(size, step, truth, tmp_path):
    """From this step on; one line says why, and the same call ends with the same bits."""
    with contextlib.ExitStack() as stack:

        def fill(what, done, expected):
            if done == step:
                stack.enter_context(files_of_at_most(size))

        if not step:
            fill("", 0, 0)
        with pytest.raises((CheckpointError, OSError)) as stopped:
            run(out=tmp_path / "run", progress=fill, **EVALUATED)
        assert "\n" not in str(stopped.value)
    run(out=tmp_path / "run", **EVALUATED)
    assert shown(tmp_path / "run") == truth


def wide(params, example):
    return (jnp.tanh(example["x"] @ params["w"]).sum() - example["y"]) ** 2


@pytest.mark.usefixtures("default_promotion")
def test_a_changed_byte_of_a_checkpoint_is_noticed(tmp_path):
    """In any file, also in large arrays, of which Orbax keeps no checksum: refused, or the same end."""
    values = np.random.default_rng(0).normal(size=(3, 600)).astype(np.float32)
    options = dict(model={"w": jnp.asarray(values)}, loss=wide, optimizer=optax.adam(0.01))
    options |= dict(checkpoint_every=4)
    crashed(9, out=tmp_path / "part", **options)
    shutil.copytree(tmp_path / "part", tmp_path / "whole")
    run(out=tmp_path / "whole", **options)
    whole, generator = shown(tmp_path / "whole"), random.Random(0)
    found = (tmp_path / "part/checkpoints/8").rglob("*")
    files = [path for path in found if path.stat().st_size and path.is_file()]
    large = [path for path in files if path.stat().st_size > 4000]
    refused = 0
    assert large
    for path in [*generator.sample(files, 4), *large]:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "part", copy)
        content = bytearray(path.read_bytes())
        content[generator.randrange(len(content))] ^= 16
        (copy / path.relative_to(tmp_path / "part")).write_bytes(content)
        try:
            run(out=copy, **options)
        except (CheckpointError, ValueError) as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert shown(copy) == whole, path.name
    assert refused >= len(large)
