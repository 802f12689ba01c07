"""Examples in docstrings run and give what they print."""

import doctest
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("jaxacct", "train")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


def test_there_are_some():
    assert {"jaxacct.schemes.poisson", "jaxacct.strategies.banded_toeplitz"} <= set(WITH_EXAMPLES)


def test_examples():
    for name in WITH_EXAMPLES:
        done = doctest.testmod(importlib.import_module(name))
        assert done.attempted > 0
        assert done.failed == 0
