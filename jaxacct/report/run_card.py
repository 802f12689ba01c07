"""Run card: `result.json` of a finished run, which names its plan and its model; and the check of all three.

Nothing in it is signed. The check finds another plan, another model and an edited card; that the run was made
as its card says is taken on trust.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxacct.common.files import json_digest, read_json
from jaxacct.common.records import differences, read
from jaxacct.core.plan import SCHEMA as PLAN_SCHEMA
from jaxacct.core.plan import Plan
from jaxacct.report.page import ASSUMPTIONS, NOT_COVERED

SCHEMA, SCHEMA_VERSION = "jaxacct-run", 1
ON_TRUST = (
    "that the model was trained by this run: nothing here is signed",
    "steps, clip norm, evaluation and versions of the card, as the trainer wrote them",
    "that keys and private logs of the run (secret.json, checkpoints/, private/) were not published",
    "that the plan's samples were fresh, which `jaxacct verify` shows",
)


def read_plan(path):
    """Return a plan of any kind, checked; ValueError for a file without a plan."""
    data = read_json(path, "plan")
    if data.get("schema") == PLAN_SCHEMA:
        return Plan.from_json(data)
    from jaxacct.accountants.dice_plan import DicePlan  # which loads dp-accounting
    from jaxacct.accountants.tradeoff.plan import GeneralPlan, LastIteratePlan

    kinds = {kind.schema: kind for kind in (DicePlan, GeneralPlan, LastIteratePlan)}
    return kinds.get(str(data.get("schema")), Plan).from_json(data)


@dataclass(frozen=True)
class RunCard:
    """What a finished run says of itself, without times.

    Attributes:
      plan: digest, target, mechanism and data set of the plan (`about_plan`).
      guarantee: the plan's statement, and what the run adds to it.
      steps: steps run, at most the plan's.
      clip_norm: largest norm of a clipped gradient.
      clipping: how gradients were clipped, or None.
      evaluation: numbers of the last `evaluate` by name; None for one that is not finite.
      model: SHA-256 of names and contents of the files of the folder `model`.
      versions: of the packages that computed.
      assumptions, not_covered: of the guarantee, for readers.
    """

    plan: dict[str, Any]
    guarantee: str
    steps: int
    clip_norm: float
    clipping: str | None
    evaluation: dict[str, float | None]
    model: str
    versions: dict[str, str]
    assumptions: list[str] = field(default_factory=lambda: [words for words, *_ in ASSUMPTIONS])
    not_covered: list[str] = field(default_factory=lambda: list(NOT_COVERED))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values with their digest, which detects accidental changes, not forgery."""
        values = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}
        return values | {"digest": json_digest(values)}

    @classmethod
    def load(cls, run) -> "RunCard":
        """Return the card in the folder of a run; ValueError for a missing, edited or malformed one."""
        path = Path(run) / "result.json"
        values = read_json(path, "run card")
        head = values.pop("schema", None), values.pop("schema_version", None)
        digest = values.pop("digest", "")
        if head != (SCHEMA, SCHEMA_VERSION):
            raise ValueError(
                f"run card {path} must have the schema {SCHEMA!r} {SCHEMA_VERSION}, got {head!r:.80}"
            )
        card = read(cls, values, "run card")
        if card.to_json()["digest"] != digest:
            raise ValueError(f"run card {path} was edited or damaged: its digest is of other values")
        return card

    def flaws(self, run, plan) -> list[str]:
        """Return why card, model and plan do not belong together, one line each; empty where they do.

        Args:
          run: folder with `model`.
          plan: of any kind.

        Raises:
          ValueError: no model, or links in it.
        """
        if not plan.certified:
            return ["plan is not certified"]
        about = about_plan(plan)
        flaws = [f"run card: {line}" for line in differences(self.plan, about, "plan")]
        if self.plan.get("digest") != about["digest"]:
            flaws = [f"run card names another plan: {self.plan.get('digest')!r:.80}, not {about['digest']}"]
        if self.guarantee != about["statement"] and not self.guarantee.startswith(about["statement"] + " "):
            flaws.append("run card states another guarantee than the plan")
        if not 1 <= self.steps <= plan.iterations:
            flaws.append(f"run card has {self.steps} steps, the plan covers 1 to {plan.iterations}")
        if not self.clip_norm > 0:
            flaws.append(f"run card has the clip norm {self.clip_norm}, which must be above 0")
        for name, missing in (
            ("assumptions", {words for words, *_ in ASSUMPTIONS} - {*self.assumptions}),
            ("not_covered", {*NOT_COVERED} - {*self.not_covered}),
        ):
            flaws += [f"run card lacks in {name}: {line}" for line in sorted(missing)]
        if digest_of_files(Path(run) / "model") != self.model:
            flaws.append("model has other files than those of the run card")
        return flaws

    def adds(self, plan) -> str:
        """Return what the run's guarantee says beyond the plan's, which nothing here computes again."""
        return self.guarantee.removeprefix(plan.statement()).strip()


def about_plan(plan) -> dict[str, Any]:
    """Return what a card says of its plan, of any kind; all of it follows from the plan's file."""
    if not isinstance(plan, Plan):
        values = plan.to_json()
        about = {"digest": json_digest(values), **values}
    else:
        mechanism = plan.mechanism
        about = {
            "digest": plan.digest,
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            "adjacency": mechanism.adjacency,
            "scheme": repr(mechanism.scheme),
            "strategy": mechanism.strategy.describe(),
            "noise_multiplier": plan.noise_multiplier,
            "dataset_size": plan.dataset_size,
        }
    return about | {"iterations": plan.iterations, "statement": plan.statement()}


def digest_of_files(folder: Path) -> str:
    """Return the SHA-256 of names and contents of all files in a folder; ValueError for links, or no file."""
    digests = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"model must consist of plain files, {path} is none")
        if path.is_file():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    if folder.is_symlink() or not digests:
        raise ValueError(f"run must be a folder with the folder model, {str(folder.parent)!r} has no model")
    return json_digest(digests)
