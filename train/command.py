"""`jaxacct train`: train a model under a plan."""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxacct.accountants.tradeoff.plan import LastIteratePlan
from jaxacct.cli.output import complain
from jaxacct.cli.usage import Flat, Integer, Number, options_of
from jaxacct.common import validate as _validate
from jaxacct.common.progress import watch
from jaxacct.report.run_card import read_plan

from .batches.data import load
from .batches.sampler import BatchOverflowError
from .batches.sources import ArrayRows
from .models.networks import SmallCNN, cross_entropy
from .optimizers import OPTIMIZERS
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


# Those that only Python can give, and those that are given otherwise below.
_NOT_OF_COMMANDS = "inner wrt loss_key graph individual mesh progress callback keys verify"
Options: Any = options_of(TrainOptions, tuple(_NOT_OF_COMMANDS.split()))


def train(
    *,
    plan: str,
    out: str,
    data: Literal["digits", "mnist"] = "digits",
    data_folder: str | None = None,
    optimizer: Literal["sgd", "adam"] = "sgd",
    learning_rate: Number = 0.5,
    clip_norm: Number | None = None,
    model_seed: Integer = 0,
    options: Annotated[Options | None, Flat] = None,
    json_output: bool = False,
) -> int:
    """Train a small CNN under a plan: DP-SGD or BandMF, batch clipping, or DiceSGD.

    For example:

        jaxacct train --plan plan.json --data digits --out run/

    Exit codes: 0 done, 1 the run stopped at an overfull batch, 2 bad input or a full disk, 130 interrupted;
    the same command continues the run.

    Args:
      plan: from `jaxacct calibrate --out`, made with --dataset-size, or `jaxacct tradeoff general --out`.
      out: folder of the run: model, logs, checkpoints (secret) and the guarantee.
      data: name of the data set.
      data_folder: its folder, in the published layout; digits need none.
      optimizer: SGD with momentum 0.95 (the default), or Adam; both with the paper's learning-rate decay.
      learning_rate: initial learning rate, 0.5 by default.
      clip_norm: norm that each example's gradient, or each term, is clipped to; 1 by default.
      model_seed: of the initial parameters, which are public; 0 by default.
      json_output: print one JSON object and nothing else.
    """
    chosen = TrainOptions() if options is None else TrainOptions(**vars(options))
    covered = read_plan(plan)
    split = load(data, data_folder)
    if isinstance(covered, LastIteratePlan):
        raise ValueError("plan must not be of last-iterate: jaxacct.train.fit trains its losses")
    model = SmallCNN(split.shape, split.num_classes, nnx.Rngs(model_seed))
    rate = _validate.positive_number("learning_rate", learning_rate)
    rule = OPTIMIZERS[optimizer](rate, covered.iterations if chosen.steps is None else chosen.steps)
    kept: dict[str, Any] = dict(clip_norm=clip_norm, out=out, evaluate=accuracy(model, split.test))
    with watch() as progress:
        chosen = replace(chosen, progress=progress or False)
        try:
            result = fit(covered, model, cross_entropy, split.train, rule, options=chosen, **kept)
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
