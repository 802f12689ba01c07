"""Every notebook runs from top to bottom."""

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Smaller numbers for the same cells: (what is written, what is run).
SMALLER = [
    (r"iterations=(400|1000)", "iterations=24"),
    (r"sgd\(0\.3, 400\)", "sgd(0.3, 24)"),
    (r"min_separation=64", "min_separation=8"),
    (r"bands=16", "bands=8"),
    (r"\(1, 4, 16\)", "(8,)"),
    (r"num_samples=20_000", "num_samples=2_000"),
    (r"checkpoint_every=50", "checkpoint_every=8"),
    (r"50 \* np\.arange", "8 * np.arange"),
    (r'result\.evaluation\["accuracy"\] > 0\.6', 'result.evaluation["accuracy"] > 0'),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path, as_installed, monkeypatch, tmp_path):
    """As it is, in a kernel, from another folder and with the names of an installation."""
    monkeypatch.setenv("PYTHONPATH", str(as_installed))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_runs_with_smaller_numbers(path, monkeypatch, tmp_path):
    """In this process, where `train` stands for `jaxacct.train`; nothing is shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    matplotlib.use("agg")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    source = "\n".join(cells).replace("jaxacct.train", "train")
    for written, run in SMALLER:
        source = re.sub(written, run, source)
    assert not re.search(r"iterations=\d{3}|num_samples=\d+_", source.replace("num_samples=2_000", ""))
    names = {"__name__": "notebook"}
    try:
        exec(compile(source, path.name, "exec"), names)
    finally:
        plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_stored_without_outputs(path):
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
