"""Claim: a mechanism meets a target, for a data set and batches of given sizes."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from jaxacct.common import records
from jaxacct.common import validate as _validate
from jaxacct.common.files import json_digest
from jaxacct.core import truncation
from jaxacct.mechanisms.mechanism import ZERO_OUT, Mechanism, check_composition
from jaxacct.schemes import SCHEMES
from jaxacct.schemes.protocol.batch_sizes import OVERFLOW, Overflow, batch_sizes, check_dataset_size, overflow
from jaxacct.schemes.protocol.scheme import scheme_from_fields, scheme_to_json
from jaxacct.statistics.bounds import Budget
from jaxacct.statistics.composed import Composed
from jaxacct.statistics.hockey_stick import hockey_stick
from jaxacct.strategies import STRATEGIES
from jaxacct.strategies.banded_toeplitz import BandedToeplitz


@dataclasses.dataclass(frozen=True)
class ClaimedTarget:
    """Target (epsilon, delta) of a mechanism.

    Attributes:
      epsilon: natural log, at least 0; at 0 delta bounds the advantage of every test.
      delta: in (0, 1).
      budget: split of delta between verified divergence and failure probability; at most delta in total.
      compose_with: the dp-accounting `DpEvent` that the guarantee also covers, or None.
    """

    epsilon: float
    delta: float
    budget: Budget
    compose_with: object = None

    def __post_init__(self):
        _validate.check_fields(self, epsilon=_validate.nonnegative_number, delta=_validate.open_probability)
        if not self.budget.delta <= self.delta:
            raise ValueError(f"budget must spend at most delta {self.delta!r}, spends {self.budget.delta!r}")

    @classmethod
    def at(cls, epsilon: float, delta: float, compose_with=None, *, reserved: float = 0.0) -> "ClaimedTarget":
        """Return the target with the default split of all of delta that is not `reserved`.

        Reserved is what truncated batches and stopped runs need.
        """
        _validate.open_probability("delta", delta)
        return cls(epsilon, delta, Budget.split(delta - reserved), compose_with)

    @property
    def composed(self) -> bool:
        """Whether the claim composes another mechanism."""
        return self.compose_with is not None

    @functools.cached_property
    def profile(self) -> Callable:
        """Function g of the terms `w g(t)`, of float64 `t` (num,): the hockey stick, or the composed profile.

        Raises:
          ValueError: an event that dp-accounting does not support.
        """
        return _events().event_profile(self.compose_with) if self.composed else hockey_stick

    @functools.cached_property
    def composition(self) -> Composed | None:
        """Composed mechanism, for proposals, or None. ValueError as `profile`."""
        profile: Any = self.profile
        return Composed(profile, self.budget.delta_v) if self.composed else None


@dataclasses.dataclass(frozen=True)
class Claim:
    """Mechanism, its claimed target, and the data set.

    Attributes:
      mechanism: scheme, strategy, noise multiplier and adjacency.
      target: epsilon, delta, budget, composition.
      dataset_size: number of examples; None where it is unspecified, and then all batch sizes are.
      truncate_to: batches above this size are truncated to a random subset; None to never truncate.
    """

    mechanism: Mechanism
    target: ClaimedTarget
    dataset_size: int | None
    truncate_to: int | None

    def __post_init__(self):
        scheme = self.mechanism.scheme
        check_composition(self.mechanism, self.target.compose_with)
        if self.dataset_size is not None:
            check_dataset_size(scheme, _validate.positive_integer("dataset_size", self.dataset_size))
        if self.truncate_to is not None:
            _validate.positive_integer("max_batch_size", self.truncate_to)
            if self.dataset_size is None:
                raise ValueError("dataset_size must be given with max_batch_size")
            if self.target.composed:
                raise ValueError("max_batch_size must not be given together with compose_with")
            if self.mechanism.adjacency != ZERO_OUT:
                raise ValueError(
                    f"max_batch_size must not be given with {self.mechanism.adjacency} adjacency"
                )

    @functools.cached_property
    def overflow(self) -> Overflow | None:
        """Reserve for runs that stop at an oversized batch; None for truncated or unknown sizes."""
        target = self.target
        scheme = self.mechanism.scheme
        return overflow(scheme, target.epsilon, target.delta, self.dataset_size, self.truncate_to)

    @functools.cached_property
    def truncation_delta(self) -> float | None:
        """Reserve for truncated batches (`core.truncation`); None without truncation."""
        if self.truncate_to is None:
            return None
        scheme, epsilon = self.mechanism.scheme, self.target.epsilon
        return truncation.reserve(scheme, epsilon, self.dataset_size or 0, self.truncate_to)

    @property
    def reserved(self) -> float:
        """Part of delta that is not for the verification: truncated batches and stopped runs."""
        return (self.truncation_delta or 0.0) + (self.overflow.delta if self.overflow else 0.0)

    @functools.cached_property
    def batch_sizes(self) -> tuple[float | None, int | None]:
        """(expected batch size over the run, largest batch size); None without a data set size."""
        stops = OVERFLOW if self.overflow is None else self.overflow.probability
        return batch_sizes(self.mechanism.scheme, self.dataset_size, self.truncate_to, stops)

    def check_reserves(self) -> None:
        """Check that delta covers the budget and all reserves; ValueError otherwise."""
        available = self.target.delta - self.reserved
        if not self.target.budget.delta <= available:
            raise ValueError(f"the budget spends {self.target.budget.delta:g} of {available:g} of delta")
        if self.truncate_to is not None and not truncation.covers(self.mechanism, self.target.epsilon):
            raise ValueError("the reserve for truncated batches does not cover this noise multiplier")
        if not all(map(math.isfinite, (available, self.mechanism.noise_multiplier))):
            raise ValueError("every number of a claim must be finite")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, readable by `claim_from_json`."""
        mechanism, target = self.mechanism, self.target
        return {
            "adjacency": mechanism.adjacency,
            "scheme": scheme_to_json(mechanism.scheme),
            "strategy": mechanism.strategy.to_json(),
            "noise_multiplier": mechanism.noise_multiplier,
            "epsilon": target.epsilon,
            "delta": target.delta,
            "budget": dataclasses.asdict(target.budget),
            "compose_with": _events().event_to_json(target.compose_with) if target.composed else None,
            "dataset_size": self.dataset_size,
            "truncate_to": self.truncate_to,
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the claim: evidence contains it, so that it cannot be used for another claim."""
        return json_digest(self.to_json())


@dataclasses.dataclass(frozen=True)
class _Written:
    """Fields of a claim as `Claim.to_json` writes them."""

    adjacency: str
    scheme: dict[str, Any]
    strategy: dict[str, Any]
    noise_multiplier: float
    epsilon: float
    delta: float
    budget: Budget
    compose_with: Any
    dataset_size: int | None
    truncate_to: int | None


def claim_from_json(data) -> Claim:
    """Return the claim that `Claim.to_json` wrote; ValueError for fields that are not as it writes them."""
    read = records.read(_Written, data, "plan claim")
    name, kind = read.scheme.get("name"), read.strategy.get("kind", BandedToeplitz.kind)
    scheme = scheme_from_fields(SCHEMES[_validate.one_of("scheme", name, tuple(SCHEMES))], read.scheme)
    strategy = STRATEGIES[_validate.one_of("strategy kind", kind, tuple(STRATEGIES))].from_json(read.strategy)
    mechanism = Mechanism(scheme, strategy, read.noise_multiplier, read.adjacency)
    event = None if read.compose_with is None else _events().event_from_json(read.compose_with)
    target = ClaimedTarget(read.epsilon, read.delta, read.budget, event)
    claim = Claim(mechanism, target, read.dataset_size, read.truncate_to)
    written = records.differences(data, claim.to_json(), "claim")
    if written:  # such as a strategy whose column norm is not 1
        raise ValueError(f"plan does not add up: {written[0]}")
    return claim


def _events():
    """Return `accountants.composition`, imported only for a claim that composes another mechanism."""
    from jaxacct.accountants import composition

    return composition
