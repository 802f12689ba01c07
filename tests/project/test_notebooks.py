"""Every notebook runs from top to bottom, and ships with the outputs of a run without errors."""

import base64
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

import jaxacct
from jaxacct.report import plots as plot
from tests.benchmarks import notebooks
from tests.benchmarks.notebooks import BADGE, INSTALL, with_addresses
from train.run import loop

pytestmark = pytest.mark.usefixtures("default_promotion")  # programs as users write them

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: int(path.stem.split("-")[0]))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Whose samplers and whose training others and the tests of `train` have; each runs as it is in the slow test.
LONG = ("2-who-is-in-the-batch", "9-fine-tuning-with-lora")

# Values of the cell tagged "parameters" that make a short run; notebooks share what is compiled for them.
_SMALL = dict(
    dataset_size=500, batch_size=50, iterations=12, min_separation=3, bands=3, epsilon=2.0, delta=1e-2
)
SHORT = {
    "1-why-correlated-noise": dict(steps=12, bands=3, dimensions=4),
    "2-who-is-in-the-batch": dict(steps=12, separation=3, cycle=4, draws=512, examples=40, compared=()),
    "3-first-certificate": _SMALL,
    "4-how-many-bands": {name: value for name, value in _SMALL.items() if name != "bands"}
    | dict(epsilons=(2.0,), certified_bands=(3,), memory_copies=2),
    "5-train-on-digits": dict(iterations=12, bands=3, batch_size=50, seeds=(0,), evaluate_every=12)
    | dict(epsilon=2.0, delta=1e-2),
    "6-reading-the-evidence": _SMALL | dict(profile_draws=512),
    "7-trade-off-functions": dict(simulated=100, records=100, epochs=1),
    "8-individual-accounting": dict(steps=2, filtered_steps=4),
    "9-fine-tuning-with-lora": dict(length=15, width=8, layers=1, heads=2, pretraining_steps=0, steps=3)
    | dict(batch_size=8, delta=1e-2, rank=2, max_pieces=100, test_pieces=64),
    "10-samplers-compared": {name: value for name, value in _SMALL.items() if name != "min_separation"}
    | dict(examples=40, compared=("b-min-sep",)),
    "11-two-implementations": _SMALL | dict(smaller=0.3),
}


def cells(path: Path, kind: str = "code") -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.fixture(scope="module")
def calibrated():
    """`jaxacct.calibrate`, asked once for what several notebooks want; by a formula for those that train."""
    found, real = {}, jaxacct.calibrate

    def calibrate(scheme, strategy, **options):
        size = options.setdefault("dataset_size", _SMALL["dataset_size"])
        if strategy.bands == 1 or size != _SMALL["dataset_size"]:
            options["options"] = jaxacct.CalibrationOptions(accountant="unamplified")
        wanted = (scheme, strategy, repr(sorted(options.items())))
        if wanted not in found:
            found[wanted] = real(scheme, strategy, **options)
        return found[wanted]

    return calibrate


def no_steps(run, state, ready, *_):
    """All of a run but its steps, whose program is traced and never compiled."""
    for _ in ready:
        pass
    return state


MARKED = [pytest.param(p, id=p.stem, marks=pytest.mark.slow if p.stem in LONG else ()) for p in NOTEBOOKS]


@pytest.mark.parametrize("path", MARKED)
def test_every_cell_runs_with_small_numbers(path, monkeypatch, tmp_path, calibrated):
    """In this process, where `train` stands for `jaxacct.train`; nothing is shown, nothing trained."""
    monkeypatch.setattr(jaxacct, "calibrate", calibrated)
    monkeypatch.setattr(loop.Run, "_taken", no_steps)
    monkeypatch.setattr(plot, "svg", lambda figure: "<svg></svg>")  # drawing takes a second a page
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    matplotlib.use("agg")
    small, names = SHORT[path.stem], {"__name__": "notebook"}
    try:
        for number, cell in enumerate(cells(path)):
            source = re.sub(r"\bjaxacct\.train\b", "train", cell.source)
            exec(compile(source, f"{path.name} code cell {number}", "exec"), names)
            if "parameters" in cell.metadata.get("tags", ()):
                assert small.keys() <= names.keys(), "the table above names what the notebook does not have"
                names |= small
    finally:
        plt.close("all")


@by_name
def test_what_ships_was_run_and_is_independent_of_the_machine(path):
    """Outputs in every part, no error or warning, no path of a home or of a temporary folder, no key."""
    code = cells(path)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [out for cell in code for out in cell.outputs]
    kinds = {"stream", "display_data", "execute_result"}
    assert len(outputs) >= 4 and {out.output_type for out in outputs} <= kinds
    texts = [out.text for out in outputs if out.output_type == "stream"]
    shown = [data for out in outputs if "data" in out for data in out.data.items()]
    texts += [text for kind, text in shown if kind.startswith("text/")]
    of_a_machine = r"/(tmp|home|work|root|Users|usr)/|Traceback|Warning|0x[0-9a-f]{8}"
    assert not re.search(of_a_machine, "\n".join(texts))
    assert len(" ".join(texts)) < 20_000
    pictures = [base64.b64decode(data) for kind, data in shown if kind == "image/png"]
    assert pictures and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert path.stat().st_size < 150_000


@by_name
def test_a_newcomer_can_start(path):
    """Badge, install cell, parameters, words explained, something to try, links that lead somewhere."""
    words = [cell.source for cell in cells(path, "markdown")]
    assert words[0].startswith("[![Open in Colab]") and f"({BADGE}/{path.name})" in words[0]
    code = cells(path)
    assert code[0].source == INSTALL
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in code) == 1
    assert "## Try this" in words[-1] and words[-1].count("\n* ") >= 2
    text = "\n".join(words)
    assert "guides/glossary.md" in words[0], "words are explained on one page"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (FOLDER / link).exists(), link


def test_the_install_cell_asks_for_the_checkout_or_a_pinned_address(monkeypatch, tmp_path):
    """The folder above where that is a checkout, else this version of PyPI."""
    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for folder in (FOLDER, tmp_path):
        monkeypatch.chdir(folder)
        exec(INSTALL, {})
    assert commands[0] == [sys.executable, *"-m pip install -q".split(), commands[0][-1]]
    asked = [f"jaxacct[notebooks] @ {FOLDER.parent.as_uri()}", f"jaxacct[notebooks]=={jaxacct.__version__}"]
    assert [command[-1] for command in commands] == asked


def test_addresses_are_written_from_one_place():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    notebook.cells[0].source = "[an old badge]\n\n# Title"
    notebook.cells[1].source = "an old install cell"
    page = "/blob/main/jaxacct/guides/glossary.md"
    notebook.cells[-1].source = f"[words](https://github.com/old/name{page})"
    changed = with_addresses(notebook, "name.ipynb")
    assert changed.cells[-1].source == f"[words]({notebooks.SOURCE}{page})"
    assert f"({BADGE}/name.ipynb)\n\n# Title" in changed.cells[0].source
    assert changed.cells[1].source == INSTALL


def test_the_set_is_whole():
    site = (FOLDER.parent / ".ci/mkdocs.yml").read_text(encoding="utf-8")
    assert list(SHORT) == [path.stem for path in NOTEBOOKS]
    assert all(f"notebooks/{path.name}" in site for path in NOTEBOOKS)
