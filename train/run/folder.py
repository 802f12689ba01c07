"""The folder of one training run: what it is, its secrets, its checkpoints, its logs.

    run.json               what is run; a resumed call must describe the same (not to be published)
    secret.json            sampler key, keyed digests of what is private, last step that was shown (mode 600)
    checkpoints/           Orbax: parameters, optimizer, noise buffer and key, sampler, and every example's
                           own privacy loss where it is followed (mode 700)
    private/               metrics.jsonl: loss, clipped fraction, norms: no guarantee covers these (mode 700,
                           so that size and time of the log are not visible either); batches: keyed digests
    metrics.jsonl          step, evaluation on public data; no times: they show batch sizes, which are private
    model/                 safetensors: the trained parameters, covered by the guarantee; no times
    result.json            the run card: what was run, under which plan; .gitignore lets in these three alone

Anyone who reads a secret can remove the noise. No part of secret.json, checkpoints/ or private/ may be
published with the model.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxacct.common.files import Checkpoint, read_json, write_atomically
from jaxacct.common.validate import in_one_line
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import Poisson
from jaxacct.strategies import BandedToeplitz

from ..batches.fingerprints import of_arrays
from ..batches.given import Committed, keyed
from ..batches.sampler import SamplerState, is_key
from ..clipping.grid import Grid
from ..models.saving import write_model
from ..noise.normals import ARRANGEMENT, normals_on_host, standard_normals
from . import hosts

_PRIVATE_LOG, _BATCHES = "private/metrics.jsonl", "private/batches"
# What a run is bound to by digests or long lists, which say nothing to a reader: what may have changed.
_DIGESTS = {
    "plan": "plan",
    "loss": "loss, or a release of JAX that traces it otherwise",
    "optimizer": "optimizer, or a release of JAX that traces it otherwise",
    "program": "program (model, loss, optimizer, batch, or a release of jaxacct that computes otherwise)",
    "generator": "generator of noise (a release that draws otherwise)",
    "frozen": "frozen part (weights that are not trained, or key of the loss)",
}
# What may change where a run continues elsewhere, and which of it shows that it does ("process" by itself).
_ELSEWHERE = ("versions", "device", "devices", "layout", "flags", "processor")
_ELASTIC = {"program", "microbatch_size", "process", *_ELSEWHERE}
_NUM_KEPT = 2  # checkpoints: the newest, and the one before it in case the newest is damaged


def generator() -> list[float]:
    """Numbers that identify how noise is drawn from a key, on which grid, and for which parameter.

    Drawn from a public key that is used for nothing else.
    """
    of_one = Mechanism(Poisson(1, 1.0), BandedToeplitz.identity(), 1.0)
    key = np.arange(8, dtype=np.uint32)
    drawn = np.concatenate([standard_normals(key, 5, 6), normals_on_host(key.tobytes(), 5, 6)])
    return [*drawn.tolist(), float(Grid.of(of_one, 1.0).bits), float(ARRANGEMENT)]


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the one before it still stands."""


