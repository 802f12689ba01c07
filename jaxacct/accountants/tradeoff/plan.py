"""Plans of the two deterministic accountants: what was promised, checked again whenever it is asked for.

A plan says who it holds against (`terms`), whether it holds (`certified`), what to tell people (`statement`)
and which procedure of the trainer realises it (`training`).
"""

from dataclasses import asdict, dataclass
from typing import Any

from jaxacct.accountants.tradeoff.curves.terms import Terms, last_iterate, sampling_revealed
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD, calibrate_sigma
from jaxacct.accountants.tradeoff.generalized_dpsgd.laws import SamplerLaw
from jaxacct.accountants.tradeoff.generalized_dpsgd.mixture_certificate import (
    MixtureEvidence,
    calibrate_mixture,
    certify_mixture,
    flaws,
    replayed,
)
from jaxacct.accountants.tradeoff.last_iterate.calibration import METHODS, calibrate_noise
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.common.stored_plan import StoredPlan
from jaxacct.kernels.randomness import checked_key


@dataclass(frozen=True)
class GeneralPlan(StoredPlan):
    """Generalised DP-SGD under a guarantee against whoever sees the sampling (arXiv 2212.05796).

    Attributes:
      dataset_size, num_microbatches, microbatch_size, num_epochs, sampling, group_size: as `GeneralDPSGD`.
      sigma: noise std over twice the clip norm, on the sum of clipped terms.
      epsilon, delta: what is promised.
    """

    dataset_size: int
    num_microbatches: int
    microbatch_size: int
    num_epochs: int
    sampling: str
    group_size: int
    sigma: float
    epsilon: float
    delta: float

    schema = "jaxacct-general-dpsgd"
    training = "general-dpsgd"

    def __post_init__(self):
        _validate.scale("sigma", self.sigma)
        _validate.calibration_target("epsilon", self.epsilon, "delta", self.delta)
        self.run  # noqa: B018  checks the sizes

    @classmethod
    def calibrate(
        cls,
        epsilon: float,
        delta: float,
        *,
        dataset_size: int,
        num_microbatches: int,
        microbatch_size: int,
        num_epochs: int,
        sampling: str,
        group_size: int = 1,
    ) -> "GeneralPlan":
        """The plan with the least noise for (epsilon, delta)."""
        sizes: dict[str, Any] = dict(
            dataset_size=dataset_size,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            num_epochs=num_epochs,
            sampling=sampling,
            group_size=group_size,
        )
        return cls(sigma=calibrate_sigma(epsilon, delta, **sizes), epsilon=epsilon, delta=delta, **sizes)

    @property
    def run(self) -> GeneralDPSGD:
        """The mechanism."""
        return GeneralDPSGD(
            self.dataset_size,
            self.num_microbatches,
            self.microbatch_size,
            self.num_epochs,
            self.sampling,
            self.group_size,
        )

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        return self.run.rounds_per_epoch * self.num_epochs

    @property
    def iterations(self) -> int:
        """Steps that it covers: its rounds."""
        return self.rounds

    @property
    def certified(self) -> bool:
        """Whether the noise gives the promise, computed again."""
        return bool(self.run.curve(self.sigma).delta(self.epsilon) <= self.delta)

    def verify(self, *, progress=None) -> None:
        """Nothing to draw: `certified` computes all of it again."""
        del progress

    def lasting(self) -> dict:
        """What a run may not change and go on: all but evidence, which may be drawn anew."""
        return self.to_json()

    @property
    def terms(self) -> Terms:
        """Who it holds against."""
        return self.run.terms()

    def statement(self) -> str:
        """The guarantee in a sentence."""
        return (
            f"({exact(self.epsilon)}, {exact(self.delta)})-differential privacy for replacing up to "
            f"{self.group_size} of {self.dataset_size} records, against an adversary who sees which records "
            f"are in which batch and everything else but the noise; {self.run.clip} clipping, "
            f"{self.sampling}, {self.num_epochs} epochs, noise {exact(self.sigma)} times twice the clip norm."
        )


