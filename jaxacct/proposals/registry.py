"""Registered families of proposal distributions; a new family is one file and one line here.

The module of a family has `build(setting, *parameters) -> Proposal`, which returns None or raises ValueError
where the family does not cover the setting, and `candidates(setting, samples_needed) -> list[Proposal]`. A
module is imported when its family is used.
"""

import functools
import importlib
import operator
from types import ModuleType
from typing import NamedTuple

from jaxacct.mechanisms.mechanism import REPLACE_ONE, ZERO_OUT
from jaxacct.proposals.base import Proposal, ProposalSpec, SamplesNeeded, Setting
from jaxacct.statistics.hockey_stick import Direction

_REMOVE, _BOTH = (Direction.REMOVE,), (Direction.REMOVE, Direction.ADD)
_ALL = (ZERO_OUT, REPLACE_ONE)


class Family(NamedTuple):
    """Module of a family, and what it covers.

    Attributes:
      parameters: values of each parameter; a mechanism may have fewer of them.
      adjacencies: of the dominating pairs (`Mechanism.pair_adjacency`) that it draws from.
      optional: number of the last parameters that may be left out.
      is_costly: whether it is considered only where those before it need many samples.
    """

    module: str
    directions: tuple[Direction, ...]
    composed: tuple[bool, ...]
    parameters: tuple[range, ...]
    adjacencies: tuple[str, ...] = (ZERO_OUT,)
    optional: int = 0
    is_costly: bool = False


# Of proposals with the same predicted cost the first one is chosen.
FAMILIES: dict[str, Family] = {
    "plain": Family("base", _BOTH, (False, True), (), _ALL),
    "replicas": Family("families.replicas", _REMOVE, (False, True), (range(1, 49), range(2, 33)), _ALL, 1),
    "joint-replicas": Family("families.joint_replicas", _REMOVE, (False,), (range(3, 9),), is_costly=True),
    "truncated": Family("families.truncated", _BOTH, (False,), ()),
}


def _module(family: Family) -> ModuleType:
    return importlib.import_module(f"jaxacct.proposals.{family.module}")


def _covers(family: Family, setting: Setting) -> bool:
    mechanism = setting.mechanism
    return (
        setting.direction in family.directions
        and setting.direction in mechanism.directions
        and mechanism.pair_adjacency in family.adjacencies
        and (setting.composed is not None) in family.composed
    )


def check_name(name: str, composed: bool) -> ProposalSpec:
    """Return what a name as users give it stands for, without building it.

    ValueError for an unknown family, a wrong number of parameters, or a family for another purpose.
    """
    spec, family = _known(ProposalSpec.parse(name))
    if composed not in family.composed:
        allowed = [name for name, other in FAMILIES.items() if composed in other.composed]
        raise ValueError(f"proposal must be of {', '.join(allowed)}, got {str(spec)!r}")
    return spec


def _known(spec: ProposalSpec) -> tuple[ProposalSpec, Family]:
    family = FAMILIES.get(spec.family)
    if family is None:
        raise ValueError(f"proposal family must be one of {', '.join(FAMILIES)}, got {spec.family!r:.80}")
    allowed = family.parameters
    number = len(spec.parameters)
    fits = len(allowed) - family.optional <= number <= len(allowed)
    if not (fits and all(map(operator.contains, allowed, spec.parameters))):
        ranges = ",".join(f"{r.start}..{r.stop - 1}" for r in allowed)
        raise ValueError(f"proposal must be {spec.family}{ranges and f':{ranges}'}, got {str(spec)!r}")
    return spec, family


@functools.lru_cache(maxsize=64)
def build(setting: Setting, spec: ProposalSpec) -> Proposal:
    """Return the proposal of a specification; ValueError where it does not cover the setting."""
    _, family = _known(spec)
    if not _covers(family, setting):
        composed = "" if setting.composed is None else " with a composed mechanism"
        raise ValueError(
            f"proposal {spec} does not cover the {setting.direction} direction{composed} under "
            f"{setting.mechanism.adjacency} adjacency"
        )
    found = _module(family).build(setting, *spec.parameters)
    if found is None or found.spec != spec or found.direction != setting.direction:
        raise ValueError(f"proposal {spec} is not available for this mechanism")
    return found


def candidates(setting: Setting, samples_needed: SamplesNeeded = None) -> list[Proposal]:
    """Return every proposal worth considering for a setting, plain sampling first."""
    found: list[Proposal] = []
    for family in FAMILIES.values():
        needs_few = family.is_costly and samples_needed and any(samples_needed(each) <= 0 for each in found)
        if _covers(family, setting) and not needs_few:
            found += _module(family).candidates(setting, samples_needed)
    return found
