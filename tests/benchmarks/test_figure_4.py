"""Figure 4's protocol on digits: what is compared, resumed and said; training itself is the trainer's."""

import pytest

from jaxacct.common.files import write_atomically
from tests.benchmarks import figure_4
from tests.benchmarks.figure_4 import (
    COLUMNS,
    FULL,
    NOT_PRIVATE,
    OURS,
    SHORT,
    Protocol,
    judged,
    summary,
)


def rows(protocol: Protocol, of) -> list[dict[str, str]]:
    found = []
    for name, epsilon, rate, seed in protocol.jobs():
        values = (protocol.iterations, name, epsilon, 1.5, rate, seed, of(name, epsilon, rate, seed), 1.0)
        found.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return found


def test_the_best_rate_counts_and_a_rate_with_runs_missing_does_not():
    made = rows(FULL, lambda name, epsilon, rate, seed: 0.5 + rate + seed / 1000)
    best = summary(made)
    assert best[OURS, 8.0].mean == pytest.approx(0.802) and best[OURS, 8.0].values.size == 5
    lucky = [row for row in made if row["learning_rate"] != "0.3" or row["seed"] == "4"]
    assert summary(lucky)[OURS, 8.0].mean == pytest.approx(0.602)
    assert {epsilon for name, epsilon in best if name == NOT_PRIVATE} == {float("inf")}


@pytest.mark.parametrize(
    ("gain", "spread", "agrees"),
    [(0.02, 1e-3, True), (-0.02, 1e-3, False), (0.02, 1.0, None), (0, 1e-3, None)],
)
def test_differences_are_judged_by_their_intervals(gain, spread, agrees):
    """Three seeds a cell; b-min-sep is better by `gain`, give or take."""

    def of(name, epsilon, rate, seed):
        return 0.7 + (gain + spread * (seed - 1) if name == OURS else 0.0)

    verdicts = judged(summary(rows(Protocol(20, (1.0, 8.0), (0.3,), 3), of)))
    assert [verdict.agrees for verdict in verdicts] == [agrees, agrees]
    assert f"{100 * gain:+.1f}" in verdicts[0].found
    assert [verdict.agrees for verdict in judged({})] == [None, None]


def test_finished_runs_are_not_made_again(tmp_path, capsys, monkeypatch):
    for name in ("run", "not_private", "plan_of"):
        monkeypatch.setattr(figure_4, name, lambda *_: pytest.fail("it was made again"))
    made = rows(SHORT, lambda name, epsilon, rate, seed: 0.9 + seed / 100)
    lines = [",".join(COLUMNS)] + [",".join(f'"{row[c]}"' for c in COLUMNS) for row in made]
    write_atomically(tmp_path / "figure-4.csv", "\n".join(lines) + "\n")
    figure_4.main(["--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "undecided" in said and "90.5 ± 6.4" in said and (tmp_path / "figure-4.png").exists()
    (tmp_path / "figure-4.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is none of this command"):
        figure_4.main(["--out", str(tmp_path)])
