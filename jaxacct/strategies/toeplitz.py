"""Toeplitz strategy matrices that need not be banded within a separation (arXiv 2602.09338, appendix B).

Participations of one example then overlap, and the likelihood ratio no longer factorises. It is bounded from
both sides instead (proofs/non_banded.md): dropping the cross terms `x_i x_j <c_i, c_j> >= 0` raises it,
subtracting `cross_terms` from every participation lowers it. So the certificate is for an upper bound, and
plans state that.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from jaxacct.strategies.banded_toeplitz import FirstColumn
from jaxacct.strategies.base import check_is_bounded


@dataclass(frozen=True)
class Toeplitz(FirstColumn):
    """Lower-triangular Toeplitz strategy matrix with any number of coefficients.

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
