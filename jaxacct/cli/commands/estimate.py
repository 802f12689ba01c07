"""`jaxacct estimate`."""

import dataclasses
from typing import Annotated, Any

from jaxacct.accountants.history import joined
from jaxacct.cli import output
from jaxacct.cli.events import Events, parsed
from jaxacct.cli.problem import Problem
from jaxacct.cli.usage import Flat, Integer, Number, OfRun
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.core.text import noise_multipliers
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.mechanisms.mechanism import AdjacencyName, Mechanism


def command(
    *,
    noise_multiplier: Annotated[Number, OfRun],
    problem: Annotated[Problem, Flat],
    epsilon: Number | None = None,
    delta: Number | None = None,
    adjacency: AdjacencyName = "zero-out",
    event: Events = (),
    samples: Integer | None = None,
    confidence: Number = 0.95,
    json: bool = False,
) -> int:
    r"""Estimate delta at an epsilon, or epsilon at a delta. An estimate is not a guarantee.

    For example:

        jaxacct estimate --scheme poisson --sampling-probability 0.004 \
            --iterations 5000 --noise-multiplier 1.1 --delta 1e-6
        jaxacct estimate --dataset-size 50k --batch-size 200 --iterations 1000 \
            --bands 16 --noise-multiplier 0.6 --epsilon 8

    Args:
      noise_multiplier: noise standard deviation per unit of clip norm.
      epsilon: estimate delta here; delta at 0 is the advantage of the best membership test.
      delta: estimate epsilon here.
      adjacency: neighbouring data set: the example's gradients are zero, the example is absent, or another
        example is in its place.
      event: estimate the run together with this event; as of `spent`, may be repeated.
      samples: samples for each direction, 100,000 by default; none by default where an accountant is exact,
        as for Poisson sampling with one band.
      confidence: of the interval.
      json: print one JSON object.
    """
    if (epsilon is None) == (delta is None):
        raise ValueError("epsilon or delta must be given, and only one of them")
    if problem.sampling_probability is not None and problem.scheme != "truncated-b-min-sep":
        output.refuse("together with sampling_probability", dataset_size=problem.dataset_size)
    validate.positive_number("noise_multiplier", noise_multiplier)
    if samples is not None:
        validate.positive_integer("samples", samples)
    validate.open_probability("confidence", confidence)
    composed = joined(parsed(event)) if event else None
    with watch() as progress:
        options: dict[str, Any] = dict(num_samples=samples, confidence=confidence, progress=progress)
        options["compose_with"] = composed
        mechanism = Mechanism(*problem.build(), noise_multiplier, adjacency)
        if epsilon is not None:
            estimate, given = estimate_delta(mechanism, epsilon, **options), {"epsilon": epsilon}
        else:
            assert delta is not None
            estimate, given = estimate_epsilon(mechanism, delta, **options), {"delta": delta}
    if json:
        output.show({"kind": "estimate", **given, **dataclasses.asdict(estimate)}, True)
    else:
        parts = ", ".join(f"{d} {v:.4g} ({estimate.proposals[d]})" for d, v in estimate.directions.items())
        value = f"estimate, not a guarantee: {estimate.quantity} = {estimate.value:.4g}"
        if estimate.num_samples:
            kind = f"from {estimate.num_samples:,} samples for each direction"
            held = f"{100 * estimate.confidence:g}% interval"
        else:
            kind, held = "computed", "without samples"
        ends = f"at most {estimate.high:.4g} ({held}; upper bound only)"
        if estimate.low:
            ends = f"{held} [{estimate.low:.4g}, {estimate.high:.4g}]"
        print(f"{value}, {ends}\n{kind}: {parts}")
        if mechanism.strategy.given_norm != 1:
            print(f"noise multiplier {noise_multipliers(mechanism)}")
    return 0
