"""A plan: what was certified, with its evidence, as JSON to read and to verify again."""

import dataclasses
import datetime
import functools
import html
import platform
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxacct import _validate, records
from jaxacct._validate import nonnegative_number, open_probability
from jaxacct.accountants import truncation
from jaxacct.accountants.composition import event_from_json, event_to_json
from jaxacct.batch_sizes import OVERFLOW, Overflow, batch_sizes, overflow
from jaxacct.choice import Choice, choice_from_json
from jaxacct.files import read_json, to_json, write_atomically
from jaxacct.mechanisms.mechanism import ADJACENCIES, Mechanism
from jaxacct.records import exact
from jaxacct.schemes import scheme_from_json, scheme_to_json
from jaxacct.statistics.bounds import Budget
from jaxacct.strategies import prefix_sum_error, strategy_from_json, strategy_to_json
from jaxacct.verification.analytic_bound import AnalyticBound
from jaxacct.verification.certificate import PlanCertificate
from jaxacct.verification.certificates import of_plan
from jaxacct.verification.replay import Replayed, replay
from jaxacct.verification.run import Evidence, Progress, verify
from jaxacct.verification.target import Target

SCHEMA = "jaxacct-plan"
SCHEMA_VERSION = 3
# Version 1 stored no accountant, which is computed on reading, and draws without the digest of their target:
# relabelled ones could not be told from honest ones, so that drawn plans of version 1 are refused.
# Version 2 put nothing aside for batches too large; a plan that does not is still written as that.
_READABLE = (1, 2, SCHEMA_VERSION)
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
      epsilon, delta: the guarantee under zero-out adjacency; epsilon is a natural log. At epsilon 0, delta is
        the largest advantage (true minus false positive rate) of any test for membership. With Monte Carlo
        evidence it is the guarantee of the whole procedure, calibration and training, whose verifier may
        err with the probability booked in `evidence.budget`.
      evidence: the accepted verification, or None where `analytic_delta` proves the guarantee.
      analytic_accountant: which of `accountants.ACCOUNTANTS` gives `analytic_delta`, or None.
      analytic_delta: its upper bound on delta(epsilon), at most `delta`, or None.
      compose_with: the dp-accounting `DpEvent` the guarantee also covers, or None.
      dataset_size: number of examples, None if not stated.
      expected_batch_size: mean batch size over the run, None without a data set size.
      max_batch_size: a run stops at a larger batch, or where `truncation_delta` is not None larger ones are
        cut to it; None likewise.
      truncation_delta: the part of `delta` that cutting batches spends (`accountants.truncation`); None where
        batches are never cut.
      overflow_delta: the part of `delta` that stopping at a larger batch spends (`batch_sizes.overflow`);
        None where sizes are cut or not stated, and in plans of before, which put nothing aside.
      choice: how scheme and matrix were chosen where a search did, else None.
      created: time of certification, ISO 8601, UTC.
      device: the platform JAX drew on.
      versions: package versions.
    """

    mechanism: Mechanism
    epsilon: float
    delta: float
    evidence: Evidence | None = None
    analytic_accountant: str | None = None
    analytic_delta: float | None = None
    compose_with: object = None
    dataset_size: int | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    truncation_delta: float | None = None
    overflow_delta: float | None = None
    choice: Choice | None = None
    created: str = field(default_factory=_now)
    device: str = field(default_factory=lambda: jax.devices()[0].device_kind)
    versions: dict[str, str] = field(default_factory=_versions)

    def __post_init__(self):
        nonnegative_number("epsilon", self.epsilon)
        open_probability("delta", self.delta)
        if self.dataset_size is not None:
            _validate.positive_integer("dataset_size", self.dataset_size)
        if self.choice is not None:
            _validate.instance("choice", self.choice, Choice, "a jaxacct.choice.Choice")

    @property
    def training(self) -> str:
        """What realises it: the name of a procedure of `train.loop`."""
        return "correlated-noise"

    @property
    def iterations(self) -> int:
        """Steps that it covers."""
        return self.mechanism.scheme.iterations

    @functools.cached_property
    def flaws(self) -> tuple[str, ...]:
        """Why the plan is not certified, a line each; empty if everything that it claims follows.

        All that can be computed from the mechanism is, and compared; the draws are taken as they are stored.
        """
        return tuple(_flaws(self))

    @property
    def certified(self) -> bool:
        """Whether the evidence, looked at again, supports the guarantee."""
        return not self.flaws

    @property
    def target(self) -> Target:
        """What it guarantees, with the budget of its evidence, or the usual one where it has none.

        Raises:
          ValueError: where the budget of the evidence spends more than delta.
        """
        if self.evidence is not None:
            return Target(self.epsilon, self.delta, self.evidence.budget, self.compose_with)
        spent = (self.truncation_delta or 0.0) + (self.overflow_delta or 0.0)
        return Target.at(self.epsilon, self.delta, self.compose_with, spent=spent)

    @functools.cached_property
    def certificate(self) -> PlanCertificate:
        """What proves it.

        Raises:
          ValueError: for a plan that names two things.
        """
        return of_plan(self.evidence, self.analytic_accountant, self.analytic_delta)

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
        how = self.certificate.how(self.target)
        target = f"({exact(self.epsilon)}, {exact(self.delta)})"
        together = "" if self.compose_with is None else f", composed with {self.compose_with!r}"
        return (
            f"The training run is {target}-differentially private for one {self._unit()} under "
            f"{self.mechanism.adjacency} adjacency{together}, certified {how}.{self._advantage()} It assumes "
            f"that batches are drawn exactly as the {self.mechanism.scheme.name} scheme says, that each "
            f"example's gradient is clipped, {self._cuts()}and that only the noisy sums and what follows "
            f"from them are released.{self._bound()}"
        )

    def _advantage(self) -> str:
        if self.epsilon > 0:
            return ""
        return (
            f" At epsilon 0 this says: no test of whether one {self._unit()} took part has a true positive "
            f"rate more than {exact(self.delta)} above its false positive rate."
        )

    def _bound(self) -> str:
        if not self.mechanism.is_upper_bound:
            return ""
        what = "the strategy matrix is not banded and its cross terms were bounded"
        if self.mechanism.scheme.examples_overlap:
            what = "the likelihood of a user's examples that take part together was bounded"
        return f" It is an upper bound: {what}."

    def _repr_html_(self) -> str:
        """In a notebook: the statement, and a table of the mechanism and of where delta goes."""
        rows = [
            ("noise multiplier", exact(self.mechanism.noise_multiplier)),
            ("scheme", self.mechanism.scheme),
            ("strategy", self.mechanism.strategy.describe()),
            ("prefix-sum error", f"{self.prefix_sum_error:.6g}"),
        ]
        if self.expected_batch_size is not None:
            sizes = f"{self.expected_batch_size:.6g} expected, {self.max_batch_size} at most"
            rows.append(("batch size", sizes))
        rows += [(f"delta for {name}", f"{delta:.6g}") for name, delta in self.budget_lines()]
        cells = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows
        )
        return f"<p><b>{html.escape(self.statement())}</b></p><table>{cells}</table>"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """In a shell of IPython, and what a notebook keeps beside the HTML."""
        del cycle
        printer.text(self.statement())

    @property
    def holds_for_shared_examples(self) -> bool:
        """Whether the guarantee holds on graphs in which an example has several owners.

        It does by the scheme, or by a bound that holds with all coins revealed; anything else is refused.
        """
        if self.mechanism.scheme.holds_for_shared_examples:
            return True
        return self.certified and self.certificate.reveals_all_coins

    def _unit(self) -> str:
        if self.certificate.reveals_all_coins:
            return self.mechanism.scheme.unit_if_shared
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
          ValueError: for a plan whose guarantee is analytic: `flaws` computes its bound again.
        """
        if self.evidence is None:
            raise ValueError("plan is certified by an analytic accountant: there is nothing to sample")
        options: dict[str, Any] = {
            "budget": self.evidence.budget,
            "compose_with": self.compose_with,
        } | options
        return verify(self.mechanism, self.epsilon, self.delta, **options)

    def replay(self, progress: Progress | None = None) -> tuple[Replayed, ...]:
        """Draw what the stored keys name again, and compare histograms; see `verification.replay`.

        Raises:
          ValueError: for a plan without Monte Carlo evidence, or whose evidence does not add up.
        """
        if self.evidence is None:
            raise ValueError("plan is certified by an analytic accountant: there are no draws to repeat")
        if self.flaws:
            raise ValueError(f"plan evidence does not add up: {self.flaws[0]}")
        return replay(self.evidence, self.mechanism, self.target, progress)

    def checked(self) -> list[str]:
        """What loading computed again, and what only drawing can show; lines for people."""
        said = self.certificate.checked()
        if self.choice is not None:
            said.append("as written: that a search chose; the command in its statement searches again")
        if self.overflow_delta is not None or _overflow_of(self) is None:
            return said
        before = (
            "not put aside: a run stopped by a batch too large, 1e-9 of delta at most, for users "
            "1 + e^epsilon times that; plans of version 3 do"
        )
        return [*said, before]

    def budget_lines(self) -> list[tuple[str, float]]:
        """(item, delta spent) for every item of the budget of delta."""
        items = self.certificate.spends()
        if self.truncation_delta is not None:
            items.append(("cut batches", self.truncation_delta))
        if self.overflow_delta is not None:
            items.append(("runs stopped by a batch too large", self.overflow_delta))
        return items

    def profile(self, epsilons) -> np.ndarray:
        """Estimated delta at each of `epsilons` (natural log) from the stored histograms of losses.

        An estimate without a guarantee, of both directions where both were drawn: binned losses rounded
        pessimistically, of the mechanism alone where another is composed in. NaN where no loss was stored.
        """
        return self.certificate.profile(self.mechanism, self.target, np.asarray(epsilons, float))

    def to_json(self) -> dict:
        """Plain JSON values, readable by `from_json`."""
        held = self.certificate.to_json()
        before = _overflow_of(self) is not None and self.overflow_delta is None
        new_in_3 = {} if before else {"overflow_delta": self.overflow_delta}
        # Absent where nothing was searched, so that such plans are what they were.
        new_in_3 |= {} if before or self.choice is None else {"choice": self.choice.to_json()}
        return new_in_3 | {
            "schema": SCHEMA,
            "schema_version": 2 if before else SCHEMA_VERSION,
            "statement": self.statement(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "adjacency": self.mechanism.adjacency,
            "scheme": scheme_to_json(self.mechanism.scheme),
            "strategy": strategy_to_json(self.mechanism.strategy),
            "noise_multiplier": self.mechanism.noise_multiplier,
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
            "truncation_delta": self.truncation_delta,
            "prefix_sum_error": self.prefix_sum_error,
            "analytic_accountant": held["analytic_accountant"],
            "analytic_delta": held["analytic_delta"],
            "compose_with": event_to_json(self.compose_with),
            "evidence": held["evidence"],
            "created": self.created,
            "device": self.device,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, data: dict) -> "Plan":
        """Read what `to_json` wrote and check it: all that follows from the mechanism is computed again.

        Raises:
          ValueError: another schema or version, a field that is missing, unknown or of another type, or
            anything that does not follow from the mechanism and the stored draws.
        """
        if not isinstance(data, dict):
            raise ValueError(f"plan must be a JSON object, was {data!r:.80}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"plan must have the schema {SCHEMA!r}, had {data.get('schema')!r}")
        version = data.get("schema_version")
        if type(version) is not int or version not in _READABLE:
            raise ValueError(f"plan schema_version must be {SCHEMA_VERSION} or below, was {version!r}")
        if data.get("adjacency") not in ADJACENCIES:
            allowed = " or ".join(map(repr, ADJACENCIES))
            raise ValueError(f"plan adjacency must be {allowed}, was {data.get('adjacency')!r}")
        names = {hint.name for hint in dataclasses.fields(cls)} - {"mechanism"}
        names |= {"schema", "schema_version", "statement", "adjacency", "prefix_sum_error"}
        names |= {"scheme", "strategy", "noise_multiplier"}
        names -= _NEW_IN_3 if version < 3 else set()
        names -= set() if "choice" in data else {"choice"}
        lacks = sorted(names - set(data) - (_NEW_IN_2 if version == 1 else set()))
        unknown = sorted(set(data) - names)
        if lacks or unknown:
            what = f"lacks the field {lacks[0]!r}" if lacks else f"has an unknown field {unknown[0]!r}"
            raise ValueError(f"plan {what}")
        if version == 1 and data["evidence"] is not None:
            raise ValueError(
                "plan of version 1 holds draws that name no target and put too little aside for rounding: "
                "certify the mechanism again with `jaxacct calibrate`"
            )
        try:
            plan = _read(data, version)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"plan garbles a field: {error}") from None
        if plan.flaws:
            raise ValueError(f"plan evidence does not add up: {'; '.join(plan.flaws[:3])}")
        again = plan.to_json()
        if version == 2:
            again = {name: value for name, value in again.items() if name not in _NEW_IN_3}
            again["schema_version"] = version
        written = records.differences(data, _as_read(again))
        if version > 1 and written:
            raise ValueError(f"plan does not add up: {'; '.join(written[:3])}")
        return plan

    def save(self, path) -> None:
        """Write the plan to `path`, whole or not at all."""
        write_atomically(path, to_json(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path) -> "Plan":
        """Read and check a plan; ValueError in one line otherwise."""
        return cls.from_json(read_json(path, "plan"))


_NEW_IN_2 = {"analytic_accountant", "truncation_delta"}
_NEW_IN_3 = {"overflow_delta", "choice"}


def _as_read(value):
    """Plain values as JSON gives them back."""
    if isinstance(value, dict):
        return {key: _as_read(item) for key, item in value.items()}
    return [_as_read(item) for item in value] if isinstance(value, list | tuple) else value


def _read(data: dict, version: int) -> Plan:
    """The plan in JSON values, their types checked; of version 1 with its accountant filled in."""
    for name, kind in (("scheme", dict), ("strategy", dict), ("statement", str)):
        if not isinstance(data[name], kind):
            raise ValueError(f"plan {name} must be of type {kind.__name__}, was {data[name]!r}")
    strategy = strategy_from_json(data["strategy"])
    scheme, adjacency = scheme_from_json(data["scheme"]), data["adjacency"]
    mechanism = Mechanism(scheme, strategy, data["noise_multiplier"], adjacency)
    fields: dict[str, Any] = {
        name: records.read(kind, data.get(name), f"plan {name}")
        for name, kind in {
            "epsilon": float,
            "delta": float,
            "analytic_accountant": str | None,
            "analytic_delta": float | None,
            "dataset_size": int | None,
            "expected_batch_size": float | None,
            "max_batch_size": int | None,
            "truncation_delta": float | None,
            "overflow_delta": float | None,
            "created": str,
            "device": str,
            "versions": dict[str, str],
        }.items()
    }
    datetime.datetime.fromisoformat(fields["created"])
    if records.differences(data["strategy"], _as_read(strategy_to_json(strategy)), "strategy"):
        raise ValueError("plan strategy is not as it was written: its column norm must be 1")
    given = records.read(float, data["prefix_sum_error"], "plan prefix_sum_error")
    evidence = data["evidence"]
    if evidence is not None:
        evidence = records.read(Evidence, evidence, "plan evidence")
    compose_with = event_from_json(data["compose_with"])
    choice = choice_from_json(data.get("choice"))
    plan = Plan(mechanism, evidence=evidence, compose_with=compose_with, choice=choice, **fields)
    if records.differences(given, plan.prefix_sum_error, "prefix_sum_error"):
        raise ValueError(f"plan prefix_sum_error must be {plan.prefix_sum_error!r}, was {given!r}")
    if version == 1:
        bound = AnalyticBound.computed(mechanism, plan.target)
        plan = dataclasses.replace(plan, **bound.fields())
    return plan


def _flaws(plan: Plan) -> list[str]:
    """What in a plan does not follow from its mechanism and its draws, a line each; cheap checks first."""
    try:
        if plan.choice is not None:
            mechanism = plan.mechanism
            found = plan.choice.flaws(
                mechanism.scheme, mechanism.strategy, plan.epsilon, plan.delta, plan.dataset_size
            )
            if found:
                return found
        found = plan.certificate.is_about(plan.mechanism, plan.target)
        if found:
            return found
        stops, needed = OVERFLOW, None  # of a plan of before, or without batches that may be too large
        booked = None if plan.overflow_delta is None else _overflow_of(plan)
        if booked is not None:
            stops, needed = booked.probability, booked.delta
        found = records.differences(plan.overflow_delta, needed, "overflow_delta")
        if found:
            return found
        available = plan.delta - _spent_on_cuts(plan) - (needed or 0.0)
        cut_to = plan.max_batch_size if plan.truncation_delta is not None else None
        sizes = batch_sizes(plan.mechanism.scheme, plan.dataset_size, cut_to, stops)
        stated = plan.expected_batch_size, plan.max_batch_size
        found = records.differences(stated, sizes, "batch sizes")
        if found:
            return found
        target = plan.target
        if not plan.certificate.drawn:
            target = dataclasses.replace(target, budget=Budget.split(available))
        if not target.budget.delta <= available:
            return [f"the budget spends {target.budget.delta:g} of {available:g} of delta"]
        return plan.certificate.recheck(plan.mechanism, target)
    except (ValueError, ArithmeticError) as error:
        return [str(error)]


def _overflow_of(plan: Plan) -> Overflow | None:
    """What is to be put aside for batches too large."""
    cut_to = plan.max_batch_size if plan.truncation_delta is not None else None
    return overflow(plan.mechanism.scheme, plan.epsilon, plan.delta, plan.dataset_size, cut_to)


def _spent_on_cuts(plan: Plan) -> float:
    """The delta that cut batches spend, computed again; 0 where none are cut."""
    if plan.truncation_delta is None:
        return 0.0
    if plan.dataset_size is None or plan.max_batch_size is None or plan.compose_with is not None:
        raise ValueError("batches cannot be cut without a dataset_size and max_batch_size, or composed")
    needed = truncation.reserve(plan.mechanism.scheme, plan.epsilon, plan.dataset_size, plan.max_batch_size)
    found = records.differences(plan.truncation_delta, needed, "truncation_delta")
    if found:
        raise ValueError(found[0])
    if not truncation.covers(plan.mechanism, plan.epsilon):
        raise ValueError("the delta put aside for cut batches does not cover this noise multiplier")
    return max(needed, plan.truncation_delta)
