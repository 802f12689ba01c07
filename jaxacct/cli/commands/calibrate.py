"""`jaxacct calibrate`."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from jaxacct.calibration.calibrate import calibrate
from jaxacct.calibration.options import CalibrationOptions
from jaxacct.cli import output
from jaxacct.cli.problem import Problem, TargetOptions
from jaxacct.cli.usage import Flat, Integer, Number, OfSearch, OfTarget, options_of
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import AdjacencyName
from jaxacct.proposals import registry
from jaxacct.report.facts import describe

DIGITS = 1440  # examples of the data set that `jaxacct train` has without a download
Search: Any = options_of(CalibrationOptions, ("executor", "estimate"))


def command(
    problem: Annotated[Problem, Flat],
    *,
    target: Annotated[TargetOptions | None, OfTarget] = None,
    adjacency: AdjacencyName = "zero-out",
    out: str | None = None,
    noise_multiplier: Number | None = None,
    max_batch_size: Integer | None = None,
    memory_copies: Integer | None = None,
    search: Annotated[Search | None, OfSearch] = None,
    force: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    r"""Find and certify the noise multiplier of a run, or certify the one given.

    Options that are given are kept. With --dataset-size and --batch-size the rest of scheme, separation,
    bands and matrix is selected as `jaxacct recommend` does; one band, which is DP-SGD, is for --bands 1 or
    --scheme poisson.

    For example:

        jaxacct calibrate --dataset-size 50k --batch-size 200 --iterations 1000 \
            --epsilon 8 --delta 1e-5 --out plan.json
        jaxacct calibrate --dataset-size 50k --batch-size 200 --iterations 1000 \
            --epsilon 8 --delta 1e-5 --bands 1
        jaxacct calibrate --scheme poisson --sampling-probability 0.004 \
            --iterations 5000 --noise-multiplier 1.1 --delta 1e-6

    Args:
      adjacency: what the data set is compared with: the same one in which an example's gradients count as
        zero (zero-out), in which it is missing (add-or-remove-one), or in which another is in its place
        (replace-one). The last two are not for every scheme; a refusal names those that a scheme has.
      out: write the plan to this file.
      noise_multiplier: certify this value only, or say why it was not certified; with --delta alone find and
        certify the smallest epsilon, with --epsilon alone the smallest delta.
      max_batch_size: truncate larger batches to this size, and account for it.
      memory_copies: for the selection, maximum copies of the parameters that training may keep for the noise,
        as many as bands; 16 by default. 0 is for noise that is drawn again.
      force: let --out replace a file that is not a plan.
      verbose: print also all budget items, the proposal distribution, and which fields were recomputed.
      json: print the plan as one JSON object.
    """
    asked = target or TargetOptions()
    goal = asked.target()
    options = CalibrationOptions(**({} if search is None else vars(search)))
    if options.proposal is not None:
        registry.check_name(options.proposal, False)
    # Fixed numbers of participations have no truncated batches and few proposals.
    if problem.scheme is None and (max_batch_size, options.proposal) != (None, None):
        problem = dataclasses.replace(problem, scheme="b-min-sep")
    is_searched = options.accountant is None and goal.missing is None and problem.is_searched
    if noise_multiplier is None:
        goal.point  # noqa: B018 - one of both alone is refused
    else:
        validate.noise_multiplier("noise_multiplier", noise_multiplier)
    if max_batch_size is not None:
        validate.positive_integer("max_batch_size", max_batch_size)
    how: dict[str, Any] = dict(
        noise_multiplier=noise_multiplier, max_batch_size=max_batch_size, adjacency=adjacency
    )
    output.check_out(out, force)
    if memory_copies is not None and not is_searched:
        raise ValueError(
            "memory_copies must not be given where nothing is selected: that takes an open choice, "
            "dataset_size and batch_size"
        )
    with watch() as progress:
        how |= dict(options=options, progress=progress)
        if is_searched:
            recommendation = problem.choose(
                memory_copies=memory_copies, adjacency=adjacency, progress=progress, target=goal
            )
            if not json:
                print(f"{recommendation.why()}\n", flush=True)
            plan = recommendation.calibrate(**how)
        else:
            scheme, strategy = problem.build(goal if goal.missing is None else None)
            plan = calibrate(scheme, strategy, target=goal, dataset_size=problem.dataset_size, **how)
    # The result is printed before it is written, and written even where it cannot be printed: neither a full
    # disk nor a closed output loses it.
    try:
        output.show(plan.to_json() if json else describe(plan, verbose), json)
        words = goal.in_words(plan.epsilon, plan.delta)
        if words is not None and not json:
            print(f"\n{words}")
        sys.stdout.flush()
    finally:
        if out:
            plan.save(out)
    if not json:
        print(f"\n{_next_steps(plan, out)}")
    return 0


def _next_steps(plan: Plan, out: str | None) -> str:
    """Return what a reader of the plan can do with it, commands in lines of their own."""
    if out is None:
        return "not written: --out plan.json keeps the plan with its evidence"
    path = f"./{out}" if out.startswith("-") else out  # or it would be an option
    file = shlex.quote(path)
    page = shlex.quote(f"{path.removesuffix(Path(path).suffix)}-report.html")
    lines = [f"written to {out}; next:", f"  jaxacct report {file} --out {page}"]
    if plan.dataset_size is None:
        lines.append("to train under it, calibrate with --dataset-size and --batch-size")
    elif plan.dataset_size == DIGITS and plan.mechanism.scheme.unit == "example":
        lines.append(f"  jaxacct train --plan {file} --data digits --out run/")
    else:
        lines.append(f"  jaxacct.train.fit in Python, with your model and {plan.dataset_size:,} examples")
    return "\n".join(lines)
