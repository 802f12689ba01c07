"""`jaxacct train`: train a model under a plan."""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxacct.accountants.tradeoff.plan import LastIteratePlan
from jaxacct.cli.output import complain
from jaxacct.cli.usage import Flat, Integer, Number, options_of
from jaxacct.common import validate as _validate
from jaxacct.common.progress import watch
from jaxacct.report.run_card import read_plan

from .batches.data import Split, load
from .batches.graph import Attribution
from .batches.sampler import BatchOverflowError
from .batches.sources import ArrayRows
from .individual import IndividualAccounting
from .models.networks import SmallCNN, cross_entropy
from .optimizers import OPTIMIZERS
from .procedures.convex import LogisticRegression
from .procedures.protocol import TrainingPlan
from .training import TrainOptions, fit


def accuracy(model: nnx.Module, data: ArrayRows, chunk: int = 512):
    """Return `evaluate(params) -> {"accuracy"}` on a data set; the model gives the structure."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def correct(params, rows):
        logits = nnx.merge(graph, params, rest)(rows["inputs"])
        return jnp.argmax(logits, axis=-1) == rows["labels"]

    def evaluate(params) -> dict[str, float]:
        count = 0
        for start in range(0, len(data), chunk):
            indices = np.arange(start, min(start + chunk, len(data)))
            count += int(correct(params, data.take(indices, chunk))[: len(indices)].sum())
        return {"accuracy": count / len(data)}

    return evaluate


def network(plan: TrainingPlan, split: Split, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return a Flax model, its loss and an optimizer, as arguments of `fit`; `inner` is an option."""
    total = plan.iterations if chosen["steps"] is None else chosen["steps"]
    rate = 0.5 if chosen["learning_rate"] is None else chosen["learning_rate"]
    _validate.positive_number("learning_rate", rate)
    rngs = nnx.Rngs(chosen["model_seed"] or 0)
    model = SmallCNN(split.shape, split.num_classes, rngs)
    inner = chosen["inner_learning_rate"]
    if inner is not None:
        inner = optax.sgd(_validate.positive_number("inner_learning_rate", inner))
    optimizer = OPTIMIZERS[chosen["optimizer"] or "sgd"](rate, total)
    evaluate = accuracy(model, split.test)
    return dict(model=model, loss=cross_entropy, optimizer=optimizer, inner=inner, evaluate=evaluate)


def logistic(plan: LastIteratePlan, split: Split, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the logistic regression that a plan of last iterates covers; nothing is left to choose."""
    for name, value in chosen.items():
        if name != "steps" and value is not None:
            raise ValueError(f"{name} must not be given for a plan of {plan.training}")
    loss = LogisticRegression.within(plan, split.num_classes)
    test = split.test.take(np.arange(len(split.test)), len(split.test))

    def evaluate(weights) -> dict[str, float]:
        return {"accuracy": float(np.mean(loss.predict(weights, test["inputs"]) == test["labels"]))}

    return dict(model=None, loss=loss, evaluate=evaluate)


# Those that only Python can give, and those that are given otherwise below.
_NOT_OF_COMMANDS = "inner has_aux wrt loss_key graph individual mesh progress callback keys verify"
Options: Any = options_of(TrainOptions, tuple(_NOT_OF_COMMANDS.split()))


def train(
    *,
    plan: str,
    out: str,
    data: Literal["digits", "mnist"] = "digits",
    data_folder: str | None = None,
    optimizer: Literal["sgd", "adam"] | None = None,
    learning_rate: Number | None = None,
    clip_norm: Number | None = None,
    inner_learning_rate: Number | None = None,
    model_seed: Integer | None = None,
    graph: str | None = None,
    individual_epsilon: Number | None = None,
    individual_delta: Number | None = None,
    options: Annotated[Options | None, Flat] = None,
    json_output: bool = False,
) -> int:
    """Train a model under a plan: DP-SGD or BandMF, batch clipping, DiceSGD, or noisy descent.

    For example:

        jaxacct train --plan plan.json --data digits --out run/

    Exit codes: 0 done, 1 the run stopped at an overfull batch, 2 bad input or a full disk, 130 interrupted;
    the same command continues the run.

    Args:
      plan: from `jaxacct calibrate --out`, made with --dataset-size; or from `jaxacct tradeoff general --out`
        or `last-iterate --out`, which trains the logistic regression that it covers.
      out: folder of the run: model, logs, checkpoints (secret) and the guarantee.
      data: name of the data set.
      data_folder: its folder, in the published layout; digits need none.
      optimizer: SGD with momentum 0.95 (the default), or Adam; both with the paper's learning-rate decay.
      learning_rate: initial learning rate, 0.5 by default.
      clip_norm: norm that each example's gradient, or each term, is clipped to; 1 by default.
      inner_learning_rate: SGD through the records of each term instead of their mean gradient, for plans that
        clip whole terms.
      model_seed: of the initial parameters, which are public; 0 by default.
      graph: from `jaxacct attribution`, for an attribution plan.
      individual_epsilon: exclude every example from each step that would take its own loss past this
        (`train.individual`), for Poisson batches with independent noise. Excluded examples are private and
        not shown.
      individual_delta: delta of `individual_epsilon`.
      json_output: print one JSON object and nothing else.
    """
    chosen = TrainOptions() if options is None else TrainOptions(**vars(options))
    covered = read_plan(plan)
    split = load(data, data_folder)
    of_model = dict(optimizer=optimizer, learning_rate=learning_rate, steps=chosen.steps)
    of_model |= dict(inner_learning_rate=inner_learning_rate, model_seed=model_seed)
    recipe = (logistic if isinstance(covered, LastIteratePlan) else network)(covered, split, of_model)
    individual = None
    if individual_epsilon is not None or individual_delta is not None:
        individual = IndividualAccounting(individual_epsilon, individual_delta)
    with watch() as progress:
        chosen = replace(
            chosen,
            inner=recipe.pop("inner", None),
            graph=None if graph is None else Attribution.load(graph),
            individual=individual,
            progress=progress or False,
        )
        try:
            result = fit(covered, data=split.train, clip_norm=clip_norm, out=out, options=chosen, **recipe)
        except BatchOverflowError as error:
            complain(str(error))
            return 1
    if json_output:
        print(json.dumps({"steps": result.steps, **result.evaluation, "guarantee": result.statement}))
    else:
        print(f"{result.steps} steps, test accuracy {result.evaluation['accuracy']:.4f}")
        print(result.statement)
        folder = out.rstrip("/")
        print(f"parameters: {folder}/model; never publish: {folder}/secret.json, {folder}/checkpoints")
    return 0
