"""The microbatch size that is measured, that it stays with a run, and when padding costs nothing."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacct import Plan
from tests.train.test_loop import PARAMS, ROWS, Crash, crash_at, flat, loss, plan, run
from train import correlated_noise
from train.batches.sampler import Sampler
from train.clipping import microbatch
from train.options import TrainOptions

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.mark.parametrize(
    ("costs", "best"), [((9, 5, 3, 2, 4), 8), ((1, 2, 3, 4, 5), 1), ((9, 8, 7, 6, 5), 11)]
)
def test_the_fastest_is_found(costs, best, monkeypatch):
    """Of steps that say how long they take; 11 rows are the most, the search begins at 4."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(microbatch.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(microbatch, "default_microbatch_size", lambda params: 4)
    seen = []

    class Step:
        def __init__(self, micro):
            self.cost = dict(zip((1, 2, 4, 8, 11), costs, strict=True))[micro]
            seen.append(micro)

        def init(self, params):
            return params

        def __call__(self, state, batch, mask):
            assert mask.all()  # the work of a full batch
            clock.now += self.cost
            return state, jnp.zeros(())

    assert microbatch.fastest(Step, PARAMS, None, np.zeros(11, bool)) == best
    assert len(seen) == len(set(seen))


def test_a_run_goes_on_with_the_size_it_measured(tmp_path, monkeypatch):
    options = dict(out=tmp_path, microbatch_size="auto", checkpoint_every=5)
    monkeypatch.setattr(microbatch, "fastest", lambda *_: 4)
    with crash_at(Sampler, "next", 8), pytest.raises(Crash):
        run(**options)
    assert json.loads((tmp_path / "run.json").read_text())["microbatch_size"] == 4
    monkeypatch.setattr(microbatch, "fastest", None)  # asked no more
    resumed = run(**options)
    np.testing.assert_array_equal(flat(resumed.params), flat(run(microbatch_size=4).params))
    with pytest.raises(ValueError, match="microbatch_size must be"):
        run(microbatch_size="automatic")


def test_it_measures_real_steps(monkeypatch):
    monkeypatch.setattr(microbatch, "_REPEATS", 1)
    monkeypatch.setattr(microbatch, "default_microbatch_size", lambda params: 16)
    found = run(microbatch_size="auto", steps=1)
    np.testing.assert_allclose(flat(found.params), flat(run(steps=1).params), rtol=1e-5, atol=1e-7)


def test_batches_that_are_truncated_take_the_same_time_whatever_their_size(monkeypatch):
    """Run times would show the sizes, and the pair of truncated batches does not hold if they are known."""
    covered = plan("poisson", dataset_size=ROWS)
    cut = plan("poisson", dataset_size=ROWS, truncation_delta=1e-6)
    mesh = jax.make_mesh((1,), ("data",))
    assert correlated_noise._skips_padding(covered, TrainOptions())
    assert not correlated_noise._skips_padding(covered, TrainOptions(skip_padding=False))
    assert not correlated_noise._skips_padding(cut, TrainOptions())
    assert not correlated_noise._skips_padding(covered, TrainOptions(mesh=mesh))
    monkeypatch.setattr(Plan, "certified", True)
    for options, message in ((dict(plan=cut), "a plan that truncates"), (dict(mesh=mesh), "with mesh")):
        with pytest.raises(ValueError, match=f"skip_padding must not be True .*{message}|{message}"):
            run(**options, skip_padding=True)


def test_steps_of_padding_do_no_work_in_fit():
    called = []

    def counted(params, example):
        jax.debug.callback(lambda: called.append(1))
        return loss(params, example)

    covered = plan("poisson", dataset_size=ROWS, rate=0.02, iterations=4)
    run(plan=covered, loss=counted, microbatch_size=1)
    jax.effects_barrier()
    few = len(called)
    run(plan=covered, loss=counted, microbatch_size=1, skip_padding=False)
    jax.effects_barrier()
    assert covered.max_batch_size is not None
    assert few <= 20 and len(called) - few == 4 * covered.max_batch_size > 2 * few
