"""The words of the project: one term for one thing in pages, docstrings, comments and messages."""

import ast
import importlib
import inspect
import io
import json
import pkgutil
import re
import tokenize
from functools import cached_property
from pathlib import Path

import jaxacct
import train

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "jaxacct/guides").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
PROOFS = sorted((ROOT / "jaxacct/proofs").glob("*.md"))
BANNED = re.compile(
    r"\b(told|tells|knows|whoever|who(ever)? comes|somebody|nobody|sits? out|sat out|busier|barred|bars"
    r"|puts? aside|glances?|garbled|laws?|sooner|cut batch(es)?|takes? part|of before|alike|to the bit"
    r"|is none for|says no|cannot be told|what moves the model|who has them)\b",
    re.IGNORECASE,
)


def text_of(page: Path) -> str:
    """The words of a page, without what is code in it."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        found = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(source) for source in found)
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def prose_of_page(page: Path) -> str:
    """A Markdown page without its blocks of code; empty for a notebook."""
    if page.suffix != ".md":
        return ""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_pages_use_the_words_of_the_field():
    """Proofs may have laws."""
    for page in [*PAGES, *PROOFS]:
        found = {match[0].lower() for match in BANNED.finditer(text_of(page))}
        assert not found - ({"law", "laws"} if page in PROOFS else set()), (page, found)


BROKEN = re.compile(r"^(?![-+*|#>\s]|\d+\.).+\n[-+*] .*", re.MULTILINE)


def test_lines_are_short_and_not_broken():
    """At most 110 characters, but for tables and code; no formula nor name between backticks across lines.

    A line of a paragraph that begins with a minus sign is shown as an item of a list.
    """
    for page in [*PAGES, *PROOFS]:
        prose = prose_of_page(page)
        lines = [line for line in prose.splitlines() if not line.startswith(("|", "    ", "![", "#"))]
        long = [line for line in lines if len(line) > 110]
        assert not [line for line in long if max(map(len, re.findall(r"`[^`]*`|\S+", line))) < 60], page
        blocks = [block for block in prose.split("\n\n") if not block.startswith("    ")]
        assert not [code for block in blocks for code in re.findall(r"`[^`]*`", block) if "\n" in code], page
        assert not BROKEN.findall(prose), page


# Banned in code as well: private words of a former version.
BANNED_IN_CODE = re.compile(
    BANNED.pattern[:-3]
    + r"|barring|took part|take part|taking part|whole or not at all|off by|booked|nothing of"
    r"|rests? on|what is seen|at most what|as many as there are|hangs? on|cuts? batches)\b",
    re.IGNORECASE,
)
CODE = [path for folder in ("jaxacct", "train", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE.remove(Path(__file__).resolve())


def prose_of(source: str, with_messages: bool = True) -> str:
    """Docstrings, comments and messages of a module without code in backticks; one-word strings are data."""
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token.string for token in tokens if token.type in kinds and " " in token.string]
    if not with_messages:
        found = [text for text in found if text.startswith(("#", '"""', 'r"""'))]
    return re.sub(r"`[^`]*`", "", "\n".join(found))


def test_code_uses_the_words_of_the_field():
    for path in CODE:
        source = path.read_text(encoding="utf-8")
        if BANNED_IN_CODE.search(source):  # many have none at all, not even as names
            prose = prose_of(source, with_messages=ROOT / "tests" not in path.parents)
            found = [match[0] for match in BANNED_IN_CODE.finditer(prose)]
            assert not found, (path, found)


BANNED_IN_NAMES = {
    *"told tells knows nobody somebody whoever busier barred alike glance garbled wanted booked".split()
}
BOUNDS = ("most_", "least_", "largest_", "smallest_")  # bounds are max_ and min_
KEPT = {"smallest_bound", "smallest_subnormal"}  # results of searches


def wrong_names(source: str) -> set[str]:
    """Names of a module's functions, classes, arguments, attributes and variables with a banned word."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        parts = (getattr(node, kind, None) for kind in ("id", "name", "arg", "attr"))
        found.update(part for part in parts if isinstance(part, str))
    bounds = {name for name in found - KEPT if name.lstrip("_").startswith(BOUNDS)}
    return bounds | {name for name in found if BANNED_IN_NAMES & set(name.lower().split("_"))}


def test_names_use_the_words_of_the_field():
    for path in CODE:
        if ROOT / "tests" not in path.parents:
            assert not wrong_names(path.read_text(encoding="utf-8")), path


def public_classes():
    """Classes in `__all__` of any module, and their bases here."""
    for package in (jaxacct, train):
        walked = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        for name in [package.__name__, *(each.name for each in walked if "__main__" not in each.name)]:
            module = importlib.import_module(name)
            for value in (getattr(module, public) for public in getattr(module, "__all__", ())):
                if inspect.isclass(value):
                    ours = "jaxacct", "train"
                    yield from (one for one in value.__mro__ if one.__module__.startswith(ours))


def is_documented(cls: type, name: str) -> bool:
    """Whether a member has a docstring, or a base has one or declares it as an attribute."""
    owners = [base for base in cls.__mro__ if name in vars(base)]
    declared = any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__)
    return declared or any(inspect.getdoc(inspect.getattr_static(base, name)) for base in owners)


def test_public_methods_have_docstrings():
    """Ruff's D102 does not see inherited ones."""
    missing = {
        f"{cls.__module__}.{cls.__name__}.{name}"
        for cls in public_classes()
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property | cached_property))
        if not is_documented(cls, name)
    }
    assert not missing, sorted(missing)


def test_the_main_functions_read_like_a_reference():
    """An imperative summary, then arguments, result and errors."""
    for function in (jaxacct.calibrate, jaxacct.verify, jaxacct.estimate_delta, jaxacct.recommend, train.fit):
        text = inspect.getdoc(function)
        sections = re.findall(r"^(Args|Returns|Raises|Source):", text, flags=re.MULTILINE)
        assert sections[:3] == ["Args", "Returns", "Raises"], (function.__name__, sections)
        for name in inspect.signature(function).parameters:
            assert re.search(rf"^ +\*{{0,2}}{name}: ", text, flags=re.MULTILINE), (function.__name__, name)
