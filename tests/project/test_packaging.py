"""What an installation holds, and what it does not; `.ci/site.py` finds what is wrong with a built site.

tests/README.md says how the wheel itself is built; `.ci/docs` builds the whole site and checks it.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxacct

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OPTIONAL = ("flax", "optax", "orbax", "sklearn", "pyarrow")  # come with jaxacct[train]


def test_training_is_installed_under_the_package():
    """An installation is started in `test_start.py`."""
    packages = PROJECT["tool"]["setuptools"]
    assert packages["package-dir"]["jaxacct.train"] == "train"
    assert {name.split(".")[0] for name in packages["packages"]} == {"jaxacct"}


def test_every_package_is_listed():
    """The list is written out, as `train` lives outside of `jaxacct`; a new folder must join it."""
    paths = [*ROOT.glob("jaxacct/**/*.py"), *ROOT.glob("train/**/*.py")]
    names = {".".join(path.parent.relative_to(ROOT).parts) for path in paths}
    names = {re.sub(r"^train\b", "jaxacct.train", name) for name in names}
    assert names == set(PROJECT["tool"]["setuptools"]["packages"]) - {"jaxacct.guides", "jaxacct.proofs"}
    for name in ("guides", "proofs"):
        assert (ROOT / "jaxacct" / name).is_dir(), name


def test_pages_and_styles_are_listed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [(name.replace(".", "/"), each) for name, part in data.items() for each in part]
    listed = {path for name, pattern in patterns for path in (ROOT / name).glob(pattern)}
    for suffix in ("*.md", "*.css", "*.pyi", "py.typed"):
        assert {*(ROOT / "jaxacct").rglob(suffix)} <= listed, suffix


def test_training_imports_itself_relatively_and_accounting_nothing_of_it():
    """`pip install jaxacct` brings no training library, so the accountant may import none."""
    for folder, names in (("train", ["train"]), ("jaxacct", ["train", *OPTIONAL])):
        imports = re.compile(rf"^\s*(from|import) ({'|'.join(names)})\b", re.M)
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports.search(path.read_text(encoding="utf-8")), path


def test_the_version_is_written_once():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jaxacct.common.version.VERSION"}
    changelog = (ROOT / "jaxacct" / "guides" / "changelog.md").read_text(encoding="utf-8")
    assert f"## {jaxacct.__version__}" in changelog


def test_the_lowest_versions_are_the_declared_ones():
    """`.ci/lowest.txt` pins exactly the lower bounds of what is installed for use, training and tests."""
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {}
    used = (*extras["train"], *extras["data"], *extras["test"])
    for requirement in [*PROJECT["project"]["dependencies"], *used]:
        name, bound = re.match(r"([a-z\-]+)(?:\[[^\]]*\])?(?:>=([\d.]+))?", requirement).groups()
        if bound:
            declared[name] = bound
    lines = (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert set(declared) <= set(pinned)
    for name, bound in declared.items():
        assert pinned[name] == bound or pinned[name].startswith(f"{bound}."), name


CHECK = ROOT / ".ci/site.py"
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
