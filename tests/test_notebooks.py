"""Every notebook runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_runs(path, as_installed, monkeypatch, tmp_path):
    """Run from another folder and with the names of an installation."""
    monkeypatch.setenv("PYTHONPATH", str(as_installed))
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
