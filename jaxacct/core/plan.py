"""Plan: a claim and its evidence, as JSON to read, to check and to verify again."""

import dataclasses
import datetime
import functools
import html
import platform
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax

from jaxacct.common import records
from jaxacct.common.files import Checkpoint, json_digest, read_json, to_json, write_atomically
from jaxacct.common.progress import Progress
from jaxacct.common.version import VERSION
from jaxacct.core.check import Verdict, check
from jaxacct.core.claim import Claim, ClaimedTarget, claim_from_json
from jaxacct.core.evidence import Evidence, RuleName, Sampled, evidence_from_json, evidence_to_json
from jaxacct.core.verify import Stop, verify_claim
from jaxacct.mechanisms.mechanism import Mechanism

SCHEMA = "jaxacct-plan"
SCHEMA_VERSION = 2
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class Provenance:
    """Origin of a plan, on which the guarantee does not depend; `created` is ISO 8601, UTC."""

    created: str
    device: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> "Provenance":
        """Return the provenance of a plan made here and at this time."""
        versions = {"jaxacct": VERSION, "python": platform.python_version()}
        versions |= {name: metadata.version(name) for name in _PACKAGES}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(now, jax.devices()[0].device_kind, versions)


@dataclass(frozen=True)
class Plan:
    """Mechanism, its (epsilon, delta) guarantee and the evidence.

    Attributes:
      claim: the mechanism, the target and the data set.
      evidence: samples of both directions, or the accountant whose bound proves the claim.
      choice: how a search chose scheme and matrix, as JSON values of
        `jaxacct.calibration.choice.Choice`, or None; the guarantee does not depend on it.
      provenance: when, where and with which versions it was made.
    """

    claim: Claim
    evidence: Evidence
    choice: dict[str, Any] | None = None
    provenance: Provenance = dataclasses.field(default_factory=Provenance.here)

    @functools.cached_property
    def verdict(self) -> Verdict:
        """What the evidence proves, computed anew (`jaxacct.core.check`)."""
        return check(self.claim, self.evidence)

    @property
    def flaws(self) -> tuple[str, ...]:
        """Why the plan is not certified, one line each; empty where the evidence proves the claim."""
        return self.verdict.flaws

    @property
    def certified(self) -> bool:
        """Whether the evidence proves the claim."""
        return not self.flaws

    @property
    def mechanism(self) -> Mechanism:
        """Scheme, strategy and noise multiplier (noise per unit of clip norm x column norm, which is 1)."""
        return self.claim.mechanism

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise per unit of the clip norm."""
        return self.mechanism.noise_multiplier

    @property
    def target(self) -> ClaimedTarget:
        """Epsilon, delta, the budget of the verification, and the composed mechanism."""
        return self.claim.target

    @property
    def epsilon(self) -> float:
        """Epsilon of the guarantee, nats; 0 where delta bounds the advantage of every test."""
        return self.target.epsilon

    @property
    def delta(self) -> float:
        """Delta of the guarantee, including the failure probability of the verification."""
        return self.target.delta

    @property
    def compose_with(self) -> object:
        """The dp-accounting `DpEvent` that the guarantee also covers, or None."""
        return self.target.compose_with

    @property
    def dataset_size(self) -> int | None:
        """Number of examples, None where it is unspecified."""
        return self.claim.dataset_size

    @property
    def expected_batch_size(self) -> float | None:
        """Mean batch size over the run, None without a data set size."""
        return self.claim.batch_sizes[0]

    @property
    def max_batch_size(self) -> int | None:
        """Size above which batches stop a run, or are truncated; None without a data set size."""
        return self.claim.batch_sizes[1]

    @property
    def truncation_delta(self) -> float | None:
        """Reserve of delta for truncated batches; None without truncation."""
        return self.claim.truncation_delta

    @property
    def overflow_delta(self) -> float | None:
        """Reserve of delta for runs that stop at an oversized batch; None without it."""
        return None if self.claim.overflow is None else self.claim.overflow.delta

    @property
    def digest(self) -> str:
        """SHA-256 of claim and evidence, hexadecimal: identifies the plan."""
        return json_digest([self.claim.to_json(), evidence_to_json(self.evidence)])

    @property
    def training(self) -> str:
        """Name of the procedure of `train.procedures.protocol` that realises the plan."""
        return "correlated-noise"

    @property
    def iterations(self) -> int:
        """Number of steps."""
        return self.mechanism.scheme.iterations

    @property
    def prefix_sum_error(self) -> float:
        """That of the mechanism."""
        return self.mechanism.prefix_sum_error

    @property
    def is_sampled(self) -> bool:
        """Whether the evidence is samples, which `verify` draws again with a fresh key."""
        return isinstance(self.evidence, Sampled)

    @property
    def holds_for_shared_examples(self) -> bool:
        """Whether the guarantee holds on graphs in which an example has several owners.

        It does by the scheme, or by a bound that holds with all participations revealed.
        """
        if self.mechanism.scheme.holds_for_shared_examples:
            return True
        return self.certified and self.verdict.reveals_all_participations

    def statement(self) -> str:
        """Return the guarantee in a sentence for a privacy review."""
        from jaxacct.core import text

        return text.statement(self.verdict)

    def verify(
        self,
        *,
        rule: RuleName = "anytime",
        max_samples: int | None = None,
        proposal: str | None = None,
        checkpoint: Checkpoint | None = None,
        executor: Executor | None = None,
        progress: Progress | None = None,
        key=None,
    ) -> Verdict:
        """Return the verdict on samples with a fresh key, by the proposals of the plan's own evidence.

        Arguments are those of `jaxacct.verify`; by default at most 2 million samples for each direction, or 8
        times those of the evidence where these are more. ValueError for an analytic plan: loading computes
        its bound.
        """
        if not isinstance(self.evidence, Sampled):
            raise ValueError("plan is certified by an analytic accountant: there is nothing to sample")
        options = dict(checkpoint=checkpoint, executor=executor, progress=progress, key=key)
        if max_samples is None:
            max_samples = max(2_000_000, 8 * self.evidence.num_samples)
        return verify_claim(self.claim, Stop(rule, max_samples), proposal, again=self.evidence, **options)

    def _repr_html_(self) -> str:
        from jaxacct.core import text

        words = "\n".join(text.verdict_lines(self.verdict))
        return f"<p><b>{html.escape(self.statement())}</b></p><pre>{html.escape(words)}</pre>"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(self.statement())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, readable by `from_json`, which ignores "notes"."""
        from jaxacct.core import text

        claim, evidence = self.claim.to_json(), evidence_to_json(self.evidence)
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "claim": claim,
            "evidence": evidence,
            "digest": json_digest([claim, evidence]),
            "choice": self.choice,
            "provenance": dataclasses.asdict(self.provenance),
            "notes": text.notes(self.verdict),
        }

    @classmethod
    def from_json(cls, data) -> "Plan":
        """Read the output of `to_json`, and check it: everything that follows from the claim is recomputed.

        ValueError for another schema or version, a field that is missing, unknown or of another type, or
        evidence that does not prove the claim.
        """
        if not isinstance(data, dict):
            raise ValueError(f"plan must be a JSON object, got {data!r:.80}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"plan must have the schema {SCHEMA!r}, got {data.get('schema')!r:.80}")
        version = data.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION or "claim" not in data:
            raise ValueError(
                f"plan must be of schema version {SCHEMA_VERSION}, got of {version!r:.80} or from before "
                "the first release: calibrate again with `jaxacct calibrate`"
            )
        try:
            read = records.read(_Written, data, "plan")
            datetime.datetime.fromisoformat(read.provenance.created)
            claim, evidence = claim_from_json(read.claim), evidence_from_json(read.evidence)
            plan = cls(claim, evidence, read.choice, read.provenance)
            digest = json_digest([data["claim"], data["evidence"]])
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"plan has a malformed field: {error}") from None
        if data["digest"] != digest:
            raise ValueError(
                "plan digest does not match its claim and evidence: the file was edited or damaged"
            )
        if plan.flaws:
            raise ValueError(f"plan evidence does not add up: {'; '.join(plan.flaws[:3])}")
        return plan

    def save(self, path) -> None:
        """Write the plan to `path`, atomically."""
        write_atomically(path, to_json(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path) -> "Plan":
        """Read and check a plan; a one-line ValueError otherwise."""
        return cls.from_json(read_json(path, "plan"))


@dataclass(frozen=True)
class _Written:
    """Fields of a plan as `Plan.to_json` writes them."""

    schema: str
    schema_version: int
    claim: dict[str, Any]
    evidence: dict[str, Any]
    digest: str
    choice: dict[str, Any] | None
    provenance: Provenance
    notes: Any
