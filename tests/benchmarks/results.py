"""Measurements as JSON records, and the pages that show them.

    python -m tests.benchmarks.results               # the pictures, and the list of records in RESULTS.md
    python -m tests.benchmarks.results TABLES.md     # every record as a table, as the site shows it

A file holds one record, the newest answer to one question. A benchmark writes its own by `record`. RESULTS.md
is written by hand, and every number of a section is in one of the records that it names.
"""

import csv
import dataclasses
import io
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxacct.common.files import write_atomically

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "RESULTS.md"
FIELDS = ("question", "order", "date", "command", "commit", "machine", "columns", "rows", "note")
SECTIONS = {
    10: "Speed of draws",
    20: "Certificates",
    30: "Matrices",
    40: "The main paper's comparisons",
    50: "Users, estimates and accountants",
    60: "Training",
    70: "The other papers",
    80: "Accelerators",
    90: "Tests and memory",
    100: "Real images",
}
HEADER = """# All records

Every table states its command, commit, machine and date. Times on shared machines vary by a factor of two;
compare ratios. [Results](RESULTS.md) answers what readers ask.
"""
LIST = "## All records\n\n"


def this_machine() -> str:
    """Return the processor, number of cores and load of this machine."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"


def record(
    name: str,
    *,
    question: str,
    order: int,
    columns: list[str],
    rows: list[list],
    note: str = "",
    machine: str = "",
) -> None:
    """Store the answer to a question, with the command that runs, the commit, the machine and the date.

    Args:
      name: the file's name in `results/`, without its ending.
      question: title of the table.
      order: position on the page; its tens choose the section.
      columns: names of the columns.
      rows: one list of values for each row, as long as `columns`.
      note: what a reader must know to read the table.
      machine: that measured, if it is another than this one.
    """
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER).stdout.strip()
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else f"python {os.path.relpath(sys.argv[0])}"
    found = {
        "question": question,
        "order": order,
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join([program, *sys.argv[1:]]),
        "commit": commit,
        "machine": machine or this_machine(),
        "columns": columns,
        "rows": [[str(value) for value in row] for row in rows],
        "note": note,
    }
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def recorded(name: str, *, rows: Iterable, **options) -> None:
    """Print rows as they are measured, and store the record after each."""
    found = []
    for row in rows:
        found.append(list(row))
        print("|", " | ".join(map(str, row)), "|", flush=True)
        record(name, rows=found, **options)


def rows_of(name: str) -> dict[str, list]:
    """Return the rows of a record by their first column; none where there is no record."""
    path = FOLDER / f"{name}.json"
    return {row[0]: row for row in json.loads(path.read_text("utf-8"))["rows"]} if path.exists() else {}


class Kept:
    """A CSV file of finished rows, each under a key; every row that is added is on disk.

    Columns beyond those of the keys and `found`, as in older tables, are read over.

    Args:
      path: of the file, which may be missing.
      kind: a dataclass of texts and numbers, the keys; its fields are the first columns.
      found: names of the other columns.
      above_0: one of them, which holds a finite number above 0.

    Raises:
      ValueError: for a file that is no such table.
    """

    def __init__(self, path: Path, kind: type, found: tuple[str, ...], *, above_0: str):
        self.path, self.found = path, found
        self.rows: dict[Any, dict[str, str]] = {}
        kinds = {field.name: field.type for field in dataclasses.fields(kind)}
        self.columns = (*kinds, *found)
        if not path.exists():
            return
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    key = kind(*(read(row[name]) for name, read in kinds.items()))
                    self.rows[key] = {name: row[name] for name in found}
                    assert 0 < float(row[above_0]) < math.inf
            assert self.rows
        except (AssertionError, KeyError, TypeError, ValueError, csv.Error):
            raise ValueError(f"out must hold no other {path.name}, {path} is none of this command") from None

    def add(self, key, row: dict[str, str]) -> None:
        """Keep a row, and write the whole table, atomically."""
        self.rows[key] = row
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(self.columns)
        for one, values in self.rows.items():
            lines.writerow([*dataclasses.astuple(one), *(values[name] for name in self.found)])
        write_atomically(self.path, text.getvalue())


def records() -> list[dict]:
    """Return all records in the order of the page, each with its `name`.

    Raises:
      ValueError: a record lacks a field, or a row has another length than the columns.
    """
    found = []
    for path in FOLDER.glob("*.json"):
        entry = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in FIELDS if name not in entry]
        if missing:
            raise ValueError(f"{path.name} lacks {', '.join(missing)}")
        if any(len(row) != len(entry["columns"]) for row in entry["rows"]):
            raise ValueError(f"{path.name} has a row of another length than its columns")
        found.append(entry | {"name": path.stem})
    return sorted(found, key=lambda entry: (entry["order"], entry["name"]))


def table(entry: dict) -> str:
    """Return one record as Markdown."""
    lines = [f"### {entry['question']} {{#{entry['name']}}}", ""]
    lines += [" | ".join(["", *map(str, row), ""]).strip() for row in (entry["columns"],)]
    lines += ["|" + "---|" * len(entry["columns"])]
    lines += [" | ".join(["", *map(str, row), ""]).strip() for row in entry["rows"]]
    lines += ["", entry["note"], ""] if entry["note"] else [""]
    lines += [f"![{entry['question']}]({picture})\n" for picture in entry.get("picture", "").split()]
    lines += [f"`{entry['command']}`, {entry['date']}, commit {entry['commit']}, {entry['machine']}.", ""]
    return "\n".join(lines)


def tables() -> str:
    """Return the page of all records."""
    parts, section = [HEADER], None
    for entry in records():
        heading = SECTIONS[entry["order"] // 10 * 10]
        if heading != section:
            parts.append(f"## {heading}\n")
            section = heading
        parts.append(table(entry))
    return "\n".join(parts)


def listed(page: str) -> str:
    """Return a page with the list of all records at its end."""
    lines = [f"* [{entry['question']}](results/{entry['name']}.json)" for entry in records()]
    return page.partition(LIST)[0] + LIST + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(tables(), encoding="utf-8")
    else:
        from tests.benchmarks import pictures

        pictures.write({entry["name"]: entry for entry in records()})
        PAGE.write_text(listed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
