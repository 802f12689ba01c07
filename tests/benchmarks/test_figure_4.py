"""Figure 4's protocol on digits: what is compared, resumed and said; training itself is the trainer's."""

import numpy as np
import pytest

from tests.benchmarks import figure_4
from tests.benchmarks.figure_4 import (
    COLUMNS,
    CYCLIC,
    NOT_PRIVATE,
    OURS,
    Protocol,
    summary,
)


def rows(protocol: Protocol, of) -> list[dict[str, str]]:
    found = []
    for name, epsilon, rate, seed in protocol.jobs():
        values = (protocol.iterations, name, epsilon, 1.5, rate, seed, of(name, epsilon, rate, seed), 1.0)
        found.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return found


@pytest.mark.slow
def test_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figure_4, "SHORT", Protocol(40, (8.0,), (0.3,), 2))
    with pytest.raises(SystemExit) as stop:
        figure_4.main(["--out", str(tmp_path)])
    assert stop.value.code == 0 and "printed: " in capsys.readouterr().out
    best = summary(figure_4._read(tmp_path / "figure-4.csv"))
    assert np.all(best[NOT_PRIVATE, np.inf].values > 0.2) and {CYCLIC, OURS} <= {name for name, _ in best}