@dataclass(frozen=True)
class SampledGeneralPlan(GeneralPlan):
    """A `GeneralPlan` by draws of its participation law: where the exact law takes too long to compute.

    Attributes:
      evidence: the draws; delta includes the probability that they mislead.
    """

    evidence: MixtureEvidence | None = None

    schema = "jaxacct-general-dpsgd-sampled"

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.evidence, MixtureEvidence):
            raise ValueError(f"evidence must be draws of the law, was {type(self.evidence).__name__}")

    @classmethod
    def calibrate(
        cls, epsilon: float, delta: float, *, num_samples: int = 2**18, key=None, progress=None, **sizes
    ) -> "SampledGeneralPlan":
        """A plan with hardly more noise than (epsilon, delta) needs, shown by at most `num_samples` draws.

        Args:
          epsilon, delta: the promise.
          num_samples: more of them need less noise.
          key: a JAX key; from the operating system by default. Only tests should fix it.
          progress: called with ("participations", draws, most draws).
          sizes: as `GeneralPlan.calibrate`.

        Raises:
          ValueError: bad arguments, or draws that do not show it.
        """
        law = SamplerLaw(GeneralDPSGD(**sizes))
        key = checked_key(key)
        sigma = calibrate_mixture(law, epsilon, delta, num_samples=num_samples, key=key)
        evidence = certify_mixture(
            law, sigma, epsilon, delta, num_samples=num_samples, key=key, progress=progress
        )
        return cls(sigma=sigma, epsilon=epsilon, delta=delta, evidence=evidence, **asdict(law.run))

    @property
    def law(self) -> SamplerLaw:
        """What was drawn."""
        return SamplerLaw(self.run)

    @property
    def draws(self) -> MixtureEvidence:
        """The evidence, which is never missing."""
        assert self.evidence is not None
        return self.evidence

    @property
    def flaws(self) -> list[str]:
        """Why the draws do not show the promise, a line each; empty if they do."""
        return flaws(self.draws, self.law, self.sigma, self.epsilon, self.delta)

    @property
    def certified(self) -> bool:
        """Whether the stored draws show the promise, computed again."""
        return not self.flaws

    def verify(self, *, num_samples: int | None = None, key=None, progress=None) -> MixtureEvidence:
        """Fresh draws that show the promise, a million or eight times as many at most; or ValueError."""
        most = max(2**20, 8 * self.draws.num_samples) if num_samples is None else num_samples
        return certify_mixture(
            self.law, self.sigma, self.epsilon, self.delta, num_samples=most, key=key, progress=progress
        )

    def replay(self) -> bool:
        """Whether the stored key draws the stored counts."""
        return replayed(self.draws, self.law)

    def lasting(self) -> dict:
        return {name: value for name, value in self.to_json().items() if name != "evidence"}

    @property
    def terms(self) -> Terms:
        """Who it holds against."""
        return sampling_revealed(self.group_size, "certified")

    def statement(self) -> str:
        """The guarantee in a sentence."""
        return (
            f"{super().statement()} Certified by {self.draws.num_samples:,} draws of the batches, with the "
            "probability that they mislead in delta."
        )


