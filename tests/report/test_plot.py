"""Pictures show what was computed, are distinguished without colour, and replace no other file."""

import builtins
import functools
import html
import math

import pytest

from jaxacct import recommend
from jaxacct.core.text import verdict_lines
from jaxacct.report import plots as plot
from jaxacct.statistics.hockey_stick import LOSS_BIN_WIDTH, loss_bounds
from tests.refusals import refused
from tests.stored_plans import KINDS, whole


@functools.cache
def drawn():
    """A plan with bets in its evidence."""
    plans = map(whole, KINDS)
    return next(plan for plan in plans if plan.is_sampled and plan.evidence.remove.bets)


def lines_of(figure, place=0):
    return {line.get_label(): line for line in figure.axes[place].lines}


def test_losses_of_the_evidence_have_their_mean():
    direction = {patch.get_label(): patch for patch in plot.losses(drawn()).axes[0].patches}
    for name, sign in (("remove", 1), ("add", -1)):
        counts = dict(getattr(getattr(drawn().evidence, name), "loss_counts", ()))
        if counts:
            mean = sum(loss_bounds(name)[i] * n for i, n in counts.items()) / sum(counts.values())
            heights, edges, _ = direction[name].get_data()
            assert (edges[1:] + edges[:-1]) / 2 @ heights == pytest.approx(sign * mean, abs=LOSS_BIN_WIDTH)


def test_histograms_hold_every_draw_and_refuse_what_is_no_number():
    figure = plot.histogram({"with": [0.0, 1.0, 1.0], "without": [-1.0, 0.5]}, epsilon=0.7)
    heights = [patch.get_data().values for patch in figure.axes[0].patches]
    assert [part.sum() for part in heights] == pytest.approx([1, 1])
    assert len({str(patch.get_linestyle()) for patch in figure.axes[0].patches}) == 2
    for bad in ({}, {"a": []}, {"a": [math.inf]}):
        refused("samples must be a dictionary of non-empty lists", plot.histogram, bad)


@pytest.fixture(scope="module")
def found():
    return recommend(dataset_size=100, batch_size=10, iterations=12, epsilon=2.0, delta=1e-3, memory_copies=2)


def test_the_chosen_candidate_is_marked(found):
    lines = lines_of(plot.recommendation(found))
    assert lines["chosen"].get_data()[1] == [found.chosen.prefix_sum_error]
    drawn = sum(len(line.get_xdata()) for name, line in lines.items() if name != "chosen")
    assert drawn == len(found.candidates)


def test_without_matplotlib_a_figure_is_refused_in_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(r"^plot needs matplotlib: pip install 'jaxacct\[plot\]'$", plot.blank, 1, 1)


def test_a_notebook_shows_figures_and_plans():
    """A figure as a PNG, without pyplot; a plan as its statement and verdict, whatever its numbers."""
    assert plot.blank(1, 1)._repr_png_().startswith(b"\x89PNG")
    for kind in KINDS:
        plan = whole(kind)
        shown = plan._repr_html_()
        assert plan.statement() in html.unescape(shown)
        assert all(line in html.unescape(shown) for line in verdict_lines(plan.verdict))
        assert shown.count("<p") == shown.count("</p") == 2 and "<script" not in shown
