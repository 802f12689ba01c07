"""Participation laws that can be drawn: how often a group of records is touched, whatever the sampler.

A law draws `c^2 = sum over rounds of (clipped terms that hold a record of the group)^2` of whole runs.
Batches must not depend on data; then a run is the mixture `G_{c / sigma}` with the batches shown
(proofs/tradeoff.md).
"""

import abc
import functools
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import sample_participation
from jaxacct.common import validate as _validate
from jaxacct.schemes import SCHEMES, Scheme, scheme_to_json


class ParticipationLaw(abc.ABC):
    """What bears on a guarantee is abstract: nothing holds by default."""

    kind: ClassVar[str]
    group_size: int
    """g records that may be replaced."""

    @abc.abstractmethod
    def draw(self, key, num_samples: int) -> np.ndarray:
        """(num_samples,) int64 independent draws of c^2."""

    @abc.abstractmethod
    def most(self) -> int:
        """The largest c^2 there can be."""

    @abc.abstractmethod
    def draw_error(self) -> float:
        """A bound on how much likelier any draw may really be, as a relative error."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything that it depends on, in JSON values."""


@dataclass(frozen=True)
class SamplerLaw(ParticipationLaw):
    """Of generalised DP-SGD: shuffled or fixed-size batches, individual, batch or mixed clipping."""

    run: GeneralDPSGD
    kind: ClassVar[str] = "generalised-dp-sgd"

    @property
    def group_size(self) -> int:
        return self.run.group_size

    def draw(self, key, num_samples: int) -> np.ndarray:
        run = self.run
        sizes = run.dataset_size, run.num_microbatches, run.microbatch_size, run.num_epochs, run.group_size
        return np.asarray(sample_participation(key, *sizes, run.sampling, num_samples), np.int64)

    def most(self) -> int:
        return self.run.most()

    def draw_error(self) -> float:
        """Every position is one of N values of `floor(x span / 2^64)`: off by N 2^-64 of itself at most."""
        run = self.run
        draws = run.num_epochs * (1 if run.sampling == "shuffling" else run.rounds_per_epoch)
        return float(np.expm1(draws * run.group_size * run.dataset_size * 2.0**-64))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind} | asdict(self.run)


@dataclass(frozen=True)
class SchemeLaw(ParticipationLaw):
    """Of g records that take part by a sampling scheme independently of each other.

    Attributes:
      scheme: of `jaxacct.schemes`, for single examples, whose batches are never cut.
      group_size: g.
      clip: "batch" (a round is one term) or "individual" (a term a record).
    """

    scheme: Scheme
    group_size: int
    clip: str
    kind: ClassVar[str] = "scheme"

    def __post_init__(self):
        _validate.instance("scheme", self.scheme, tuple(SCHEMES.values()), "one of jaxacct's schemes")
        _validate.positive_integer("group_size", self.group_size)
        _validate.one_of("clip", self.clip, ("batch", "individual"))
        if self.scheme.unit != "example" or self.scheme.cut_to is not None:
            raise ValueError(
                f"scheme must be of single examples in batches that are never cut, was {self.scheme.name}"
            )

    def draw(self, key, num_samples: int) -> np.ndarray:
        hits = np.zeros((num_samples, self.scheme.iterations), np.int64)
        for member in range(self.group_size):
            drawn = _participations(self.scheme, jax.random.fold_in(key, member), num_samples)
            hits += np.asarray(drawn, np.int64)
        terms = np.minimum(hits, 1) if self.clip == "batch" else hits
        return (terms**2).sum(axis=1)

    def most(self) -> int:
        n, g, each = self.scheme.iterations, self.group_size, self.scheme.max_participations
        if self.clip == "batch":
            return min(n, g * each)
        return each * g * g  # all records together whenever one takes part

    def draw_error(self) -> float:
        return float(np.expm1(self.group_size * np.log1p(self.scheme.draw_error())))

    def describe(self) -> dict[str, Any]:
        described = {"kind": self.kind, "group_size": self.group_size, "clip": self.clip}
        return described | {"scheme": scheme_to_json(self.scheme)}


@functools.partial(jax.jit, static_argnums=(0, 2))
def _participations(scheme: Scheme, key, num_samples: int):
    return scheme.draw_participation(key, num_samples)
