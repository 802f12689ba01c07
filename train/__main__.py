"""`jaxacct train`: train a model under a plan.

    jaxacct train --plan plan.json --data digits --out run/

Exit codes: 0 done, 1 the run stopped at an overfull batch, 2 bad input or a full disk, 130 interrupted; the
same command continues the run.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxacct.accountants.tradeoff.plan import LastIteratePlan
from jaxacct.common import validate as _validate
from jaxacct.common.progress import watch
from jaxacct.report.run_card import read_plan

from . import command as _command
from .batches.data import Split, load
from .batches.graph import Attribution
from .batches.sources import ArrayRows
from .individual import IndividualAccounting
from .models.networks import SmallCNN, cross_entropy
from .optimizers import OPTIMIZERS
from .procedures.convex import LogisticRegression
from .procedures.protocol import TrainingPlan
from .run.metrics import tensorboard as event_files
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


# The `training` of a plan -> (plan, data, model and optimizer options) -> arguments of `fit`.
RECIPES: dict[str, Callable[[Any, Split, dict[str, Any]], dict[str, Any]]] = {
    "correlated-noise": network,
    "general-dpsgd": network,
    "last-iterate": logistic,
    "dice": network,
}


def train(
    plan: str,
    out: str,
    data: Literal["digits", "mnist"] = "digits",
    data_folder: str | None = None,
    optimizer: Literal["sgd", "adam"] | None = None,
    learning_rate: float | None = None,
    clip_norm: float | None = None,
    clip: Literal["individual", "batch", "mixed"] | None = None,
    inner_learning_rate: float | None = None,
    normalize: bool = False,
    steps: int | None = None,
    microbatch_size: int | None = None,
    clipping: Literal["auto", "ghost", "per_example"] = "auto",
    clip_groups: Literal["layer"] | None = None,
    average: float | None = None,
    checkpoint_every: int = 100,
    model_seed: int | None = None,
    graph: str | None = None,
    individual_epsilon: float | None = None,
    individual_delta: float | None = None,
    elastic: bool = False,
    tensorboard: str | None = None,
    json_output: bool = False,
) -> int:
    """Train a model under a plan: DP-SGD or BandMF, batch clipping, DiceSGD, or noisy descent.

    Args:
      plan: from `jaxacct calibrate --out`, made with --dataset-size; or from `jaxacct tradeoff general --out`
        or `last-iterate --out`, which trains the logistic regression that it covers.
      out: folder of the run: model, logs, checkpoints (secret) and the guarantee.
      data: name of the data set.
      data_folder: its folder, in the published layout; digits need none.
      optimizer: SGD with momentum 0.95 (the default), or Adam; both with the paper's learning-rate decay.
      learning_rate: initial learning rate, 0.5 by default.
      clip_norm: norm that each example's gradient, or each term, is clipped to; 1 by default.
      clip: what is clipped, to be checked against the plan.
      inner_learning_rate: SGD through the records of each term instead of their mean gradient, for plans that
        clip whole terms.
      normalize: automatic clipping.
      steps: number of steps, by default all of the plan's.
      microbatch_size: examples, or terms, whose gradients are in memory at a time.
      clipping: "ghost" clips without the gradients of examples, much faster for dense layers; "auto" uses it
        where it applies and pays.
      clip_groups: "layer" clips each layer's gradient to its own norm, clip_norm / sqrt(layers).
      average: decay of an exponential moving average of the parameters, which is then what is published.
      checkpoint_every: steps between checkpoints.
      model_seed: of the initial parameters, which are public; 0 by default.
      graph: from `jaxacct attribution`, for an attribution plan.
      individual_epsilon: exclude every example from each step that would take its own loss past this
        (`train.individual`), for Poisson batches with independent noise. Excluded examples are private and
        not shown.
      individual_delta: delta of `individual_epsilon`.
      elastic: continue a run of `out` that began on other devices or package versions; the bits then differ.
      tensorboard: folder for event files of the metrics of every step. Private: no guarantee covers them.
      json_output: print one JSON object and nothing else.
    """
    covered = read_plan(plan)
    callback = None if tensorboard is None else event_files(tensorboard)
    split = load(data, data_folder)
    chosen = dict(optimizer=optimizer, learning_rate=learning_rate, steps=steps)
    chosen |= dict(inner_learning_rate=inner_learning_rate, model_seed=model_seed)
    recipe = RECIPES[covered.training](covered, split, chosen)
    individual = None
    if individual_epsilon is not None or individual_delta is not None:
        individual = IndividualAccounting(individual_epsilon, individual_delta)
    with watch() as progress:
        options = TrainOptions(
            steps=steps,
            clip=clip,
            clipping=clipping,
            clip_groups=clip_groups,
            average=average,
            normalize=normalize,
            inner=recipe.pop("inner", None),
            microbatch_size=microbatch_size,
            graph=None if graph is None else Attribution.load(graph),
            individual=individual,
            checkpoint_every=checkpoint_every,
            progress=progress or False,
            callback=callback,
            elastic=elastic,
        )
        result = fit(covered, data=split.train, clip_norm=clip_norm, out=out, options=options, **recipe)
    if json_output:
        print(json.dumps({"steps": result.steps, **result.evaluation, "guarantee": result.statement}))
    else:
        print(f"{result.steps} steps, test accuracy {result.evaluation['accuracy']:.4f}")
        print(result.statement)
        folder = str(out).rstrip("/")
        print(f"parameters: {folder}/model; never publish: {folder}/secret.json, {folder}/checkpoints")
    return 0


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with the codes in the module's docstring."""
    _command.run(train, "train", prog="jaxacct train", argv=argv)


if __name__ == "__main__":
    main()
