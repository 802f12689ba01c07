"""Accounting for generalised DP-SGD: shuffled or fixed-size batches; individual, batch or mixed clipping.

Sound against an adversary who sees the sampling, and so against every weaker one. With the participations
revealed, `delta(eps) = E_c delta_{G_{c/sigma}}(eps)`: hockey-stick divergences average (`GaussianMixture`).
There is no amplification: an accountant that hides the sampling gives a far smaller epsilon where it applies
(arXiv 2212.05796 notes this itself).
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.parametric import GaussianMixture
from jaxacct.accountants.tradeoff.curves.terms import Terms
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    ParticipationPMF,
    check_sizes,
    participation_pmf,
)
from jaxacct.common import validate as _validate
from jaxacct.statistics import roots

_MAX_LOG = 69.0  # of sigma, whose range is that of `_validate.scale`


@dataclass(frozen=True)
class GeneralDPSGD:
    """One run of generalised DP-SGD: everything its guarantee depends on.

    Attributes:
      dataset_size: number of records N, the same in both data sets.
      num_microbatches: m separately clipped terms a round; 1 is batch clipping.
      microbatch_size: s records a term; 1 is individual clipping.
      num_epochs: number of passes E.
      sampling: how batches are drawn, "shuffling" or "subsampling".
      group_size: g records that may be replaced.
    """

    dataset_size: int
    num_microbatches: int
    microbatch_size: int
    num_epochs: int
    sampling: str
    group_size: int = 1

    def __post_init__(self):
        check_sizes(**dataclasses.asdict(self))

    @property
    def clip(self) -> str:
        """Name of the clipping: "individual", "batch" or "mixed"."""
        if self.microbatch_size == 1:
            return "individual"
        return "batch" if self.num_microbatches == 1 else "mixed"

    @property
    def rounds_per_epoch(self) -> int:
        """R = N / (m s)."""
        return self.dataset_size // (self.num_microbatches * self.microbatch_size)

    def pmf(self) -> ParticipationPMF:
        """Return the exact distribution of c^2."""
        return participation_pmf(**dataclasses.asdict(self))

    def most(self) -> int:
        """Return the largest possible c^2."""
        m, g = self.num_microbatches, self.group_size
        if self.sampling == "subsampling":
            return self.num_epochs * self.rounds_per_epoch * min(m, g) ** 2
        # g records hit at most g terms in all, at most m in a round: full rounds first.
        full, rest = divmod(min(g, m * self.rounds_per_epoch), m)
        return self.num_epochs * (full * m * m + rest * rest)

    def curve(self, sigma: float) -> GaussianMixture:
        """Return the exact trade-off function with the sampling revealed."""
        return mixture_curve(self.pmf(), sigma)

    def epsilon(self, delta: float, sigma: float) -> float:
        """Return epsilon at delta."""
        return mixture_epsilon(delta, self.pmf(), sigma)

    def terms(self) -> Terms:
        """Return the adversary and adjacency of the guarantee."""
        convention = "noise std = 2 x clip_norm x sigma on the sum of clipped terms"
        return Terms("sampling-revealed", "replace", self.group_size, convention, "exact")

    def warnings(self, epsilon: float, delta: float) -> list[str]:
        """Return caveats that belong next to the number."""
        found = []
        if epsilon > 10:
            found.append(f"epsilon {epsilon:.3g} is above 10: hardly a guarantee")
        if delta >= 1 / self.dataset_size:
            found.append(f"delta {delta:g} is at least 1/dataset_size: one record may be published outright")
        why = {
            "subsampling": "the adversary sees the batches; an accountant that hides them gives a far "
            "smaller epsilon",
            "shuffling": "shuffled batches must not be accounted for as Poisson batches",
        }
        return [*found, f"no amplification: {why[self.sampling]}"]

    def relative_noise(self, sigma: float) -> float:
        """Return the noise of the mean clipped term over the clip norm: `2 sigma / m`."""
        return 2 * sigma / self.num_microbatches


def mixture_curve(pmf: ParticipationPMF, sigma: float) -> GaussianMixture:
    """Return the exact trade-off function with the participations revealed; `sigma` relative to 2 C."""
    arrays.scale("sigma", sigma)
    if not isinstance(pmf, ParticipationPMF):
        raise ValueError(f"pmf must be a ParticipationPMF, got {type(pmf).__name__}")
    return GaussianMixture(np.sqrt(pmf.squared_sensitivity) / sigma, pmf.prob, pmf.truncated_mass)


def mixture_tradeoff(alpha, pmf: ParticipationPMF, sigma: float):
    """Return `f(alpha)` of `mixture_curve`; NOT the average of the parts' trade-offs, which is larger."""
    return mixture_curve(pmf, sigma)(alpha)


