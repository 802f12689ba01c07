"""Samples that the remove direction is predicted to need, without and with replicas in pairs.

`PYTHONPATH=. python -m tests.benchmarks.pairs` prints rows of a table; nothing is drawn.
"""

import sys

from jaxacct import (
    BallsInBins,
    BandedToeplitz,
    BMinSep,
    Budget,
    CyclicPoisson,
    IndependentAttribution,
    Mechanism,
    MultiAttribution,
)
from jaxacct.proposals.candidates import candidates

SETTINGS = [  # scheme, bands, noise multiplier, epsilon, delta
    (lambda: IndependentAttribution(1000, 64, 1 / 187, 4), 16, 3.2, 4, 1e-5),
    (lambda: IndependentAttribution(1000, 64, 1 / 187, 8), 16, 6.9, 4, 1e-5),
    (lambda: IndependentAttribution(1000, 64, 1 / 187, 16), 16, 14.0, 4, 1e-5),
    (lambda: IndependentAttribution(1000, 16, 0.0036, 2), 16, 5.762, 1, 2e-6),
    (lambda: MultiAttribution(1000, 16, 0.0036, 2), 16, 6.116, 1, 2e-6),
    (lambda: BMinSep(1000, 64, 1 / 187), 16, 3.0, 1, 1e-5),
    (lambda: BMinSep(1500, 150, 1 / 151), 4, 2.261, 0.5, 2.8e-6),
    (lambda: BallsInBins(1500, 300), 8, 3.1716, 0.5, 2.8e-6),
    (lambda: CyclicPoisson(1500, 100, 1 / 3), 16, 4.0, 0.5, 2.8e-6),
    (lambda: BMinSep(7200, 256, 1 / 7969), 256, 1.0, 1, 1e-6),
]


def main() -> None:
    for scheme, bands, sigma, epsilon, delta in SETTINGS:
        mechanism = Mechanism(scheme(), BandedToeplitz.square_root(bands), sigma)
        found = candidates(mechanism, epsilon, "remove", Budget.split(delta))
        without = next(c for c in found if not c.proposal.name.startswith("pairs:"))
        row = [str(mechanism.scheme), bands, sigma, f"({epsilon}, {delta:g})"]
        for one in (without, found[0]):
            row.append(f"{one.predicted_samples:,.0f} ({one.proposal.name})")
        sys.stdout.write("| " + " | ".join(map(str, row)) + " |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
