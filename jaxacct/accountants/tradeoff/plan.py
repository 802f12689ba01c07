"""Plans of the two deterministic accountants: `certified` recomputes the guarantee at every access."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from jaxacct.accountants.tradeoff.curves.terms import Terms, last_iterate
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD, calibrate_sigma
from jaxacct.accountants.tradeoff.last_iterate.calibration import METHODS, calibrate_noise
from jaxacct.common import validate as _validate
from jaxacct.common.records import exact
from jaxacct.common.stored_plan import StoredPlan


@dataclass(frozen=True)
class GeneralPlan(StoredPlan):
    """Plan of generalised DP-SGD against an adversary who sees the sampling (arXiv 2212.05796).

    Attributes:
      dataset_size, num_microbatches, microbatch_size, num_epochs, sampling, group_size: as `GeneralDPSGD`.
      sigma: noise std over twice the clip norm, on the sum of clipped terms.
      epsilon, delta: the guarantee.
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
        _validate.target(self.epsilon, self.delta)
        self.run  # noqa: B018  checks the sizes

    @classmethod
    def calibrate(cls, epsilon: float, delta: float, **sizes) -> "GeneralPlan":
        """Return the plan with the smallest noise for (epsilon, delta); `sizes` as `GeneralDPSGD`."""
        sizes = asdict(GeneralDPSGD(**sizes))
        return cls(sigma=calibrate_sigma(epsilon, delta, **sizes), epsilon=epsilon, delta=delta, **sizes)

    @property
    def run(self) -> GeneralDPSGD:
        """Mechanism."""
        return GeneralDPSGD(*(getattr(self, size.name) for size in fields(GeneralDPSGD)))

    @property
    def iterations(self) -> int:
        """Number of steps that the plan covers: its rounds."""
        return self.run.rounds_per_epoch * self.num_epochs

    @property
    def certified(self) -> bool:
        """Whether the noise gives the guarantee, recomputed."""
        return bool(self.run.curve(self.sigma).delta(self.epsilon) <= self.delta)

    @property
    def terms(self) -> Terms:
        """Adversary and adjacency."""
        return self.run.terms()

    def statement(self) -> str:
        """Return the guarantee in a sentence."""
        return (
            f"{self.promise} for replacing up to "
            f"{self.group_size} of {self.dataset_size} records, against an adversary who sees which records "
            f"are in which batch and everything else but the noise; {self.run.clip} clipping, "
            f"{self.sampling}, {self.num_epochs} epochs, noise {exact(self.sigma)} times twice the clip norm."
        )


@dataclass(frozen=True)
class LastIteratePlan(StoredPlan):
    """Plan of noisy gradient descent on convex losses that releases only the last iterate (arXiv 2403.00278).

    Attributes:
      method: "gd", "cgd" or "sgd".
      num_examples: number of examples n, the same in both data sets.
      steps: total; for "cgd" a whole number of epochs.
      batch_size: for "cgd" and "sgd"; n for "gd".
      stepsize: of every step.
      noise_std: on the mean gradient of a batch.
      grad_sensitivity, smoothness, strong_convexity: of every example's loss.
      diameter: of the ball that is projected onto, if there is one.
      epsilon, delta: the guarantee.
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
        _validate.target(self.epsilon, self.delta, above_0=True)
        _validate.positive_number("stepsize", self.stepsize)
        if self.method == "gd" and self.batch_size != self.num_examples:
            raise ValueError(
                f"batch_size must be num_examples {self.num_examples} for gd, got {self.batch_size}"
            )
        if self.method == "cgd" and (
            self.num_examples % self.batch_size or self.steps % (self.num_examples // self.batch_size)
        ):
            raise ValueError("batch_size must divide num_examples, and steps be whole epochs, for cgd")
        self.bound()

    @classmethod
    def calibrate(cls, epsilon: float, delta: float, *, method: str, loss, **run) -> "LastIteratePlan":
        """Return the plan with the smallest noise for (epsilon, delta), for a loss of `procedures.convex`.

        The loss has `grad_sensitivity`, `smoothness` and `strong_convexity`; the run num_examples, steps,
        batch_size, stepsize and diameter.
        """
        plan = cls._of(loss, run, method=method, noise_std=1.0, epsilon=epsilon, delta=delta)
        return replace(plan, noise_std=calibrate_noise(epsilon, delta, method=method, **plan._arguments()))

    @classmethod
    def at_noise(cls, noise_std: float, delta: float, *, method: str, loss, **run) -> "LastIteratePlan":
        """Return the plan with this noise and the smallest epsilon at `delta`; arguments as `calibrate`."""
        plan = cls._of(loss, run, method=method, noise_std=noise_std, epsilon=1.0, delta=delta)
        epsilon = float(plan.bound().epsilon(delta))
        # A root from below would not be certified.
        for hair in (0.0, 1e-12, 1e-9, 1e-6):
            found = replace(plan, epsilon=max(epsilon * (1 + hair), 1e-9))
            if found.certified:
                return found
        raise ValueError(f"noise_std must give an epsilon at delta {delta:g}, got {noise_std!r}")

    @classmethod
    def bound_at(cls, noise_std: float, delta: float, *, method: str, loss, **run):
        """Return the accountant's result at this noise, whose epsilon may be infinite; see `at_noise`."""
        return cls._of(loss, run, method=method, noise_std=noise_std, epsilon=1.0, delta=delta).bound()

    @classmethod
    def _of(cls, loss, run: dict[str, Any], **fields) -> "LastIteratePlan":
        """Return the plan of a loss, of all of `_RUN` and of the other fields."""
        if sorted(run) != list(_RUN):
            raise ValueError(f"run must give {', '.join(_RUN)}, gave {', '.join(sorted(run))}")
        return cls(**{name: getattr(loss, name) for name in _OF_LOSS}, **run, **fields)

    @property
    def iterations(self) -> int:
        """Number of steps that the plan covers, all of which must be run."""
        return self.steps

    def bound(self):
        """Return the accountant's result."""
        return METHODS[self.method](noise_std=self.noise_std, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Return the accountant's arguments besides the noise."""
        found = {name: getattr(self, name) for name in (*_RUN, *_OF_LOSS)}
        if self.method == "gd":
            del found["batch_size"]
        elif self.method == "cgd":
            cycle = self.num_examples // self.batch_size
            found |= dict(batches_per_epoch=cycle, epochs=found.pop("steps") // cycle)
        return found

    @property
    def certified(self) -> bool:
        """Whether the noise gives the guarantee, recomputed."""
        return self.bound().holds(self.epsilon, self.delta)

    @property
    def terms(self) -> Terms:
        """Adversary and adjacency."""
        return last_iterate("certified")

    def statement(self) -> str:
        """Return the guarantee in a sentence."""
        return (
            f"{self.promise} for replacing one of "
            f"{self.num_examples} examples, where nothing but the last of {self.steps} iterates of noisy "
            f"{self.method} is ever shown, every example's loss has a gradient sensitivity of at most "
            f"{exact(self.grad_sensitivity)}, smoothness {exact(self.smoothness)} and strong convexity "
            f"{exact(self.strong_convexity)}, and the noise on mean gradients has the standard deviation "
            f"{exact(self.noise_std)}."
        )


_RUN = ("batch_size", "diameter", "num_examples", "steps", "stepsize")
_OF_LOSS = ("grad_sensitivity", "smoothness", "strong_convexity")
