"""Lower limit of every bound for noisy gradient descent on a bounded set (arXiv 2403.00278, theorem C.16)."""

import math

from scipy import special

from jaxacct.accountants.tradeoff.last_iterate.contraction import check_run
from jaxacct.common import validate as _validate


def constrained_gdp_lower_bound(
    *,
    steps: int,
    stepsize: float,
    noise_std: float,
    grad_sensitivity: float,
    num_examples: int,
    diameter: float,
    batches_per_epoch: int = 1,
) -> float:
    """Return a lower bound on the mu of the last iterate, for any proof: theorem C.16 with its constants.

    The paper has `mu = (c1 / sigma) sqrt(LD / (eta n))` with unnamed constants. Here a flat loss is compared
    with a sloping one on an interval of length D from its middle: without drift the iterate is above the
    middle with probability 1/2 at most, with it below at most with

        beta = Phi(-sqrt(X r)) + exp(-X),  X = LD / (eta n sigma^2),  r = t eta L / (n D),

    so `mu >= Phi^-1(1 - beta)`: about sqrt(X) after t = Dn / (eta L) steps, sqrt(2 X) in the end, where
    theorem 4.3 has 2 sqrt(X) (proofs/shifted_interpolation.md).

    Args:
      steps: t, whole epochs for a cycle of batches.
      stepsize: as `noisy_gd_gdp`, all above 0.
      noise_std: as `noisy_gd_gdp`, all above 0.
      grad_sensitivity: as `noisy_gd_gdp`, all above 0.
      num_examples: as `noisy_gd_gdp`, all above 0.
      diameter: as `noisy_gd_gdp`, all above 0.
      batches_per_epoch: l, of noisy CGD.
    """
    t = _validate.positive_integer("steps", steps)
    cycle = _validate.positive_integer("batches_per_epoch", batches_per_epoch)
    check_run(
        noise_std=noise_std, grad_sensitivity=grad_sensitivity, num_examples=num_examples, diameter=diameter
    )
    eta = _validate.scale("stepsize", stepsize)
    width = _validate.scale("diameter", diameter)
    if t % cycle or num_examples % cycle:
        raise ValueError(f"batches_per_epoch must divide steps and num_examples, got {cycle} for {t}")
    drift, noise = eta * grad_sensitivity / num_examples, eta * noise_std
    # Over a cycle of l steps one is steeper by l drift: from any step on the mean is at least `drift` a step.
    beta = special.ndtr(-math.sqrt(t) * drift / noise) + math.exp(-drift * width / noise**2)
    return max(0.0, float(-special.ndtri(min(1.0, beta))))
