"""`jaxacct estimate`."""

import dataclasses
import math
from typing import Annotated, Any

from jaxacct.cli import output
from jaxacct.cli.problem import AdjacencyName, Problem
from jaxacct.cli.usage import Flat, Integer, Number, OfRun
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.estimates.estimate import estimate_delta, estimate_epsilon
from jaxacct.mechanisms.mechanism import Mechanism


def command(
    *,
    noise_multiplier: Annotated[Number, OfRun],
    problem: Annotated[Problem, Flat],
    epsilon: Number | None = None,
    delta: Number | None = None,
    adjacency: AdjacencyName = "zero-out",
    samples: Integer | None = None,
    confidence: Number = 0.95,
    plot: str | None = None,
    json: bool = False,
) -> int:
    """Estimate delta at an epsilon, or epsilon at a delta. An estimate is not a guarantee.

    Args:
      noise_multiplier: noise standard deviation per unit of clip norm.
      epsilon: estimate delta here.
      delta: estimate epsilon here.
      adjacency: neighbouring data set: the example's gradients are zero, the example is absent, or another
        example is in its place.
      samples: samples for each direction, 100,000 by default; none by default where an accountant is exact,
        as for Poisson sampling with one band.
      confidence: of the interval.
      plot: write plain samples of the privacy loss, and where epsilon lies among them, to this PNG.
      json: print one JSON object.
    """
    if (epsilon is None) == (delta is None):
        raise ValueError("epsilon or delta must be given, and not both")
    if problem.sampling_probability is not None and problem.scheme != "truncated-b-min-sep":
        output.refuse("together with sampling_probability", dataset_size=problem.dataset_size)
    validate.positive_number("noise_multiplier", noise_multiplier)
    if samples is not None:
        validate.positive_integer("samples", samples)
    validate.open_probability("confidence", confidence)
    output.check_plot(plot)
    with watch() as progress:
        options: dict[str, Any] = dict(num_samples=samples, confidence=confidence, progress=progress)
        mechanism = Mechanism(*problem.build(), noise_multiplier, adjacency)
        if epsilon is not None:
            found, given = estimate_delta(mechanism, epsilon, **options), {"epsilon": epsilon}
        else:
            assert delta is not None
            found, given = estimate_epsilon(mechanism, delta, **options), {"delta": delta}
    if json:
        fields = {"kind": "estimate", **given, **dataclasses.asdict(found)}
        output.show({k: None if v == math.inf else v for k, v in fields.items()}, True)  # inf is not JSON
    else:
        parts = ", ".join(f"{d} {found.directions[d]:.4g} ({found.proposals[d]})" for d in found.directions)
        value = f"estimate, not a guarantee: {found.quantity} = {found.value:.4g}"
        if not found.num_samples and not found.low:
            print(f"{value}, an upper bound that is exact up to its grid, without samples\n{parts}")
        else:
            kind = f"from {found.num_samples:,} samples for each direction" if found.num_samples else "exact"
            ends = f"{100 * found.confidence:g}% interval [{found.low:.4g}, {found.high:.4g}]"
            print(f"{value}, {ends}\n{kind}: {parts}")
    drawn = [] if samples is None else [samples]
    output.draw(plot, "privacy_losses", mechanism, found.value if epsilon is None else epsilon, *drawn)
    return 0
