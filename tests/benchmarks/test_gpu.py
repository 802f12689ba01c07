"""The script for a machine with a GPU runs where there is none: a short loan is not spent on its bugs."""

import functools

from jaxacct.kernels.likelihoods import gpu_recurrence
from tests.benchmarks import gpu, throughput


def test_draws_are_measured(monkeypatch):
    setting = (40, 4, 3000, 50, 1.0, 2.0)
    monkeypatch.setattr(throughput, "SETTINGS", (setting,))
    monkeypatch.setattr(gpu, "SAMPLES", 128)
    by_interpreter = functools.partial(gpu_recurrence.kernel_values, interpret=True)
    monkeypatch.setattr(gpu_recurrence, "kernel_values", by_interpreter)
    (row,) = gpu.draws()
    columns = gpu.TABLES["gpu_draws"][3]
    assert len(row) == len(columns) and row[:2] == (40, 4)
    assert all(float(str(cell).replace(",", "")) >= 0 for cell in row)
