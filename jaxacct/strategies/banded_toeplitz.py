"""Banded Toeplitz strategy matrices, given by the non-zero entries of the first column.

No function forms an n x n matrix.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.common.files import write_atomically
from jaxacct.common.validate import read_only
from jaxacct.strategies.base import check_is_bounded, schedule_of
from jaxacct.strategies.series import binomial, inverse, local_minimum, quotient, sums_at_lags
from jaxacct.strategies.stationary import Stationary, checked_numbers, norms_of
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, checked


class FirstColumn(Stationary):
    """Toeplitz C whose first column is stored, without trailing zeros."""

    coefficients: tuple[float, ...]
    given_norm: float

    def __post_init__(self):
        given, allowed = self.coefficients, "finite and at least 0"
        values = checked_numbers("coefficients", given, lambda x: (x >= 0) & (x < np.inf), allowed)
        if values[0] <= 0:
            raise ValueError("coefficients must begin with a number above 0, began with 0.0")
        peak, (norm, given_norm) = float(values.max()), norms_of(values, self.given_norm, 1e-14)
        values = values / norm
        if values[0] <= 0:
            raise ValueError(f"coefficients must begin above 1e-308 times the largest, {peak!r}")
        coefficients = tuple(np.trim_zeros(values, "b").tolist())
        _validate.set_fields(self, coefficients=coefficients, given_norm=given_norm)

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    @property
    def array(self) -> np.ndarray:
        """(bands,) float64, read-only; a copy each time."""
        return read_only(np.array(self.coefficients))


@dataclass(frozen=True)
class BandedToeplitz(FirstColumn):
    """Banded Toeplitz strategy matrix, given by the non-zero entries of its first column.

    Attributes:
      coefficients: (bands,) non-negative numbers, the first above 0, of norm 1e-290 to 1e290; stored in
        float64 scaled to norm 1, without trailing zeros.
      given_norm: their norm before they were scaled; 0, the default, to compute it.

    Raises:
      ValueError: anything else.

    Example:
      >>> BandedToeplitz((4, 3)).coefficients
      (0.8, 0.6)
    """

    coefficients: tuple[float, ...]
    given_norm: float = dataclasses.field(default=0.0, compare=False, repr=False)
    kind: ClassVar[str] = "banded-toeplitz"

    def of_first_steps(self) -> "BandedToeplitz":
        return self

    def check(self, scheme) -> None:
        """Refuse overlapping participations."""
        if self.bands > scheme.min_separation:
            raise ValueError(
                f"bands must be at most the minimum separation {scheme.min_separation} of the scheme, "
                f"got {self.bands}"
            )

    def to_json(self) -> dict:
        """Return the coefficients and their norm as given, without a kind."""
        return {"coefficients": list(self.coefficients), "given_norm": self.given_norm}

    @classmethod
    def from_json(cls, data: dict) -> "BandedToeplitz":
        return cls(tuple(data["coefficients"]), data["given_norm"])

    @classmethod
    def identity(cls) -> "BandedToeplitz":
        """Return one band: independent noise, DP-SGD."""
        return cls((1.0,))

    @classmethod
    def scaled(cls, coefficients: np.ndarray) -> "BandedToeplitz":
        """Return the strategy of coefficients whose scale has no meaning, as those of a search."""
        return dataclasses.replace(cls(tuple(coefficients)), given_norm=1.0)

    @classmethod
    def square_root(cls, bands: int) -> "BandedToeplitz":
        """Return the banded square root of the prefix-sum matrix: `c_k = binom(2k, k) / 4^k` (BSR)."""
        return cls(tuple(binomial(-0.5, _validate.positive_integer("bands", bands))))

    @classmethod
    def optimal(
        cls,
        *,
        iterations: int,
        bands: int,
        min_separation: int,
        participations: int,
        workload: Workload = PREFIX_SUMS,
    ) -> "BandedToeplitz":
        """Return the banded Toeplitz matrix with the smallest error at a given unamplified sensitivity.

        Minimises `(1/n) ||A C^-1||_F^2` times the squared sensitivity. With `min_separation >= bands` the
        columns of one example's participations are disjoint, so the sensitivity is sqrt(participations)
        times the column norm and the minimiser depends on `iterations` and `bands` alone; the other two are
        checked, because a matrix for an impossible schedule is a mistake.

        Args:
          iterations: n, at least `bands`: otherwise no column of C would have its full norm.
          bands: at most `min_separation`.
          min_separation: minimum number of steps between two participations of one example.
          participations: at most `ceil(iterations / min_separation)`.
          workload: A; effect of the noise on the optimizer's iterates, prefix sums by default.

        Raises:
          ValueError: an impossible schedule, or more steps than a varying learning rate allows.

        Source: arXiv 2602.09338, section 7.1; Choquette-Choo et al. 2023. Found by L-BFGS from the square
        root.
        """
        n = _validate.positive_integer("iterations", iterations)
        bands = _validate.positive_integer("bands", bands)
        separation = _validate.positive_integer("min_separation", min_separation)
        if bands > separation:
            raise ValueError(f"bands must be at most min_separation {separation}, got {bands}")
        if bands > n:
            raise ValueError(f"bands must be at most iterations {n}, got {bands}")
        schedule_of(n, separation, participations)
        checked(workload)
        if bands == 1:
            return cls.identity()
        start = binomial(-0.5, bands)
        log_error = log_error_of(workload, n)
        how = dict(maxiter=500, maxcor=30, ftol=1e-13, gtol=1e-9)
        best = local_minimum(log_error, start, (0.0, None), **how)
        return cls.scaled(best if log_error(best)[0] <= log_error(start)[0] else start)

    @classmethod
    def from_file(cls, path) -> "BandedToeplitz":
        """Read coefficients from a text file, or a JSON list.

        Text has one number a line, or all numbers in one line with commas or spaces between. A truncated JSON
        list is refused. Text has no end mark, so truncated text reads as fewer bands.

        Raises:
          ValueError: an unreadable file, or invalid coefficients.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            if text.lstrip().startswith("["):
                return cls(json.loads(text))
            lines = [line.strip().removesuffix(",") for line in text.strip().splitlines()]
            if len(lines) > 1 and "," in "".join(lines):
                raise ValueError("numbers must be one a line or all in one line, with a point for decimals")
            return cls(tuple(float(value) for value in " ".join(lines).replace(",", " ").split()))
        except OSError as error:
            raise ValueError(f"strategy file {path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"strategy file {path}: {error}") from None

    def save(self, path) -> None:
        """Write the coefficients, one a line, atomically."""
        write_atomically(path, "".join(f"{value!r}\n" for value in self.coefficients))


@dataclass(frozen=True)
class Toeplitz(FirstColumn):
    """Lower-triangular Toeplitz strategy matrix with any number of coefficients.

    Participations of one example may then overlap, and the likelihood ratio no longer factorises. It is
    bounded from both sides instead (arXiv 2602.09338, appendix B; proofs/non_banded.md): dropping the cross
    terms `x_i x_j <c_i, c_j> >= 0` raises it, subtracting `cross_terms` from every participation lowers it.
    So the certificate is for an upper bound, and plans state that.

    Attributes:
      coefficients: as for `BandedToeplitz`: the first column, stored scaled to norm 1. May be longer than the
        minimum separation of a scheme.
      given_norm: as for `BandedToeplitz`.
    """

    coefficients: tuple[float, ...]
    given_norm: float = dataclasses.field(default=0.0, compare=False, repr=False)
    kind: ClassVar[str] = "toeplitz"

    def check(self, scheme) -> None:
        check_is_bounded(scheme)


def log_error_of(workload: Workload, n: int) -> Callable:
    """Return the objective of a search: coefficients -> log of error x squared column norm, its gradient."""
    return functools.partial(_log_error, n=n, error_of=workload.error_of(n, n))


def _log_error(coefficients: np.ndarray, n: int, error_of: Callable):
    """Return the log of error x squared column norm, and its gradient in all coefficients but the first.

    g is the first column of C^-1, and `dg/dc_k` is -g * g delayed by k. Where C^-1 diverges, as in the first
    steps of a search, the log is large and the gradient 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        g = inverse(coefficients, n)
        error, slopes = error_of(g)
    if not 0 < error < 1e100:
        return 1e3, np.zeros(coefficients.size - 1)
    gradient = -sums_at_lags(slopes, quotient(g, coefficients), coefficients.size)
    square_norm = np.dot(coefficients, coefficients)
    return np.log(error) + np.log(square_norm), (gradient / error + 2 * coefficients / square_norm)[1:]
