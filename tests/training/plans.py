"""Plans for tests of the trainer: of a huge epsilon, so that an analytic bound certifies any noise."""

import dataclasses

from jaxacct import BandedToeplitz, BMinSep, CyclicPoisson, Mechanism, Plan, Poisson
from jaxacct.accountants import analytic
from jaxacct.batch_sizes import batch_sizes

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
    epsilon=1e9,
    strategy=None,
    **fields,
):
    """A plan by an analytic bound; at an epsilon of about 1 it is not certified. Fields may be forged."""
    bands = 1 if kind == "poisson" else bands
    scheme = SCHEMES[kind](iterations, rate, separation)
    mechanism = Mechanism(scheme, strategy or BandedToeplitz.square_root(bands), sigma)
    bound = analytic.delta_by("unamplified", mechanism, epsilon)
    expected, largest = batch_sizes(scheme, dataset_size)
    made = Plan(
        mechanism,
        epsilon,
        1e-5,
        analytic_accountant="unamplified",
        analytic_delta=bound,
        dataset_size=dataset_size,
        expected_batch_size=expected,
        max_batch_size=largest,
    )
    return dataclasses.replace(made, **fields)
