"""Runs that go on elsewhere, with a warning or a reason why not; metrics for callbacks and TensorBoard."""

import json
import shutil

import numpy as np
import pytest

from tests.train.test_loop import Crash, crash_at, flat, run
from train.batches.sampler import Sampler
from train.clipping import grid
from train.run import folder, machine

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_other_versions_go_on_when_that_is_asked_for(tmp_path, monkeypatch):
    """Close to the uninterrupted run, bit for bit from then on; and every reason to refuse."""
    options = dict(out=tmp_path, checkpoint_every=4)
    with crash_at(Sampler, "next", 8), pytest.raises(Crash):
        run(**options)
    with pytest.raises(ValueError, match="another program"):
        run(**options, microbatch_size=2, elastic=True)  # nothing but the program: another model perhaps
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "9", "numpy": "9"})
    options |= dict(microbatch_size=2)
    with pytest.raises(
        ValueError, match=r"another versions: .*'9'}; its noise .*; elastic continues all the"
    ) as e:
        run(**options)
    assert "\n" not in str(e.value)
    with pytest.raises(
        ValueError, match=r"another clip_norm: 1\.0, now 2\.0; its noise must not be used twice$"
    ):
        run(**options, clip_norm=2.0, elastic=True)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "generator", lambda: [0.0] * 6)
        with pytest.raises(ValueError, match="another generator of noise"):
            run(**options, elastic=True)
    with monkeypatch.context() as patch:
        patch.setattr(grid, "_LEVELS", grid._LEVELS / 4)  # a release whose kept noise is in other units
        with pytest.raises(ValueError, match="another generator of noise"):
            run(**options, elastic=True)
    with pytest.warns(
        UserWarning, match="continues elsewhere from step 4 .versions .* loss and optimizer, .* The guarantee"
    ):
        moved = run(**options, elastic=True, evaluate=lambda params: {"size": 0.0})
    bare = []
    whole = run(callback=lambda *each: bare.append(each))
    np.testing.assert_allclose(flat(moved.params), flat(whole.params), rtol=1e-4, atol=1e-5)
    assert [step for step, _ in bare] == list(range(1, 13))  # without a folder too
    assert set(bare[0][1]) == {"loss", "clipped_fraction", "median_norm", "dropped", "max_norm"}
    (earlier,) = json.loads((tmp_path / "run.json").read_text())["earlier"]
    assert earlier["until"] == 4 and earlier["versions"]["numpy"] == np.__version__
    # There it is at home now.
    np.testing.assert_array_equal(flat(run(**options).params), flat(moved.params))
    # The model of step 12 was shown; with its checkpoint gone those steps would be made twice with one noise.
    shutil.rmtree(tmp_path / "checkpoints/12")
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "10", "numpy": "9"})
    with pytest.raises(ValueError, match="has shown step 12 and has no checkpoint of it"):
        run(**options, elastic=True)
    # Moving away what was published does not change that, nor going on at home from the checkpoint before.
    for path in ("model", "result.json", "metrics.jsonl"):
        shutil.rmtree(tmp_path / path, ignore_errors=True) or (tmp_path / path).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has shown step 12 and"):
        run(**options, elastic=True)
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "9", "numpy": "9"})
    with crash_at(Sampler, "next", 9), pytest.raises(Crash):
        run(**options)
    monkeypatch.setattr(machine, "versions", lambda: {"jax": "10", "numpy": "9"})
    with pytest.raises(ValueError, match="has shown step 12 and"):
        run(**options, elastic=True)


def test_folders_with_another_generator_are_refused(tmp_path):
    """A folder with another generator of noise is refused, with small differences of rounding it is not."""
    with folder.RunFolder(tmp_path) as kept:
        stored = {"plan": "p", "steps": 3, "versions": 1, "program": "a"}
        now = stored | {"devices": 1, "generator": folder.generator()}
        rounded = now | {"generator": [x * (1 + 1e-12) for x in now["generator"]]}
        assert kept._compare(now, rounded, elastic=False) is None
        other = now | {"generator": [*now["generator"][:-1], now["generator"][-1] + 1]}
        for before in (stored, other, now | {"generator": now["generator"][:-1]}):
            with pytest.raises(
                ValueError, match=r"another generator of noise .a release that draws otherwise\)"
            ):
                kept._compare(before, now | {"versions": 2}, elastic=True)


def test_metrics_go_to_a_callback(tmp_path):
    """Each step once and in order, as in the private file."""
    seen = []
    run(out=tmp_path, callback=lambda *each: seen.append(each))
    lines = [json.loads(line) for line in (tmp_path / "private/metrics.jsonl").open()]
    assert [{"step": step, **values} for step, values in seen] == lines
    assert len(seen) == 12
