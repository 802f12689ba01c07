"""Plans for tests of the trainer. Their guarantee is made up, so that none has to be certified first."""

from jaxacct import BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Plan, Poisson
from jaxacct.calibration import max_batch_size

SCHEMES = {
    "poisson": lambda n, p, b: Poisson(n, p),
    "cyclic-poisson": lambda n, p, b: CyclicPoisson(n, b, min(1.0, p * b)),
    "b-min-sep": lambda n, p, b: BMinSep(n, b, p),
}


def plan(
    kind="b-min-sep",
    *,
    dataset_size,
    iterations=12,
    rate=0.1,
    separation=4,
    bands=3,
    sigma=1.0,
    epsilon=1e4,
    **fields,
):
    """A plan that claims an analytic bound of 0, or of 1 (not certified) at an epsilon below 1000."""
    bands = 1 if kind == "poisson" else bands
    scheme = SCHEMES[kind](iterations, rate, separation)
    mechanism = Mechanism(scheme, BandedToeplitz.square_root(bands), sigma)
    largest = max_batch_size(dataset_size, float(scheme.participation_probabilities().max()), iterations)
    return Plan(
        mechanism,
        epsilon,
        1e-5,
        analytic_delta=0.0 if epsilon >= 1000 else 1.0,
        dataset_size=dataset_size,
        expected_batch_size=float(dataset_size * scheme.participation_probabilities().mean()),
        max_batch_size=largest,
        **fields,
    )
