"""The folder of one training run: what it is, its secrets, its checkpoints, its logs.

    run.json               what is run; a resumed call must describe the same (public)
    secret.json            sampler key, keyed digests of what is private (mode 600)
    checkpoints/           Orbax: parameters, optimizer, noise buffer and key, sampler (mode 700);
                           private_individual/: every example's own privacy loss, where it is followed;
                           private_dice/: the error of DiceSGD
    private/               metrics.jsonl: loss, clipped fraction, norms: no guarantee covers these (mode 700,
                           so that size and time of the log are not visible either)
    metrics.jsonl          step, evaluation on public data; no times: they tell batch sizes, which are private
    model/                 Orbax: the trained parameters, covered by the guarantee; no times
    result.json            the end of the run and its guarantee

Whoever reads a secret can remove the noise. Nothing of secret.json, checkpoints/ or private/ may be published
with the model.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jaxacct import BandedToeplitz, Mechanism, Poisson
from jaxacct.common.files import Checkpoint, read_json, write_atomically

from .batches.sampler import SamplerState
from .clipping.grid import Grid
from .loss import digest
from .noise.normals import ARRANGEMENT, standard_normals

_SECRET_FOLDERS = "checkpoints", "private"
_PRIVATE_LOG = "private/metrics.jsonl"
_OLD_PRIVATE_LOG = "private_metrics.jsonl"  # its place in folders of earlier releases
# What a run is bound to by digests under its secret key: name in secret.json -> what the refusal calls it.
_PRIVATE = {
    "data": "on other data",
    "continues": "with other earlier losses (continues of individual)",
}
# What a run is bound to by digests, which say nothing to a reader, or long lists: what may have changed.
_DIGESTS = {
    "plan": "plan",
    "program": "program (model, loss, optimizer, batch, or a release of jaxacct that computes otherwise)",
    "generator": "generator of noise (a release that draws otherwise, or one that did not record it)",
    "clip_groups": "partition of the parameters, or other norms of its parts (clip_groups)",
    "frozen": "frozen part (weights that are not trained, or key of the loss)",
}
# What may change where a run goes on elsewhere, and what of it says that it does.
_ELSEWHERE = ("versions", "jaxlib", "device", "devices", "flags", "processor")
_ELASTIC = {"program", "microbatch_size", *_ELSEWHERE}
_LATER = {"devices", "generator", "jaxlib", "flags", "processor"}  # what folders of before do not state
_KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


def generator() -> list[float]:
    """Numbers that tell how noise is drawn from a key, of a key that is public and used for nothing else.

    And on what grid, as kept noise is in its units; and which parameter gets which of many normals.
    """
    of_one = Mechanism(Poisson(1, 1.0), BandedToeplitz.identity(), 1.0)
    normals = np.asarray(standard_normals(np.arange(8, dtype=np.uint32), 5, 6)).tolist()
    return [*normals, float(Grid.of(of_one, 1.0).bits), float(ARRANGEMENT)]


def _same_numbers(before, now) -> bool:
    """The same generator, however a device rounds."""
    return isinstance(before, list) and len(before) == len(now) and np.allclose(before, now, 1e-9, 1e-9)


def _unknown(stored: dict, name: str) -> bool:
    return name in _LATER and name not in stored


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the one before it still stands."""


