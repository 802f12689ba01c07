"""A plan of DiceSGD: the bound that holds (`dice.dice_mu`), checked again whenever it is asked for."""

from dataclasses import dataclass
from typing import Any

from jaxacct import _validate
from jaxacct.accountants.dice import dice_mu, dice_noise_std
from jaxacct.individual.gdp import gdp_delta
from jaxacct.records import exact
from jaxacct.tradeoff.plan import _Stored


@dataclass(frozen=True)
class DicePlan(_Stored):
    """DiceSGD on shuffled batches of one size, under a guarantee for the whole released history.

    The bound holds for any batches that are fixed beforehand or drawn independently of the data, even where
    they are known to the adversary; it does not use that they are random. Its adjacency is zero-out: in the
    neighbouring data set one example's gradients are zero.

    Attributes:
      dataset_size: N.
      batch_size: B, at most N; also the divisor of every mean.
      iterations: T.
      clip_norm: C1, of each gradient.
      error_clip_norm: C2, of the error that is fed back.
      noise_std: sigma_1, standard deviation on the mean.
      reset_every: the error is set to 0 after so many steps; None for never.
      automatic: gradients and error are normalised (algorithm 4) rather than clipped.
      epsilon, delta: what is promised.
    """

    dataset_size: int
    batch_size: int
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
            raise ValueError(f"batch_size must be at most the dataset_size {size}, was {self.batch_size}")
        _validate.positive_number("epsilon", self.epsilon)
        _validate.open_probability("delta", self.delta)
        _validate.instance("automatic", self.automatic, bool, "True or False")
        self.mu  # noqa: B018  checks the rest

    @classmethod
    def calibrate(
        cls,
        epsilon: float,
        delta: float,
        *,
        dataset_size: int,
        batch_size: int,
        iterations: int,
        clip_norm: float,
        error_clip_norm: float,
        reset_every: int | None = None,
        automatic: bool = False,
    ) -> "DicePlan":
        """The plan with the least noise for (epsilon, delta)."""
        problem: dict[str, Any] = dict(
            iterations=iterations,
            clip_norm=clip_norm,
            error_clip_norm=error_clip_norm,
            batch_size=batch_size,
            reset_every=reset_every,
        )
        # A hair more: what is rounded down would not be certified.
        noise_std = dice_noise_std(epsilon, delta, **problem) * (1 + 1e-9)
        return cls(
            dataset_size=dataset_size,
            noise_std=noise_std,
            automatic=automatic,
            epsilon=epsilon,
            delta=delta,
            **problem,
        )

    @property
    def mu(self) -> float:
        """The released history is mu-GDP."""
        return dice_mu(
            iterations=self.iterations,
            clip_norm=self.clip_norm,
            error_clip_norm=self.error_clip_norm,
            batch_size=self.batch_size,
            noise_std=self.noise_std,
            reset_every=self.reset_every,
        )

    @property
    def certified(self) -> bool:
        """Whether the noise gives the promise, computed again."""
        return bool(gdp_delta(self.mu, self.epsilon) <= self.delta)

    def statement(self) -> str:
        """The guarantee in a sentence."""
        resets = "" if self.reset_every is None else f", set to 0 every {self.reset_every} steps"
        scaled = "normalised to" if self.automatic else "clipped at"
        return (
            f"({exact(self.epsilon)}, {exact(self.delta)})-differential privacy under zero-out adjacency for "
            f"one of {self.dataset_size} examples, against an adversary who sees every released step and "
            "which examples are in which batch, but neither the error that is fed back nor the noise: "
            f"DiceSGD, {self.iterations} steps of {self.batch_size} examples, gradients {scaled} "
            f"{exact(self.clip_norm)}, the error at {exact(self.error_clip_norm)}{resets}, noise "
            f"{exact(self.noise_std)} on the mean. By the bound of proofs/dice.md, section 1, not by theorem "
            "3.7 of arXiv 2311.14632, which is false."
        )
