"""The benchmark of draws reports rates."""

import pytest

from tests.benchmarks import draws


@pytest.mark.parametrize(
    "settings", [((60, 6, 3000, 50, 1.0, 2.0),), pytest.param(draws.SETTINGS, marks=pytest.mark.slow)]
)
def test_rates(settings, monkeypatch):
    monkeypatch.setattr(draws, "SETTINGS", settings)  # a small one in CI
    found = draws.measure(256)
    assert len(found["settings"]) == 3 * len(settings)
    assert all(row["samples_per_second"] > 0 for row in found["settings"])
    # The memory promised on a CPU; nothing larger was run in this process.
    assert found["peak_memory_mb"] < 4096
