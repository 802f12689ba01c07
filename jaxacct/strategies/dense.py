"""Arbitrary lower-triangular strategy matrices; losses are bounds as for `Toeplitz`."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import scipy

from jaxacct.common.validate import read_only, set_fields
from jaxacct.strategies.base import NoiseRecursion, Strategy, check_is_bounded
from jaxacct.strategies.stationary import cross_terms, norms_of
from jaxacct.strategies.workload import Workload


@dataclass(frozen=True, eq=False)
class Dense(Strategy):
    """Lower-triangular strategy matrix without negative entries.

    Attributes:
      matrix: (n, n) float64, scaled so that the largest column norm is 1. O(n^2) memory and work per sample.
      given_norm: largest column norm that the matrix had before it was scaled; 0, the default, to compute it.

    Raises:
      ValueError: another shape, entries above the diagonal, negative or non-finite ones.
    """

    matrix: np.ndarray
    given_norm: float = field(default=0.0, compare=False, repr=False)
    kind: ClassVar[str] = "dense"
    is_toeplitz: ClassVar[bool] = False

    def __post_init__(self):
        matrix = np.array(self.matrix, np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(f"matrix must be square, got shape {matrix.shape}")
        if not np.isfinite(matrix).all() or (matrix < 0).any():
            raise ValueError("matrix must have finite entries of at least 0")
        if np.triu(matrix, 1).any() or not (np.diag(matrix) > 0).all():
            raise ValueError("matrix must be lower triangular with a diagonal above 0")
        norm, given_norm = norms_of(matrix, self.given_norm, 1e-12)
        set_fields(self, given_norm=given_norm, matrix=read_only(matrix / norm))

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.matrix.tobytes()).hexdigest()

    @property
    def bands(self) -> int:
        """Diagonals up to the last one that is not zero."""
        rows, columns = np.nonzero(self.matrix)
        return int((rows - columns).max()) + 1

    def __eq__(self, other):
        return isinstance(other, Dense) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def check(self, scheme) -> None:
        if len(self.matrix) != scheme.iterations:
            raise ValueError(f"strategy must have {scheme.iterations} rows, got {len(self.matrix)}")
        check_is_bounded(scheme)

    def cross_terms(self, iterations: int, min_separation: int) -> np.ndarray:
        return cross_terms(self, iterations, min_separation)

    def farther_products(self, iterations: int) -> np.ndarray:
        gram, steps = self.matrix.T @ self.matrix, np.arange(iterations)
        later = np.minimum(steps[:, None] + steps, iterations)  # one column of zeros after the last
        shared = np.take_along_axis(np.pad(gram, ((0, 0), (0, 1))), later, axis=1)
        return np.maximum.accumulate(shared[:, ::-1], axis=1)[:, ::-1] * (1 + 1e-9)

    def square_norms(self, iterations: int) -> np.ndarray:
        return np.square(self.matrix).sum(axis=0)

    def columns(self, iterations: int, steps: np.ndarray) -> np.ndarray:
        return self.matrix[:, steps]

    def half_square_norms(self) -> np.ndarray:
        """Return (iterations,): a dense C has no rows past the last step."""
        return self.square_norms(len(self.matrix)) / 2

    def signal(self, participation):
        """Return `C x` at the full accuracy of the dtype."""
        return jnp.dot(participation, jnp.asarray(self.matrix.T, participation.dtype), precision="highest")

    def output_scores(self, outputs):
        return jnp.dot(outputs, jnp.asarray(self.matrix, outputs.dtype), precision="highest")

    def gram(self, weights: np.ndarray) -> np.ndarray:
        return self.matrix.T @ (self.matrix @ weights)

    def noise_recursion(self) -> NoiseRecursion:
        raise ValueError("strategy must be Toeplitz to train with: a dense one needs the noise of every step")

    def unit_workload_error(self, iterations: int, workload: Workload) -> float:
        inverse = scipy.linalg.solve_triangular(self.matrix, np.eye(iterations), lower=True)
        squares = np.square(workload.matrix(iterations) @ inverse).sum(axis=1)
        return float(squares[-1] if workload.last else squares.mean())

    def describe(self) -> str:
        return "dense, not for training"
