"""Run notebooks from top to bottom as they would run where jaxacct is installed, and store what they print.

    PYTHONPATH=. python tests/benchmarks/notebooks.py notebooks/1-*.ipynb      (all by default)
    PYTHONPATH=. python tests/benchmarks/notebooks.py --addresses     # writes their links, runs nothing

Outputs are those of a kernel in another folder, which imports `jaxacct.train` and has no `train`; times and
other machine's marks are left out of the file.
"""

import argparse
import base64
import io
import os
import re
import tempfile
import time
import tomllib
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

from jaxacct.common.version import VERSION
from tests.commands import link_installation

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
# The one place of the address of the repository, from which those of notebooks are written.
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
BADGE = SOURCE.replace("github.com", "colab.research.google.com/github") + "/blob/main/notebooks"
PAGE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/main/(?=jaxacct/|notebooks/|tests/)")
INSTALL = f"""# Installs jaxacct where it is missing (Colab): from the checkout around it, else from PyPI.
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("jaxacct") is None:
    checkout = Path.cwd().resolve().parent
    is_checkout = (checkout / "pyproject.toml").is_file()
    wanted = f"jaxacct[notebooks] @ {{checkout.as_uri()}}" if is_checkout else "jaxacct[notebooks]=={VERSION}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted], check=True)"""


def with_addresses(notebook, name: str):
    """Return a notebook with the badge of its name, the install cell, and links to the repository's pages."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = PAGE.sub(f"{SOURCE}/blob/main/", cell.source)
    words = notebook.cells[0]
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({BADGE}/{name})"
    words.source = "\n".join([badge, *words.source.splitlines()[1:]])
    next(cell for cell in notebook.cells if cell.cell_type == "code").source = INSTALL
    return notebook


def execute(path: Path, imports: Path, folder: Path, timeout: int = 600):
    """The notebook with fresh outputs, run in `folder` with `imports` to import from.

    Raises:
      nbclient.exceptions.CellExecutionError: where a cell fails.
    """
    notebook = with_addresses(nbformat.read(path, as_version=4), path.name)
    os.environ["PYTHONPATH"] = str(imports)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            # A stored slider has no kernel to move it; its first picture stays.
            kept = (out for out in cell.outputs if out.get("name") != "stderr")
            cell.outputs = [out for out in kept if WIDGET not in out.get("data", {})]
            for data in (out.data for out in cell.outputs if "image/png" in out.get("data", {})):
                data["image/png"] = smaller(data["image/png"])
    return notebook


WIDGET = "application/vnd.jupyter.widget-view+json"


def smaller(picture: str) -> str:
    """A PNG in base64 with 128 colours."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(file, format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--addresses", action="store_true")
    given = parser.parse_args()
    for path in given.paths:
        if given.addresses:
            nbformat.write(with_addresses(nbformat.read(path, as_version=4), path.name), path)
            continue
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as imports, tempfile.TemporaryDirectory() as folder:
            link_installation(Path(imports))
            nbformat.write(execute(path, Path(imports), Path(folder)), path)
        print(f"{path.name}: {time.monotonic() - since:.0f} s, {path.stat().st_size // 1000} kB", flush=True)


if __name__ == "__main__":
    main()
