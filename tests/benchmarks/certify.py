"""Samples and seconds to certify the same noise: plain sampling against the default, bounded proposals.

    PYTHONPATH=. python tests/benchmarks/certify.py

Both verify the noise multiplier that the grids released (`grid.py`). Where plain sampling would need more
than three million samples its seconds are projected: predicted samples over its rate, measured on the spot.
"""

import time

import jax

from jaxacct import BandedToeplitz, BMinSep, Mechanism, verify
from jaxacct.proposals.base import draw_in_batches, plain
from jaxacct.proposals.candidates import candidates

# (iterations, epoch, bands, separation, epsilon, delta, noise multiplier)
CELLS = [
    (1024, 128, 8, 64, 1.0, 1e-3, 1.9477),
    (1024, 128, 8, 64, 4.0, 1e-3, 0.8034),
    (1024, 512, 8, 8, 4.0, 1e-3, 0.4885),
    (1500, 300, 16, 64, 8.0, 2.8e-6, 0.6265),
    (1500, 300, 16, 64, 4.0, 2.8e-6, 0.8700),
    (1500, 300, 16, 64, 1.0, 2.8e-6, 2.2389),
    (7200, 8224, 256, 256, 10.0, 1.301e-8, 0.3925),
]
_MOST = 3_000_000


def rate(mechanism: Mechanism) -> float:
    """Samples a second of plain sampling, remove direction."""
    proposal = plain(mechanism, "remove")
    list(draw_in_batches(proposal, jax.random.key(0), 0, 16))
    started = time.perf_counter()
    list(draw_in_batches(proposal, jax.random.key(1), 0, 160))
    return 160 * 128 / (time.perf_counter() - started)


def timed(*args, **options):
    started = time.perf_counter()
    evidence = verify(*args, **options)
    return evidence, time.perf_counter() - started


def main() -> None:
    print("| n, epoch, bands, separation | eps, delta | noise | bounded | samples | s | plain | s | ratio |")
    print("|---" * 9 + "|")
    for n, epoch, bands, separation, epsilon, delta, sigma in CELLS:
        strategy = BandedToeplitz.optimal(
            iterations=n, bands=bands, min_separation=separation, participations=1
        )
        if n == 7200:
            strategy = BandedToeplitz.square_root(bands)
        scheme = BMinSep.from_batch_size(
            dataset_size=1000 * epoch, batch_size=1000, iterations=n, min_separation=separation
        )
        mechanism = Mechanism(scheme, strategy, sigma)
        evidence, seconds = timed(mechanism, epsilon, delta)
        names = f"{evidence.remove.proposal} / {evidence.add.proposal}"
        if not evidence.certified:
            names += " (not accepted)"
        offered = candidates(mechanism, epsilon, "remove", evidence.claim.target.budget)
        predicted = 2 * next(c.predicted_samples for c in offered if c.proposal.name == "plain")
        if predicted <= _MOST:
            direct, plain_seconds = timed(mechanism, epsilon, delta, proposal="plain")
            shown, how = direct.num_samples, "measured" if direct.certified else "rejected"
        else:
            shown, plain_seconds, how = predicted, predicted / rate(mechanism), "projected"
        print(
            f"| {n}, {epoch}, {bands}, {separation} | {epsilon:g}, {delta:g} | {sigma} | {names} | "
            f"{evidence.num_samples:,} | {seconds:.1f} | {shown:,.0f} ({how}) | {plain_seconds:,.0f} | "
            f"{plain_seconds / seconds:,.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