class RunFolder:
    """The files of one run, locked against a second process; a context manager.

    Raises:
      ValueError: when the folder cannot be used, is in use or belongs to another run.
    """

    def __init__(self, folder):
        self.folder = Path(folder).absolute()
        self._lock = Checkpoint(self.folder)
        self._moved: tuple[dict, str] | None = None
        for name in _SECRET_FOLDERS:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
            # What was there already may be open to others.
            (self.folder / name).chmod(0o700)
        if (self.folder / _OLD_PRIVATE_LOG).exists():
            os.replace(self.folder / _OLD_PRIVATE_LOG, self.folder / _PRIVATE_LOG)
        for name in ("secret.json", _PRIVATE_LOG):
            if (self.folder / name).exists():
                (self.folder / name).chmod(0o600)
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.close()
        self._lock.close()

    def begin(self, described: dict, key, private: dict[str, str], elastic: bool = False) -> list[int]:
        """Record a new run, or check that the stored one is the same; the sampler key that counts.

        With `elastic` devices and versions may be others, and with them what the program is compiled to;
        then call `went_on` once the run stands where it was.

        Args:
          described: JSON values, public.
          key: sampler key of a new run.
          private: texts by the names of `_PRIVATE`, of which keyed digests are kept: "data" and what else
            there is.
          elastic: as in `train.loop.fit`.

        Raises:
          ValueError: when another plan, clip norm, program, version, device or data set was begun with here;
            for a run of which something was shown and no checkpoint is left; with `elastic`, when noise would
            be drawn otherwise, or for steps of which something was shown.
        """
        run, secret = self.folder / "run.json", self.folder / "secret.json"
        self._refuse_without_checkpoints()
        if not secret.exists():
            if self._manager.latest_step() is not None:
                raise ValueError(
                    f"out {self.folder} holds checkpoints of a run whose secret.json is gone: its noise "
                    "must not be used twice; begin in a new folder"
                )
            key = [int(word) for word in key]
            digests = {name: _keyed(key, text) for name, text in private.items()}
            # The secret last: as long as it is missing, nothing was drawn.
            write_atomically(run, json.dumps(described, indent=1) + "\n")
            write_secret(secret, json.dumps({"sampler_key": key, **digests}))
            return key
        # Before there was another kind of clipping, runs did not say theirs.
        self._compare({"clipping": "per_example"} | read_json(run, "run"), described, elastic)
        kept = read_json(secret, "secret")
        if not (_is_key(kept.get("sampler_key")) and isinstance(kept.get("data"), str)):
            raise ValueError(
                f"secret {secret} must hold a sampler key of four words and a digest of the data"
            )
        for name, other in _PRIVATE.items():
            given = _keyed(kept["sampler_key"], private[name]) if name in private else None
            if kept.get(name) != given:
                raise ValueError(f"out {self.folder} holds a run {other}; its noise must not be used twice")
        return kept["sampler_key"]

    def _refuse_without_checkpoints(self) -> None:
        """Refuse to begin a run anew of which something was shown: same batches, fresh noise."""
        if self._manager.latest_step() is None and (shown := self._shown()):
            raise ValueError(
                f"out {self.folder} has shown step {shown} of a run and has no checkpoints of it: training "
                "again would release its batches with other noise; begin in a new folder"
            )

    @property
    def verified(self) -> bool:
        """Return whether this run's plan was verified with fresh randomness."""
        return read_json(self.folder / "run.json", "run").get("verified") is True

    def note(self, **values) -> None:
        """Add values to run.json."""
        run = self.folder / "run.json"
        write_atomically(run, json.dumps(read_json(run, "run") | values, indent=1) + "\n")

    def _compare(self, stored: dict, described: dict, elastic: bool) -> None:
        """Refuse another run, and prepare to go on elsewhere where that is allowed."""
        known = (
            described.items() if elastic else [kv for kv in described.items() if not _unknown(stored, kv[0])]
        )
        other = {name: value for name, value in known if stored.get(name) != value}
        if "generator" in other and _same_numbers(stored.get("generator"), other["generator"]):
            del other["generator"]
        moved = [name for name in _ELSEWHERE if name in other]
        if other and (not elastic or not moved or set(other) - _ELASTIC):
            strict = [name for name in other if name not in _ELASTIC] or moved or list(other)
            name, value = strict[0], other[strict[0]]
            shown = _DIGESTS.get(name, f"{name}: {stored.get(name)!r}, now {value!r}")
            hint = (
                "" if elastic or set(other) - _ELASTIC else "; elastic goes on all the same, not to the bit"
            )
            raise ValueError(
                f"out {self.folder} holds a run with another {shown}; its noise must not be used twice"
                + (hint if moved else "")
            )
        if not other:
            return
        stands = self._manager.latest_step() or 0
        if self._shown() > stands:
            raise ValueError(
                f"out {self.folder} has shown step {self._shown()} and has no checkpoint of it: elsewhere "
                "its noise would be used twice; go on where the run began, or begin in a new folder"
            )
        before = {name: stored.get(name) for name in sorted(_ELASTIC)}
        changes = "; ".join(f"{name} {stored.get(name)!r}, now {other[name]!r}" for name in moved)
        earlier = [*stored.get("earlier", []), before | {"until": stands}]
        self._moved = stored | described | {"earlier": earlier}, changes

    def _shown(self) -> int:
        """The last step of which something is public: an evaluation, or the model at the end."""
        path = self.folder / "run.json"
        run = read_json(path, "run") if path.exists() else {}
        steps = [int(run.get("shown", 0)), *(at for at, _ in _lines(self.folder / "metrics.jsonl"))]
        if (self.folder / "model").exists() or (self.folder / "result.json").exists():
            steps.append(int(run.get("steps", 1)))
        return max(steps)

    def went_on(self, step: int) -> None:
        """Warn of a run that goes on elsewhere, and remember where; nothing for others."""
        if self._moved is None:
            return
        described, changes = self._moved
        self._moved = None
        warnings.warn(
            f"the run in {self.folder} goes on elsewhere from step {step} ({changes}): the same plan, data, "
            "batches and noise, but no longer the same numbers to the bit as where it began; whether model, "
            "loss and optimizer are the same is not checked. The guarantee stands",
            stacklevel=2,
        )
        write_atomically(self.folder / "run.json", json.dumps(described, indent=1) + "\n")

    def save(self, state, drawn: SamplerState) -> None:
        """Checkpoint the state after `drawn.step` steps; whole or not at all.

        Raises:
          CheckpointError: when it cannot be written (a full disk, say).
        """
        if drawn.step in self._manager.all_steps():
            return
        sampler = {"key": list(drawn.key), "step": drawn.step, "digest": drawn.digest}
        items = {name: ocp.args.StandardSave(leaves) for name, leaves in _parts(state).items()} | {
            "sampler": ocp.args.JsonSave(sampler | {"checksum": _checksum(sampler, state)}),
        }
        try:
            self._manager.save(drawn.step, args=ocp.args.Composite(**items))
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint of step {drawn.step} in {self.folder} could not be written: "
                f"{_in_one_line(error)}; run the same command again once there is room"
            ) from error

    def restore(self, like):
        """(state, sampler state) of the newest checkpoint, or None before the first; logs are cut to it.

        Args:
          like: a state of the same structure, shapes and shardings.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        leaves, structure = jax.tree.flatten(like)

        def shape(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))

        parts = _parts(like)
        items = {
            name: ocp.args.StandardRestore(jax.tree.map(shape, wanted)) for name, wanted in parts.items()
        } | {"sampler": ocp.args.JsonRestore()}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._damaged(step, _in_one_line(error)) from error
        kept = found["sampler"]
        checksum = kept.pop("checksum", None)
        if kept.keys() != {"key", "step", "digest"} or kept["step"] != step or not _is_key(kept["key"]):
            raise self._damaged(step, "its sampler stands elsewhere")
        kept_leaves = {name: _placed(leaf) for part in parts for name, leaf in found[part].items()}
        leaves = [kept_leaves.get(f"{i:05d}", leaf) for i, leaf in enumerate(leaves)]
        state = jax.tree.unflatten(structure, leaves)
        # Orbax notices a changed byte of its own tables, and not one of a large array.
        if checksum not in (None, _checksum(kept, state)):
            raise self._damaged(step, "it is not what was written")
        if (shown := self._shown()) > step:
            # Lines go, and what they showed stays seen.
            self.note(shown=shown)
        for name in ("metrics.jsonl", _PRIVATE_LOG):
            self._cut(self.folder / name, step)
        return state, SamplerState(tuple(kept["key"]), kept["step"], kept["digest"])

    def _damaged(self, step: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {step} in {self.folder} is damaged: {why}; remove its folder {step} to go "
            "on from the one before it"
        )

    def _cut(self, path: Path, step: int) -> None:
        """Drop log lines of steps after the checkpoint, and a last one that was cut short."""
        if not path.exists():
            return
        text = "".join(line + "\n" for at, line in _lines(path) if at <= step)
        write_secret(path, text) if path == self.folder / _PRIVATE_LOG else write_atomically(path, text)

    def has_logged(self, step: int) -> bool:
        """Return whether metrics.jsonl has a line of this step or of a later one."""
        return any(at >= step for at, _ in _lines(self.folder / "metrics.jsonl"))

    def log(self, line: dict) -> None:
        """Append to metrics.jsonl: public values only."""
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def log_private(self, lines: list[dict]) -> None:
        """Append to private/metrics.jsonl."""
        path = self.folder / _PRIVATE_LOG
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def save_model(self, params) -> None:
        """Write the parameters alone to model/, those that were trained; see `save_model`."""
        _write_model(self.folder, params)

    def finish(self, result: dict) -> None:
        """Write result.json."""
        write_atomically(self.folder / "result.json", json.dumps(result, indent=1) + "\n")


def save_model(folder, model) -> None:
    """Write the parameters of a model to `folder`, where `load_model` finds them: a checkpoint to begin from.

    Args:
      folder: made where it is missing; a `model/` in it is replaced.
      model: an `nnx.Module`, of which its `nnx.Param` are written, or a pytree of parameters.
    """
    _write_model(Path(folder).absolute(), nnx.state(model, nnx.Param) if _is_module(model) else model)


def _write_model(folder: Path, params) -> None:
    """As plain nested dictionaries where they are an nnx state.

    A single array is the entry "params" of one: Orbax does not store it bare.
    """
    # One file a parameter: Orbax's default, OCDBT, stores when each version was written.
    with _without_warnings(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "model", args=ocp.args.PyTreeSave(_plain(params)), force=True)
    _remove_times(folder / "model")


@contextlib.contextmanager
def _without_warnings():
    """Silence Orbax, which warns where there is no OCDBT to merge."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _remove_times(model: Path) -> None:
    """Remove the times and the path that Orbax writes: the same parameters are then the same bytes."""
    (model / "commit_success.txt").unlink(missing_ok=True)
    about = model / "_CHECKPOINT_METADATA"
    if about.exists():
        kept = {name: value for name, value in read_json(about, "model").items() if "timestamp" not in name}
        write_atomically(about, json.dumps(kept))


