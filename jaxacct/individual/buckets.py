"""Buckets of effective noise: a norm becomes a bucket, rounded to the more expensive side."""

from dataclasses import dataclass

import numpy as np

from jaxacct.common import validate as _validate

SPACINGS = ("uniform", "geometric")


@dataclass(frozen=True)
class SigmaGrid:
    """Grid of effective noise ratios `sigma C / norm`; each step costs as much as its bucket's edge.

    Attributes:
      smallest: the noise multiplier; no clipped gradient has a smaller ratio.
      largest: ratio of the smallest norms; a tiny gradient still costs this much.
      num: number of edges, including both ends.
      spacing: "uniform" (as in the paper) or "geometric", which is finer where it matters.
      zero_bucket: whether a norm of exactly 0 has a bucket of its own, of cost 0.
    """

    smallest: float
    largest: float
    num: int = 100
    spacing: str = "geometric"
    zero_bucket: bool = True

    def __post_init__(self):
        number = _validate.positive_number
        _validate.check_fields(self, smallest=number, largest=number, num=_validate.positive_integer)
        _validate.one_of("spacing", self.spacing, SPACINGS)
        if self.num > 1 and not self.largest > self.smallest:
            raise ValueError(f"largest must be above smallest {self.smallest:g}, got {self.largest!r}")

    @property
    def edges(self) -> np.ndarray:
        """(num,) float64, increasing, exactly `smallest` first."""
        if self.num == 1:
            return np.array([self.smallest])
        space = np.linspace if self.spacing == "uniform" else np.geomspace
        edges = space(self.smallest, self.largest, self.num)
        edges[0], edges[-1] = self.smallest, self.largest
        return edges

    @property
    def sigmas(self) -> np.ndarray:
        """(num,) or (num + 1,) float64: the ratio of each bucket; infinity for the bucket of zeros."""
        return np.append(self.edges, np.inf) if self.zero_bucket else self.edges

    def encode(self, sigma) -> np.ndarray:
        """Return the int32 bucket of each effective noise ratio `sigma`, rounded down, of the same shape.

        Raises:
          ValueError: NaN, or below `smallest`: an unclipped norm, which must not be ignored.
        """
        sigma = np.asarray(sigma, float)
        if np.any(np.isnan(sigma)) or np.any(sigma < self.smallest):
            raise ValueError(
                f"sigma must be at least {self.smallest:g} (norms clipped), got {np.min(sigma):g}"
            )
        found = np.searchsorted(self.edges, sigma, side="right") - 1
        if self.zero_bucket:
            found = np.where(np.isposinf(sigma), self.num, found)
        return found.astype(np.int32)

    def norm_limits(self, noise_multiplier: float, clip_norm: float, dtype: type = np.float32) -> np.ndarray:
        """Return (buckets,) the largest norm of each bucket, rounded down to `dtype`; 0 for zeros."""
        with np.errstate(divide="ignore"):
            exact = noise_multiplier * clip_norm / self.sigmas
        rounded = exact.astype(dtype)
        return np.where(rounded > exact, np.nextafter(rounded, dtype(0)), rounded).astype(dtype)
