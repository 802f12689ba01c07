"""Fine-tune a small language model with low-rank adapters, privately: a script to read and to change.

    python -m train.models.lora --out tuned/                          # minutes on two cores, no download
    python -m train.models.lora --out tuned/ --checkpoint pretrained/   # of train.save_model, sizes as given
    python -m train.models.lora --out tuned/ --text letters.txt         # your own text

A transformer on characters is trained on public text (NumPy's documentation), frozen, and adapted to private
text (the reference of the Python language). One example is a piece of `length` characters: the guarantee is
for a piece, not for an author of several of them.
"""

from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
from flax import nnx

from jaxacct import BandedToeplitz, Poisson, calibrate
from jaxacct.common import validate as _validate
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan

from .. import command as _command
from ..training import TrainOptions, fit
from .networks import Transformer, add_lora, next_token
from .saving import load_model, save_model

VOCABULARY = 128  # ASCII
_BATCH = 64  # of public text, and of text to evaluate


def public_text() -> str:
    """Return the documentation of NumPy."""
    pages = {getattr(getattr(np, name), "__doc__", None) for name in dir(np)}
    return "\n".join(sorted(page for page in pages if isinstance(page, str)))


def private_text() -> tuple[str, str]:
    """Return the reference of Python, to train on, and every tenth page of it, to evaluate."""
    from pydoc_data.topics import topics

    pages = [topics[name] for name in sorted(topics)]
    return "\n".join(page for i, page in enumerate(pages) if i % 10), "\n".join(pages[::10])


def pieces(text: str, length: int) -> np.ndarray:
    """Return (pieces, length + 1) int32 of a text; what is not ASCII is a question mark."""
    found = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    number = len(found) // (length + 1)
    if number == 0:
        raise ValueError(f"text must have at least {length + 1} characters, got {len(found)}")
    return found[: number * (length + 1)].reshape(number, length + 1)


def pretrain(model: nnx.Module, rows: np.ndarray, steps: int) -> None:
    """Train with Adam on public text, in place, without privacy."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        def mean(model):
            graph, state = nnx.split(model)
            return jax.vmap(lambda row: next_token(nnx.merge(graph, state), row))(batch).mean()

        optimizer.update(model, nnx.grad(mean)(model))

    generator = np.random.default_rng(0)
    for _ in range(steps):
        step(model, optimizer, rows[generator.integers(0, len(rows), _BATCH)])


def nats(model: nnx.Module, rows: np.ndarray):
    """Return `evaluate(adapters) -> {"nats"}`, the mean loss a character on public text."""
    graph, _, others = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def losses(adapters, others, batch):
        return jax.vmap(lambda row: next_token(nnx.merge(graph, adapters, others), row))(batch)

    def evaluate(adapters) -> dict[str, float]:
        # One program for all: other shapes and committed arrays would be compiled again.
        adapters = jax.tree.map(np.asarray, adapters)
        padded = np.pad(rows, ((0, -len(rows) % _BATCH), (0, 0)))
        parts = [losses(adapters, others, padded[i : i + _BATCH]) for i in range(0, len(rows), _BATCH)]
        return {"nats": float(np.concatenate(parts)[: len(rows)].mean())}

    return evaluate


def poisson_plan(rows: int, batch_size: int, steps: int, epsilon: float, delta: float) -> Plan:
    """Return a plan of DP-SGD on Poisson batches, by dp-accounting's bound."""
    scheme = Poisson.from_batch_size(dataset_size=rows, batch_size=batch_size, iterations=steps)
    white = BandedToeplitz.square_root(1)
    return calibrate(scheme, white, epsilon=epsilon, delta=delta, dataset_size=rows, accountant="pld")


def tune(
    out: str,
    checkpoint: str | None = None,
    text: str | None = None,
    test_text: str | None = None,
    epsilon: float = 4.0,
    delta: float = 1e-5,
    steps: int = 100,
    batch_size: int = 256,
    learning_rate: float = 0.01,
    clip_norm: float = 0.3,
    rank: int = 4,
    length: int = 64,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    pretraining_steps: int = 800,
    clipping: Literal["auto", "ghost", "per_example"] = "auto",
) -> int:
    """Train adapters of a language model under a plan for this text.

    Args:
      out: folder: base/ (public), plan.json and run/, see `train.run.folder`; the same command continues.
      checkpoint: folder that `train.save_model` wrote a Transformer of these sizes to; by default one is
        trained on public text first.
      text: file with private text; by default the reference of the Python language without every tenth page.
      test_text: file with public text to evaluate on; by default those pages, and nothing for a `text`.
      epsilon: of the guarantee for one piece of `length` characters.
      delta: of the guarantee.
      steps: steps of private training.
      batch_size: expected pieces a step.
      learning_rate: of Adam.
      clip_norm: of the gradient of a piece's adapters.
      rank: of the adapters.
      length: context of the transformer, in characters.
      width: of the transformer.
      layers: number of layers.
      heads: number of attention heads.
      pretraining_steps: on public text, without a checkpoint.
      clipping: as `TrainOptions`: "ghost" clips without the gradients of examples; "auto" where that pays.
    """
    for name, value in dict(rank=rank, length=length, width=width, layers=layers, heads=heads).items():
        _validate.positive_integer(name, value)
    private, test = private_text() if text is None else (_read(text), None)
    test = test if test_text is None else _read(test_text)
    rows, folder = pieces(private, length), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    model = Transformer(VOCABULARY, length, width, layers, heads, nnx.Rngs(0))
    base = folder / "base" if checkpoint is None else Path(checkpoint)
    if checkpoint is None and not (base / "model").is_dir():
        pretrain(model, pieces(public_text(), length), pretraining_steps)
        save_model(base, model)
    load_model(base, model)
    add_lora(model, rank, nnx.Rngs(1))
    covered = poisson_plan(len(rows), batch_size, steps, epsilon, delta)
    covered.save(folder / "plan.json")
    evaluate = None if test is None else nats(model, pieces(test, length))
    before = {} if evaluate is None else evaluate(nnx.state(model, nnx.LoRAParam))
    with watch(unit="steps") as progress:
        options = TrainOptions(wrt=nnx.LoRAParam, clipping=clipping, progress=progress or False)
        parts = covered, model, next_token, rows, optax.adam(learning_rate)
        result = fit(*parts, clip_norm=clip_norm, out=folder / "run", evaluate=evaluate, options=options)
    if evaluate is not None:
        after = result.evaluation["nats"]
        print(f"nats a character: {before['nats']:.3f} before, {after:.3f} after {result.steps} steps")
    print(result.statement)
    print(f"adapters: {out}/run/model; secret, never to be published: {out}/run/checkpoints, secret.json")
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text {path} cannot be read: {error}") from None


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits as `train.command.run`."""
    _command.run(tune, "lora", prog=f"python -m {__spec__.name}", argv=argv)


if __name__ == "__main__":
    main()
