"""Interface of strategy matrices. A new one is one new file and one line in `STRATEGIES`.

C is lower triangular without negative entries, and its largest column norm is 1: one participation changes
`C x` by at most one unit of clip norm, so a noise multiplier means the same for every strategy. The privacy
loss depends on the outputs through their scores `s = C^T y` alone.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxacct.common import validate as _validate
from jaxacct.kernels import randomness
from jaxacct.strategies.workload import PREFIX_SUMS, Workload, checked

_NORM_ROUNDING = 2.0**-40  # relative: of a norm of at most 2**20 numbers, each of relative error 2**-52


class NoiseRecursion(NamedTuple):
    """Streaming of `w = C^{-1} z` by the coefficients of C, or of its inverse where that is banded.

    Of C: `c_0 w_t = z_t - c_1 w_{t-1} - ..`. Of the inverse h: `w_t = h_0 z_t + h_1 z_{t-1} + ..`.

    Attributes:
      coefficients: (copies + 1,) float64: a step needs `copies` earlier vectors, w or z.
      of_inverse: whether they are of the inverse.
    """

    coefficients: np.ndarray
    of_inverse: bool

    @property
    def copies(self) -> int:
        """Copies of the parameters, int32 each, that are kept between steps."""
        return len(self.coefficients) - 1


class BufferedRecursion(NamedTuple):
    """Streaming of `w = C^{-1} z` by running sums.

    C has the first column `first` times `1, c_1, c_2, ..` with `c_t = sum_j weights_j decays_j^(t-1)`. Then
    `w_t = z_t / first - sum_j weights_j s_j`, then `s_j <- decays_j s_j + w_t`, from `s = 0`.

    Attributes:
      first: above 0.
      weights: (buffers,) float64.
      decays: (buffers,) float64, from 0 to below 1.
      noise_reach: upper bound on `|w_t|` per unit of the largest `|z|`.
      reach: (buffers,) float64: upper bounds on `|s_j|` per unit of the largest `|z|`.
    """

    first: float
    weights: np.ndarray
    decays: np.ndarray
    noise_reach: float
    reach: np.ndarray

    @property
    def copies(self) -> int:
        """Two of 32 bits per running sum: it is no integer, and its rounding must be far below one."""
        return 2 * len(self.weights)


class Strategy(abc.ABC):
    """Strategy matrix C. Arrays of samples have shape (num_samples, iterations).

    Attributes:
      kind: in JSON.
      is_toeplitz: whether the columns of C are shifts of one another, up to truncation at the last row.
    """

    kind: ClassVar[str]
    is_toeplitz: ClassVar[bool]

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if not hasattr(cls, "is_toeplitz"):
            raise TypeError(f"strategy {cls.__name__} must state whether it is Toeplitz")

    @property
    @abc.abstractmethod
    def given_norm(self) -> float:
        """Largest column norm of C as it was given; C is that divided by it."""

    def noise_as_given(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of C as it was given, rounded up: the same noise, not yet divided."""
        return noise_multiplier * self.given_norm * (1 + _NORM_ROUNDING)

    @property
    @abc.abstractmethod
    def bands(self) -> int:
        """Diagonals of C up to the last one that is not zero."""

    @property
    def named_bands(self) -> int:
        """Argument of `strategies.by_name` for this matrix: by default its bands."""
        return self.bands

    @abc.abstractmethod
    def check(self, scheme) -> None:
        """Refuse an incompatible scheme; ValueError."""

    @abc.abstractmethod
    def cross_terms(self, iterations: int, min_separation: int) -> np.ndarray:
        """Return upper bounds on the overlap of a participation with all later ones.

        They are () or (iterations,), `kappa_i >= sum_{j > i} x_j <c_i, c_j>` for every possible x, exactly 0
        where C has no more bands than the separation.
        """

    def squared_sensitivity(self, iterations: int, min_separation: int, participations: int) -> float:
        """Return an upper bound on `||C x||^2` of the n x n matrix, for x of 0 and 1."""
        k = min(participations, -(-iterations // min_separation))
        return k * (1 + 2 * float(self.cross_terms(iterations, min_separation).max()))

    @abc.abstractmethod
    def square_norms(self, iterations: int) -> np.ndarray:
        """Return `||c_i||^2` of each column of the n x n matrix, (iterations,) float64."""

    @abc.abstractmethod
    def columns(self, iterations: int, steps: np.ndarray) -> np.ndarray:
        """Return the columns of the n x n matrix at some steps, (iterations, steps) float64."""

    @abc.abstractmethod
    def farther_products(self, iterations: int) -> np.ndarray:
        """Return bounds on `<c_i, c_{i+e}>` for all `e >= d`, raised by a relative 1e-9.

        They are float64 by d: (iterations,) for Toeplitz C, otherwise (iterations, iterations), by i first.
        """

    def rows(self, iterations: int) -> int:
        """Return the rows of the matrix of `scores_from_normals`: n, or more if it continues past the end."""
        return iterations

    @abc.abstractmethod
    def half_square_norms(self) -> np.ndarray:
        """Return `||c_i||^2 / 2` on these rows, () or (iterations,) float64."""

    def column_products(self, block: int) -> np.ndarray:
        """Return `<c_i, c_{i-d}>` on these rows, (block,) or (iterations, block) float64; for Toeplitz C."""
        raise NotImplementedError

    def products_from_end(self, block: int) -> np.ndarray:
        """Return `<c_i, c_{i-d}>` on these rows by the distance of i from the end, (ends, block) float64.

        For Toeplitz C. Row k is for the column i = n - 1 - k, and the last row also for all farther ones.
        """
        raise NotImplementedError

    def truncated_products(self, iterations: int, block: int) -> np.ndarray:
        """Return `<c_i, c_{i-d}>` of the n x n matrix, 0 for i < d, (iterations, block) float64."""
        raise NotImplementedError

    def draw_normals(self, key, iterations: int, num_samples: int, dtype) -> tuple:
        """Draw the standard normals of the noise of `num_samples` samples: by default the noise itself."""
        return (randomness.normals(key, (num_samples, iterations), dtype),)

    def scores_from_normals(self, normals, iterations: int, sigma, participation=None) -> Any:
        """Return the scores of `C x + sigma z`: `C^T C x + sigma C^T z`; `participation` None is x = 0."""
        outputs = jnp.asarray(sigma, normals[0].dtype) * normals[0]
        if participation is not None:
            outputs = outputs + self.signal(participation.astype(outputs.dtype))
        return self.output_scores(outputs)

    def signal(self, participation) -> Any:
        """Return `C x` of the n x n matrix, of (..., iterations) counts, of their shape and dtype."""
        raise NotImplementedError

    @abc.abstractmethod
    def output_scores(self, outputs) -> Any:
        """Return `C^T y` of outputs of the n x n matrix, (..., iterations), of the same shape and dtype."""

    @abc.abstractmethod
    def gram(self, weights: np.ndarray) -> np.ndarray:
        """Return `C^T C m` as for `scores_from_normals`, (iterations,) float64 NumPy."""

    @abc.abstractmethod
    def noise_recursion(self) -> NoiseRecursion | BufferedRecursion:
        """Return the recursion that makes the noise; ValueError if a step needs that of all earlier ones."""

    @property
    def noise_copies(self) -> int:
        """Copies of the parameters, int32, kept from step to step; ValueError as `noise_recursion`."""
        return self.noise_recursion().copies

    @property
    def memory_copies(self) -> int:
        """Copies of the parameters that training keeps for the noise, the one being made included.

        All texts and options count so; 1 is independent noise. ValueError as `noise_recursion`.
        """
        return self.noise_copies + 1

    @abc.abstractmethod
    def unit_workload_error(self, iterations: int, workload: Workload) -> float:
        """Return `(1/n) ||A C^-1||_F^2`, A that of the workload, or the square norm of its last row."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a short description as text."""

    def to_json(self) -> dict:
        """Return the kind and the fields as plain JSON values."""
        return {"kind": self.kind} | msgspec.to_builtins(self, enc_hook=np.ndarray.tolist)

    @classmethod
    def from_json(cls, data: dict) -> Self:
        """Return the strategy that `to_json` wrote; `KeyError` for a missing field."""
        values = (data[field.name] for field in dataclasses.fields(cls))  # pyrefly: ignore[bad-argument-type]
        return cls(*(tuple(value) if isinstance(value, list) else value for value in values))

    def of_first_steps(self) -> "Strategy | None":
        """Return one whose first t rows begin with those of C, for all t, in any number of steps; or None."""
        return None

    def numbers_per_sample(self, iterations: int) -> int:
        """Return the length of the longest array that drawing a sample needs."""
        return iterations

    def add_signal_windows(self, scores, positions, scale, counts=None) -> jax.Array:
        """Return `scores + scale C^T C x`, x at known steps, for Toeplitz C (`strategies.stationary`)."""
        raise NotImplementedError


def prefix_sum_error(strategy: Strategy, *, iterations: int, noise_multiplier: float) -> float:
    """Return the mean squared error of prefix sums, `(1/n) ||A C^-1||_F^2 sigma^2`.

    Args:
      strategy: C.
      iterations: n; any size, in O(n bands) time and O(n) memory (dense: O(n^3) and O(n^2)).
      noise_multiplier: sigma per unit of clip norm, above 0.

    Returns:
      Squared noise per unit of clip norm squared (arXiv 2602.09338, section 7.1).
    """
    at = dict(iterations=iterations, noise_multiplier=noise_multiplier)
    return workload_error(strategy, workload=PREFIX_SUMS, **at)


def workload_error(
    strategy: Strategy, *, iterations: int, noise_multiplier: float, workload: Workload
) -> float:
    """Return the mean squared error of an optimizer's iterates, `(1/n) ||A C^-1||_F^2 sigma^2`.

    Args:
      strategy: C.
      iterations: n; O(n bands) time, and O(n^2) where the learning rate changes (dense: O(n^3)).
      noise_multiplier: sigma per unit of clip norm, above 0.
      workload: A, effect of the noise on the iterates. `Workload()` is `prefix_sum_error`.

    Returns:
      Squared noise of the parameters per unit of clip norm squared, the mean over steps and coordinates, or
      over coordinates after the last step.
    """
    n = _validate.positive_integer("iterations", iterations)
    sigma = _validate.positive_number("noise_multiplier", noise_multiplier)
    return float(strategy.unit_workload_error(n, checked(workload)) * sigma**2)


def schedule_of(iterations: int, min_separation: int | None, participations: int) -> tuple[int, int]:
    """Return (separation, participations), n without a separation; ValueError for an impossible schedule."""
    k = _validate.positive_integer("participations", participations)
    if min_separation is None and k > 1:
        raise ValueError(f"min_separation must be given for {k} participations")
    separation = iterations if min_separation is None else min_separation
    separation = _validate.positive_integer("min_separation", separation)
    max_participations = -(-iterations // separation)
    if k > max_participations:
        raise ValueError(f"participations must be at most {max_participations}, got {k}")
    return separation, k


def check_iterations(strategy, scheme) -> None:
    """Refuse a scheme of another number of steps than the strategy has; ValueError."""
    if strategy.iterations != scheme.iterations:
        raise ValueError(
            f"strategy must have the scheme's {scheme.iterations} iterations, got {strategy.iterations}"
        )


def check_is_bounded(scheme) -> None:
    """Refuse schemes that the bounds for non-banded C do not cover: side information, overlaps."""
    if scheme.side_information is not None:
        raise ValueError(f"strategy must be banded Toeplitz for {scheme.name}: Q is no Gaussian there")
    if scheme.examples_overlap:
        raise ValueError(f"strategy must be banded Toeplitz for {scheme.name}: no bound is known otherwise")
