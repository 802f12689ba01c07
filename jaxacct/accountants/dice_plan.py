"""Plan of DiceSGD under valid bounds: `dice.dice_mu` and `dice.dice_delta_subsampled`."""

from dataclasses import dataclass
from typing import Any

from jaxacct.accountants.dice import dice_delta_subsampled, dice_mu
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta, gdp_mu
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.common.stored_plan import StoredPlan
from jaxacct.schemes import Poisson
from jaxacct.schemes.protocol.batch_sizes import Overflow, batch_sizes, overflow
from jaxacct.statistics import roots

SAMPLING = ("shuffling", "poisson")
_STEPS = ("iterations", "clip_norm", "error_clip_norm", "batch_size", "reset_every")


@dataclass(frozen=True)
class DicePlan(StoredPlan):
    """DiceSGD plan with a guarantee for the whole released history; zero-out adjacency.

    In the neighbouring data set one example's gradients are zero. The bound for shuffled batches holds for
    any batches, which may be public, that have an example once in an epoch of N // B steps. The bound for
    Poisson batches is the smaller of that of an example in every batch and of amplification: outputs before
    an example's first participation do not depend on it, and later its clipped gradients are hidden, but not
    what is fed back. It requires that the batches stay hidden.

    Attributes:
      dataset_size: N.
      batch_size: B, at most N, of every batch or, Poisson, on average; the divisor of every mean.
      sampling: "shuffling" or "poisson".
      iterations: T.
      clip_norm: C1, of each gradient.
      error_clip_norm: C2, of the fed-back error.
      noise_std: sigma_1, standard deviation on the mean.
      reset_every: the error is reset to 0 after so many steps; None for never.
      automatic: gradients and error are normalised (algorithm 4) rather than clipped.
      epsilon, delta: the guarantee.
    """

    dataset_size: int
    batch_size: int
    sampling: str
    iterations: int
    clip_norm: float
    error_clip_norm: float
    noise_std: float
    reset_every: int | None
    automatic: bool
    epsilon: float
    delta: float

    schema = "jaxacct-dice"
    training = "dice"

    def __post_init__(self):
        size = _validate.positive_integer("dataset_size", self.dataset_size)
        if _validate.positive_integer("batch_size", self.batch_size) > size:
            raise ValueError(f"batch_size must be at most the dataset_size {size}, got {self.batch_size}")
        _validate.one_of("sampling", self.sampling, SAMPLING)
        _validate.positive_number("epsilon", self.epsilon)
        _validate.open_probability("delta", self.delta)
        _validate.instance("automatic", self.automatic, bool, "True or False")
        self.mu  # noqa: B018  checks the rest

    @classmethod
    def calibrate(cls, epsilon: float, delta: float, **run) -> "DicePlan":
        """Return the plan with the smallest noise for (epsilon, delta).

        The run has dataset_size, batch_size, iterations, clip_norm, error_clip_norm; and sampling
        ("shuffling"), reset_every (None), automatic (False) where they differ from these defaults.
        """
        given: dict[str, Any] = dict(sampling="shuffling", reset_every=None, automatic=False) | run

        def at(noise_std: float) -> "DicePlan":
            return cls(noise_std=noise_std, epsilon=epsilon, delta=delta, **given)

        is_shuffled = given["sampling"] == "shuffling"
        # Part of delta is reserved for oversized Poisson batches.
        whole = delta if is_shuffled else delta * (1 - 2e-3)
        # Slightly larger: a value rounded down would not be certified.
        high = at(1.0).mu / float(gdp_mu(epsilon, whole)) * (1 + 1e-9)
        if is_shuffled:
            return at(high)
        low = high / 2
        while at(low).certified:
            high, low = low, low / 2
        return at(roots.bisect(lambda noise_std: at(noise_std).certified, low, high, relative=1e-6)[1])

    @property
    def scheme(self) -> Poisson:
        """Sampling scheme of Poisson batches."""
        return Poisson(self.iterations, self.batch_size / self.dataset_size)

    @property
    def overflow(self) -> Overflow | None:
        """Reserve for an oversized Poisson batch, at which a run stops; None for shuffled batches."""
        if self.sampling == "shuffling":
            return None
        return overflow(self.scheme, self.epsilon, self.delta, self.dataset_size)

    @property
    def max_batch_size(self) -> int:
        """Largest batch."""
        reserve = self.overflow
        largest = (
            batch_sizes(self.scheme, self.dataset_size, None, reserve.probability)[1] if reserve else None
        )
        return self.batch_size if largest is None else largest

    @property
    def mu(self) -> float:
        """Mu of the released history, which is mu-GDP."""
        return dice_mu(noise_std=self.noise_std, participations=self.participations, **self._steps)

    @property
    def participations(self) -> int:
        """Most steps that an example is in: one an epoch of shuffled batches, whose rest is dropped."""
        of_epoch = 1 if self.sampling == "poisson" else self.dataset_size // self.batch_size
        return -(-self.iterations // of_epoch)

    @property
    def _steps(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STEPS}

    @property
    def certified(self) -> bool:
        """Whether the noise gives the guarantee, recomputed."""
        bound, reserve = float(gdp_delta(self.epsilon, self.mu)), self.overflow
        if reserve is None:
            return bound <= self.delta
        at = dict(noise_std=self.noise_std, sampling_probability=self.batch_size / self.dataset_size)
        bound = min(bound, dice_delta_subsampled(self.epsilon, **at, **self._steps))
        return bound + reserve.delta <= self.delta

    def statement(self) -> str:
        """Return the guarantee in a sentence."""
        resets = "" if self.reset_every is None else f", set to 0 every {self.reset_every} steps"
        scaled = "normalised to" if self.automatic else "clipped at"
        seen, section = "every released step and which examples are in which batch", "section 1"
        drawn = f", an example in at most {self.participations} of them"
        if self.sampling == "poisson":
            seen, drawn, section = "every released step", " on average, Poisson-sampled", "sections 1 and 2"
        return (
            f"{self.promise} under zero-out adjacency for "
            f"one of {self.dataset_size} examples, against an adversary who sees {seen}, but neither the "
            f"error that is fed back nor the noise: DiceSGD, {self.iterations} steps of "
            f"{self.batch_size} examples{drawn}, gradients {scaled} {exact(self.clip_norm)}, the error at "
            f"{exact(self.error_clip_norm)}{resets}, noise {exact(self.noise_std)} on the mean. By the "
            f"bounds of proofs/dice.md, {section}, not by theorem 3.7 of arXiv 2311.14632, which is false."
        )