def mixture_delta(epsilon, pmf: ParticipationPMF, sigma: float):
    """Return `delta(epsilon)` of `mixture_curve`, epsilon >= 0; truncated mass counts as delta."""
    return mixture_curve(pmf, sigma).delta(epsilon)


def mixture_epsilon(delta, pmf: ParticipationPMF, sigma: float):
    """Return the smallest epsilon >= 0 with `mixture_delta <= delta`.

    Raises:
      ValueError: no epsilon suffices, because the truncated mass alone exceeds delta.
    """
    if not np.all(arrays.open_share("delta", delta) > pmf.truncated_mass):
        raise ValueError(
            f"delta must be above the truncated mass {pmf.truncated_mass:.3g} of the pmf, got {delta!r}"
        )
    return mixture_curve(pmf, sigma).epsilon(delta)


def shuffled_batch_clip_mu(
    num_epochs: int, group_size: int, sigma: float, num_rounds_per_epoch: int | None = None
) -> float:
    """Return mu = `sqrt(min(g, R) E) / sigma` of shuffling with batch clipping; tight for one record.

    Args:
      num_epochs: E.
      group_size: g records.
      sigma: noise std over twice the clip norm.
      num_rounds_per_epoch: R; None for no limit.
    """
    E = _validate.positive_integer("num_epochs", num_epochs)
    g = _validate.positive_integer("group_size", group_size)
    _validate.scale("sigma", sigma)
    if num_rounds_per_epoch is not None:
        g = min(g, _validate.positive_integer("num_rounds_per_epoch", num_rounds_per_epoch))
    return math.sqrt(g * E) / sigma


def calibrate_sigma(
    target_epsilon: float,
    target_delta: float,
    *,
    dataset_size: int,
    num_microbatches: int,
    microbatch_size: int,
    num_epochs: int,
    group_size: int = 1,
    sampling: str = "shuffling",
) -> float:
    """Return the smallest sigma (noise std over 2 C) with delta(target_epsilon) <= target_delta, rounded up.

    Sizes as of `GeneralDPSGD`.

    Raises:
      ValueError: no sigma suffices, because the truncated mass alone exceeds target_delta.
    """
    epsilon, delta = _validate.target(target_epsilon, target_delta, ("target_epsilon", "target_delta"))
    pmf = participation_pmf(dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling)
    if pmf.truncated_mass >= delta:
        raise ValueError(
            f"target_delta must be above {pmf.truncated_mass:.3g}, the truncated mass, got {delta:g}"
        )

    def is_enough(log_sigma: float) -> bool:
        return mixture_curve(pmf, math.exp(log_sigma)).log_delta(epsilon) <= math.log(delta)

    _, high = roots.turn(is_enough, 0.0, 2.0, -_MAX_LOG, _MAX_LOG, absolute=1e-13)
    if high == math.inf:
        raise ValueError(
            f"target_delta must be one that sigma {math.exp(_MAX_LOG):.3g} reaches, got {delta!r}"
        )
    return math.exp(high)
