"""What shuffling is worth: epsilon at delta 1e-5 of three samplers, independent noise, one epoch; a picture.

python -m tests.benchmarks.shuffling
"""

from pathlib import Path

import numpy as np

from jaxacct.accountants.shuffled import compare_epsilons
from jaxacct.report.figure import blank_axes, finished
from tests.benchmarks.results import record

DELTA = 1e-5
CASES = [(1000, 0.5), (1000, 0.7), (1000, 1.0), (1000, 1.5), (10_000, 0.5), (10_000, 0.7), (10_000, 1.0)]
PICTURE = Path(__file__).parent / "figures" / "shuffling.png"


def main():
    rows = []
    for steps, sigma in CASES:
        found = compare_epsilons(steps, 1, sigma, DELTA)
        values = found.unamplified, found.shuffled_at_least, found.redrawn_at_most
        rows.append([f"{steps:,}", f"{sigma:g}", *(f"{value:.2f}" for value in values)])
        print(*rows[-1], flush=True)
    record(
        "shuffling",
        question="What shuffling is worth: epsilon at delta 1e-5, one epoch, independent noise",
        order=57,
        columns=["steps", "sigma", "no amplification", "shuffled, at least", "balls-in-bins, at most"],
        rows=rows,
        note="C = I, zero-out adjacency. The middle column bounds every accountant from below.",
    )
    sigmas = np.geomspace(0.4, 2.0, 17)
    found = [compare_epsilons(1000, 1, float(sigma), DELTA) for sigma in sigmas]
    figure, axes = blank_axes(5.6, 3.6)
    for name, label, style in (
        ("unamplified", "order known: exact", "-"),
        ("shuffled_at_least", "shuffled: no accountant can be below", "--"),
        ("redrawn_at_most", "balls-in-bins: certified", "-."),
    ):
        axes.plot(sigmas, [getattr(one, name) for one in found], style, color="0.15", label=label)
    axes.set(
        xlabel="noise multiplier",
        ylabel="epsilon at delta 1e-5",
        yscale="log",
        title="one epoch of 1,000 steps, independent noise",
    )
    finished(figure).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
