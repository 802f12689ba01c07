"""Workloads as text, on the command line and in plans: "prefix-sum", "momentum:0.9,cosine,warmup:50"."""

import math
from dataclasses import dataclass
from typing import Any

from jaxacct.common import validate as _validate
from jaxacct.strategies.workload import PREFIX_SUMS, Workload

PREFIX_SUM = "prefix-sum"
GRAMMAR = (
    f"{PREFIX_SUM}, or a list such as momentum:0.9,weight-decay:1e-4,learning-rate:0.1,cosine (or linear),"
    "warmup:100"
)
SHAPES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """Learning rate: linear warmup for `warmup` steps, then constant or decaying to 0 at `iterations`.

    Cosine with a warmup is `optax.warmup_cosine_decay_schedule(0, rate, warmup, iterations)`; equal schedules
    compare equal, unlike functions.

    Attributes:
      rate: the largest one, above 0.
      iterations: number of steps of the run.
      shape: one of `SHAPES`.
      warmup: steps, fewer than `iterations`; step 0 has rate 0 then.
    """

    rate: float
    iterations: int
    shape: str
    warmup: int = 0

    def __post_init__(self):
        _validate.positive_number("learning_rate", self.rate)
        n = _validate.positive_integer("iterations", self.iterations)
        _validate.one_of("shape", self.shape, SHAPES)
        if not _validate.positive_integer("warmup", self.warmup, minimum=0) < n:
            raise ValueError(f"warmup must be below iterations {n}, got {self.warmup}")

    def __call__(self, step) -> float:
        """Return the rate of `step`, from 0."""
        if step < self.warmup:
            return self.rate * step / self.warmup
        part = min(1.0, (step - self.warmup) / (self.iterations - self.warmup))
        fallen = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part}
        return self.rate * fallen[self.shape]


def workload_named(text: str, iterations: int) -> Workload:
    """Return the workload of that name for a run of so many steps.

    Args:
      text: "prefix-sum", or parts with commas between: "momentum:M", "weight-decay:W", "learning-rate:R",
        "cosine" or "linear" (falls to 0 at the end), "warmup:STEPS". As in `Workload`, the rate matters
        beside weight decay alone, up to one factor.
      iterations: number of steps, for schedules.

    Raises:
      ValueError: anything else.

    Example:
      >>> workload_named("momentum:0.9,weight-decay:0.01", 100)
      Workload(learning_rate=1.0, momentum=0.9, weight_decay=0.01)
    """
    if not isinstance(text, str):
        raise ValueError(f"workload must be {GRAMMAR}, got {text!r:.80}")
    if text == PREFIX_SUM:
        return PREFIX_SUMS
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, is_given, value = part.strip().partition(":")
        is_shape = name in SHAPES[1:] and not is_given
        name, value = ("shape", name) if is_shape else (name, value)
        if not (is_shape or name in _NUMBERS) or name in found:
            twice = " twice" if name in found else ""
            raise ValueError(f"workload must be {GRAMMAR}, got {part!r:.40}{twice}")
        found[name] = value if name == "shape" else _number(name, value)
    rate, warmup = found.get("learning-rate", 1.0), found.get("warmup", 0.0)
    if warmup != int(warmup):
        raise ValueError(f"warmup must be a number of steps, got {warmup!r}")
    if warmup or "shape" in found:
        rate = Schedule(rate, iterations, str(found.get("shape", "constant")), int(warmup))
    return Workload(rate, found.get("momentum", 0.0), found.get("weight-decay", 0.0))


def name_of(workload: Workload) -> str | None:
    """Return the name that `workload_named` reads as this workload; None for another kind of schedule."""
    rate, parts = workload.learning_rate, []
    if isinstance(rate, Schedule):
        parts += [rate.shape] if rate.shape != "constant" else []
        parts += [f"warmup:{rate.warmup}"] if rate.warmup else []
        rate = rate.rate
    if callable(rate):
        return None
    numbers = {"momentum": workload.momentum, "weight-decay": workload.weight_decay}
    parts = [f"{name}:{value!r}" for name, value in numbers.items() if value] + parts
    parts += [f"learning-rate:{rate!r}"] if rate != 1 else []
    return ",".join(parts) or PREFIX_SUM


_NUMBERS = ("momentum", "weight-decay", "learning-rate", "warmup")


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"workload must have {name} with a number of at least 0, got {value!r:.40}")
    return number
