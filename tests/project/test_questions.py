"""Commands of the pages in `guides/questions`: each runs, with smaller numbers."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from jaxacct.cli import main as cli

FOLDER = Path(__file__).parents[2] / "jaxacct/guides/questions"
PAGES = sorted(FOLDER.glob("*.md"))
# Numbers of a page -> smaller ones, which the quick tests use.
SMALLER = {
    "1200000": "12000",
    "200000": "60000",
    "4096": "200",
    "8192": "400",
    "5859": "60",
    "5000": "60",
    "240": "100",
    "--epsilon 1.46": "--epsilon 4",
    "2930": "30",
    "60000": "3000",
    "--batch-size 200 --min-separation 16": "--batch-size 30 --min-separation 8",
    "--iterations 1000 --bands 16": "--iterations 60 --bands 6",
}
# A plan that is certified in seconds, for pages that start with one.
CALIBRATE = (
    "jaxacct calibrate --scheme b-min-sep --dataset-size 3000 --batch-size 50 --iterations 60 --bands 6"
    " --min-separation 6 --strategy square-root --epsilon 2 --delta 2e-2 --out plan.json"
)
REPLACED = re.compile("|".join(rf"(?<![\d.]){re.escape(number)}(?!\d)" for number in SMALLER))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


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
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert not caught.value.code, line


def prepare(folder: Path, page: Path, rows: int) -> None:
    """Write what the page's reader has: a plan, pairs of users and rows."""
    text = page.read_text(encoding="utf-8")
    if "edges.csv" in text:
        pairs = "".join(f"{row // 5},{row}\n" for row in range(rows))
        (folder / "edges.csv").write_text(f"user,row\n{pairs}", encoding="utf-8")
    if "calibrate" not in text:
        run(CALIBRATE)


def run_page(page: Path, folder: Path, shorten) -> None:
    for block in blocks(page, "sh"):
        for line in block.strip().splitlines():
            run(shorten(line))
    for block in blocks(page, "python"):
        exec(compile(block.replace("jaxacct.train", "train"), page.name, "exec"), {"__name__": "page"})


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, page, rows=3000)
    run_page(page, tmp_path, lambda line: REPLACED.sub(lambda found: SMALLER[found[0]], line))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, page, rows=60000)
    run_page(page, tmp_path, lambda line: line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_one_screen(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 60
