"""`python -m train`: train a model under a plan.

    python -m train --plan plan.json --data digits --out run/

from a checkout; `python -m jaxacct.train` where jaxacct[train] is installed.

Exit codes: 0 done, 1 the run stopped (a full disk, an overfull batch), 2 bad input, 130 interrupted; the same
command goes on where it was.
"""

import json
import sys
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from jaxacct import _validate
from jaxacct._interrupted import leave
from jaxacct.compilation_cache import keep_compiled_programs
from jaxacct.plan import Plan
from jaxacct.progress import watch

from .attribution import Attribution
from .data import Dataset, load
from .loop import fit
from .models import MODELS, cross_entropy
from .optimizers import OPTIMIZERS
from .run_folder import CheckpointError
from .sampler import BatchOverflowError


def accuracy(model: nnx.Module, data: Dataset, chunk: int = 512):
    """`evaluate(params) -> {"accuracy"}` on a data set; the model gives the structure."""
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def right(params, rows):
        logits = nnx.merge(graph, params, rest)(rows["inputs"])
        return jnp.argmax(logits, axis=-1) == rows["labels"]

    def evaluate(params) -> dict[str, float]:
        found = 0
        for start in range(0, len(data), chunk):
            indices = np.arange(start, min(start + chunk, len(data)))
            found += int(right(params, data.take(indices, chunk))[: len(indices)].sum())
        return {"accuracy": found / len(data)}

    return evaluate


def train(
    plan: str,
    out: str,
    data: Literal["digits", "cifar-10", "cinic-10"] = "digits",
    data_folder: str | None = None,
    model: Literal["cnn", "vgg"] = "cnn",
    optimizer: Literal["sgd", "adam"] = "sgd",
    learning_rate: float = 0.5,
    clip_norm: float = 1.0,
    normalize: bool = False,
    steps: int | None = None,
    microbatch_size: int | None = None,
    checkpoint_every: int = 100,
    model_seed: int = 0,
    graph: str | None = None,
    json_output: bool = False,
) -> int:
    """Train a model with DP-SGD or BandMF exactly as a plan says.

    Args:
      plan: from `jaxacct calibrate --out`, made with --dataset-size.
      out: folder of the run: model, logs, checkpoints (secret) and the guarantee.
      data: which data set.
      data_folder: where it is, in its published layout; digits need none.
      model: "cnn", or the "vgg" of the paper for 32 x 32 images.
      optimizer: SGD with momentum 0.95, or Adam; both with the paper's learning-rate decay.
      learning_rate: before the decay.
      clip_norm: norm that each example's gradient is clipped to.
      normalize: automatic clipping.
      steps: by default all of the plan's.
      microbatch_size: examples whose gradients are in memory at a time.
      checkpoint_every: steps between checkpoints.
      model_seed: of the initial parameters, which are public.
      graph: from `python -m train.attribution`, for an attribution plan.
      json_output: print one JSON object and nothing else.
    """
    covered = Plan.load(plan)
    split = load(data, data_folder)
    _validate.positive_number("learning_rate", learning_rate)
    total = covered.mechanism.scheme.iterations if steps is None else steps
    network = MODELS[model](split.train.shape, split.num_classes, nnx.Rngs(model_seed))
    with watch(unit="steps") as progress:
        result = fit(
            covered,
            network,
            cross_entropy,
            split.train,
            OPTIMIZERS[optimizer](learning_rate, total),
            clip_norm=clip_norm,
            out=out,
            steps=steps,
            microbatch_size=microbatch_size,
            normalize=normalize,
            evaluate=accuracy(network, split.test),
            checkpoint_every=checkpoint_every,
            progress=progress,
            graph=None if graph is None else Attribution.load(graph),
        )
    if json_output:
        print(json.dumps({"steps": result.steps, **result.evaluation, "guarantee": result.statement}))
    else:
        print(f"{result.steps} steps, test accuracy {result.evaluation['accuracy']:.4f}")
        print(result.statement)
        print(f"parameters: {out}/model; secret, never to be published: {out}/secret.json, {out}/checkpoints")
    return 0


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with the codes in the module's docstring."""
    keep_compiled_programs()
    try:
        code = tyro.cli(train, prog=f"python -m {__package__}", args=argv)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        code = 2
    except (CheckpointError, BatchOverflowError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        leave("train: interrupted; the same command goes on")
    sys.exit(code)


if __name__ == "__main__":
    main()
