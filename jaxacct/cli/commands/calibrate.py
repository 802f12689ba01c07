"""`jaxacct calibrate`."""

import sys
from typing import Annotated, Literal

from jaxacct.calibration.calibrate import calibrate
from jaxacct.calibration.targets import in_words
from jaxacct.cli import output
from jaxacct.cli.problem import AdjacencyName, Problem, TargetOptions
from jaxacct.cli.usage import Flat, Integer, Number, OfTarget
from jaxacct.common.progress import watch
from jaxacct.recommendation.search import recommend
from jaxacct.report.facts import describe

AccountantName = Literal["analytic", "unamplified", "revealed-pattern", "pld", "random-allocation"]


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
    max_samples: Integer | None = None,
    rule: Literal["anytime", "fixed"] = "anytime",
    proposal: str | None = None,
    accountant: AccountantName | None = None,
    plot: str | None = None,
    force: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Find and certify the noise multiplier of a run, or certify the one given.

    With --dataset-size and --batch-size and nothing else about batches or noise (scheme, bands, separation,
    strategy, noise multiplier, proposal, accountant) it selects the first candidate of `jaxacct recommend`;
    with any of them it selects nothing, and the defaults of the others hold.

    Args:
      adjacency: neighbouring data set: the example's gradients are zero, the example is absent, or another
        example is in its place; the last two need examples that are sampled independently.
      out: write the plan to this file.
      noise_multiplier: certify this value only, or say why it was not certified.
      max_batch_size: truncate larger batches to this size, and account for it.
      memory_copies: for the selection, maximum copies of the parameters that training may keep for the noise,
        as many as bands; 16 by default.
      checkpoint_dir: keep finished batches of samples here; the same command then resumes.
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
    wanted = (target or TargetOptions()).arguments()
    output.check_out(out, output.PLAN, force)
    output.check_plot(plot, out)
    how = dict(noise_multiplier=noise_multiplier, proposal=proposal, accountant=accountant)
    decided = [*problem.decided(), *(name for name, value in how.items() if value is not None)]
    if memory_copies is not None and decided:
        raise ValueError(
            f"memory_copies must not be given together with {decided[0]}: nothing is selected then"
        )
    choice, estimate, certified_by = None, None, accountant
    with watch() as progress:
        if decided or problem.dataset_size is None or problem.batch_size is None:
            scheme, strategy = problem.build(**wanted)
        else:
            found = recommend(
                dataset_size=problem.dataset_size,
                batch_size=problem.batch_size,
                iterations=problem.iterations,
                memory_copies=16 if memory_copies is None else memory_copies,
                workload=problem.workload_of_run(),
                progress=progress,
                **wanted,
            )
            choice, estimate = found.choice, found.chosen.noise_multiplier
            scheme, strategy = found.chosen.scheme, found.chosen.strategy
            asked = max_samples is not None or rule != "anytime" or checkpoint_dir is not None
            if not asked and adjacency != "replace-one":  # no samples asked for, nor another pair
                certified_by = found.chosen.accountant
            if not json:
                print(f"{found.why()}\n", flush=True)
        plan = calibrate(
            scheme,
            strategy,
            dataset_size=problem.dataset_size,
            adjacency=adjacency,
            noise_multiplier=noise_multiplier,
            max_batch_size=max_batch_size,
            checkpoint_dir=checkpoint_dir,
            max_samples=max_samples,
            rule=rule,
            proposal=proposal,
            accountant=certified_by,
            choice=choice,
            estimate=estimate,
            progress=progress,
            **wanted,
        )
    # The result is printed before it is written, and written even where it cannot be printed: neither a full
    # disk nor a closed output loses it.
    try:
        output.show(plan.to_json() if json else describe(plan, verbose), json)
        words = in_words(plan.epsilon, plan.delta, wanted)
        if words is not None and not json:
            print(f"\n{words}")
        sys.stdout.flush()
    finally:
        if out:
            plan.save(out)
    output.draw(plot, "profile", plan)
    if out and not json:
        print(f"\nwritten to {out}; next: `jaxacct.train.fit` under it, or with data of its size")
        print(f"python -P -m jaxacct.train --plan {out} --out run/; jaxacct report {out} --out report.html")
    return 0
