"""The trusted core, found by tracing: `python -m tests.trusted` writes `jaxacct/core/TRUSTED.md`.

Loads and verifies the README's plan, a stored file, and counts the files of the package whose functions are
entered, and their executed lines.
"""

import ast
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "tests/fixtures/readme_plan.json"
LIST = ROOT / "jaxacct/core/TRUSTED.md"
MAX_FILES, MAX_LINES = 34, 2000
HEADER = f"""# The trusted core

A certificate is true if these files are right: those of the package whose functions are entered while the
README's plan is loaded and verified. `python -m tests.trusted` writes this page, and a test compares it with
a fresh trace: at most {MAX_FILES} files and {MAX_LINES:,} executed lines. Search, recommendation, reports,
caching and the command line are outside; a mistake there costs time or noise, never truth.
`jaxacct/checker.py` checks a plan without any of them.

| file | what it holds |
|---|---|
"""


def entered(plan_path: Path = PLAN) -> dict[str, set[int]]:
    """File of the package -> its executed lines, while the plan is loaded and verified with fresh samples."""
    import jax

    from jaxacct import Plan

    package = str(ROOT / "jaxacct") + "/"
    lines: dict[str, set[int]] = {}

    def tracer(frame, event, argument):
        path = frame.f_code.co_filename
        if not path.startswith(package) or frame.f_code.co_name == "<module>":
            return None
        seen = lines.setdefault(path[len(package) :], set())

        def local(frame, event, argument):
            if event == "line":
                seen.add(frame.f_lineno)
            return local

        return local

    key = jax.random.key(0)  # with some keys the best bet is the largest one, and its root is not looked for
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        assert Plan.load(plan_path).verify(key=key).certified
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return lines


def page(files) -> str:
    """The page for these files."""
    rows = []
    for name in sorted(files):
        text = ast.get_docstring(ast.parse((ROOT / "jaxacct" / name).read_text(encoding="utf-8"))) or ""
        rows.append(f"| `{name}` | {text.splitlines()[0] if text else ''} |\n")
    return HEADER + "".join(rows)


if __name__ == "__main__":
    found = entered()
    LIST.write_text(page(found), encoding="utf-8")
    print(f"{len(found)} files, {sum(map(len, found.values()))} executed lines")
