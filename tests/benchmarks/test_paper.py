"""The paper's comparisons by one command: cells, what is certified, what is said of printed statements."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxacct import BMinSep, calibrate, prefix_sum_error
from jaxacct.recommendation.search import recommend
from jaxacct.strategies import by_name, ending
from tests.benchmarks import figure_4
from tests.benchmarks.figure_4 import CYCLIC, FULL, NOT_PRIVATE, OURS, SHORT, Protocol, judged, summary
from tests.benchmarks.paper import __main__ as command
from tests.benchmarks.paper import cells, statements
from tests.benchmarks.paper.cells import METHODS, SECTION_7_1, SECTION_7_2, Cell, Setting, Table, scheme_of
from tests.benchmarks.paper.statements import Compared
from tests.benchmarks.results import Kept
from tests.refusals import refused

# One epoch and a half, and one, at numbers whose programs other tests have as well.
TINY = Setting(12, 1e-2, (8, 12), (0.5,), (2,), separations=())


def run(*arguments) -> None:
    command.main([str(argument) for argument in arguments])


@pytest.fixture
def drawn(monkeypatch) -> list[Cell]:
    """The cells that are certified, tiny ones: draws are real, and the noise is given, not searched."""
    seen = []
    for sweep in (command.FIGURE_2, command.FIGURE_3):
        monkeypatch.setitem(command.SWEEPS, sweep.name, dataclasses.replace(sweep, short=TINY))

    def quick(scheme, strategy, **options):
        enough = 3.5 if scheme.name == "cyclic-poisson" else 2.3  # that bound reveals the phase
        return calibrate(scheme, strategy, noise_multiplier=enough, **options)

    def counted(cell, progress):
        seen.append(cell)
        return cells.certified(cell, progress)

    monkeypatch.setattr(cells, "calibrate", quick)
    monkeypatch.setattr(command, "certified", counted)
    return seen


def test_the_figures_are_drawn_resumed_and_judged(drawn, tmp_path, capsys):
    """Two points, really certified: rows are what was certified, and nothing is made twice."""
    out = tmp_path / "paper"
    run("figure-3", "--out", out, "--short")
    said = capsys.readouterr()
    assert "1/2 points" in said.err and "2/2 points" in said.err
    assert said.out.count("agrees: ") + said.out.count("DISAGREES: ") == 3
    table = Table(out / "cells.csv")
    assert list(table.rows) == drawn and len(set(drawn)) == len(drawn) >= 3
    for cell, row in table.rows.items():
        noise = float(row["noise_multiplier"])
        only_phase = cell.separation in (cell.epoch_length, cell.iterations)  # where a bound may be as good
        allowed = ("certified", "analytic random-allocation") if only_phase else ("certified",)
        assert row["method"] in allowed
        assert int(row["samples"]) >= 2048 or row["method"] != "certified"
        exact = prefix_sum_error(matrix_of(cell), iterations=12, noise_multiplier=noise)
        assert table.error_of(cell) == pytest.approx(exact, rel=1e-9)
    drawn.clear()
    run("figure-3", "--out", out, "--short")
    assert not drawn and capsys.readouterr().out == said.out
    run("figure-2", "--out", out, "--short")
    assert [cell.scheme for cell in drawn] == ["cyclic-poisson"] * 2
    assert {path.name for path in out.iterdir()} >= {"figure-2.png", "figure-2.txt", "figure-3.png"}
    assert "ratio" in (out / "figure-2.txt").read_text()


def matrix_of(cell: Cell):
    scheme = scheme_of(cell)
    return ending(by_name("optimal", cell.bands, scheme), scheme)


def test_the_sweeps_are_those_of_the_paper():
    swept = {m: SECTION_7_1.cells(m, 128, 1.0) for m in METHODS}
    assert [c.separation for c in swept["b-min-sep"] if c.bands == 8] == [8, 16, 32, 64, 128]
    assert {(c.bands, c.separation) for c in swept["balls-in-bins"]} == {(2 << k, 128) for k in range(5)}
    assert all(c.bands == c.separation for c in swept["cyclic-poisson"])
    assert set(swept["balls-in-bins"]) <= set(swept["b-min-sep"])
    assert len(SECTION_7_1.points()) == 24 and len(SECTION_7_2.points()) == 5
    separations = {c.separation for c in SECTION_7_2.cells("b-min-sep", 300, 8.0)}
    assert separations == {2, 4, 8, 16, 32, 64, 150, 300}
    for method in METHODS:
        for cell in SECTION_7_2.cells(method, 300, 8.0):
            scheme = scheme_of(cell)
            assert (scheme.iterations, scheme.min_separation) == (1500, cell.separation)
            assert scheme.expected_batch_sizes(300_000).mean() == pytest.approx(1000)
    assert scheme_of(swept["balls-in-bins"][0]) == BMinSep(1024, 128, 1.0)


def test_the_tested_cell_is_what_recommend_ranks_first():
    swept = Setting(12, 1e-2, (8,), (0.5,), (2,)).cells("b-min-sep", 8, 0.5)
    sizes = dict(dataset_size=8000, batch_size=1000, iterations=12, epsilon=0.5, delta=1e-2)
    found = recommend(**sizes, scheme="b-min-sep", bands=2, strategy="optimal")
    best = found.candidates[0]
    first, second, *_ = cells.promising(swept)
    assert first.separation == best.scheme.min_separation != second.separation


def test_one_of_each_kind_of_separation_is_certified_however_estimates_rank_them(monkeypatch):
    """A certified best candidate that was estimated third was never tried."""
    swept = Setting(12, 1e-2, (8,), (0.5,), (2, 4), (6,)).cells("b-min-sep", 8, 0.5)
    kinds = [cell.separation == cell.bands for cell in swept]
    for equal_first in (True, False):
        errors = [0.1 * place + (equal != equal_first) for place, equal in enumerate(kinds)]
        found_errors = functools.partial(lambda errors, *_, **__: errors, errors)
        monkeypatch.setattr("tests.benchmarks.paper.cells.estimated_errors", found_errors)
        found = cells.promising(swept)
        by_error = [cell for _, cell in sorted(zip(errors, swept, strict=True), key=lambda pair: pair[0])]
        assert found[:2] == by_error[:2] and len(found) == 3
        assert {cell.separation == cell.bands for cell in found} == {True, False}


def points(ratios: dict[tuple[int, float], float], method: str) -> list[Compared]:
    return [Compared(epoch, epsilon, ratio, {method: 1.0}) for (epoch, epsilon), ratio in ratios.items()]


GRID = [(epoch, epsilon) for epoch in (128, 1024) for epsilon in (1.0, 8.0)]


def test_figures_2_and_3_are_judged():
    for ratios, agrees in (
        ((0.99, 0.8, 0.8, 0.8), [True, True]),
        ((0.8, 0.8, 0.8, 0.8), [True, False]),  # an improvement where there should be none
        ((1.2, 0.99, 0.8, 0.8), [False, True]),  # what the grid of noise does not resolve is none
        ((1.2, 1.1, 0.8, 0.8), [False, True]),
    ):
        compared = points(dict(zip(GRID, ratios, strict=True)), "cyclic-poisson")
        verdicts = statements.figure_2(compared, 1024)
        assert [verdict.agrees for verdict in verdicts] == agrees
        assert ("DISAGREES" in verdicts[0].line()) != agrees[0]
        assert ("(128, 8)" in verdicts[0].found) == (ratios[1] > 0.98)
    for ratios, agrees in (
        ((0.5, 0.9, 1.0, 0.99), [True, True, True]),
        ((0.5, 1.0, 1.0, 1.0), [True, False, True]),
        ((0.5, 0.9, 0.7, 1.0), [True, True, False]),
        ((0.5, 0.9, 1.1, 1.0), [False, True, False]),
    ):
        compared = points(dict(zip(GRID, ratios, strict=True)), "balls-in-bins")
        assert [verdict.agrees for verdict in statements.figure_3(compared, 1024)] == agrees, ratios


def test_an_undecided_statement_is_not_counted_as_agreement():
    for judge in (statements.figure_2, statements.figure_3, statements.section_7_2):
        assert {verdict.agrees for verdict in judge([], 1024)} == {None}
        assert all(verdict.line().startswith("printed: ") for verdict in judge([], 1024))
    worse = [Compared(300, 1.0, 2.0, {"dp-sgd": 3.0, "balls-in-bins": 1.0})]
    assert [verdict.agrees for verdict in statements.section_7_2(worse, 1500)] == [False, None]


def test_another_file_in_its_place_is_refused(tmp_path):
    path = tmp_path / "cells.csv"
    Table(path).add(Cell("b-min-sep", 12, 4, 2, 4, 1.0, 0.01), dict.fromkeys(cells.FOUND, "nan"))
    for text in ("a,b\n1,2\n", "scheme,iterations\nb-min-sep,12\n", path.read_text()):
        path.write_text(text)
        refused("cells.csv", run, "figure-2", "--out", tmp_path, "--short")
        assert path.read_text() == text


def rows(protocol: Protocol, of) -> dict[figure_4.Job, dict[str, str]]:
    row = dict(noise_multiplier="1.5", seconds="1.0")
    return {job: row | dict(accuracy=str(of(job))) for job in protocol.jobs()}


def test_the_best_rate_counts_and_a_rate_with_runs_missing_does_not():
    made = rows(FULL, lambda job: 0.5 + job.learning_rate + job.seed / 1000)
    best = summary(made)
    assert best[OURS, 8.0].mean == pytest.approx(0.802) and best[OURS, 8.0].values.size == 5
    lucky = {job: row for job, row in made.items() if job.learning_rate != 0.3 or job.seed == 4}
    assert summary(lucky)[OURS, 8.0].mean == pytest.approx(0.602)
    assert {epsilon for name, epsilon in best if name == NOT_PRIVATE} == {float("inf")}


@pytest.mark.parametrize(
    ("gain", "spread", "agrees"),
    [(0.02, 1e-3, True), (-0.02, 1e-3, False), (0.02, 1.0, None), (0, 1e-3, None)],
)
def test_differences_are_judged_by_their_intervals(gain, spread, agrees):
    """Three seeds a cell; b-min-sep is better by `gain`, give or take."""

    def of(job):
        return 0.7 + (gain + spread * (job.seed - 1) if job.scheme == OURS else 0.0)

    verdicts = judged(summary(rows(Protocol(20, (1.0, 8.0), (0.3,), 3), of)))
    assert [verdict.agrees for verdict in verdicts] == [agrees, agrees]
    assert f"{100 * gain:+.1f}" in verdicts[0].found
    assert [verdict.agrees for verdict in judged({})] == [None, None]


def test_finished_runs_are_not_made_again(tmp_path, capsys, monkeypatch):
    for name in ("run", "not_private", "plan_of"):
        monkeypatch.setattr(figure_4, name, lambda *_: pytest.fail("it was made again"))
    table = Kept(tmp_path / "figure-4.csv", figure_4.Job, figure_4.FOUND, above_0="accuracy")
    for job, row in rows(SHORT, lambda job: 0.9 + job.seed / 100).items():
        table.add(job, row)
    figure_4.main(["--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "undecided" in said and "90.5 ± 6.4" in said and (tmp_path / "figure-4.png").exists()
    (tmp_path / "figure-4.csv").write_text("a,b\n1,2\n")
    refused("is none of this command", figure_4.main, ["--out", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure-2", "figure-3", "cinic-10"])
def test_the_short_forms(name, tmp_path):
    run(name, "--out", tmp_path, "--short")
    assert (tmp_path / f"{name}.png").exists()


@pytest.mark.slow
def test_a_point_of_the_paper(tmp_path, monkeypatch):
    """The first point of figure 2, of 1,024 steps: b-min-sep improves on cyclic Poisson there."""
    one = dataclasses.replace(SECTION_7_1, epochs=(512,), epsilons=(4.0,))
    monkeypatch.setitem(command.SWEEPS, "figure-2", dataclasses.replace(command.FIGURE_2, whole=one))
    run("figure-2", "--out", tmp_path)
    assert "agrees" in (tmp_path / "figure-2.txt").read_text()


@pytest.mark.slow
def test_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure_4, "SHORT", Protocol(40, (8.0,), (0.3,), 2))
    figure_4.main(["--out", str(tmp_path)])
    assert "printed: " in capsys.readouterr().out
    table = Kept(tmp_path / "figure-4.csv", figure_4.Job, figure_4.FOUND, above_0="accuracy")
    best = summary(table.rows)
    assert np.all(best[NOT_PRIVATE, np.inf].values > 0.2) and {CYCLIC, OURS} <= {name for name, _ in best}
