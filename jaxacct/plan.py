"""A plan: what was certified, with its evidence, as JSON to read and to verify again."""

import dataclasses
import datetime
import json
import platform
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxacct._validate import open_probability, positive_number
from jaxacct.accountants import truncation
from jaxacct.accountants.composition import event_from_json, event_to_json
from jaxacct.files import read_json, write_atomically
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.proposals.half_space import log_remainder_scale
from jaxacct.schemes import scheme_from_json, scheme_to_json
from jaxacct.statistics import hockey_stick
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.lines import BudgetLine
from jaxacct.strategies import prefix_sum_error, strategy_from_json, strategy_to_json
from jaxacct.verification.extrapolation import Certificate
from jaxacct.verification.run import DirectionEvidence, Evidence, dense_counts, recheck, verify

SCHEMA = "jaxacct-plan"
SCHEMA_VERSION = 1
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "dp-accounting")


def _versions() -> dict[str, str]:
    from jaxacct import __version__

    found = {"jaxacct": __version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in _PACKAGES}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Plan:
    """A mechanism, its (epsilon, delta) guarantee and what proves it.

    Attributes:
      mechanism: scheme, strategy and noise multiplier (noise per unit of clip norm x column norm, which
        is 1).
      epsilon, delta: the guarantee under zero-out adjacency; epsilon is a natural log. With Monte Carlo
        evidence it is the guarantee of the whole procedure, calibration and training, whose verifier may
        err with the probability booked in `evidence.budget`.
      evidence: the accepted verification, or None where `analytic_delta` proves the guarantee.
      analytic_delta: an analytic upper bound on delta(epsilon), at most `delta`, or None.
      compose_with: the dp-accounting `DpEvent` the guarantee also covers, or None.
      dataset_size: number of examples, None if not stated.
      expected_batch_size: mean batch size over the run, None without a data set size.
      max_batch_size: exceeded in any step of a run with probability 1e-9 at most, or what larger batches are
        cut to where `truncation_delta` is not None; None likewise.
      truncation_delta: the part of `delta` that cutting batches spends (`accountants.truncation`); None where
        batches are never cut.
      created: time of certification, ISO 8601, UTC.
      device: the platform JAX drew on.
      versions: package versions.
    """

    mechanism: Mechanism
    epsilon: float
    delta: float
    evidence: Evidence | None = None
    analytic_delta: float | None = None
    compose_with: object = None
    dataset_size: int | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    truncation_delta: float | None = None
    created: str = field(default_factory=_now)
    device: str = field(default_factory=lambda: jax.devices()[0].device_kind)
    versions: dict[str, str] = field(default_factory=_versions)

    def __post_init__(self):
        positive_number("epsilon", self.epsilon)
        open_probability("delta", self.delta)

    @property
    def certified(self) -> bool:
        """Whether the stored evidence, looked at again, supports the guarantee."""
        if self.evidence is None:
            spent = self.truncation_delta or 0.0
            if self.analytic_delta is None or self.analytic_delta + spent > self.delta:
                return False
            return not _truncation_flaws(self)
        return self.evidence.accepted and not _flaws(self)

    @property
    def prefix_sum_error(self) -> float:
        """`(1/n) ||A C^-1||_F^2 sigma^2`, squared noise per unit clip norm squared (arXiv 2602.09338,
        7.1).
        """
        return prefix_sum_error(
            self.mechanism.strategy,
            iterations=self.mechanism.scheme.iterations,
            noise_multiplier=self.mechanism.noise_multiplier,
        )

    def statement(self) -> str:
        """The guarantee in a sentence for a privacy review."""
        if not self.certified:
            return "NOT CERTIFIED: the stored evidence does not support the stated guarantee."
        how = (
            "by an analytic accountant"
            if self.evidence is None
            else (
                f"by {self.evidence.num_samples:,} Monte Carlo samples; the {self.delta:g} includes the "
                f"verifier's failure probability {self.evidence.budget.failure_probability:.3g}"
            )
        )
        together = "" if self.compose_with is None else f", composed with {self.compose_with!r}"
        return (
            f"The training run is ({self.epsilon:g}, {self.delta:g})-differentially private for one "
            f"{self._unit()} under zero-out adjacency{together}, certified {how}. It assumes that batches "
            f"are drawn exactly as the {self.mechanism.scheme.name} scheme says, that each example's "
            f"gradient is clipped, {self._cuts()}and that only the noisy sums and what follows from them are "
            f"released.{self._bound()}"
        )

    def _bound(self) -> str:
        if not self.mechanism.is_upper_bound:
            return ""
        what = "the strategy matrix is not banded and its cross terms were bounded"
        if self.mechanism.scheme.examples_overlap:
            what = "the likelihood of a user's examples that take part together was bounded"
        return f" It is an upper bound: {what}."

    def _unit(self) -> str:
        return self.mechanism.scheme.unit_in_words

    def _cuts(self) -> str:
        if self.truncation_delta is None:
            return self.mechanism.scheme.assumption
        return (
            f"batches above {self.max_batch_size} are cut to random subsets of that size (which spends "
            f"{self.truncation_delta:.3g} of delta), "
        )

    def verify(self, **options) -> Evidence:
        """Repeat the verification with fresh randomness; see `verification.run.verify` for the options.

        Raises:
          ValueError: for a plan whose guarantee is analytic: there is nothing to draw.
        """
        if self.evidence is None:
            raise ValueError("plan is certified by an analytic accountant: there is nothing to sample")
        budget = self.evidence.budget
        options = {"budget": budget, "compose_with": self.compose_with} | options
        return verify(self.mechanism, self.epsilon, self.delta, **options)

    def profile(self, epsilons) -> np.ndarray:
        """Estimated delta at each of `epsilons` (natural log) from the stored histograms of losses.

        An estimate without a guarantee, of both directions where both were drawn: binned losses rounded
        pessimistically. NaN where no loss was stored.
        """
        epsilons = np.asarray(epsilons, float)
        if self.evidence is None:
            return np.full(epsilons.shape, np.nan)
        curves = [
            _profile(seen, self.epsilon, epsilons) for seen in (self.evidence.remove, self.evidence.add)
        ]
        return np.fmax(*curves)

    def to_json(self) -> dict:
        """Plain JSON values, readable by `from_json`."""
        mechanism = self.mechanism
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "statement": self.statement(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "adjacency": "zero-out",
            "scheme": scheme_to_json(mechanism.scheme),
            "strategy": strategy_to_json(mechanism.strategy),
            "noise_multiplier": mechanism.noise_multiplier,
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
            "truncation_delta": self.truncation_delta,
            "prefix_sum_error": self.prefix_sum_error,
            "analytic_delta": self.analytic_delta,
            "compose_with": event_to_json(self.compose_with),
            "evidence": None if self.evidence is None else _evidence_to_json(self.evidence),
            "created": self.created,
            "device": self.device,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, data: dict) -> "Plan":
        """Read what `to_json` wrote and check it, evidence included.

        Raises:
          ValueError: another schema or version, a missing field, or evidence that does not add up.
        """
        if not isinstance(data, dict):
            raise ValueError(f"plan must be a JSON object, was {data!r:.80}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"plan must have the schema {SCHEMA!r}, had {data.get('schema')!r}")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"plan schema_version must be {SCHEMA_VERSION}, was {data.get('schema_version')!r}"
            )
        if data.get("adjacency") != "zero-out":
            raise ValueError(f"plan adjacency must be 'zero-out', was {data.get('adjacency')!r}")
        try:
            mechanism = Mechanism(
                scheme_from_json(data["scheme"]),
                strategy_from_json(data["strategy"]),
                data["noise_multiplier"],
            )
            evidence = data["evidence"]
            plan = cls(
                mechanism=mechanism,
                epsilon=data["epsilon"],
                delta=data["delta"],
                evidence=None if evidence is None else _evidence_from_json(evidence),
                analytic_delta=data["analytic_delta"],
                compose_with=event_from_json(data["compose_with"]),
                dataset_size=data["dataset_size"],
                expected_batch_size=data["expected_batch_size"],
                max_batch_size=data["max_batch_size"],
                truncation_delta=data.get("truncation_delta"),
                created=data["created"],
                device=data["device"],
                versions=data["versions"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"plan lacks or garbles the field {error}") from None
        flaws = _flaws(plan)
        if flaws:
            raise ValueError(f"plan evidence does not add up: {'; '.join(flaws)}")
        return plan

    def save(self, path) -> None:
        """Write the plan to `path`, whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path) -> "Plan":
        """Read and check a plan; ValueError in one line otherwise."""
        return cls.from_json(read_json(path, "plan"))


def _evidence_to_json(evidence: Evidence) -> dict:
    return dataclasses.asdict(evidence)


def _evidence_from_json(data: dict) -> Evidence:
    def direction(fields: dict) -> DirectionEvidence:
        values: dict[str, Any] = {
            name: tuple(tuple(v) if isinstance(v, list) else v for v in value)
            if isinstance(value, list)
            else value
            for name, value in fields.items()
        }
        if fields.get("extrapolation") is not None:
            stored: dict[str, Any] = dict(fields["extrapolation"])
            for name in ("near_counts", "far_counts"):
                stored[name] = tuple(map(tuple, stored[name]))
            values["extrapolation"] = Certificate(**stored)
        values["lines"] = tuple(BudgetLine(**line) for line in fields.get("lines", ()))
        return DirectionEvidence(**values)

    fields = dict(data)
    fields["budget"] = Budget(**fields["budget"])
    fields["remove"], fields["add"] = direction(fields["remove"]), direction(fields["add"])
    return Evidence(**fields)


def _flaws(plan: Plan) -> list[str]:
    """What in a plan's evidence contradicts itself; a fresh verification is the stronger check."""
    evidence = plan.evidence
    if evidence is None:
        return [] if plan.certified else ["neither evidence nor an analytic bound below delta"]
    budget, flaws = evidence.budget, _truncation_flaws(plan)
    spent = budget.delta_v + budget.failure_probability * (1 - budget.delta_v)
    spent += plan.truncation_delta or 0.0
    if spent > plan.delta * (1 + 1e-12):
        flaws.append(f"the budget spends {spent:g} of delta {plan.delta:g}")
    for name in ("remove", "add"):
        seen = getattr(evidence, name)
        if seen.direction != name:
            flaws.append(f"the {name} evidence is of direction {seen.direction!r}")
        if seen.extrapolation is not None:
            log_scale = log_remainder_scale(plan.mechanism, plan.epsilon)
            if abs(seen.extrapolation.log_scale - log_scale) > 1e-9:
                flaws.append(f"{name}: the scale is not that of the mechanism")
        elif seen.scale > 0:
            allowed = budget.delta_v / (seen.scale * (1 + seen.relative_error)) - seen.total_variation
            if seen.threshold > allowed * (1 + 1e-12):
                flaws.append(f"{name}: threshold {seen.threshold:g} is above {allowed:g}")
        if seen.accepted and not recheck(seen, evidence.rule, budget):
            flaws.append(f"{name}: the histogram does not support the verdict")
    return flaws


def _truncation_flaws(plan: Plan) -> list[str]:
    """What is wrong with the delta that cut batches spend."""
    if plan.truncation_delta is None:
        return []
    if plan.dataset_size is None or plan.max_batch_size is None or plan.compose_with is not None:
        return ["batches cannot be cut without a dataset_size and max_batch_size, or under composition"]
    needed = truncation.reserve(plan.mechanism.scheme, plan.epsilon, plan.dataset_size, plan.max_batch_size)
    if plan.truncation_delta < needed * (1 - 1e-12):
        return [f"cutting batches needs {needed:g} of delta, {plan.truncation_delta:g} is put aside"]
    if not truncation.covers(plan.mechanism, plan.epsilon):
        return ["the delta put aside for cut batches does not cover this noise multiplier"]
    return []


def _profile(seen: DirectionEvidence, target: float, epsilons: np.ndarray) -> np.ndarray:
    """The curve of one direction; NaN where its draws have no weights that losses alone determine."""
    weights_known = seen.proposal == "plain" or seen.proposal == f"{seen.replicas} replicas"
    if not seen.num_samples or not weights_known:
        return np.full(epsilons.shape, np.nan)
    losses = hockey_stick.loss_bounds(seen.direction)
    counts = dense_counts(seen.loss_counts, losses.size)
    losses, counts = losses[counts > 0], counts[counts > 0]
    # M = Z (1/(m-1)) ((m-1)/m)^m e^{(1-m) target} gives Z back; the weight of a draw is Z e^{(1-m) L}.
    m, log_weights = seen.replicas, np.zeros(losses.size)
    if seen.direction == "remove" and m > 1:
        log_normalizer = np.log(seen.scale) + np.log(m - 1) - m * np.log((m - 1) / m) + (m - 1) * target
        # Weights fall with L, so a binned loss weighs as its bin's lower edge: pessimistic again.
        log_weights = log_normalizer + (1 - m) * (losses - hockey_stick.LOSS_BIN_WIDTH)
    weights = np.exp(log_weights) * counts / seen.num_samples
    sign = 1 if seen.direction == "remove" else -1
    return np.array([float(np.sum(weights * hockey_stick.hockey_stick(e - sign * losses))) for e in epsilons])
