"""Workloads: effect of noise on the iterates of an optimizer that is linear in its gradients; and as text.

Prefix sums are SGD at a constant rate of 1. With momentum, weight decay or a learning-rate schedule the noise
of past steps has other weights, and another matrix is optimal. On the command line and in plans a workload is
text: "prefix-sum", "momentum:0.9,cosine,warmup:50".
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from jaxacct.common import validate as _validate
from jaxacct.strategies.series import quotient

_MAX_NUMBERS = 2e7  # 160 MB in float64


@dataclass(frozen=True)
class Workload:
    """SGD, as by `optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum))`.

    With gradient g of step t, rate eta_t and parameters u: `m <- momentum m + g + weight_decay u`, then
    `u <- u - eta_t m`. A is lower triangular: `A[t, j]` is the contribution of noise of step j to `-u` after
    step t.

    Attributes:
      learning_rate: a number above 0, or an optax schedule: step, from 0, to a rate of at least 0.
      momentum: from 0 to below 1, without Nesterov momentum.
      weight_decay: at least 0, before momentum and rate, as L2 regularisation.
      last: whether errors are of the last iterate, not the mean over all of them. At a constant rate that is
        the maximal error.

    Raises:
      ValueError: numbers out of range.

    Example:
      >>> Workload(momentum=0.5).matrix(3)
      array([[1.  , 0.  , 0.  ],
             [1.5 , 1.  , 0.  ],
             [1.75, 1.5 , 1.  ]])
    """

    learning_rate: float | Callable = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    last: bool = False

    def __post_init__(self):
        _validate.instance("last", self.last, bool, "True or False")
        if not callable(self.learning_rate):
            _validate.check_fields(self, learning_rate=_validate.positive_number)
        elif getattr(self.learning_rate, "__hash__", None) is None:
            raise ValueError("learning_rate must be a number or a function, as optax's schedules are")
        at_least_0 = _validate.nonnegative_number
        _validate.check_fields(self, momentum=at_least_0, weight_decay=at_least_0)
        if not self.momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {self.momentum!r}")

    def rates(self, iterations: int) -> np.ndarray:
        """Return (iterations,) float64; ValueError for a schedule with an invalid rate."""
        return _rates(self, _validate.positive_integer("iterations", iterations))

    def matrix(self, iterations: int) -> np.ndarray:
        """Return A, (iterations, iterations) float64."""
        rates = self.rates(iterations)
        return np.array(list(self._iterates(np.eye(rates.size), rates)))

    def error(self, series: np.ndarray) -> float:
        """Return `(1/n) ||A S||_F^2`, S Toeplitz with the first column `series`, (n,), or of the last row.

        In O(n) time where the rate is constant, O(n^2) otherwise, and O(n) memory.
        """
        n, rates = series.size, self.rates(series.size)
        if _is_constant(rates):
            return self.error_of(n, n)(series)[0]
        shifted = (np.append(series[t::-1], np.zeros(n - 1 - t)) for t in range(n))
        squares = [np.dot(row, row) for row in self._iterates(shifted, rates)]
        return float(squares[-1] if self.last else sum(squares) / n)

    def error_of(self, iterations: int, bands: int) -> Callable:
        """Return the objective of a search: first column S, (bands,) -> its `error` and gradient, (bands,).

        ValueError where the rate varies and there are too many steps for so many bands.
        """
        n, rates = iterations, self.rates(iterations)
        if not _is_constant(rates):
            gram = self._gram(rates, bands) / (1 if self.last else n)
            return lambda series: (float(series @ gram @ series), 2 * gram @ series)
        # With z a delay: (1 - z) u = eta m and (1 - momentum z) m = w - decay z u.
        poles = np.array([1.0, rates[0] * self.weight_decay - 1 - self.momentum, self.momentum])
        weights, after = np.ones(n) if self.last else (n - np.arange(n)) / n, np.zeros(n - bands)

        def error_and_gradient(series):
            column = rates[0] * quotient(np.append(series, after), poles)
            weighted = weights * column
            back = rates[0] * quotient(weighted, poles, transposed=True)
            return float(np.dot(weighted, column)), 2 * back[:bands]

        return error_and_gradient

    def check_size(self, iterations: int, bands: int) -> None:
        """Refuse sizes for which `error_of` has no memory."""
        changes = not _is_constant(self.rates(iterations))
        if changes and iterations * min(iterations, 2 * bands) > _MAX_NUMBERS:
            what = f"{iterations} iterations and {bands} numbers of C^-1"
            raise ValueError(f"workload must have a constant learning rate for {what}")

    def _iterates(self, noise, rates: np.ndarray):
        """Yield rows of `A noise`, one a step, from rows of noise."""
        moment = parameters = 0.0  # parameters with the opposite sign
        for row, rate in zip(noise, rates, strict=True):
            moment = self.momentum * moment + row - self.weight_decay * parameters
            parameters = parameters + rate * moment
            yield parameters

    def _gram(self, rates: np.ndarray, bands: int) -> np.ndarray:
        """Return (bands, bands) K with `series K series = ||A S||_F^2`, or of the last row.

        `K[i, i + d]` is the sum over j >= i of the overlap of the columns j and j + d of A: over all j it is
        the autocorrelation of the rows, less the first few.
        """
        n = rates.size
        kept = min(n, 2 * bands)
        self.check_size(n, bands)
        unit = (np.bincount([t], minlength=n).astype(float) for t in range(n))
        length = scipy.fft.next_fast_len(2 * n, real=True)
        power, first = np.zeros(length // 2 + 1), np.zeros((n, kept))
        for t, row in enumerate(self._iterates(unit, rates)):
            if self.last and t < n - 1:
                continue
            power += np.abs(np.fft.rfft(row, length)) ** 2
            first[t] = row[:kept]
        everywhere = np.fft.irfft(power, length)[:bands]
        shared, gram = first.T @ first, np.zeros((bands, bands))
        for d in range(bands):
            off = np.cumsum(np.diagonal(shared, d))[: bands - d - 1]
            i = np.arange(bands - d)
            gram[i, i + d] = gram[i + d, i] = everywhere[d] - np.append(0.0, off)
        return gram


def _is_constant(rates: np.ndarray) -> bool:
    return bool((rates == rates[0]).all())


@functools.lru_cache(maxsize=16)
def _rates(workload: Workload, iterations: int) -> np.ndarray:
    rate = workload.learning_rate
    if not callable(rate):
        rates = np.full(iterations, rate)
    else:
        try:
            rates = np.array([float(rate(t)) for t in range(iterations)])
        except (TypeError, ValueError) as error:
            raise ValueError(f"learning_rate must give a number at every step: {error}") from None
        if not (np.isfinite(rates) & (rates >= 0)).all() or not rates.any():
            raise ValueError("learning_rate must be finite and at least 0 at every step, and not always 0")
    return _validate.read_only(rates)


def checked(workload) -> Workload:
    """Return `workload` if it is one; ValueError otherwise."""
    return _validate.instance("workload", workload, Workload, "a jaxacct.strategies.Workload")


PREFIX_SUMS = Workload()

PREFIX_SUM = "prefix-sum"
GRAMMAR = (
    f"{PREFIX_SUM}, or a list such as momentum:0.9,weight-decay:1e-4,learning-rate:0.1,cosine (or linear),"
    "warmup:100,last-iterate"
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
        "cosine" or "linear" (falls to 0 at the end), "warmup:STEPS", "last-iterate" (its error, not
        the mean). As in `Workload`, the rate matters beside weight decay alone, up to one factor.
      iterations: number of steps, for schedules.

    Raises:
      ValueError: anything else.

    Example:
      >>> workload_named("momentum:0.9,weight-decay:0.01", 100)
      Workload(learning_rate=1.0, momentum=0.9, weight_decay=0.01, last=False)
    """
    if not isinstance(text, str):
        raise ValueError(f"workload must be {GRAMMAR}, got {text!r:.80}")
    if text == PREFIX_SUM:
        return PREFIX_SUMS
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, is_given, value = part.strip().partition(":")
        is_word = name in (*SHAPES[1:], _LAST) and not is_given
        name, value = ("shape", name) if is_word and name != _LAST else (name, value)
        if not (is_word or name in _NUMBERS) or name in options:
            twice = " twice" if name in options else ""
            raise ValueError(f"workload must be {GRAMMAR}, got {part!r:.40}{twice}")
        options[name] = value if is_word else _number(name, value)
    rate, warmup = options.get("learning-rate", 1.0), options.get("warmup", 0.0)
    if warmup != int(warmup):
        raise ValueError(f"warmup must be a number of steps, got {warmup!r}")
    if warmup or "shape" in options:
        rate = Schedule(rate, iterations, str(options.get("shape", "constant")), int(warmup))
    of_parts = options.get("momentum", 0.0), options.get("weight-decay", 0.0), _LAST in options
    return Workload(rate, *of_parts)


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
    parts += [_LAST] if workload.last else []
    return ",".join(parts) or PREFIX_SUM


_LAST = "last-iterate"
_NUMBERS = ("momentum", "weight-decay", "learning-rate", "warmup")


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"workload must have {name} with a number of at least 0, got {value!r:.40}")
    return number
