"""`jaxacct calibrate`."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from jaxacct.accountants import AccountantName
from jaxacct.calibration.calibrate import SECONDS, calibrate, check_options
from jaxacct.calibration.targets import in_words
from jaxacct.cli import output
from jaxacct.cli.problem import Problem, TargetOptions
from jaxacct.cli.usage import Flat, Integer, Number, OfTarget
from jaxacct.common.progress import watch
from jaxacct.core.evidence import RuleName
from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import AdjacencyName
from jaxacct.report.facts import describe

DIGITS = 1440
"""Examples of the data set that `jaxacct train` has without a download."""


def command(
    problem: Annotated[Problem, Flat],
    *,
    target: Annotated[TargetOptions | None, OfTarget] = None,
    adjacency: AdjacencyName = "zero-out",
    out: str | None = None,
    noise_multiplier: Number | None = None,
    max_batch_size: Integer | None = None,
    memory_copies: Integer | None = None,
    checkpoint_dir: str | None = None,
    seconds: Number = SECONDS,
    grid_ratio: Number | None = None,
    max_samples: Integer | None = None,
    rule: RuleName = "anytime",
    proposal: str | None = None,
    accountant: AccountantName | None = None,
    plot: str | None = None,
    force: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Find and certify the noise multiplier of a run, or certify the one given.

    Options that are given are kept. With --dataset-size and --batch-size the rest of scheme, separation,
    bands and matrix is selected as `jaxacct recommend` does; one band, which is DP-SGD, is for --bands 1 or
    --scheme poisson.

    Args:
      adjacency: what the data set is compared with: the same one in which an example's gradients count as
        zero (zero-out), in which it is missing (add-or-remove-one), or in which another is in its place
        (replace-one). The last two are not for every scheme; a refusal names those that a scheme has.
      out: write the plan to this file.
      noise_multiplier: certify this value only, or say why it was not certified; with --delta alone find and
        certify the smallest epsilon, with --epsilon alone the smallest delta.
      max_batch_size: truncate larger batches to this size, and account for it.
      memory_copies: for the selection, maximum copies of the parameters that training may keep for the noise,
        as many as bands; 16 by default.
      checkpoint_dir: keep finished batches of samples here; the same command then resumes.
      seconds: time for samples, which refine a bound where pilot runs predict at least 3 % less noise; a
        stage that has begun is finished.
      grid_ratio: ratio of neighbouring noise multipliers; by default 1.0005 for bounds, 1.01 for samples.
      max_samples: maximum samples for each direction and candidate.
      rule: stop as soon as the evidence suffices, or draw a fixed number of samples.
      proposal: use this proposal distribution, such as plain.
      accountant: certify by this bound, or by the best ("analytic"), without samples; unamplified and
        revealed-pattern hold for multi-attribution where users share examples, random-allocation is for
        balls-in-bins with one band.
      plot: write what the plan implies for delta at other epsilons to this PNG.
      force: let --out replace a file that is not a plan.
      verbose: print also all budget items, the proposal distribution, and which fields were recomputed.
      json: print the plan as one JSON object.
    """
    asked = target or TargetOptions()
    if problem.scheme is None and max_batch_size is not None:  # fixed numbers of participations have none
        problem = dataclasses.replace(problem, scheme="b-min-sep")
    if proposal is not None:
        problem = problem.for_proposal(proposal)
    is_open = noise_multiplier is not None and asked.is_open
    requested: dict[str, Any] = dataclasses.asdict(asked) if is_open else asked.arguments()
    is_searched = accountant is None and not is_open and problem.is_searched
    how: dict[str, Any] = dict(
        noise_multiplier=noise_multiplier,
        max_batch_size=max_batch_size,
        seconds=seconds,
        grid_ratio=grid_ratio,
        rule=rule,
        max_samples=max_samples,
        proposal=proposal,
        accountant=accountant,
        adjacency=adjacency,
        checkpoint_dir=checkpoint_dir,
    )
    check_options(**how)
    output.check_out(out, output.PLAN, force)
    output.check_plot(plot, out)
    if memory_copies is not None and not is_searched:
        raise ValueError(
            "memory_copies must not be given where nothing is selected: that takes an open choice, "
            "dataset_size and batch_size"
        )
    with watch() as progress:
        how |= dict(progress=progress)
        if is_searched:
            search = dict(memory_copies=memory_copies, adjacency=adjacency, progress=progress)
            found, scheme, strategy = problem.choose(**search, **requested)
            is_covered = scheme == found.chosen.scheme
            if not json:
                how_found = "" if is_covered else f"\nfor {scheme!r}: selected as for b-min-sep"
                print(f"{found.why()}{how_found}\n", flush=True)
            if is_covered:
                plan = found.calibrate(**how)
            else:
                plan = calibrate(scheme, strategy, dataset_size=problem.dataset_size, **how, **requested)
        else:
            scheme, strategy = problem.build(**{} if is_open else requested)
            plan = calibrate(scheme, strategy, dataset_size=problem.dataset_size, **how, **requested)
    # The result is printed before it is written, and written even where it cannot be printed: neither a full
    # disk nor a closed output loses it.
    try:
        output.show(plan.to_json() if json else describe(plan, verbose), json)
        words = in_words(plan.epsilon, plan.delta, requested)
        if words is not None and not json:
            print(f"\n{words}")
        sys.stdout.flush()
    finally:
        if out:
            plan.save(out)
    output.draw(plot, "profile", plan)
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
