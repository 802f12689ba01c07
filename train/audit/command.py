"""`jaxacct audit`: attack a training run with canaries; a lower bound on its epsilon.

A canary is an example whose gradient is 100 clip norms long and along one coordinate of the model, so that
`fit` clips it to the clip norm: the worst example of the guarantee. Canaries are placed among the user's own
examples in one run of the model, loss and optimizer: each is in or silent by a coin, and the coins are
guessed from the releases (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846; jaxacct/proofs/audits.md). The
adversary has the other examples and their participations: their contributions are subtracted
(`train.audit.canaries`). The releases in a canary's coordinate are scored by the privacy loss of the plan's
mechanism with a third of its noise, as an audit is to find too little noise.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optax

from jaxacct.cli.output import complain
from jaxacct.cli.usage import Integer, Number
from jaxacct.common import validate as _validate
from jaxacct.common.files import check_target, holds_schema, write_atomically
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.likelihood.loss import privacy_loss
from jaxacct.report.run_card import read_plan

from ..batches.sampler import BatchOverflowError
from ..batches.sources import as_rows
from ..options import TrainOptions
from ..procedures.protocol import Request
from .bounds import max_canaries, one_run_bound
from .canaries import REAL, SILENT, Setting, quiet

CANARIES = 4000  # default number of canaries, where there is room
SUSPECTED = 1 / 3  # fraction of the plan's noise that scores assume
SCHEMA = "jaxacct-audit-1"
CAN_SEE = (
    "A lower bound above the plan's epsilon says that something is broken: too little noise, no clipping, "
    "other batches than were accounted for. All else proves nothing: an audit finds what its canaries touch. "
    "It does not test how noise is correlated, what sums are divided by, or whether examples join batches "
    "independently of each other. It does not see rows that depend on other rows, statistics of the private "
    "data in a loss or in public files, what is tuned on the private data, keys that leak, or a fault that "
    "spares the coordinates of the canaries. The audit trains on the data: to show its result to others is "
    "one more run under the plan, and costs its epsilon again."
)


@dataclass(frozen=True)
class Finding:
    """Result of an audit.

    Attributes:
      lower: lower bound on epsilon (natural log, at least 0), false with probability 1 - confidence.
      accuracy: of the guesses, at least, with that confidence (Clopper-Pearson).
      guesses, right: how many coins were guessed, and how many rightly.
      epsilon, delta: the claim of the plan.
      confidence: of `lower` and `accuracy` together.
      canaries: number of canaries.
      private_scores, private_present: (trials,) float32 and bool; they reveal what was in the run.
    """

    lower: float
    accuracy: float
    guesses: int
    right: int
    epsilon: float
    delta: float
    confidence: float
    canaries: int
    private_scores: np.ndarray = field(repr=False, compare=False)
    private_present: np.ndarray = field(repr=False, compare=False)

    @property
    def contradicts(self) -> bool:
        """Whether the plan is refuted."""
        return self.lower > self.epsilon

    def statement(self) -> str:
        """Return the result in sentences."""
        verdict = (
            f"the plan's {self.epsilon:.4g} is CONTRADICTED: something is broken"
            if self.contradicts
            else f"it does not contradict the plan's {self.epsilon:.4g}, and proves nothing beyond"
        )
        return (
            f"one-run audit, {self.canaries} canaries: epsilon at delta {self.delta:.4g} is at least "
            f"{self.lower:.4g} with confidence {self.confidence:.10g}; {verdict}. "
            f"{self.right} of {self.guesses} guesses were right, an accuracy of at least {self.accuracy:.4g}."
        )

    def to_json(self) -> dict:
        """Return the fields that are not private."""
        named = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        shown = {name: value for name, value in named.items() if not name.startswith("private_")}
        return shown | {"contradicts": self.contradicts}


def audit(
    model,
    loss,
    dataset,
    plan: Plan,
    *,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float = 1.0,
    canaries: int | None = None,
    confidence: float = 0.95,
    wrt=None,
    loss_key=None,
    keys: tuple | None = None,
    microbatch_size: int | None = None,
    normalize: bool = False,
    progress: Callable[[str, int, float], None] | bool | None = None,
) -> Finding:
    """Return the `Finding` of an attack on a run of `fit` under a plan.

    The plan is of correlated noise (`jaxacct.Plan`), for examples, batches not cut. `optimizer` is SGD at 0.1
    by default. `canaries` are `CANARIES` by default, or what examples, coordinates and delta allow. The other
    arguments are those of `fit`; coins follow from `keys`.

    Raises:
      ValueError: bad arguments, or a plan that cannot be audited.
    """
    _check(plan)
    confidence = _validate.open_probability("confidence", confidence)
    request = Request(model, loss, dataset, options=TrainOptions(wrt=wrt, loss_key=loss_key))
    functional, params = request.functional()
    options = TrainOptions(
        keys=keys,
        progress=progress,
        microbatch_size=microbatch_size,
        normalize=normalize,
        verify=False,  # the audit attacks how the plan is realised
        prefetch=0,  # a batch is read after the step before it
    )
    clip_norm = _validate.positive_number("clip_norm", clip_norm)
    setting = Setting(plan, functional, params, as_rows(dataset), clip_norm, options)
    # The coins are as secret as the keys.
    generator = np.random.default_rng(None if keys is None else [int(word) for word in keys[0]])
    size, by_delta = len(setting.rows), max_canaries(plan.delta, confidence, plan.epsilon)
    ideal = np.ones(by_delta, bool)
    if by_delta < 2 or one_run_bound(ideal * 1.0, ideal, plan.delta, confidence).lower == 0:
        raise ValueError(
            f"plan must have a smaller delta than {plan.delta:.4g} for a one-run audit to find anything at "
            f"confidence {confidence:.10g}"
        )
    # By default a third of the examples stay what they are.
    most = min(size if canaries is not None else 2 * size // 3, setting.coordinates, by_delta)
    number = min(CANARIES, most) if canaries is None else _validate.positive_integer("canaries", canaries)
    if not 2 <= number <= most:
        raise ValueError(
            f"canaries must be 2 to {most} with {size} examples, {setting.coordinates} coordinates and delta "
            f"{plan.delta:.4g}, got {number}"
        )
    coordinates = quiet(setting, number)
    inside = generator.random(number) < 0.5
    canary_of = np.full(size, REAL, np.int32)
    canary_of[:number] = np.where(inside, coordinates, SILENT)
    scores = _scores(plan, setting.outputs(canary_of, coordinates, optimizer or optax.sgd(0.1)))
    guessed = one_run_bound(scores, inside, plan.delta, confidence)
    return Finding(*guessed, plan.epsilon, plan.delta, confidence, number, scores, inside)


def _check(plan) -> None:
    _validate.instance("plan", plan, Plan, "a jaxacct.Plan: other plans have no audit here")
    scheme = plan.mechanism.scheme
    if scheme.unit != "example":
        raise ValueError(f"plan must protect examples to be audited, protects a {scheme.unit}")
    cut = plan.truncation_delta is not None or scheme.batch_size_cap is not None
    if cut or scheme.side_information is not None:
        raise ValueError("plan must not truncate batches to be audited: canaries would not be independent")
    if plan.compose_with is not None:
        raise ValueError("plan must not be composed with other releases: an audit sees this run alone")


def _scores(plan: Plan, outputs: np.ndarray) -> np.ndarray:
    """Return (canaries,) log likelihood ratios of being in, not silent, at a third of the plan's noise.

    With the right noise these separate nearly as well as at the plan's noise, and far better with less.
    """
    mechanism = plan.mechanism
    supposed = dataclasses.replace(mechanism, noise_multiplier=SUSPECTED * mechanism.noise_multiplier)
    return np.asarray(privacy_loss(supposed, outputs.astype(np.float32)))


def digits() -> dict[str, Any]:
    """Return the default of `--model`: the small CNN on the digits of scikit-learn."""
    from flax import nnx

    from ..batches.data import load
    from ..models.networks import SmallCNN, cross_entropy

    split = load("digits")
    model = SmallCNN(split.shape, split.num_classes, nnx.Rngs(0))
    return dict(model=model, loss=cross_entropy, dataset=split.train)


def named(name: str) -> dict[str, Any]:
    """Return what `module:function` returns: arguments of `audit`, at least `model`, `loss` and `dataset`."""
    module, _, function = name.partition(":")
    if not (module and function):
        raise ValueError(f"model must be module:function, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {name} cannot be imported: {error}") from None
    made = found()
    allowed = {"model", "loss", "dataset", "optimizer", "clip_norm", "wrt", "loss_key"}
    if not isinstance(made, dict) or not {"model", "loss", "dataset"} <= set(made) <= allowed:
        raise ValueError(
            f"model {name} must return a dictionary of model, loss and dataset, and optionally "
            f"{', '.join(sorted(allowed - {'model', 'loss', 'dataset'}))}"
        )
    return made


def run(
    *,
    plan: str,
    model: str | None = None,
    canaries: Integer | None = None,
    confidence: Number = 0.95,
    clip_norm: Number | None = None,
    microbatch_size: Integer | None = None,
    out: str | None = None,
    json_output: bool = False,
) -> int:
    """Attack training under a plan with canaries: a lower bound on its epsilon.

    For example:

        jaxacct audit --plan plan.json --out audit.json
        jaxacct audit --plan plan.json --model my_project:what_i_train

    Exit codes: 0 nothing contradicts the plan, 1 the audit does, or a batch was overfull, 2 bad input or a
    full disk, 130 interrupted.

    Args:
      plan: from `jaxacct calibrate --out`, for as many examples as the data has.
      model: module:function that returns a dictionary with model, loss and dataset as `fit` takes them
        (optimizer, clip_norm, wrt and loss_key too, if requested); by default a small CNN on digits.
      canaries: 4,000 by default, or what examples, coordinates and delta allow.
      confidence: of the bound.
      clip_norm: norm that gradients are clipped to; 1 by default.
      microbatch_size: examples whose gradients are in memory at a time.
      out: file for the finding, as JSON.
      json_output: print one JSON object and nothing else.
    """
    check_target(out, lambda path: holds_schema(path, SCHEMA), "the finding of an audit", may_force=False)
    covered = read_plan(plan)
    given = digits() if model is None else named(model)
    given |= {} if clip_norm is None else {"clip_norm": clip_norm}
    with watch(unit="steps") as progress:
        asked: dict[str, Any] = dict(canaries=canaries, confidence=confidence, progress=progress or False)
        try:  # other plans are refused
            found = audit(**given, plan=covered, microbatch_size=microbatch_size, **asked)
        except BatchOverflowError as error:
            complain(str(error))
            return 1
    shown = {"schema": SCHEMA, "finding": found.to_json(), "can_see": CAN_SEE}
    if out is not None:
        write_atomically(out, json.dumps(shown, indent=1) + "\n")
    if json_output:
        print(json.dumps(shown))
    else:
        print(f"{found.statement()}\n{CAN_SEE}")
    return 1 if found.contradicts else 0