@dataclass(frozen=True)
class LastIteratePlan(StoredPlan):
    """Noisy gradient descent on convex losses of which only the last iterate is released (arXiv 2403.00278).

    Attributes:
      method: "gd", "cgd" or "sgd".
      num_examples: n.
      steps: in all; for "cgd" a whole number of epochs.
      batch_size: b; n for "gd".
      stepsize: of every step.
      noise_std: on the mean gradient of a batch.
      grad_sensitivity, smoothness, strong_convexity: what every example's loss obeys.
      diameter: of the ball that is projected onto, None without one.
      epsilon, delta: what is promised.
    """

    method: str
    num_examples: int
    steps: int
    batch_size: int
    stepsize: float
    noise_std: float
    grad_sensitivity: float
    smoothness: float
    strong_convexity: float
    diameter: float | None
    epsilon: float
    delta: float

    schema = "jaxacct-last-iterate"
    training = "last-iterate"

    def __post_init__(self):
        _validate.one_of("method", self.method, tuple(METHODS))
        for name in ("num_examples", "steps", "batch_size"):
            _validate.positive_integer(name, getattr(self, name))
        _validate.target_epsilon("epsilon", self.epsilon)
        _validate.open_probability("delta", self.delta)
        _validate.positive_number("stepsize", self.stepsize)
        if self.method == "gd" and self.batch_size != self.num_examples:
            raise ValueError(
                f"batch_size must be num_examples {self.num_examples} for gd, was {self.batch_size}"
            )
        if self.method == "cgd" and (
            self.num_examples % self.batch_size or self.steps % (self.num_examples // self.batch_size)
        ):
            raise ValueError("batch_size must divide num_examples, and steps be whole epochs, for cgd")
        self.bound()

    @classmethod
    def calibrate(cls, epsilon: float, delta: float, *, method: str, loss, **run) -> "LastIteratePlan":
        """The plan with the least noise for (epsilon, delta), for a loss of `train.convex`.

        Args:
          method: "gd", "cgd" or "sgd".
          loss: with `grad_sensitivity`, `smoothness`, `strong_convexity`.
          run: num_examples, steps, batch_size, stepsize, diameter.
        """
        fields: dict[str, Any] = _complete(run) | _conditions(loss)
        found: dict[str, Any] = _arguments(method, **run) | _conditions(loss)
        noise = calibrate_noise(epsilon, delta, method=method, **found)
        return cls(method=method, noise_std=noise, epsilon=epsilon, delta=delta, **fields)

    @classmethod
    def at_noise(cls, noise_std: float, delta: float, *, method: str, loss, **run) -> "LastIteratePlan":
        """The plan with this noise and the least epsilon at `delta`; arguments as `calibrate`."""
        fields: dict[str, Any] = dict(method=method, noise_std=noise_std, delta=delta)
        fields |= _complete(run) | _conditions(loss)
        epsilon = float(cls(epsilon=1.0, **fields).bound().epsilon(delta))
        # A root from below would not be certified.
        for hair in (0.0, 1e-12, 1e-9, 1e-6):
            plan = cls(epsilon=max(epsilon * (1 + hair), 1e-9), **fields)
            if plan.certified:
                return plan
        raise ValueError(f"noise_std must give an epsilon at delta {delta:g}, was {noise_std!r}")

    @property
    def iterations(self) -> int:
        """Steps that it covers, all of which must be run."""
        return self.steps

    def bound(self):
        """The accountant's result."""
        arguments = _arguments(
            self.method,
            num_examples=self.num_examples,
            steps=self.steps,
            batch_size=self.batch_size,
            stepsize=self.stepsize,
            diameter=self.diameter,
        )
        return METHODS[self.method](
            noise_std=self.noise_std,
            grad_sensitivity=self.grad_sensitivity,
            smoothness=self.smoothness,
            strong_convexity=self.strong_convexity,
            **arguments,
        )

    @property
    def certified(self) -> bool:
        """Whether the noise gives the promise, computed again."""
        return self.bound().holds(self.epsilon, self.delta)

    @property
    def terms(self) -> Terms:
        """Who it holds against."""
        return last_iterate("certified")

    def statement(self) -> str:
        """The guarantee in a sentence."""
        return (
            f"({exact(self.epsilon)}, {exact(self.delta)})-differential privacy for replacing one of "
            f"{self.num_examples} examples, where nothing but the last of {self.steps} iterates of noisy "
            f"{self.method} is ever shown, every example's loss has a gradient sensitivity of at most "
            f"{exact(self.grad_sensitivity)}, smoothness {exact(self.smoothness)} and strong convexity "
            f"{exact(self.strong_convexity)}, and the noise on mean gradients has the standard deviation "
            f"{exact(self.noise_std)}."
        )


def _conditions(loss) -> dict[str, float]:
    return {name: getattr(loss, name) for name in ("grad_sensitivity", "smoothness", "strong_convexity")}


def _complete(run: dict[str, Any]) -> dict[str, Any]:
    wanted = {"num_examples", "steps", "batch_size", "stepsize", "diameter"}
    if set(run) != wanted:
        raise ValueError(f"run must give {', '.join(sorted(wanted))}, gave {', '.join(sorted(run))}")
    return run


def _arguments(method: str, *, num_examples, steps, batch_size, stepsize, diameter) -> dict[str, Any]:
    found: dict[str, Any] = dict(num_examples=num_examples, stepsize=stepsize, diameter=diameter)
    if method == "gd":
        return found | dict(steps=steps)
    if method == "sgd":
        return found | dict(steps=steps, batch_size=batch_size)
    size = _validate.positive_integer("batch_size", batch_size)
    if num_examples % size:
        raise ValueError(f"batch_size must divide num_examples {num_examples}, was {size}")
    cycle = num_examples // size
    return found | dict(epochs=max(1, steps // cycle), batches_per_epoch=cycle, batch_size=size)


PLANS = {kind.schema: kind for kind in (GeneralPlan, SampledGeneralPlan, LastIteratePlan)}
