"""Accounting for generalised DP-SGD: shuffled or fixed-size batches; individual, batch or mixed clipping.

Sound against an adversary who sees the sampling, and so against every weaker one. There is no
amplification: an accountant that hides the sampling gives a far smaller epsilon where it applies (arXiv
2212.05796 says so itself).
"""

import math
from dataclasses import dataclass, field

import numpy as np

from jaxacct.accountants.tradeoff.curves import arrays
from jaxacct.accountants.tradeoff.curves.curves import Gaussian
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon
from jaxacct.accountants.tradeoff.curves.mixtures import GaussianMixture, mixture_curve, mixture_epsilon
from jaxacct.accountants.tradeoff.curves.terms import Terms, sampling_revealed
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    ParticipationPMF,
    check_sizes,
    participation_pmf,
)
from jaxacct.common import validate as _validate

_MAX_LOG = 69.0  # of sigma, whose range is that of `_validate.scale`


@dataclass(frozen=True)
class GeneralDPSGD:
    """One run of generalised DP-SGD, everything its guarantee depends on.

    Attributes:
      dataset_size: N.
      num_microbatches: m separately clipped terms a round; 1 is batch clipping.
      microbatch_size: s records a term; 1 is individual clipping.
      num_epochs: E.
      sampling: "shuffling" or "subsampling".
      group_size: g records that may be replaced.
    """

    dataset_size: int
    num_microbatches: int
    microbatch_size: int
    num_epochs: int
    sampling: str
    group_size: int = 1

    def __post_init__(self):
        check_sizes(
            self.dataset_size,
            self.num_microbatches,
            self.microbatch_size,
            self.num_epochs,
            self.group_size,
            self.sampling,
        )

    @property
    def clip(self) -> str:
        """ "individual", "batch" or "mixed"."""
        if self.microbatch_size == 1:
            return "individual"
        return "batch" if self.num_microbatches == 1 else "mixed"

    @property
    def rounds_per_epoch(self) -> int:
        """R = N / (m s)."""
        return self.dataset_size // (self.num_microbatches * self.microbatch_size)

    def pmf(self) -> ParticipationPMF:
        """The exact law of c^2."""
        return participation_pmf(
            self.dataset_size,
            self.num_microbatches,
            self.microbatch_size,
            self.num_epochs,
            self.group_size,
            self.sampling,
        )

    def most(self) -> int:
        """The largest possible c^2."""
        m, g, s = self.num_microbatches, self.group_size, self.microbatch_size
        if self.sampling == "subsampling":
            return self.num_epochs * self.rounds_per_epoch * min(m, g) ** 2
        if m == 1:
            return self.num_epochs * min(g, self.rounds_per_epoch)
        # g records hit at most g terms in all, at most m in a round: full rounds first.
        full, rest = divmod(min(g, m * self.rounds_per_epoch), m)
        del s
        return self.num_epochs * (full * m * m + rest * rest)

    def curve(self, sigma: float) -> GaussianMixture:
        """The exact trade-off function with the sampling revealed."""
        return mixture_curve(self.pmf(), sigma)

    def worst_case(self, sigma: float) -> Gaussian:
        """G of the largest c: looser, without a law."""
        arrays.check_scale("sigma", sigma)
        return Gaussian(math.sqrt(self.most()) / sigma)

    def epsilon(self, delta: float, sigma: float) -> float:
        """Epsilon at delta."""
        return mixture_epsilon(delta, self.pmf(), sigma)

    def terms(self) -> Terms:
        """Who it holds against."""
        return sampling_revealed(self.group_size, "exact")

    def warnings(self, epsilon: float, delta: float) -> list[str]:
        """What a reader must know next to the number."""
        found = []
        if epsilon > 10:
            found.append(f"epsilon {epsilon:.3g} is above 10: hardly a guarantee")
        if delta >= 1 / self.dataset_size:
            found.append(f"delta {delta:g} is at least 1/dataset_size: one record may be published outright")
        if self.sampling == "subsampling":
            found.append(
                "no amplification: the adversary sees the batches; an accountant that hides them gives a far "
                "smaller epsilon"
            )
        else:
            found.append("no amplification: shuffled batches must not be accounted for as Poisson batches")
        return found

    def relative_noise(self, sigma: float) -> float:
        """Noise of the mean of a round's clipped terms, relative to the clip norm: `2 sigma / m`."""
        return 2 * sigma / self.num_microbatches


def shuffled_batch_clip_mu(
    num_epochs: int, group_size: int, sigma: float, num_rounds_per_epoch: int | None = None
) -> float:
    """`sqrt(min(g, R) E) / sigma`: shuffling with batch clipping for any group; tight for one record."""
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
    """The least sigma (noise std over 2 x clip norm) with delta(target_epsilon) <= target_delta, from above.

    Raises:
      ValueError: where no sigma will do, because the truncated mass alone exceeds target_delta.
    """
    epsilon, delta = _validate.calibration_target(
        "target_epsilon", target_epsilon, "target_delta", target_delta
    )
    pmf = participation_pmf(dataset_size, num_microbatches, microbatch_size, num_epochs, group_size, sampling)
    if pmf.truncated_mass >= delta:
        raise ValueError(
            f"target_delta must be above {pmf.truncated_mass:.3g}, the truncated mass, was {delta:g}"
        )

    def log_delta(log_sigma: float) -> float:
        return float(mixture_curve(pmf, math.exp(log_sigma)).log_delta(epsilon))

    low = high = 0.0
    while log_delta(high) > math.log(delta):
        high += 2.0
        if high > _MAX_LOG:
            raise ValueError(
                f"target_delta must be one that sigma {math.exp(_MAX_LOG):.3g} reaches, was {delta!r}"
            )
    while log_delta(low) <= math.log(delta):
        low -= 2.0
        if low < -_MAX_LOG:
            return math.exp(low + 2.0)
    while high - low > 1e-13 * max(1.0, abs(high)):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle) > math.log(delta) else (low, middle)
        if middle in (low, high) and math.nextafter(low, high) >= high:
            break
    return math.exp(high)


def generic_group_epsilon(delta: float, mu: float, group_size: int) -> float:
    """Epsilon of the generic rule, `G_{g mu}`: what group privacy costs without the mechanism's own law."""
    return float(gdp_epsilon(delta, mu * group_size))


@dataclass(frozen=True)
class MonteCarloDelta:
    """An estimate of delta and an upper limit for it. Only the limit may be released."""

    estimate: float
    upper_confidence_bound: float
    standard_error: float
    confidence: float
    num_samples: int
    terms: Terms = field(default_factory=lambda: sampling_revealed(1, "certified"))

    def __iter__(self):
        return iter((self.estimate, self.upper_confidence_bound))


def upper_mean(values: np.ndarray, confidence: float) -> float:
    """Upper limit for a mean of independent values in [0, 1]: the lesser of Hoeffding's and empirical
    Bernstein's.

    Each holds with half of the failure probability (Maurer and Pontil 2009, theorem 4).
    """
    n = len(values)
    if n < 2 or not (values.min() >= 0 and values.max() <= 1):
        raise ValueError(f"values must be at least two numbers in [0, 1], were {n}")
    log = math.log(2 / (1 - confidence))
    mean, variance = math.fsum(values) / n, float(np.var(values, ddof=1))
    hoeffding = mean + math.sqrt(log / (2 * n))
    bernstein = (
        mean + math.sqrt(2 * variance * (log + math.log(2)) / n) + 7 * (log + math.log(2)) / (3 * (n - 1))
    )
    return min(1.0, hoeffding, bernstein)
