"""Parts of the reviewer's page: its style, tables and sections, and assumptions."""

import html
from pathlib import Path

# Assumptions of a guarantee, how the code meets them, and the test that attacks them.
ASSUMPTIONS = (
    (
        "Batches are drawn exactly as the scheme says, from secret keys.",
        "The trainer's own sampler, with keys of the operating system; an interrupted run goes on with them.",
        "tests/train/batches/test_sampler.py::test_each_example_follows_the_accounted_distribution",
    ),
    (
        "Which examples were in a batch, and sizes of batches, are not released.",
        "They are in the private log alone.",
        "tests/train/test_loop.py::test_logs_are_json_without_times",
    ),
    (
        "Each example's gradient is clipped to the clip norm, whatever it is.",
        "Norms in float64, an exact integer check after scaling; what is not finite counts as zero.",
        "tests/train/clipping/test_clipping.py::test_every_power_of_two_is_clipped",
    ),
    (
        "Noise has the stated size and matrix, and its low bits are independent of the gradients.",
        "Gradients on a public grid, integer sums, integer noise from a 256-bit key.",
        "tests/train/clipping/test_released_numbers.py::test_low_bits_of_real_steps_reveal_nothing",
    ),
    (
        "Only the noisy sums and what follows from them are released.",
        "A canary audit of the trainer stays below the certified epsilon; broken trainers do not.",
        "tests/train/audit/test_audit_command.py::test_planted_faults_are_found_and_nothing_else",
    ),
)

NOT_COVERED = (  # what no plan covers, for the page and for the cards of runs
    "times of steps, which show batch sizes",
    "private/metrics.jsonl, and evaluations on private data",
    "a second run on the same data, which takes a plan that composes both (compose_with)",
    "hyperparameters, early stopping or a best of several runs that were chosen by the private data",
    "statistics of the private data that were computed beside the run, such as a mean to normalise by",
)

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def escaped(value) -> str:
    """Return text with the marks of HTML escaped."""
    return html.escape(str(value), quote=True)


def section(title: str, content: str) -> str:
    """Return a headed section of HTML."""
    return f"<h2>{escaped(title)}</h2>{content}"


def listed(lines: list[str]) -> str:
    """Return lines of text as an HTML list."""
    return "<ul>" + "".join(f"<li>{escaped(line)}</li>" for line in lines) + "</ul>"


def table(head, rows, numbers=(), raw=(), dim=()) -> str:
    """Return a table as HTML.

    Args:
      head: names of the columns; a narrow screen shows them before the values, but for the first and `dim`.
      rows: of values.
      numbers: columns that are set to the right.
      raw: columns that are HTML already.
      dim: columns of explanations.
    """

    def cell(place, value):
        kind = " class=number" if place in numbers else " class=dim" if place in dim else ""
        label = f' data-head="{escaped(head[place])}"' if place and place not in dim else ""
        return f"<td{kind}{label}>{value if place in raw else escaped(value)}</td>"

    top = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(cell(*each) for each in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
