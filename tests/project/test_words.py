"""The words of the project: phrases that a reader has to read twice do not come back."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "jaxacct/guides").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page):
    found = [match[0] for match in BANNED.finditer(text_of(page))]
    assert not found, found


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_lines_are_short(page):
    """At most 110 characters, but for tables and code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "!["))]
    assert not [line for line in lines if len(line) > 110]


def test_a_banned_phrase_is_seen():
    assert BANNED.search("Nobody knows who takes part.")
    assert not BANNED.search("The participation probability of an eligible example is p.")
