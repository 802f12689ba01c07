"""`jaxacct recommend`."""

from typing import Annotated, Any

from jaxacct.calibration.choice import COEFFICIENTS, MATRICES, SearchedScheme, options_of
from jaxacct.cli.output import show
from jaxacct.cli.problem import TargetOptions, coefficients
from jaxacct.cli.usage import Integer, Number, OfRun, OfTarget
from jaxacct.common.progress import watch
from jaxacct.common.records import exact
from jaxacct.mechanisms.mechanism import AdjacencyName
from jaxacct.recommendation.search import recommend


def command(
    *,
    dataset_size: Annotated[Integer, OfRun],
    batch_size: Annotated[Number, OfRun],
    iterations: Annotated[Integer, OfRun],
    target: Annotated[TargetOptions | None, OfTarget] = None,
    memory_copies: Integer | None = None,
    scheme: SearchedScheme | None = None,
    bands: Integer | None = None,
    min_separation: Integer | None = None,
    strategy: str | None = None,
    workload: str = "prefix-sum",
    adjacency: AdjacencyName = "zero-out",
    json: bool = False,
) -> int:
    r"""Rank schemes, separations, bands and matrices by error at estimated noise; certify none.

    Options that are given are kept fixed. The search reads only these public numbers, so it has no
    privacy cost.

    For example:

        jaxacct recommend --dataset-size 50k --batch-size 200 --iterations 1000 \
            --epsilon 8 --delta 1e-5
        jaxacct recommend --dataset-size 50k --batch-size 200 --iterations 1000 \
            --epsilon 8 --delta 1e-5 --bands 4

    Args:
      dataset_size: number of examples.
      batch_size: expected batch size.
      iterations: number of training steps.
      memory_copies: maximum copies of the parameters that training may keep for the noise: as many as bands,
        and one more than twice the buffers; 16 by default. 0 is for noise that is drawn again: matrices with
        a banded inverse.
      scheme: poisson, b-min-sep and, where these are best, schemes with a fixed number of participations by
        default; fixed-order for batches of your own loader.
      bands: of the strategy matrix, or buffers.
      min_separation: steps between participations.
      strategy: optimal, square-root, amplified (optimal at the noise needed with sampling), optimal-inverse,
        buffered (BLT, with participation revealed) or a file of coefficients; optimal, amplified and buffered
        by default.
      workload: rank by this error: prefix-sum, or momentum:0.9, weight-decay:1e-4, learning-rate:0.1, cosine
        or linear, warmup:100, last-iterate, with commas between. That of your optimizer follows accuracy more
        closely where banded and buffered matrices compete.
      adjacency: rank at the noise that this one needs; see `jaxacct calibrate`.
      json: print one JSON object.
    """
    target = target or TargetOptions()
    asked = target.target()
    sizes: dict[str, Any] = dict(dataset_size=dataset_size, batch_size=batch_size, iterations=iterations)
    fixed = dict(memory_copies=memory_copies, scheme=scheme, bands=bands, min_separation=min_separation)
    ranked = dict(workload=workload, adjacency=adjacency, target=asked)
    matrix: Any = strategy
    if strategy is not None and strategy not in MATRICES:
        matrix = coefficients(strategy, bands, MATRICES)
    with watch() as progress:
        recommendation = recommend(**sizes, **ranked, **fixed, strategy=matrix, progress=progress)
    chosen, choice = recommendation.chosen, recommendation.choice
    ranking = choice.ranking
    if chosen.matrix in ("square-root", COEFFICIENTS):  # which are made for no workload
        ranking |= {"workload": None}
    options = f"{chosen.options(strategy or '')} {target}{options_of(**ranking)}"
    calibration = f"jaxacct calibrate{options_of(**sizes)} {options}"
    if json:
        show(recommendation.to_json() | {"command": calibration}, True)
        return 0
    aim = f"advantage {exact(choice.delta)}"
    if choice.epsilon:
        aim = f"({exact(choice.epsilon)}, {exact(choice.delta)})"
    words = asked.in_words(choice.epsilon, choice.delta)
    if words is not None:
        print(f"{words}\n")
    print(
        f"Estimates, not guarantees, for {aim} over {iterations:,} steps with "
        f"batches of about {exact(batch_size)} of {dataset_size:,} examples:\n\n"
        f"{recommendation.table()}\n\n{recommendation.why()}\n\n"
        f"certify it: {calibration} --out plan.json"
    )
    return 0