def load_model(run, model):
    """The trained model of a finished run, or of `save_model`.

    Of a fine-tuned model only what was trained is stored. It is put into `model`, whose other variables must
    be those that the run began with.

    Args:
      run: folder of the run; only what the guarantee covers, or what is public, is read.
      model: an `nnx.Module` or a pytree of parameters of the same shapes and dtypes, whatever the values of
        what was trained.

    Returns:
      `model` itself with the parameters set, where it is a module; else a pytree like it.

    Raises:
      ValueError: no such folder, parameters of another structure, shape or dtype, or a fine-tuned run that
        began with other frozen variables.
    """
    folder = Path(run).absolute() / "model"
    if not folder.is_dir():
        raise ValueError(f"run must be the folder of a finished run, {str(run)!r} has no model")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(folder).item_metadata.tree
            found = {_name(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in _leaves(stored)}
        params = _trained(Path(run), model, set(found)) if _is_module(model) else model
        with ocp.StandardCheckpointer() as checkpointer:
            wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(params))
            given = {_name(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in _leaves(wanted)}
            if found != given:
                name = min(set(found.items()) ^ set(given.items()), key=str)[0]
                raise ValueError(f"its {name} was {found.get(name)} and is {given.get(name)} in model")
            plain = checkpointer.restore(folder, wanted)
    except _OtherWeightsError:
        raise
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model must be of the structure that was trained: {error}") from None
    if _is_module(model):
        nnx.replace_by_pure_dict(params, plain)
        nnx.update(model, params)
        return model
    return plain["params"] if isinstance(model, jax.Array | np.ndarray) else plain


class _OtherWeightsError(ValueError):
    """The model that parameters are to be put into is another one than they were trained in."""


def _trained(run: Path, model: nnx.Module, names: set[str]):
    """The variables of a model that are stored: all parameters, or those of a run that froze the others.

    What is not stored is what the run found there; a model that has something else would be another one, and
    not what the run ended with.
    """
    params = nnx.state(model, nnx.Param)
    if {_name(path) for path, _ in _leaves(_plain(params))} == names:
        return params
    began = read_json(run / "run.json", "run") if (run / "run.json").exists() else {}
    began = began.get("frozen") if isinstance(began, dict) else None
    if not isinstance(began, dict):
        return params  # nothing says that anything was frozen: the structure is another one

    def stored(path, _) -> bool:
        return ".".join(map(str, path)) in names

    _, trained, _, frozen = nnx.split(model, stored, nnx.RngState, ...)
    others = digest(frozen) if jax.tree.leaves(frozen) else None
    if {_name(path) for path, _ in _leaves(_plain(trained))} == names and others != began.get("variables"):
        raise _OtherWeightsError("model must have the frozen variables that the run began with, has others")
    return trained


def _is_module(model) -> bool:
    return isinstance(model, nnx.Module)


def _plain(params):
    """Parameters as Orbax stores them: plain nested dictionaries, of a single array the only entry."""
    plain = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {"params": plain} if isinstance(plain, jax.Array | np.ndarray) else plain


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))


