"""What a guarantee is about: epsilon and delta, how delta is spent, and what is composed in."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable

from jaxacct import _validate
from jaxacct.accountants.composition import event_profile, event_to_json
from jaxacct.files import to_json
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.schemes import scheme_to_json
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import hockey_stick
from jaxacct.strategies import strategy_to_json


@dataclasses.dataclass(frozen=True)
class Target:
    """The (epsilon, delta) that a mechanism has to have.

    Attributes:
      epsilon: natural log, at least 0; at 0 delta bounds the advantage of every test.
      delta: in (0, 1).
      budget: what of delta is verified and what a wrong verdict may cost; at most delta in all.
      compose_with: the dp-accounting `DpEvent` that the guarantee covers as well, or None.
    """

    epsilon: float
    delta: float
    budget: Budget
    compose_with: object = None

    def __post_init__(self):
        object.__setattr__(self, "epsilon", _validate.nonnegative_number("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _validate.open_probability("delta", self.delta))
        if not self.budget.delta <= self.delta:
            raise ValueError(f"budget must spend at most delta {self.delta!r}, spends {self.budget.delta!r}")

    @classmethod
    def at(cls, epsilon: float, delta: float, compose_with=None, *, spent: float = 0.0) -> "Target":
        """With the usual budget of all of delta, less what is `spent` on something else."""
        _validate.open_probability("delta", delta)
        return cls(epsilon, delta, Budget.split(delta - spent), compose_with)

    @property
    def composed(self) -> bool:
        """Whether another mechanism is composed in."""
        return self.compose_with is not None

    @functools.cached_property
    def profile(self) -> Callable:
        """g of the terms `w g(t)`: of float64 `t` (num,), the hockey stick or what is composed.

        Raises:
          ValueError: for an event that dp-accounting does not support.
        """
        return event_profile(self.compose_with) if self.composed else hockey_stick

    @functools.cached_property
    def composition(self) -> Composed | None:
        """What is composed in, for proposals; None where nothing is. ValueError as `profile`."""
        return Composed(event_profile(self.compose_with), self.budget.delta_v) if self.composed else None

    def describe(self, mechanism: Mechanism) -> dict:
        """The target and the mechanism in plain JSON values."""
        return {
            "scheme": scheme_to_json(mechanism.scheme),
            "strategy": strategy_to_json(mechanism.strategy),
            "noise_multiplier": mechanism.noise_multiplier,
            "epsilon": self.epsilon,
            "budget": dataclasses.asdict(self.budget),
            "compose_with": event_to_json(self.compose_with),
        }

    def digest(self, mechanism: Mechanism) -> str:
        """SHA-256 of what a verification of this target is about, mechanism and adjacency with it."""
        described = self.describe(mechanism) | {"delta": self.delta, "adjacency": mechanism.adjacency}
        return hashlib.sha256(to_json(described, sort_keys=True).encode()).hexdigest()
