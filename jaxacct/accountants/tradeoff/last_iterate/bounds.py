"""Results of shifted interpolation: one mu, with every valid bound beside it."""

import math
from dataclasses import dataclass, field

from jaxacct.accountants.tradeoff.curves.curves import Gaussian, TradeOff
from jaxacct.accountants.tradeoff.curves.terms import Terms, last_iterate


class ByCurve:
    """Queries of a bound that has a trade-off function."""

    @property
    def curve(self) -> TradeOff:
        """Trade-off function of the bound."""
        raise NotImplementedError

    def epsilon(self, delta: float) -> float:
        """Return epsilon at delta, in (0, 1), rounded up."""
        return self.curve.epsilon(delta)

    def delta(self, epsilon: float) -> float:
        """Return delta at epsilon >= 0, rounded up."""
        return self.curve.delta(epsilon)

    def holds(self, epsilon: float, delta: float) -> bool:
        """Return whether the bound shows (epsilon, delta)."""
        return bool(self.delta(epsilon) <= delta)

    def tradeoff(self, alpha):
        """Return the type II error at level alpha, rounded down."""
        return self.curve(alpha)


@dataclass(frozen=True)
class GDPBound(ByCurve):
    """Smallest of several valid GDP bounds.

    Attributes:
      mu: the run's last iterate is mu-GDP.
      theorem: name of the bound that gave it.
      window: steps or epochs after which the diameter was used; None without it.
      exact: whether the bound is attained in its class.
      compared: every valid bound by name.
      note: a limitation of the result.
      terms: adversary and adjacency.
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
        return Gaussian(self.mu)


def least(
    candidates: dict[str, tuple[float, int | None]], *, exact: tuple[str, ...] = (), note: str = ""
) -> GDPBound:
    """Return the smallest mu of `{name: (mu, window)}`, the first of equals."""
    finite = {name: pair for name, pair in candidates.items() if not math.isnan(pair[0])}
    name = min(finite, key=lambda one: finite[one][0])
    mu, window = finite[name]
    compared = {one: pair[0] for one, pair in finite.items()}
    terms = last_iterate("exact" if name in exact else "certified")
    return GDPBound(mu, name, window, name in exact, compared, note, terms)


def sqrt_tanh_ratio(c: float, t: float) -> float:
    """Return `sqrt((1 - c^t)/(1 + c^t) (1 + c)/(1 - c)) = sqrt(tanh(t h) / tanh(h))`, `h = -log(c)/2`."""
    if c == 0:
        return 1.0
    if c == 1:
        return math.sqrt(t)
    h = -0.5 * math.log(c)  # at least 2^-54
    return math.sqrt(math.tanh(t * h) / math.tanh(h))
