"""Padding must cost as much as examples where a plan truncates batches."""

import jax
import pytest

from jaxacct import Plan
from tests.train.test_loop import ROWS, plan, run
from train.options import TrainOptions
from train.procedures import bandmf

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_batches_that_are_truncated_take_the_same_time_whatever_their_size(monkeypatch):
    """Run times would show the sizes, and the pair of truncated batches does not hold if they are known."""
    covered = plan("poisson", dataset_size=ROWS)
    cut = plan("poisson", dataset_size=ROWS, truncation_delta=1e-6)
    mesh = jax.make_mesh((1,), ("data",))
    assert bandmf._skips_padding(covered, TrainOptions())
    assert not bandmf._skips_padding(covered, TrainOptions(skip_padding=False))
    assert not bandmf._skips_padding(cut, TrainOptions())
    assert not bandmf._skips_padding(covered, TrainOptions(mesh=mesh))
    monkeypatch.setattr(Plan, "certified", True)
    for options, message in ((dict(plan=cut), "a plan that truncates"), (dict(mesh=mesh), "with mesh")):
        with pytest.raises(ValueError, match=f"skip_padding must not be True .*{message}|{message}"):
            run(**options, skip_padding=True)
