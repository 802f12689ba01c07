"""What shuffling is worth: epsilon at delta 1e-5 of four samplers, independent noise; a picture.

python -m tests.benchmarks.shuffling
"""

import math
from pathlib import Path

import numpy as np

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta
from jaxacct.report.figure import blank_axes, finished
from jaxacct.statistics import roots
from tests.benchmarks.results import record
from tests.benchmarks.shuffled_bounds import SamplerComparison, redrawn_bins_delta, shuffled_delta_lower

DELTA = 1e-5
# Steps of an epoch, epochs, noise multiplier.
CASES = [(1000, 1, sigma) for sigma in (0.5, 0.7, 1.0, 1.5)]
CASES += [(10_000, 1, sigma) for sigma in (0.5, 0.7, 1.0)] + [(1000, 10, sigma) for sigma in (1.0, 1.5, 2.0)]
PICTURE = Path(__file__).parent / "figures" / "shuffling.png"


def compare_epsilons(steps: int, epochs: int, sigma: float, delta: float) -> SamplerComparison:
    """Return the epsilons at `delta` for a noise multiplier, natural logs, each rounded to its side.

    An epoch has `steps` steps. The lower bound for shuffling is that of one epoch. The certified bound on
    delta does not fall below about 1e-8 times `epochs`.
    """
    length = math.sqrt(epochs)
    return SamplerComparison(
        _epsilon_at(lambda epsilon: gdp_delta(epsilon, length / sigma), delta, 1),
        _epsilon_at(lambda epsilon: shuffled_delta_lower(steps, sigma, epsilon), delta, -1),
        _epsilon_at(lambda epsilon: redrawn_bins_delta(steps, epochs, sigma, epsilon), delta, 1),
    )


def _epsilon_at(delta_at, delta: float, side: int) -> float:
    """Return the epsilon at which a falling bound is `delta`, rounded up (`side` 1) or down (-1)."""
    ends = roots.turn(lambda epsilon: delta_at(epsilon) <= delta, 0.0, 1.0, 0.0, 1e3, absolute=1e-4)
    return 0.0 if ends[0] == -math.inf else ends[side > 0]


def main():
    rows = []
    for steps, epochs, sigma in CASES:
        found = compare_epsilons(steps, epochs, sigma, DELTA)
        # The same bin in every epoch: all its participations add up to one.
        same = compare_epsilons(steps, 1, sigma / math.sqrt(epochs), DELTA).redrawn_at_most
        values = found.unamplified, found.shuffled_at_least, same, found.redrawn_at_most
        rows.append([f"{steps:,}", str(epochs), f"{sigma:g}", *(f"{value:.2f}" for value in values)])
        print(*rows[-1], flush=True)
    record(
        "shuffling",
        question="What shuffling is worth: epsilon at delta 1e-5, independent noise",
        order=57,
        columns=["steps an epoch", "epochs", "sigma", "no amplification", "shuffled, at least",
                 "balls-in-bins, at most", "epochwise allocation, at most"],
        rows=rows,
        note="C = I, zero-out adjacency. The bound for shuffling is below every accountant, for one epoch; "
        "in one epoch the last two columns are the same sampler.",
    )  # fmt: skip
    sigmas = np.geomspace(0.4, 2.0, 17)
    found = [compare_epsilons(1000, 1, float(sigma), DELTA) for sigma in sigmas]
    figure, axes = blank_axes(5.6, 3.6)
    for name, label, style in (
        ("unamplified", "order known: exact", "-"),
        ("shuffled_at_least", "shuffled: no accountant can be below", "--"),
        ("redrawn_at_most", "balls-in-bins: certified", "-."),
    ):
        axes.plot(sigmas, [getattr(one, name) for one in found], style, color="0.15", label=label)
    title = "one epoch of 1,000 steps, independent noise"
    axes.set(xlabel="noise multiplier", ylabel="epsilon at delta 1e-5", yscale="log", title=title)
    finished(figure).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
