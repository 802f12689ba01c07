"""Samples that certify a mechanism together with another one: plain draws (predicted) and bounded weights.

    python -m tests.benchmarks.composed

Each row: what is predicted for plain draws of a direction, all that there was before, and what `calibrate`
draws at the same noise multiplier.
"""

import time

import dp_accounting as dp
import jax

from jaxacct import BandedToeplitz, BMinSep, Poisson, calibrate
from jaxacct.calibration.calibrate import NotCertifiedError
from jaxacct.proposals.candidates import predicted_samples
from jaxacct.statistics.bounds import Budget

SETTINGS = [
    (BMinSep(1000, 8, 0.005), 8, 1.0, 3.0, 1e-6, dp.GaussianDpEvent(5.0)),
    (BMinSep(1000, 8, 0.001), 8, 1.0, 3.0, 1e-6, dp.GaussianDpEvent(5.0)),
    (Poisson(1000, 0.004), 1, 1.0, 4.0, 1e-6, dp.GaussianDpEvent(2.0)),
    (Poisson(1000, 0.01), 1, 1.0, 4.0, 1e-6, dp.GaussianDpEvent(2.0)),
    (Poisson(500, 0.02), 1, 1.5, 2.0, 1e-5, dp.GaussianDpEvent(4.0)),
]


def main() -> None:
    for scheme, bands, sigma, epsilon, delta, other in SETTINGS:
        budget = Budget.split(delta)
        before = predicted_samples(budget.delta_v, budget.failure_probability)
        started = time.process_time()
        try:
            plan = calibrate(
                scheme,
                BandedToeplitz.square_root(bands),
                epsilon=epsilon,
                delta=delta,
                noise_multiplier=sigma,
                compose_with=other,
                key=jax.random.key(0),
            )
            evidence = plan.verdict
        except NotCertifiedError as error:
            evidence = error.verdict
        seconds = time.process_time() - started
        assert evidence is not None
        drawn = [f"{side.proposal} {side.num_samples:,}" for side in evidence.directions]
        said = "certified" if evidence.certified else "not certified"
        print(
            f"| {scheme}, sigma {sigma:g} | {other} | ({epsilon:g}, {delta:g}) | {before:,.0f} each "
            f"| {drawn[0]} | {drawn[1]} | {said}, {seconds:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
