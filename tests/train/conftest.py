"""Runs of the same step are one program: tracing and compiling it is most of what a short run takes."""

import functools
import signal
import sys
import types

import jax
import numpy as np
import pytest

from train.batches import fingerprints
from train.models.loss import Loss
from train.optimizers import Privatizer

_PROGRAMS, _LOSSES = {}, {}  # of this process, whatever the module
_of_trace = fingerprints.of_trace


class _Shared:
    """A jitted step; what was made of the same things before it is traced and compiled already."""

    def __init__(self, function, **options):
        made = jax.jit(function, **options)
        self._jitted = _PROGRAMS.setdefault((_made_of(function), *options.items()), made)

    def __call__(self, *args):
        return self._jitted(*_with_shared_losses(args))

    def trace(self, *args):
        return self._jitted.trace(*_with_shared_losses(args))

    def programs(self) -> int:
        """How many were made."""
        return self._jitted._cache_size()


class _Itself:
    """Equal to that of the same object."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _with_shared_losses(args) -> list:
    """The arguments, losses with the first function that was made of the same things: `jit` compares them."""
    return [
        Loss(_LOSSES.setdefault(_made_of(each.function), each.function), each.frozen, each.key)
        if isinstance(each, Loss)
        else each
        for each in args
    ]


def _made_of(value):
    """Equal where two functions are made by the same code of equal things; what may change equals itself."""
    made_of = functools.partial(map, _made_of)
    match value:
        case types.FunctionType():
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            named = (value.__kwdefaults__ or {}).items()
            return value.__code__, *made_of((cells, value.__defaults__ or (), *named))
        case functools.partial():
            return _made_of((value.func, value.args, tuple(value.keywords.items())))
        case types.MethodType():
            return _made_of((value.__func__, value.__self__))
        case Privatizer() if type(value) is Privatizer:
            return _made_of(
                (value.mechanism, value.grid, value.expected_batch_size, value.noise_memory)
            )  # the key is in the state
        case tuple():
            return type(value), *made_of(value)
        case dict():
            return dict, *made_of(value.items())
        case jax.Array():
            return _Itself(value)  # it is immutable
        case np.ndarray():
            return value.dtype, value.shape, value.tobytes()
    try:
        hash(value)
    except TypeError:
        return object()
    return type(value), value


@functools.cache
def _digest_of(traced) -> str:
    """The digest of a program, which a shared step hands out again and again."""
    return _of_trace(traced)


def share_programs(patch: pytest.MonkeyPatch) -> dict:
    """From here on equal steps share one program; all of them, to be cleared if need be."""
    proxy = types.SimpleNamespace(**vars(jax))
    proxy.jit = _Shared
    patch.setattr(fingerprints, "of_trace", _digest_of)
    for name in ("train.procedures.step", "train.procedures.convex", "train.procedures.dice"):
        if name in sys.modules:
            patch.setattr(sys.modules[name], "jax", proxy)
    return _PROGRAMS


@pytest.fixture
def interruptible():
    """Interrupts reach the tests of a process that was started in the background, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def shared_programs(monkeypatch):
    """`share_programs` for one test; not for those that change what steps call in the library."""
    return share_programs(monkeypatch)
