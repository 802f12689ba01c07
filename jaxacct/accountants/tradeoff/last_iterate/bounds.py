"""Results of shifted interpolation: one mu, with every valid bound beside it."""

import math
from dataclasses import dataclass, field

from jaxacct.accountants.tradeoff.curves.curves import Gaussian
from jaxacct.accountants.tradeoff.curves.terms import Terms, last_iterate
from jaxacct.accountants.tradeoff.last_iterate.renyi import rdp_to_epsilon


@dataclass(frozen=True)
class GDPBound:
    """The least of several valid GDP bounds.

    Attributes:
      mu: the run's last iterate is mu-GDP.
      theorem: name of the bound that gave it.
      window: steps or epochs after which the diameter was used; None where it was not.
      exact: whether the bound is attained in its class.
      compared: every valid bound by name.
      note: what to know about it.
      terms: who it holds against.
    """

    mu: float
    theorem: str
    window: int | None
    exact: bool
    compared: dict[str, float]
    note: str = ""
    terms: Terms = field(default_factory=lambda: last_iterate("certified"))

    @property
    def curve(self) -> Gaussian:
        """The trade-off function."""
        return Gaussian(self.mu)

    def epsilon(self, delta: float) -> float:
        """Epsilon at delta, in (0, 1)."""
        return self.curve.epsilon(delta)

    def delta(self, epsilon: float) -> float:
        """Delta at epsilon >= 0."""
        return self.curve.delta(epsilon)

    def holds(self, epsilon: float, delta: float) -> bool:
        """Whether it shows (epsilon, delta)."""
        return bool(self.delta(epsilon) <= delta)

    def tradeoff(self, alpha):
        """Type II error at level alpha."""
        return self.curve(alpha)

    def rdp_epsilon(self, delta: float) -> float:
        """What the same mu gives through Renyi divergence: never less than `epsilon`."""
        return rdp_to_epsilon(self.mu**2 / 2, delta)


def least(
    candidates: dict[str, tuple[float, int | None]], *, exact: tuple[str, ...] = (), note: str = ""
) -> GDPBound:
    """The least mu of `{name: (mu, window)}`, the first of equals."""
    finite = {name: pair for name, pair in candidates.items() if not math.isnan(pair[0])}
    name = min(finite, key=lambda one: finite[one][0])
    mu, window = finite[name]
    sharp = name in exact
    return GDPBound(
        mu,
        name,
        window,
        sharp,
        {one: pair[0] for one, pair in finite.items()},
        note,
        last_iterate("exact" if sharp else "certified"),
    )


def sqrt_tanh_ratio(c: float, t: float) -> float:
    """`sqrt((1 - c^t)/(1 + c^t) (1 + c)/(1 - c)) = sqrt(tanh(t h) / tanh(h))`, `h = -log(c)/2`: also as c
    -> 1."""
    if c == 0:
        return 1.0
    if c == 1:
        return math.sqrt(t)
    h = -0.5 * math.log(c)  # at least 2^-54
    return math.sqrt(math.tanh(t * h) / math.tanh(h))
