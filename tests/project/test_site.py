"""`.ci/site.py` finds what is wrong with a built site; `.ci/docs` builds the whole one and runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / ".ci/site.py"
GOOD = (
    '<title>$x$</title><a href="other/">o</a><a href="other/#here">h</a><a href="https://a.org/b">x</a>'
    '<img src="other/p.png"><p>costs $5</p><code>$y$ \\frac</code>'
)
FLAWS = {
    "a page that is not there": '<a href="gone/">x</a>',
    "a place that is not there": '<a href="other/#gone">x</a>',
    "a file of the sources": '<a href="other/index.md">x</a>',
    "a formula": "<p>after $t$ steps</p>",
    "a displayed formula": "<p>$$ C Z $$</p>",
    "a command of TeX": "<p>\\frac{1}{2}</p>",
    "a picture of another host": '<img src="https://a.org/badge.svg">',
    "a script without an address": '<script src=""></script>',
}


def check(folder: Path, page: str) -> tuple[int, str]:
    (folder / "other").mkdir()
    (folder / "other/index.html").write_text('<h1 id="here">x</h1>')
    (folder / "other/p.png").write_text("")
    (folder / "index.html").write_text(f"<html><body>{page}</body></html>")
    done = subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_site_without_flaws(tmp_path):
    assert check(tmp_path, GOOD) == (0, f"{tmp_path}: every link leads somewhere\n")


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_found(flaw, tmp_path):
    code, said = check(tmp_path, GOOD + FLAWS[flaw])
    assert code == 1 and said.startswith("index.html: ") and said.count("\n") == 1, said