def _name(path) -> str:
    """The same for attributes, keys and places, which Orbax does not tell apart."""
    return ".".join(
        str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path
    )


def _parts(state) -> dict[str, dict]:
    """The leaves of a state by the item of the checkpoint that they go to, numbered in their order.

    What a state names `private_...` is an item of that name, so that a folder says what it holds.
    """
    parts: dict[str, dict] = {"state": {}}
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        name = getattr(next(iter(path), None), "name", None)
        item = name if name and name.startswith("private_") else "state"
        # Orbax refuses empty arrays (the noise buffer of one band); there is nothing to keep of them.
        if leaf.size:
            parts.setdefault(item, {})[f"{i:05d}"] = leaf
    return parts


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return (step, line) of each line of a log; truncated and damaged lines are left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append((int(json.loads(line)["step"]), line))
    return found


def _checksum(sampler: dict, state) -> str:
    """Return a digest of a whole checkpoint; those of earlier releases have none."""
    return hashlib.blake2b(f"{sampler} {digest(state)}".encode(), digest_size=16).hexdigest()


def _is_key(words) -> bool:
    """Whether it is a sampler's key: four words of 32 bits."""
    return (
        isinstance(words, list | tuple)
        and len(words) == 4
        and all(type(word) is int and 0 <= word < 2**32 for word in words)
    )


def _placed(leaf):
    """Arrays of one device are left uncommitted, as they were, so that they mix with sharded ones."""
    if isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return leaf
    return jax.numpy.asarray(np.asarray(leaf))


def _in_one_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type where the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _keyed(key: list[int], text: str) -> str:
    """A digest that says nothing about the text to who does not have the key."""
    return hashlib.blake2b(text.encode(), key=np.array(key, np.uint32).tobytes(), digest_size=16).hexdigest()


def write_secret(path: Path, text: str) -> None:
    """Write whole or not at all, readable by the owner only from the first byte on."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")  # mode 600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
