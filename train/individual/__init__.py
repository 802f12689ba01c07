"""Every example's own privacy loss while a model trains, and filters that exclude an example in time.

`TrainOptions(individual=IndividualAccounting(...))` for DP-GD and Poisson DP-SGD with independent noise. At
every step the clipped gradient of *every* example is computed at the current parameters, and the example is
charged for the norm of exactly what it would add to the integer sum, whether it was sampled or not: a charge
that depended on the draw, or on an old norm, would void the guarantee (proofs/individual.md, section 2).

Losses of single examples are **private**: a function of the data that no guarantee covers. They are neither
printed nor logged; they are in `Result.private_individual` and in `checkpoints/`, which is secret.
"""

from .accounting import IndividualAccounting, PrivateLosses

__all__ = ["IndividualAccounting", "PrivateLosses"]
