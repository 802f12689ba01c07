"""Proposals by their specification as text, and the candidates of one family."""

import importlib
import math

from jaxacct import MultiAttribution
from jaxacct.proposals import registry
from jaxacct.proposals.base import ProposalSpec, Setting
from jaxacct.proposals.families.replicas import log_normalizer
from jaxacct.schemes.replicas.table import log_normalizer_about
from jaxacct.statistics.hockey_stick import Direction


def proposal_by_name(mechanism, epsilon, direction, name, *, composed=None):
    """The proposal that `name`, such as "replicas:2", specifies."""
    setting = Setting(mechanism, epsilon, Direction(direction), composed)
    return registry.build(setting, ProposalSpec.parse(name))


def family_candidates(family, mechanism, epsilon, samples_needed=None, *, direction=None, composed=None):
    """The candidates of one family, in its own direction unless one is given."""
    entry = registry.FAMILIES[family]
    setting = Setting(mechanism, epsilon, Direction(direction or entry.directions[0]), composed)
    return importlib.import_module(f"jaxacct.proposals.{entry.module}").candidates(setting, samples_needed)


def normalizer_of_two(mechanism) -> float:
    """ln Z of two replicas, where weights of users' examples are beyond what draws are made of, too."""
    found = log_normalizer(mechanism)
    if math.isinf(found):
        assert isinstance(mechanism.scheme, MultiAttribution) and mechanism.noise_multiplier < 0.5, mechanism
        return log_normalizer_about(mechanism)
    return found
