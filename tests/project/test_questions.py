"""Commands of the pages in `guides/questions`: all can be read, one of a kind runs with smaller numbers."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxacct.cli import main as cli
from jaxacct.cli.usage import parse
from tests.commands import exit_code
from tests.project.test_notebooks import no_steps
from tests.train.clipping.test_by_device import in_process
from tests.train.runs import plan
from train.arguments import _HINTS
from train.run import loop

FOLDER = Path(__file__).parents[2] / "jaxacct/guides/questions"
PAGES = sorted(FOLDER.glob("*.md"))
# Numbers of a page -> smaller ones, which the quick tests use; longer ones first.
SMALLER = {
    "--batch-size 200 --min-separation 16": "--batch-size 30 --min-separation 8",
    "--iterations 1000 --bands 16": "--iterations 60 --bands 6",
    "16 --dataset-size 50000 --batch-size 200": "16 --dataset-size 50000 --batch-size 200",  # has no samples
    "50000 --batch-size 200 --iterations 1000": "60 --batch-size 20 --iterations 6",
    "--dataset-size 100000000 --batch-size 4000 --iterations 100000": "--dataset-size 4000 --batch-size 400"
    " --iterations 40",
    "1.1e-10": "1e-6",
    "--dataset-size 60000 --batch-size 240": "--dataset-size 3000 --batch-size 100",
    "--batch-size 500 --iterations 600": "--batch-size 60 --iterations 1",
    "--batch-size 50 --iterations 200": "--batch-size 20 --iterations 3",
    "--epsilon 1.46": "--epsilon 4",
    "1200000": "12000",
    "200000": "20000",
    "60000": "3000",
    "4096": "200",
    "8192": "400",
    "5859": "6",
    "5000": "6",
    "2930": "6",
    "8 --delta 1e-5 --out drawn.json": "8 --delta 1e-2 --out drawn.json",
    "1e-6": "1e-2",
    "1e-7": "1e-2",
}
# A plan that is certified in seconds, for pages that start with one.
CALIBRATE = (
    "jaxacct calibrate --scheme b-min-sep --dataset-size 3000 --batch-size 50 --iterations 60 --bands 6"
    " --min-separation 6 --strategy square-root --epsilon 2 --delta 2e-2"
)
REPLACED = re.compile("|".join(rf"(?<![\d.]){re.escape(number)}(?!\d)" for number in SMALLER))


SHORT = (
    "which-delta epochs-to-iterations without-poisson-sampling my-own-mean early-stopping next-month "
    "noise-above-the-gradient images-and-labels lora-from-safetensors delta-of-epsilon "
    "thirteen-times-the-noise"
).split()


def test_a_page_is_one_screen_and_an_answer_200_words_and_a_command():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60
        assert page.stem not in SHORT or (len(text.split()) <= 200 and blocks(page))
    assert {*SHORT} <= {page.stem for page in PAGES}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Languages and texts, in the order of the page."""
    return re.findall(r"```(sh|python)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(line: str) -> None:
    """Run one command line in this process; `train` stands for `jaxacct.train`."""
    program, *arguments = shlex.split(line)
    if program == "python":
        module = arguments[arguments.index("-m") + 1].removeprefix("jaxacct.")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module, *arguments[arguments.index("-m") + 2 :]])
            try:
                runpy.run_module(module, run_name="__main__")
            except SystemExit as end:
                assert not end.code, line
        return
    assert program == "jaxacct", line
    assert not exit_code(*arguments), line


def prepare(folder: Path, page: Path, rows: int, shared: Path) -> None:
    """Write what the page's reader has: a plan, pairs of users and rows, images."""
    text = page.read_text(encoding="utf-8")
    if "images.npz" in text:
        for name, images in (("images", rows), ("public", 100)):
            numbers = np.random.default_rng(images).integers(0, 256, (images, 28, 28), np.uint8)
            np.savez(folder / f"{name}.npz", x=numbers, y=np.int32(numbers[:, 14, 14] // 26))
    if "public.safetensors" in text:
        shapes = {"0.weight": (32, 784), "0.bias": (32,), "2.weight": (10, 32), "2.bias": (10,)}
        public = {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}
        safetensors.numpy.save_file(public, folder / "public.safetensors")
    if "edges.csv" in text:
        pairs = "".join(f"{row // 5},{row}\n" for row in range(rows))
        (folder / "edges.csv").write_text(f"user,row\n{pairs}", encoding="utf-8")
    if "plan.json" in text and "--out plan.json" not in text:
        plan = shared / "plan.json"
        if not plan.exists():
            run(f"{CALIBRATE} --out {plan}")
        shutil.copy(plan, folder)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


def run_page(page: Path, shorten) -> None:
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block.replace("jaxacct.train", "train"), page.name, "exec"), {"__name__": "page"})
            continue
        for line in block.strip().splitlines():
            if not line.startswith("#"):
                run(shorten(line))


def test_every_command_of_a_page_can_be_read():
    """Each is a command line that this version has; blocks of Python are compiled."""
    for page in PAGES:
        for language, block in blocks(page):
            if language == "python":
                compile(block, page.name, "exec")
                continue
            for line in block.strip().splitlines():
                program, *words = shlex.split(line, comments=True) or [""]
                if program == "jaxacct":
                    assert callable(parse(cli.app_for(words[0]), words)), line


# Of each kind of command and of data one; the others run as printed, in the slow test.
RUN = "a-cnn-on-my-images a-sampler-of-my-own".split()


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("page", [FOLDER / f"{name}.md" for name in RUN], ids=lambda page: page.stem)
def test_commands_of_a_page_run(page, tmp_path, monkeypatch, shared):
    """As notebooks do: steps are traced and not run, which tests of training are for."""
    monkeypatch.setattr(loop.Run, "_taken", no_steps)
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, page, 3000, shared)
    run_page(page, lambda line: REPLACED.sub(lambda found: SMALLER[found[0]], line))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run_as_printed(page, tmp_path, monkeypatch, shared):
    if "import torch" in page.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, page, 60000, shared)
    run_page(page, lambda line: line)


# The page on models of other libraries: each block trains, where its library is installed.
FIRST, *LIBRARIES = (text for _, text in blocks(FOLDER.parent / "libraries.md"))
LIBRARIES = {re.search(r"(?:import|from) (\w+)", block)[1]: block for block in LIBRARIES}


def test_every_hint_has_a_block():
    assert LIBRARIES.keys() == _HINTS.keys() - {"torch"}


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_trains(library, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    plan("poisson", dataset_size=40, iterations=2).save("plan.json")
    text = (FIRST + LIBRARIES[library]).replace("jaxacct.train", "train")
    names = {"__name__": "page"}
    exec(compile(text, "libraries.md", "exec"), names)
    assert all(np.isfinite(leaf).all() for leaf in names["jax"].tree.leaves(names["params"]))


DEVICES = FOLDER / "many-devices.md"


@pytest.mark.slow
def test_the_page_of_many_devices_runs_on_eight(tmp_path, shared):
    """With the default clipping, which is ghost clipping there."""
    prepare(tmp_path, DEVICES, 3000, shared)
    said = in_process("run_page(t.DEVICES, str)", "project.test_questions", tmp_path)
    assert "clipping: ghost" in said
