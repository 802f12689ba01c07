"""What README says can be done is done: its script runs, it is short; names, links and examples are right."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "jaxacct").rglob("*.md"))]
WITH_NAMES = [page for folder in ("tests", ".github") for page in sorted((ROOT / folder).rglob("*.md"))]

OF_A_REPOSITORY = re.compile(r"github\.com/[\w-]+/(?=jaxacct\b)|raw\.githubusercontent\.com")


def test_it_is_short():
    assert len(README.split()) <= 700 and len(README.splitlines()) <= 150


def test_every_link_leads_somewhere():
    """From the page itself: none has the address of the repository, which may get another name."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert not OF_A_REPOSITORY.search(target), (page, target)
            assert target.startswith("http") or (page.parent / target).exists(), (page, target)


def test_links_on_pypi_are_those_of_the_repository(tmp_path):
    """In a copy under another name: one setting moves all of them, the picture's too."""
    for name in (".ci/links.py", "pyproject.toml", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("github.com/jaxacct/jaxacct", "github.com/other/place"))
    command = [sys.executable, tmp_path / ".ci/links.py", tmp_path / "README.md"]
    subprocess.run(command, check=True)
    targets = re.findall(r"\]\(([^)#\s]+)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    own = [target for target in targets if target.startswith("https://github.com/other/place/")]
    assert all(target.startswith("https://") for target in targets) and len(own) > 20
    for target in own:
        kind, _, path = target.removeprefix("https://github.com/other/place/").partition("/main/")
        assert kind == ("raw" if path.endswith(".png") else "blob") and (ROOT / path).exists()
    assert sum(target.endswith(".png") for target in own) == 1


def test_numbers_of_the_core_are_those_of_its_page():
    page = (ROOT / "jaxacct/core/TRUSTED.md").read_text(encoding="utf-8")
    count = re.search(r"the (\d+) files of the \[trusted", README)[1]
    assert int(count) == len(re.findall(r"^\| `", page, re.MULTILINE))


@pytest.mark.usefixtures("default_promotion")
def test_the_training_script_ends_with_a_model(tmp_path, monkeypatch, capsys):
    """Under a plan of a few steps, in this process, where `train` stands for `jaxacct.train`."""
    script = next(b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "load_model" in b)
    plan("poisson", dataset_size=1440, iterations=5, rate=0.05).save(tmp_path / "digits.json")
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("jaxacct.train", "train"), "README.md", "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    assert "differentially private" in said
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) <= 1


PATH = re.compile(r"(?:jaxacct|train|tests|notebooks|\.ci|\.github)/[\w./-]*\w/?")
PACKAGES = "|".join(sorted(path.parent.name for path in (ROOT / "jaxacct").glob("*/__init__.py")))
NAME = re.compile(rf"(?:jaxacct|train|tests|{PACKAGES})(?:\.[A-Za-z_]\w*)+")
# Files that a reader has, or makes by the steps of a page.
OF_READERS = {"jaxacct/schemes/NAME.py"}


def words_of(text: str) -> list[str]:
    """Return what stands between backticks in a line, word by word; blocks of code run in other tests."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [word for part in code for word in re.split(r"[\s(),:;=\[\]\"']+", part)]


def is_path(word: str) -> bool:
    return bool(PATH.fullmatch(word)) and (ROOT / word).exists()


def is_name(word: str) -> bool:
    """Whether a dotted name is a module, or an attribute or field of something in one."""
    name = re.sub(r"^jaxacct\.train\b", "train", word)
    parts = (name if name.split(".")[0] in ("jaxacct", "train", "tests") else f"jaxacct.{name}").split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, part):
                return part in fields
            found = getattr(found, part)
        return True
    return False


def missing(text: str) -> list[str]:
    """Return the paths and dotted names of a page that lead nowhere."""
    words = [word.rstrip(".") for word in words_of(text)]
    paths = [word for word in words if PATH.fullmatch(word) and not is_path(word)]
    names = [word for word in words if NAME.fullmatch(word) and not is_name(word)]
    return sorted({*paths, *names} - OF_READERS)


def test_every_path_and_name_exists():
    found = {page: missing(page.read_text(encoding="utf-8")) for page in [*PAGES, *WITH_NAMES]}
    assert not {page: names for page, names in found.items() if names}


def test_examples_in_docstrings_give_what_they_print():
    found = []
    for path in [path for folder in ("jaxacct", "train") for path in sorted((ROOT / folder).rglob("*.py"))]:
        if ">>>" in path.read_text(encoding="utf-8"):
            found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
            done = doctest.testmod(importlib.import_module(found[-1]))
            assert done.attempted > 0 and done.failed == 0, found[-1]
    assert {"jaxacct.schemes.poisson", "jaxacct.strategies.banded_toeplitz"} <= set(found)
