"""Plans for tests of the trainer: of a huge epsilon, so that an analytic bound certifies any noise."""

from jaxacct import BandedToeplitz, CustomScheme, Mechanism, Plan
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound
from jaxacct.schemes import BalancedMinSep, BMinSep, CyclicPoisson, EpochwiseAllocation, Poisson
from tests.stored_plans import with_derived

SCHEMES = {
    "poisson": lambda n, p, b: Poisson(n, p),
    "cyclic-poisson": lambda n, p, b: CyclicPoisson(n, b, min(1.0, p * b)),
    "b-min-sep": lambda n, p, b: BMinSep(n, b, p),
    "balanced-min-sep": lambda n, p, b: BalancedMinSep(n, b, n * p),
    "epochwise-allocation": lambda n, p, b: EpochwiseAllocation(n, round(1 / p), b),
    "custom": lambda n, p, b: CustomScheme([min(1.0, p * (i + 1)) for i in range(n)], b),
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
    **derived,
):
    """A plan by an analytic bound; at an epsilon of about 1 it is not certified. Sizes may be forged."""
    bands = 1 if kind == "poisson" else bands
    scheme = SCHEMES[kind](iterations, rate, separation)
    made = plan_of(
        Mechanism(scheme, strategy or BandedToeplitz.square_root(bands), sigma), dataset_size, epsilon
    )
    return with_derived(made, **derived) if derived else made


def plan_of(mechanism: Mechanism, dataset_size: int, epsilon: float = 1e4, delta: float = 1e-5) -> Plan:
    """The plan of a mechanism by an analytic bound."""
    claim = Claim(mechanism, ClaimedTarget.at(epsilon, delta), dataset_size, None)
    return Plan(
        Claim(mechanism, ClaimedTarget.at(epsilon, delta, reserved=claim.reserved), dataset_size, None),
        Bound("unamplified"),
    )
