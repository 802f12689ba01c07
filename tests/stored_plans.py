"""Stored plans of every kind of evidence, and ways to tamper with them."""

import dataclasses
import functools
import json
import pickle
from pathlib import Path

import numpy as np
from msgspec import structs

from jaxacct import Plan
from jaxacct.accountants.analytic import best_accountant
from jaxacct.common.files import to_json
from jaxacct.core.claim import Claim, ClaimedTarget
from jaxacct.core.evidence import Bound, Sampled
from jaxacct.statistics import bounds, hockey_stick
from jaxacct.statistics.hockey_stick import checked_counts, sparse_counts

FOLDER = Path(__file__).parent / "fixtures/plans"
KINDS = sorted(path.stem for path in FOLDER.glob("*.json"))
UNRELEASED = Path(__file__).parent / "fixtures/unreleased_schema.json"
DROP = object()


@functools.cache
def whole(kind: str) -> Plan:
    """The stored plan of one kind."""
    return Plan.load(FOLDER / f"{kind}.json")


def as_json(plan: Plan) -> dict:
    """The plan as JSON values, as a file gives them."""
    return json.loads(to_json(plan.to_json()))


def loaded(plan: Plan) -> Plan:
    """What is read of the file that the plan is written to; ValueError where it is refused."""
    return Plan.from_json(as_json(plan))


def changed(data, path, value):
    """`data` with another value, or with `DROP` none, at `path`."""
    data = pickle.loads(pickle.dumps(data))  # ten times as fast as copy.deepcopy
    at = data
    for step in path[:-1]:
        at = at[step]
    if value is DROP:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


def forged(plan: Plan, **change) -> Plan:
    """The plan with another claim that its evidence names as its own.

    Args:
      plan: with samples as evidence.
      change: fields of the claim, its mechanism or its target.
    """
    claim = claim_with(plan.claim, **change)
    assert isinstance(plan.evidence, Sampled)
    return dataclasses.replace(plan, claim=claim, evidence=structs.replace(plan.evidence, claim=claim.digest))


def claim_with(claim: Claim, **change) -> Claim:
    """The claim with other fields, of itself, its mechanism or its target."""

    def fields(record):
        names = {field.name for field in dataclasses.fields(record)}
        return {name: value for name, value in change.items() if name in names}

    mechanism = dataclasses.replace(claim.mechanism, **fields(claim.mechanism))
    target = dataclasses.replace(claim.target, **fields(claim.target))
    return dataclasses.replace(claim, **{"mechanism": mechanism, "target": target} | fields(claim))


def with_side(plan: Plan, direction: str, **change) -> Plan:
    """The plan with other fields in the evidence of one direction."""
    side = structs.replace(getattr(plan.evidence, direction), **change)
    return dataclasses.replace(plan, evidence=structs.replace(plan.evidence, **{direction: side}))


def with_derived(plan: Plan, **fields) -> Plan:
    """The plan with other batch sizes or reserves than follow from its claim, as a broken accountant's.

    Args:
      plan: any plan.
      fields: expected_batch_size, max_batch_size, truncation_delta.
    """
    claim = dataclasses.replace(plan.claim)
    sizes = (fields.pop(name, getattr(plan, name)) for name in ("expected_batch_size", "max_batch_size"))
    claim.__dict__.update({"batch_sizes": tuple(sizes)} | fields)
    return dataclasses.replace(plan, claim=claim)


def sampled_directions(plan: Plan) -> list[str]:
    """The directions of a plan that have samples."""
    return [name for name in ("remove", "add") if getattr(plan.evidence, name).num_samples]


def histograms(plan: Plan, direction: str) -> list[np.ndarray]:
    """Dense counts of terms and losses."""
    side = getattr(plan.evidence, direction)
    sizes = [len(bounds.TERM_EDGES), len(hockey_stick.loss_bounds(direction))]
    parts = side.term_counts, side.loss_counts
    return [checked_counts(part, size, "counts") for part, size in zip(parts, sizes, strict=True)]


def with_histograms(plan: Plan, direction: str, parts) -> Plan:
    """The plan with other counts in one direction, as of `histograms`."""
    terms, losses = map(sparse_counts, parts)
    return with_side(plan, direction, term_counts=terms, loss_counts=losses)


def analytic(mechanism, epsilon, delta, *, compose_with=None, dataset_size=None, truncate_to=None) -> Plan:
    """A plan of the best accountant's bound, whether that is small enough or not."""
    target = ClaimedTarget.at(epsilon, delta, compose_with)
    claim = Claim(mechanism, target, dataset_size, truncate_to)
    target = ClaimedTarget.at(epsilon, delta, compose_with, reserved=claim.reserved)
    name, _ = best_accountant(mechanism, epsilon, compose_with)
    return Plan(dataclasses.replace(claim, target=target), Bound(name))
