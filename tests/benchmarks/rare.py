"""Samples to certify where participation is rare: ordinary replicas against those at an inflated probability.

PYTHONPATH=. python tests/benchmarks/rare.py
"""

import time

import jax

from jaxacct import BandedToeplitz, BMinSep, Mechanism
from jaxacct.core.verify import verify
from jaxacct.strategies import ending


def main():
    rate, b = 0.001, 8
    scheme = BMinSep(100, b, rate / (1 - (b - 1) * rate))
    mechanism = Mechanism(scheme, ending(BandedToeplitz.square_root(8), scheme), 1.0)
    for epsilon in (0.189, 0.16, 0.15):
        for proposal in ("replicas:6", None):
            started = time.process_time()
            options = dict(key=jax.random.key(3), proposal=proposal, max_samples=1_000_000)
            found = verify(mechanism, epsilon, 1e-5, **options)
            side, delta_v = found.remove, found.claim.target.budget.delta_v
            print(
                f"epsilon {epsilon}: {side.proposal}: certified {found.certified}, {side.num_samples:,} "
                f"samples, M / delta_v {side.scale / delta_v:.0f}, estimate {side.estimate:.2e}, "
                f"{time.process_time() - started:.1f} CPU-s",
                flush=True,
            )


if __name__ == "__main__":
    main()
