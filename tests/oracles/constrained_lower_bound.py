"""Lower limit of every bound for noisy gradient descent on a bounded set (arXiv 2403.00278, theorem C.16)."""

import math

from scipy import special


def constrained_gdp_lower_bound(
    *, steps, stepsize, noise_std, grad_sensitivity, num_examples, diameter, batches_per_epoch=1
):
    """Return a lower bound on the mu of the last iterate, for any proof: theorem C.16 with its constants.

    The paper has `mu = (c1 / sigma) sqrt(LD / (eta n))` with unnamed constants. Here a flat loss is compared
    with a sloping one on an interval of length D from its middle: without drift the iterate is above the
    middle with probability 1/2 at most, with it below at most with

        beta = Phi(-sqrt(X r)) + exp(-X),  X = LD / (eta n sigma^2),  r = t eta L / (n D),

    so `mu >= Phi^-1(1 - beta)`: about sqrt(X) after t = Dn / (eta L) steps, sqrt(2 X) in the end, where
    theorem 4.3 has 2 sqrt(X) (proofs/shifted_interpolation.md). Whole epochs for a cycle of batches.
    """
    assert steps % batches_per_epoch == num_examples % batches_per_epoch == 0
    drift, noise = stepsize * grad_sensitivity / num_examples, stepsize * noise_std
    # Over a cycle of l steps one is steeper by l drift: from any step on the mean is at least `drift` a step.
    beta = special.ndtr(-math.sqrt(steps) * drift / noise) + math.exp(-drift * diameter / noise**2)
    return max(0.0, float(-special.ndtri(min(1.0, beta))))
