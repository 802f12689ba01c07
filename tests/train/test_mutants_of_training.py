"""Mistakes in calls that tests of the called functions do not see: each changes a number or a refusal."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxacct import BandedToeplitz, BufferedToeplitz, Mechanism, MultiAttribution, Poisson
from tests.train.batches.test_attribution import fit_on, loose_plan, papers
from tests.train.plans import plan_of
from tests.train.test_individual import DELTA, FULL, SAMPLED
from tests.train.test_individual import run as followed
from tests.train.test_loop import ROWS
from train.batches.attribution import bound_contributions, expected_batch_sizes
from train.individual import IndividualAccounting
from train.procedures import bandmf

pytestmark = pytest.mark.usefixtures("shared_programs", "default_promotion")


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_individual_losses_of_correlated_noise_are_refused(probability):
    """C12: batches are independent, and only the noise of a matrix without bands is not."""
    matrix = BufferedToeplitz((0.9, 0.4), (0.3, 0.2), 12)
    covered = plan_of(Mechanism(Poisson(12, probability), matrix, 3.0), ROWS)
    with pytest.raises(ValueError, match=r"needs a plan of independent noise \(one band\)"):
        followed(covered, IndividualAccounting())
    white = plan_of(Mechanism(Poisson(12, probability), BandedToeplitz.identity(), 3.0), ROWS)
    assert followed(white, IndividualAccounting(), steps=1).steps == 1


IGNORED = [
    (dict(skip_padding=True), "skip_padding must not be given with individual"),
    (dict(clipping="ghost"), "clipping must be 'per_example' with individual"),
    (dict(mesh=jax.make_mesh((1,), ("data",))), "mesh must not be given with individual"),
]


@pytest.mark.parametrize(("options", "message"), IGNORED)
def test_options_that_individual_would_ignore_are_refused(options, message):
    """C42 and its kind."""
    with pytest.raises(ValueError, match=message):
        followed(FULL, IndividualAccounting(), **options)


@pytest.mark.parametrize("covered", [FULL, SAMPLED], ids=["full", "sampled"])
@pytest.mark.parametrize("readmit", [True, False])
def test_readmission_reaches_the_filter(covered, readmit):
    """C15: the field of the filter that a run has, of mu and of Renyi."""
    scheme = covered.mechanism.scheme
    accounting = IndividualAccounting(20.0, DELTA, readmit=readmit)
    tracker: Any = accounting.tracker(scheme.sampling_probability, covered.mechanism.noise_multiplier)
    assert tracker.filter.readmit is readmit


def test_updates_on_a_graph_are_divided_by_its_own_batch_size(monkeypatch):
    """C41: by the mean of what its own examples give, which is not a function of the plan."""
    graph = bound_contributions(papers(), 1)
    divided, privatize = [], bandmf.privatize

    def sizes(given, scheme):
        assert given is graph
        return expected_batch_sizes(given, scheme) * np.linspace(1.5, 2.5, scheme.iterations)

    def watched(*args, expected_batch_size, **options):
        divided.append(expected_batch_size)
        return privatize(*args, expected_batch_size=expected_batch_size, **options)

    monkeypatch.setattr(bandmf, "expected_batch_sizes", sizes)
    monkeypatch.setattr(bandmf, "privatize", watched)
    covered = loose_plan(MultiAttribution(12, 3, 0.1, 1), graph.num_examples)
    fit_on(covered, graph)
    assert divided == [pytest.approx(2 * covered.expected_batch_size, rel=1e-9)]
