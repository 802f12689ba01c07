"""Every path and every dotted name in the pages leads to something that exists."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "tests/README.md", "tests/benchmarks/RESULTS.md")),
    *sorted((ROOT / "jaxacct").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "tests").rglob("*.md")),
]
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
    found = {page.relative_to(ROOT): missing(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not {page: names for page, names in found.items() if names}