class RunFolder:
    """The files of one run, locked against a second process; a context manager."""

    def __init__(self, folder):
        self.folder = Path(folder).absolute()
        self._run, self._secret = self.folder / "run.json", self.folder / "secret.json"
        self._lock = Checkpoint(self.folder, "out")
        self._committed: Committed | None = None
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.close)  # where the rest fails
            write_atomically(self.folder / ".gitignore", "/*\n!/model\n!/metrics.jsonl\n!/result.json\n")
            for name in ("checkpoints", "private"):
                (self.folder / name).mkdir(mode=0o700, exist_ok=True)
                (self.folder / name).chmod(0o700)  # an existing one may be open to others
            for name in ("secret.json", _PRIVATE_LOG, _BATCHES):
                if (self.folder / name).exists():
                    (self.folder / name).chmod(0o600)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=_NUM_KEPT,
                enable_async_checkpointing=False,
                create=False,
                multiprocessing_options=hosts.orbax_options(),
            )
            self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
            stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._committed:
            self._committed.close()
        self._manager.close()
        self._lock.close()

    def begin(self, described: dict, key, data: str, elastic: bool = False) -> list[int]:
        """Record a new run, or check that the stored one is the same; returns the sampler key that counts.

        `described` has no secret; of `data`, the fingerprint of the data, a keyed digest is stored.
        With `elastic` devices and versions may differ, and with them the program: it is warned of and
        recorded, and noise has another key from there on (`moves_after`): a copy that goes on elsewhere may
        release other sums than this folder did. So does another process where `described["process"]` is not
        None. Another number of steps is accepted that no checkpoint is beyond: neither noise nor batches
        depend on it. Refused by a ValueError: another run; one of which something was shown and no checkpoint
        is left; with `elastic`, another generator of noise; where noise has another key, steps that were
        shown.
        """
        if self._manager.latest_step() is None and (shown := self._shown()):
            raise ValueError(
                f"out {self.folder} has shown step {shown} of a run and has no checkpoints of it: training "
                "again would release its batches with other noise; begin in a new folder"
            )
        if not self._secret.exists():
            if self._manager.latest_step() is not None:
                raise ValueError(
                    f"out {self.folder} holds checkpoints of a run whose secret.json is gone: its noise "
                    "must not be used twice; begin in a new folder"
                )
            key = [int(word) for word in key]
            # The secret last: as long as it is missing, nothing was drawn.
            write_atomically(self._run, json.dumps(described, indent=1) + "\n")
            self._keep({"sampler_key": key, "data": keyed(key, data)})
            return key
        stored, kept = read_json(self._run, "run"), self._kept()
        moved = self._compare(stored, described, elastic)
        if not (is_key(kept.get("sampler_key")) and isinstance(kept.get("data"), str)):
            raise ValueError(
                f"secret {self._secret} must hold a sampler key of four words and a digest of the data"
            )
        if kept["data"] != keyed(kept["sampler_key"], data):
            raise ValueError(f"out {self.folder} holds a run on other data; its noise must not be used twice")
        if moved:
            warnings.warn(
                f"the run in {self.folder} continues elsewhere {moved}: the same plan, data, batches, loss "
                "and optimizer, and noise of another key. The guarantee stands",
                stacklevel=2,
            )
        if moved is not None:
            before = {name: stored.get(name) for name in sorted(_ELASTIC)}
            before["until"] = self._manager.latest_step() or 0
            self.note(**described, earlier=[*stored.get("earlier", []), before])
        elif stored.get("steps") != described.get("steps"):
            self.note(steps=described["steps"])
        return kept["sampler_key"]

    def moves_after(self, step: int) -> list[str]:
        """Return what the run is bound to where it went at this step or later, a text for each move."""
        stored = read_json(self._run, "run")
        places = itertools.pairwise([*stored.get("earlier", []), stored])
        there = [to for left, to in places if left["until"] >= step]
        return [json.dumps({name: to.get(name) for name in sorted(_ELASTIC)}) for to in there]

    @property
    def verified(self) -> bool:
        """Whether this run's plan was verified with fresh randomness."""
        return read_json(self._run, "run").get("verified") is True

    def note(self, **values) -> None:
        """Add values to run.json."""
        write_atomically(self._run, json.dumps(read_json(self._run, "run") | values, indent=1) + "\n")

    def _compare(self, stored: dict, described: dict, elastic: bool) -> str | None:
        """Refuse another run; return where and how one continues elsewhere, where that is allowed.

        An empty text for another process whose sums may have other bits, None where nothing changes.
        """
        other = {name: value for name, value in described.items() if stored.get(name) != value}
        same_process = "process" not in other
        other.pop("process", None)
        before, now = stored.get("generator"), other.get("generator", [])
        # The same, however a device rounds.
        if isinstance(before, list) and len(before) == len(now) and np.allclose(before, now, 1e-9, 1e-9):
            other.pop("generator", None)
        reached = self._manager.latest_step() or 0
        if other.pop("steps", reached) < reached:
            raise ValueError(
                f"steps must be at least {reached}, as the run in {self.folder} is there, got "
                f"{described['steps']}"
            )
        moved = [name for name in _ELSEWHERE if name in other]
        if other and (not elastic or not moved or set(other) - _ELASTIC):
            strict = [name for name in other if name not in _ELASTIC] or moved or list(other)
            name, value = strict[0], other[strict[0]]
            shown = _DIGESTS.get(name, f"{name}: {stored.get(name)!r}, now {value!r}")
            hint = "; elastic continues all the same, with other last bits"
            raise ValueError(
                f"out {self.folder} holds a run with another {shown}; its noise must not be used twice"
                + (hint if moved and not elastic and not set(other) - _ELASTIC else "")
            )
        if not other and same_process:
            return None
        if self._shown() > reached:
            raise ValueError(
                f"out {self.folder} has shown step {self._shown()} and has no checkpoint of it: elsewhere, "
                "or on a GPU, its batches would be released again; continue where the run began, or begin "
                "in a new folder"
            )
        if not other:
            return ""
        changes = "; ".join(f"{name} {stored.get(name)!r}, now {other[name]!r}" for name in moved)
        return f"from step {reached} ({changes})"

    def _shown(self) -> int:
        """Return the last step of which something is public: an evaluation, or the model at the end."""
        steps = [int(self._kept().get("shown", 0)), *(at for at, _ in _lines(self.folder / "metrics.jsonl"))]
        if (self.folder / "model").exists() or (self.folder / "result.json").exists():
            steps.append(1)
        return max(steps)

    def show(self, step: int) -> None:
        """Store, before anything of a step is public, that it is; moving what was published changes nothing.

        Training with these secrets again needs the file that says so.
        """
        if int(self._kept().get("shown", 0)) < step:
            self._keep(self._kept() | {"shown": step})

    def _kept(self) -> dict:
        """Return the content of secret.json."""
        return read_json(self._secret, "secret") if self._secret.exists() else {}

    def _keep(self, secret: dict) -> None:
        write_atomically(self._secret, json.dumps(secret), secret=True)

    def commit(self, drawn: SamplerState) -> None:
        """Commit the batches up to `drawn.step`, as `Committed.add`, before noise of their step is drawn."""
        if self._committed is None:
            step = self._manager.latest_step() or 0
            self._committed = Committed(self.folder / _BATCHES, drawn.key, step)
        self._committed.add(drawn)

    def save(self, state, drawn: SamplerState) -> None:
        """Checkpoint the state after `drawn.step` steps, atomically; CheckpointError for a full disk, say."""
        if drawn.step in self._manager.all_steps():
            return
        if self._committed:
            self._committed.flush()
        state = hosts.on_host(state)
        sampler = {"key": list(drawn.key), "step": drawn.step, "digest": drawn.digest}
        saved = ocp.args.JsonSave(sampler | {"checksum": _checksum(sampler, state)})
        items = ocp.args.Composite(state=ocp.args.StandardSave(_leaves(state)), sampler=saved)
        try:
            self._manager.save(drawn.step, args=items)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint of step {drawn.step} in {self.folder} could not be written: "
                f"{in_one_line(error)}; run the same command again once there is room"
            ) from error

    def restore(self, like):
        """Return (state, sampler state) of the newest checkpoint, or None before the first.

        Logs are truncated to its step. `like` is a state of the same structure, shapes and shardings. A
        ValueError where a later step was shown and its batches are not committed: they may be others.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        like = hosts.on_host(like)
        leaves, structure = jax.tree.flatten(like)
        expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, _leaves(like))
        items = dict(state=ocp.args.StandardRestore(expected), sampler=ocp.args.JsonRestore())
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._damaged(step, in_one_line(error)) from error
        kept = found["sampler"]
        checksum = kept.pop("checksum", None)
        if kept.keys() != {"key", "step", "digest"} or kept["step"] != step or not is_key(kept["key"]):
            raise self._damaged(step, "its sampler is at another step")
        stored = {name: _placed(leaf) for name, leaf in found["state"].items()}
        leaves = [stored.get(f"{i:05d}", leaf) for i, leaf in enumerate(leaves)]
        state = jax.tree.unflatten(structure, leaves)
        # Orbax notices a changed byte of its own tables, and not one of a large array.
        if checksum != _checksum(kept, state):
            raise self._damaged(step, "it is not what was written")
        if (shown := self._shown()) > step:
            self._committed = Committed(self.folder / _BATCHES, kept["key"], step)
            if self._committed.last < shown or self.moves_after(step + 1):
                raise ValueError(
                    f"out {self.folder} has shown step {shown} and has neither a checkpoint of it nor its "
                    "batches on one machine: others would use its noise twice; begin in a new folder"
                )
            self.show(shown)  # the lines below are removed, what they showed stays shown
        for name in ("metrics.jsonl", _PRIVATE_LOG):
            path = self.folder / name
            if path.exists():
                text = "".join(line + "\n" for at, line in _lines(path) if at <= step)
                write_atomically(path, text, secret=name == _PRIVATE_LOG)
        return state, SamplerState(tuple(kept["key"]), kept["step"], kept["digest"])

    def _damaged(self, step: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {step} in {self.folder} is damaged: {why}; remove its folder {step} to "
            "continue from the one before it"
        )

    def has_logged(self, step: int) -> bool:
        """Return whether metrics.jsonl has a line of this step or of a later one."""
        return any(at >= step for at, _ in _lines(self.folder / "metrics.jsonl"))

    def log(self, line: dict) -> None:
        """Append to metrics.jsonl: public values only."""
        self.show(line["step"])
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def log_private(self, lines: list[dict]) -> None:
        """Append to private/metrics.jsonl."""
        path = self.folder / _PRIVATE_LOG
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def try_model(self, params) -> None:
        """Write the parameters and remove them; ValueError where that fails, before a run ends with it."""
        trial = self.folder / "private" / "trial"
        try:
            write_model(trial, params)
        except Exception as error:  # whatever safetensors raises
            raise ValueError(
                f"model must have parameters that can be written to {self.folder}: {in_one_line(error)}"
            ) from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    def save_model(self, params, step: int) -> None:
        """Write the parameters alone to model/, those after `step` steps."""
        self.show(step)
        write_model(self.folder, params)

    def finish(self, card: dict) -> None:
        """Write result.json; the model is there."""
        write_atomically(self.folder / "result.json", json.dumps(card, indent=1) + "\n")


def _leaves(state) -> dict[str, Any]:
    """Return the leaves of a state, numbered in order, but for empty ones (the noise buffer of one band).

    Orbax refuses these, which hold nothing.
    """
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(state)) if leaf.size}


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return (step, line) of each line of a log; truncated and damaged lines are left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append((int(json.loads(line)["step"]), line))
    return found


def _checksum(sampler: dict, state) -> str:
    """Digest of a whole checkpoint."""
    return hashlib.blake2b(f"{sampler} {of_arrays(state)}".encode(), digest_size=16).hexdigest()


def _placed(leaf):
    """Arrays of one device are left uncommitted, as they were, so that they mix with sharded ones."""
    if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding):
        return leaf
    return jax.numpy.asarray(np.asarray(leaf))
