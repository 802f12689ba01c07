"""The script for a machine with a GPU runs where there is none: a short loan is not spent on its bugs."""

import functools
import json

import jax
import pytest

from jaxacct.kernels.likelihoods import gpu_recurrence
from tests.benchmarks import gpu, jobs, large_steps, results

SMALL = {
    "gpu_checks": {},
    "gpu_calibrations": dict(commands={"small": jobs.poisson(0.5, 2, 4, 1e-3)}),
    "gpu_transformers": dict(models=[(1, 16, 24)], calls=1, steps=4, first=1, rows=200),
    "gpu_draws": dict(settings=[(40, 4, 3000, 50)], samples=128),
    "gpu_noise": dict(sizes=(8192,), names=("1 band", "inverse of 16 bands")),
    "gpu_steps": dict(settings=[("CNN on 8 x 8", 4, 2)]),
}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Tables of small sizes; records are written elsewhere."""
    for name, (rows_of, *rest) in gpu.TABLES.items():
        monkeypatch.setitem(gpu.TABLES, name, (functools.partial(rows_of, **SMALL[name]), *rest))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return tmp_path


@pytest.mark.parametrize("name", gpu.TABLES)
def test_a_table_is_measured_and_recorded(name, small):
    file = small / "found"
    gpu.main("measure", file, name)
    rows, columns = json.loads(file.read_text())[name], gpu.TABLES[name][3]
    assert rows and all(len(row) == len(columns) for row in rows), rows
    gpu.main("record", file)
    (recorded,) = small.glob("*.json")
    assert recorded.stem == name and json.loads(recorded.read_text())["rows"] == rows


def test_kernels_are_said_to_need_a_gpu(small):
    gpu.main("measure", small / "found", "gpu_checks")
    answers = {row[0]: row[2] for row in json.loads((small / "found").read_text())["gpu_checks"]}
    serves = "works" if jax.default_backend() == "gpu" else gpu.ONLY
    assert answers["kernel of ChaCha20"] == answers["kernel of the recurrence"] == serves
    assert answers["sums of float32"] == "exact" and float(answers["sines of float64"].split()[1]) < 1e-14


def test_the_kernel_of_the_table_is_measured(monkeypatch):
    by_interpreter = functools.partial(gpu_recurrence.kernel_values, interpret=True)
    monkeypatch.setattr(gpu_recurrence, "kernel_values", by_interpreter)
    monkeypatch.setattr(gpu_recurrence, "_works", lambda: True)
    (row,) = gpu.draws(**SMALL["gpu_draws"])
    assert row[:2] == (40, 4) and all(float(str(cell).replace(",", "")) >= 0 for cell in row)


def test_the_table_after_one_that_fails_runs(small, monkeypatch):
    def failing():
        yield from gpu.checks()
        raise MemoryError("of the device\nand more")

    monkeypatch.setitem(gpu.TABLES, "gpu_checks", (failing, *gpu.TABLES["gpu_checks"][1:]))
    gpu.main("measure", small / "found", "gpu_checks", "gpu_draws")
    found = json.loads((small / "found").read_text())
    assert found["gpu_checks"][-1] == ["failed: MemoryError: of the device"] and len(found["gpu_draws"]) == 1
    gpu.main("record", small / "found")
    recorded = json.loads((small / "gpu_checks.json").read_text())
    assert len(recorded["rows"]) == 4 and "failed: MemoryError: of the device" in recorded["note"]


def test_steps_are_lowered_for_a_gpu(monkeypatch):
    """As far as a machine without one can, but for the kernel of ChaCha20, which has a test of its own."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = gpu.shapes_of(1, 16, 40)
    for begin, run, given in large_steps.all_kinds(shapes).values():
        state = begin(large_steps.parameters(shapes, scanned=True))
        run.trace(state, *given).lower(lowering_platforms=("cuda",))
