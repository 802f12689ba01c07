"""The `jaxacct` command: recommend, calibrate, verify, run-key, merge, estimate, strategy, show, report, ...

With --json, standard output carries one JSON object and nothing else. Exit codes: 0 done and certified,
1 not certified, 2 bad input, 130 interrupted, 141 where nobody reads the output on. Bad input is one line
on standard error.
"""

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

# Public names are used as `jaxacct.name` and others imported where needed, so that `--help` loads neither.
import jaxacct
from jaxacct.cli.framework import nearest, parse
from jaxacct.cli.interrupted import leave
from jaxacct.common import validate as _validate
from jaxacct.common.compilation_cache import keep_compiled_programs
from jaxacct.common.progress import watch
from jaxacct.common.records import exact

# The names of `jaxacct.SCHEMES`, which `--help` does not load; a test holds them to it.
SchemeName = Literal[
    "poisson",
    "cyclic-poisson",
    "balls-in-bins",
    "b-min-sep",
    "balanced-min-sep",
    "multi-attribution",
    "independent-attribution",
    "truncated-b-min-sep",
]


@dataclass(frozen=True)
class Problem:
    """Who takes part when, and how noise is correlated."""

    iterations: int
    """Number of training steps."""
    scheme: SchemeName | None = None
    """Sampling scheme, b-min-sep by default."""
    dataset_size: int | None = None
    """Number of examples."""
    batch_size: float | None = None
    """Expected batch size."""
    sampling_probability: float | None = None
    """Per eligible step, in place of --dataset-size and --batch-size."""
    bands: int | None = None
    """Bands of the strategy matrix; 1, which is DP-SGD, by default, or those of a file of coefficients."""
    min_separation: int | None = None
    """Steps between participations (b-min-sep), or the cycle length; the number of bands by default."""
    cold_start: bool = False
    """Start b-min-sep with every example eligible (algorithm 1) instead of the warm start."""
    examples_per_user: int | None = None
    """For attribution schemes: the most examples of a user (see `python -m
    jaxacct.train.batches.attribution`)."""
    truncate_to: int | None = None
    """For truncated-b-min-sep: larger batches are cut to this size, which may be as small as the mean one."""
    strategy: str | None = None
    """"optimal" (the default), "square-root", "amplified" (optimal at the noise needed with sampling), or a
    file of coefficients; "bisr" and "optimal-inverse" are Toeplitz with an inverse of --bands bands,
    "buffered" (BLT) is one whose noise takes --bands running sums; for these the noise is an upper bound."""
    workload: str | None = None
    """What an optimised matrix is made for, and what it ranks by where it chooses: prefix-sum by default, or
    momentum:0.9, weight-decay:1e-4, learning-rate:0.1, cosine or linear, warmup:100, with commas between."""

    def decided(self) -> list[str]:
        """Of the options that say how batches are drawn and noise is correlated, those that were given."""
        sizes = {"iterations", "dataset_size", "batch_size", "workload"}
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in sizes and not any(getattr(self, field.name) is no for no in (None, False))
        ]

    def build(self, **target):
        """(scheme, strategy); ValueError in one line for what cannot be, or would be ignored.

        Args:
          target: epsilon and delta or advantage, for a matrix that is made for them.
        """
        from jaxacct.schemes.numbers import Numbers
        from jaxacct.strategies import by_name, ending

        name = "optimal" if self.strategy is None else self.strategy
        ranked: dict[str, Any] = {} if self.workload is None else {"workload": self.workload_of_run()}
        given = None if name == "amplified" else coefficients(name, self.bands)
        if given is not None:
            _refuse(f"together with the coefficients in {name}", workload=self.workload)
        bands = given.bands if given is not None else 1 if self.bands is None else self.bands
        _validate.positive_integer("bands", bands)
        separation = bands if self.min_separation is None else self.min_separation
        numbers = Numbers(
            iterations=self.iterations,
            separation=separation,
            sampling_probability=self.sampling_probability,
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            min_separation=self.min_separation,
            warm_start=not self.cold_start,
            examples_per_user=self.examples_per_user,
            truncate_to=self.truncate_to,
        )
        scheme = jaxacct.SCHEMES["b-min-sep" if self.scheme is None else self.scheme].from_numbers(numbers)
        if name == "amplified":
            if not target:
                raise ValueError("strategy must not be amplified here: it is made for an epsilon and a delta")
            from jaxacct.recommendation.search import amplified_matrix

            return scheme, amplified_matrix(bands, scheme, **target, **ranked)
        strategy = given if given is not None else by_name(name, bands, scheme, **ranked)
        return scheme, ending(strategy, scheme)

    def workload_of_run(self):
        """Of the name given, or prefix sums."""
        from jaxacct.strategies import workload_named

        return workload_named("prefix-sum" if self.workload is None else self.workload, self.iterations)


def coefficients(strategy: str, bands: int | None):
    """The strategy in the file of that name, None for one of `NAMES`."""
    from jaxacct.strategies import NAMES

    if strategy in NAMES:
        return None
    if not Path(strategy).is_file():
        near = nearest(strategy, NAMES)
        raise ValueError(
            f"strategy must be {', '.join(NAMES)} or a file of coefficients, was {strategy!r}{near}"
        )
    if bands is not None:
        raise ValueError(f"bands must not be given with the coefficients in {strategy}: they are counted")
    return jaxacct.BandedToeplitz.from_file(strategy)


Flat = tyro.conf.arg(name="")


def recommend_command(
    dataset_size: int,
    batch_size: float,
    iterations: int,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    memory_copies: int = 16,
    scheme: Literal["poisson", "cyclic-poisson", "balls-in-bins", "b-min-sep"] | None = None,
    bands: int | None = None,
    min_separation: int | None = None,
    strategy: Literal["optimal", "square-root", "amplified", "buffered"] | None = None,
    workload: str = "prefix-sum",
    plot: str | None = None,
    json: bool = False,
) -> int:
    """Rank schemes, separations, bands and matrices by error at estimated noise; certify none.

    What is given is kept fixed. The search sees these numbers and nothing of the data: it spends nothing.

    Args:
      dataset_size: number of examples.
      batch_size: expected batch size.
      iterations: number of training steps.
      epsilon: privacy target, natural log.
      delta: privacy target.
      advantage: privacy target in place of both, such as 0.1: the most that the true positive rate of a test
        for membership may be above its false positive rate.
      memory_copies: most copies of the parameters that training may keep for the noise: as many as bands, and
        one more than twice the buffers.
      scheme: poisson and b-min-sep by default.
      bands: of the strategy matrix, or buffers.
      min_separation: steps between participations.
      strategy: matrix; by default optimal, amplified (optimal at the noise needed with sampling) and buffered
        (BLT, with participation revealed).
      workload: rank by this error: prefix-sum, or momentum:0.9, weight-decay:1e-4, learning-rate:0.1, cosine
        or linear, warmup:100, with commas between.
      plot: write error against memory of the candidates to this PNG.
      json: print one JSON object.
    """
    _check_target(epsilon, delta, advantage)
    _check_plot(plot)
    asked: dict[str, Any] = dict(
        dataset_size=dataset_size,
        batch_size=batch_size,
        iterations=iterations,
        epsilon=epsilon,
        delta=delta,
        advantage=advantage,
        memory_copies=memory_copies,
        workload=workload,
    )
    given: dict[str, Any] = dict(scheme=scheme, bands=bands, min_separation=min_separation, strategy=strategy)
    with watch() as progress:
        found = jaxacct.recommend(**asked, **given, progress=progress)
    numbers = f"--dataset-size {dataset_size} --batch-size {batch_size:g} --iterations {iterations}"
    target = f"--advantage {advantage!r}" if advantage else f"--epsilon {epsilon!r} --delta {delta!r}"
    if found.choice.workload != "prefix-sum" and found.chosen.matrix != "square-root":
        target = f"--workload {found.choice.workload} {target}"
    command = f"jaxacct calibrate {numbers} {found.chosen.options()} {target}"
    _draw(plot, "recommendation", found)
    if json:
        _print(found.to_json() | {"command": command}, True)
        return 0
    print(
        f"Estimates, not guarantees, for {_target(found.choice)} over {iterations:,} steps with "
        f"batches of about {batch_size:g} of {dataset_size:,} examples:\n\n{found.table()}\n\n"
        f"{found.why()}\n\ncertify it: {command} --out plan.json"
    )
    return 0


def _check_target(epsilon: float | None, delta: float | None, advantage: float | None) -> None:
    if advantage is None and (epsilon is None or delta is None):
        raise ValueError("--epsilon and --delta must be given, or --advantage in their place")
    _validate.target(epsilon, delta, advantage)


def _target(found) -> str:
    """The target of a plan or choice in words."""
    if found.epsilon == 0:
        return f"advantage {exact(found.delta)}"
    return f"({exact(found.epsilon)}, {exact(found.delta)})"


def calibrate_command(
    problem: Annotated[Problem, Flat],
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    out: str | None = None,
    noise_multiplier: float | None = None,
    max_batch_size: int | None = None,
    memory_copies: int | None = None,
    checkpoint_dir: str | None = None,
    max_samples: int | None = None,
    rule: Literal["anytime", "fixed"] = "anytime",
    proposal: str | None = None,
    accountant: Literal["analytic", "unamplified", "revealed-pattern", "pld", "random-allocation"]
    | None = None,
    plot: str | None = None,
    force: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Find and certify the noise multiplier of a run, or certify the one given.

    With --dataset-size and --batch-size and nothing else about batches or noise (scheme, bands, separation,
    strategy, noise multiplier, proposal, accountant) it chooses what `jaxacct recommend` puts first; with any
    of them nothing is chosen, and the defaults of the others hold.

    Args:
      problem: the mechanism.
      epsilon: privacy target, natural log.
      delta: privacy target.
      advantage: privacy target in place of both, such as 0.1: the most that the true positive rate of a test
        for membership may be above its false positive rate, whatever the test.
      out: write the plan to this file.
      noise_multiplier: certify this value only, or say why it could not be.
      max_batch_size: cut larger batches to this size, and account for it.
      memory_copies: where it chooses, most copies of the parameters that training may keep for the noise, as
        many as bands; 16 by default.
      checkpoint_dir: keep finished batches here; the same command then resumes.
      max_samples: draws a direction and candidate before giving up.
      rule: stop as soon as the evidence suffices, or draw a fixed number.
      proposal: insist on a law to draw from, such as plain.
      accountant: certify by this bound, or by the best ("analytic"), and draw nothing; unamplified and
        revealed-pattern hold for multi-attribution where users share examples, random-allocation is for
        balls-in-bins with one band.
      plot: write what the plan says of delta at other epsilons to this PNG.
      force: let --out replace a file that is not a plan.
      verbose: print also every item that was put aside, how it was drawn and what was computed again.
      json: print the plan as one JSON object.
    """
    _check_target(epsilon, delta, advantage)
    _check_out(out, PLAN, force)
    _check_plot(plot, out)
    how = dict(noise_multiplier=noise_multiplier, proposal=proposal, accountant=accountant)
    decided = [*problem.decided(), *(name for name, value in how.items() if value is not None)]
    if memory_copies is not None and decided:
        raise ValueError(
            f"memory_copies must not be given together with {decided[0]}: nothing is chosen then"
        )
    choice, estimate, certified_by = None, None, accountant
    asked: dict[str, Any] | None = None
    if not decided and problem.dataset_size is not None and problem.batch_size is not None:
        asked = dict(
            dataset_size=problem.dataset_size,
            batch_size=problem.batch_size,
            iterations=problem.iterations,
            epsilon=epsilon,
            delta=delta,
            advantage=advantage,
            memory_copies=16 if memory_copies is None else memory_copies,
            workload=problem.workload_of_run(),
        )
    with watch() as progress:
        if asked is None:
            scheme, strategy = problem.build(epsilon=epsilon, delta=delta, advantage=advantage)
        else:
            found = jaxacct.recommend(**asked, progress=progress)
            choice = found.choice
            scheme, strategy = found.chosen.scheme, found.chosen.strategy
            estimate = found.chosen.noise_multiplier
            if max_samples is None and rule == "anytime" and checkpoint_dir is None:  # no draws asked for
                certified_by = found.chosen.accountant
            if not json:
                print(f"{found.why()}\n", flush=True)
        plan = jaxacct.calibrate(
            scheme,
            strategy,
            epsilon=epsilon,
            delta=delta,
            advantage=advantage,
            dataset_size=problem.dataset_size,
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
        )
    # What was found is shown first: a disk that has filled up since does not lose it.
    try:
        _print(plan.to_json() if json else describe(plan, verbose), json)
        sys.stdout.flush()
    finally:  # nor does a reader that has had enough, as `| head`
        if out:
            plan.save(out)
    _draw(plot, "profile", plan)
    if out and not json:
        print(f"\nwritten to {out}; next: `jaxacct.train.fit` under it, or with data of its size")
        print(f"python -P -m jaxacct.train --plan {out} --out run/; jaxacct report {out} --out report.html")
    return 0


def verify_command(
    plan: Annotated[str, tyro.conf.Positional],
    checkpoint_dir: str | None = None,
    max_samples: int | None = None,
    rule: Literal["anytime", "fixed"] | None = None,
    proposal: str | None = None,
    shard: str | None = None,
    run_key: str | None = None,
    samples: int | None = None,
    out: str | None = None,
    plot: str | None = None,
    force: bool = False,
    replay: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Verify a plan again with fresh randomness, whole or one shard of many.

    An analytic plan is verified by its accountant.

    Args:
      plan: file written by calibrate.
      replay: draw the key that is stored in the plan again, and compare the histograms.
      shard: "i/k", i from 0: draw this part only and write it to --out, for `jaxacct merge`.
      run_key: file of `jaxacct run-key`, the same for all shards.
      samples: draws a direction in all shards together.
      out: where a shard's part is written.
      checkpoint_dir: keep finished batches here; the same command then resumes.
      max_samples: draws a direction before giving up, two million by default.
      rule: stop as soon as the evidence suffices (anytime, the default), or draw a fixed number.
      proposal: insist on a law to draw from, such as plain.
      plot: write how the evidence grew with draws to this PNG.
      force: let --out replace a file that is not a part.
      verbose: print also every item that was put aside and how it was drawn.
      json: print the verdict as one JSON object.
    """
    from jaxacct.common.files import Checkpoint
    from jaxacct.verification import shards

    if shard is None:
        _refuse("without shard", run_key=run_key, samples=samples, out=out, force=force or None)
    else:
        whole = dict(max_samples=max_samples, rule=rule, proposal=proposal, plot=plot, json=json or None)
        whole |= dict(verbose=verbose or None)
        _refuse("together with shard", **whole)
        if run_key is None or samples is None or out is None:
            raise ValueError("shard needs run_key, samples and out as well")
        shards.parse_shard(shard)
        _validate.positive_integer("samples", samples)
        _check_out(out, PART, force)
    if max_samples is not None:
        _validate.positive_integer("max_samples", max_samples)
    if replay:
        fresh = dict(shard=shard, max_samples=max_samples, rule=rule, proposal=proposal, plot=plot)
        fresh |= dict(verbose=verbose or None)
        _refuse("together with replay", **fresh, checkpoint_dir=checkpoint_dir)
    _check_plot(plot)
    loaded = jaxacct.Plan.load(plan)
    if replay:
        return _replay(loaded, json)
    if not loaded.is_sampled and shard is None:
        # Loading has computed the bound.
        drawing = dict(max_samples=max_samples, rule=rule, proposal=proposal, checkpoint_dir=checkpoint_dir)
        _refuse("for an analytic plan", **drawing, plot=plot)
        _print_verdict(loaded.verdict, True, json)
        return 0
    checkpoint = Checkpoint(checkpoint_dir) if checkpoint_dir else None
    if shard is not None and run_key is not None and samples is not None and out is not None:
        index, count = shards.parse_shard(shard)
        with watch() as progress:
            part = shards.draw_part(
                loaded,
                shards.read_run_key(run_key),
                index,
                count,
                samples,
                checkpoint=checkpoint,
                progress=progress,
            )
        part.save(out)
        return 0
    with watch() as progress:
        verdict = loaded.verify(
            rule=rule or "anytime",
            max_samples=max_samples or 2_000_000,
            proposal=proposal,
            checkpoint=checkpoint,
            progress=progress,
        )
    _print_verdict(verdict, verbose, json)
    _draw(plot, "verification", verdict)
    return 0 if verdict.certified else 1


def _replay(plan, json: bool) -> int:
    """Draw the stored keys again; 0 where the histograms are the stored ones."""
    import jax

    from jaxacct.verification.replay import replay

    here = jax.devices()[0].device_kind
    with watch() as progress:
        directions = replay(plan, progress)
    same_device = plan.provenance.device == here
    same = all(seen.moved == 0 for seen in directions)
    close = all(seen.close for seen in directions)
    accepted = all(seen.accepted for seen in directions) and (same or (close and not same_device))
    if json:
        found = {"accepted": accepted, "same_device": same_device}
        _print(found | {seen.direction: dataclasses.asdict(seen) for seen in directions}, True)
        return 0 if accepted else 1
    for seen in directions:
        verdict = "supports" if seen.accepted else "does NOT support"
        print(
            f"{seen.direction:<22}{seen.drawn:,} draws of the stored key, {seen.moved:,} in another bin than "
            f"stored; the fresh histogram {verdict} the verdict"
        )
    if not same and not same_device:
        print(
            f"drawn on {plan.provenance.device}, replayed on {here}: rounding in float32 may "
            "move a few draws to the next bin; on a machine of one kind not one moves"
        )
    print("replayed" if accepted else "NOT replayed: the stored histograms are not those of the stored key")
    return 0 if accepted else 1


def run_key_command(out: str) -> int:
    """Write a fresh run key for the shards of one verification.

    Args:
      out: a new file; one that exists may be in use and is never replaced.
    """
    from jaxacct.common import files
    from jaxacct.verification import shards

    files.check_target(out, None, "")
    shards.write_run_key(out)
    return 0


def merge_command(
    plan: Annotated[str, tyro.conf.Positional],
    parts: Annotated[list[str], tyro.conf.Positional],
    out: str | None = None,
    redraw: int = 0,
    force: bool = False,
    json: bool = False,
) -> int:
    """Merge the parts of a sharded verification into its verdict.

    Args:
      plan: file that the parts were drawn for.
      redraw: draw so many randomly chosen stretches of the parts again, and compare.
      parts: files written by `jaxacct verify --shard`, of one run.
      out: write the plan with the merged evidence here, if it is certified.
      force: let --out replace a file that is not a plan.
      json: print the verdict as one JSON object.
    """
    from jaxacct.verification import shards

    _check_out(out, PLAN, force)
    found = [shards.Part.load(part) for part in parts]
    if not found:
        raise ValueError("parts must not be empty")
    reference = jaxacct.Plan.load(plan)
    with watch() as progress:
        merged, verdict = shards.merge(reference, found, redraw=redraw, progress=progress)
    _print_verdict(verdict, False, json)
    if merged is not None and out:
        merged.save(out)
    return 0 if verdict.certified else 1


def estimate_command(
    problem: Annotated[Problem, Flat],
    noise_multiplier: float,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int = 100_000,
    confidence: float = 0.95,
    plot: str | None = None,
    json: bool = False,
) -> int:
    """Estimate delta at an epsilon, or epsilon at a delta. An estimate is not a guarantee.

    Args:
      problem: the mechanism.
      noise_multiplier: noise per unit of clip norm.
      epsilon: estimate delta here.
      delta: estimate epsilon here.
      samples: draws a direction.
      confidence: of the interval.
      plot: write plain draws of the privacy loss, and where epsilon lies among them, to this PNG.
      json: print one JSON object.
    """
    if (epsilon is None) == (delta is None):
        raise ValueError("epsilon or delta must be given, and not both")
    if problem.sampling_probability is not None and problem.scheme != "truncated-b-min-sep":
        _refuse("together with sampling_probability", dataset_size=problem.dataset_size)
    _validate.positive_number("noise_multiplier", noise_multiplier)
    _validate.positive_integer("samples", samples)
    _validate.open_probability("confidence", confidence)
    _check_plot(plot)
    with watch() as progress:
        options: dict[str, Any] = dict(num_samples=samples, confidence=confidence, progress=progress)
        mechanism = jaxacct.Mechanism(*problem.build(), noise_multiplier)
        if epsilon is not None:
            found = jaxacct.estimate_delta(mechanism, epsilon, **options)
            given = {"epsilon": epsilon}
        else:
            assert delta is not None
            found = jaxacct.estimate_epsilon(mechanism, delta, **options)
            given = {"delta": delta}
    if json:
        fields = {"kind": "estimate", **given, **dataclasses.asdict(found)}
        # Infinity is not JSON.
        _print({k: None if v == float("inf") else v for k, v in fields.items()}, True)
    else:
        parts = ", ".join(f"{d} {found.directions[d]:.4g} ({found.proposals[d]})" for d in found.directions)
        print(
            f"estimate, not a guarantee: {found.quantity} = {found.value:.4g}, "
            f"{100 * found.confidence:g}% interval [{found.low:.4g}, {found.high:.4g}]\n"
            f"from {found.num_samples:,} draws a direction: {parts}"
        )
    _draw(plot, "privacy_losses", mechanism, found.value if epsilon is None else epsilon, samples)
    return 0


def strategy_command(
    iterations: int,
    bands: int | None = None,
    min_separation: int | None = None,
    strategy: str = "optimal",
    noise_multiplier: float = 1.0,
    workload: str = "prefix-sum",
    out: str | None = None,
    plot: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Make a strategy matrix, print its prefix-sum error, write its coefficients.

    Args:
      iterations: number of training steps.
      bands: bands of the matrix, unless they are in a file.
      min_separation: steps between participations, for optimal (the number of bands by default),
        optimal-inverse and buffered (by default one participation).
      strategy: optimal, square-root, bisr, optimal-inverse, buffered, or a file of coefficients.
      noise_multiplier: for the error.
      workload: what the error is of and an optimised matrix is made for: prefix-sum, or momentum:0.9,
        weight-decay:1e-4, learning-rate:0.1, cosine or linear, warmup:100, with commas between.
      out: write the coefficients to this file, one a line.
      plot: write pictures of the matrix, its inverse and the noise that adds up to this PNG.
      force: let --out replace a file that does not hold coefficients.
      json: print one JSON object.
    """
    _validate.positive_number("noise_multiplier", noise_multiplier)
    from jaxacct.strategies import OPTIMISED, by_name, workload_error, workload_named

    _validate.positive_integer("iterations", iterations)
    made_for = workload_named(workload, iterations)
    for_one = strategy in ("optimal-inverse", "buffered")  # participation, where no separation is given
    if strategy != "optimal" and not for_one:
        _refuse(f"together with strategy {strategy}", min_separation=min_separation)
    matrix = coefficients(strategy, bands)
    if matrix is None:
        if bands is None:
            raise ValueError("bands must be given, or a file of coefficients as strategy")
        _validate.positive_integer("bands", bands)
    if out is not None and (for_one or strategy == "bisr"):
        raise ValueError(f"out must not be given for {strategy}: it is made again from its bands")
    _check_out(out, COEFFICIENTS, force)
    _check_plot(plot, out)
    with watch():
        if matrix is None:
            assert bands is not None
            once = iterations if for_one else bands
            scheme = jaxacct.BMinSep(iterations, once if min_separation is None else min_separation, 1.0)
            optimised = {"workload": made_for} if strategy in OPTIMISED else {}
            matrix = by_name(strategy, bands, scheme, **optimised)
        at: dict[str, Any] = dict(iterations=iterations, noise_multiplier=noise_multiplier)
        error = jaxacct.prefix_sum_error(matrix, **at)
        others: dict[str, Any] = {} if workload == "prefix-sum" else {"workload": workload}
        if others:
            others["workload_error"] = workload_error(matrix, workload=made_for, **at)
    if json:
        _print({"coefficients": matrix.array.tolist(), "prefix_sum_error": error} | others, True)
    else:
        print(f"{matrix.bands} bands, mean squared prefix-sum error {error:.6g} over {iterations} steps")
        if others:
            print(f"mean squared error of the iterates of {workload}: {others['workload_error']:.6g}")
        if not out:
            print(" ".join(f"{c:.6g}" for c in matrix.array))
    if out:
        matrix.save(out)
    _draw(plot, "strategy_matrices", matrix, iterations)
    return 0


def show_command(
    plan: Annotated[str, tyro.conf.Positional],
    plot: str | None = None,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Print a plan after checking it.

    Args:
      plan: file written by calibrate, by `jaxacct tradeoff` or by training with DiceSGD.
      plot: write what the plan says of delta at other epsilons to this PNG.
      verbose: print also every item that was put aside, how it was drawn and what was computed again.
      json: print it as one JSON object.
    """
    _check_plot(plot)
    other = _of_another_kind(plan)
    if other is not None:
        _refuse(f"for a plan of {other}", plot=plot, verbose=verbose or None)
        return _show_other(plan, json)
    loaded = jaxacct.Plan.load(plan)
    _print(loaded.to_json() if json else describe(loaded, verbose), json)
    _draw(plot, "profile", loaded)
    return 0


def check_command(plan: Annotated[str, tyro.conf.Positional], json: bool = False) -> int:
    """Check a plan by the second implementation, with samples of its own; exits with 0, 1, 2 or 3.

    0: certified; 1: not certified, or the implementations disagree; 2: bad input; 3: not covered.

    Args:
      plan: file written by calibrate.
      json: print one JSON object.
    """
    from jaxacct import checker

    return checker.main([plan, "--json"] if json else [plan])


def report_command(
    plan: Annotated[str, tyro.conf.Positional],
    out: str,
    draws: int | None = None,
    check: bool = False,
    force: bool = False,
    json: bool = False,
) -> int:
    """Write a page for a privacy reviewer: statement, budget, evidence, risk, pictures.

    Args:
      plan: file written by calibrate.
      out: HTML file to write; it needs no other file and loads nothing.
      draws: fresh draws a direction for bands of the whole privacy profile, such as 20000; none by default.
      check: run `jaxacct check` as well, and say on the page whether both implementations agree.
      force: replace a file that is no report.
      json: print one JSON object: certified, out, and the certified risk; with --check what that found.
    """
    from jaxacct import checker
    from jaxacct.common import files
    from jaxacct.report import html as report
    from jaxacct.report import risk

    files.check_target(out, None if force else report.is_report, "a report")
    other = _of_another_kind(plan)
    if other is not None:
        raise ValueError(
            f"plan must be of `jaxacct calibrate`, was of {other}: `jaxacct show {plan}` reads it"
        )
    loaded = jaxacct.Plan.load(plan)
    bands = None
    if draws is not None:
        with watch() as progress:
            bands = report.measure(loaded, _validate.positive_integer("draws", draws), progress=progress)
    second = checker.check_file(plan)[1] if check else None
    report.save(loaded, out, Path(plan).name, bands, second)
    found: dict[str, Any] = {"certified": loaded.certified, "out": out}
    if second is not None:
        found["check"] = second
    if loaded.certified:
        found["advantage_at_most"] = risk.advantage(loaded.epsilon, loaded.delta)
        found["true_positive_rate_at_one_percent_at_most"] = float(
            risk.true_positive_rate(loaded.epsilon, loaded.delta, 0.01)
        )
    if json:
        _print(found, True)
    else:
        print(f"{loaded.statement()}\n{out} written")
    agrees = second is None or second["verdict"] in ("certified", "not covered")
    return 0 if loaded.certified and agrees else 1


def bench_command(samples: int = 8192, json: bool = False) -> int:
    """Measure draws of the privacy loss per second on this machine.

    Args:
      samples: draws a setting, after a first pass that compiles.
      json: print one JSON object.
    """
    _validate.positive_integer("samples", samples)
    from jaxacct.cli.bench import measure

    with watch():
        found = measure(samples)
    if json:
        _print(found, True)
    else:
        for row in found["settings"]:
            print(
                f"n={row['iterations']} b={row['bands']} {row['proposal']}: "
                f"{row['samples_per_second']:,.0f} samples/s"
                + (
                    f", {row['noise_multipliers']} noise multipliers for "
                    f"{row['ratio_to_one_noise_multiplier']:.1f} times the time of one"
                    if "noise_multipliers" in row
                    else f" (compile {row['compile_seconds']:.1f} s)"
                )
            )
        print(f"{found['device']}, peak memory {found['peak_memory_mb']:.0f} MB")
    return 0


def tradeoff_command() -> int:
    """Trade-off functions: convert, generalised DP-SGD, last iterates; see `jaxacct tradeoff --help`."""
    raise ValueError("tradeoff must be followed by convert, general, last-iterate or show")


def _print_verdict(verdict: "jaxacct.Verdict", verbose: bool, json: bool) -> None:
    from jaxacct.core import text

    if json:
        _print(text.verdict_to_json(verdict), True)
        return
    print("\n".join(text.verdict_lines(verdict, verbose)))
    print("verified" if verdict.certified else "NOT verified")


def describe(plan: "jaxacct.Plan", verbose: bool = False) -> str:
    """A plan for a person to read; `verbose` with every item that was booked and how it was drawn."""
    from jaxacct.calibration.choice import choice_of
    from jaxacct.core import text
    from jaxacct.report import risk

    mechanism, advantage = plan.mechanism, risk.advantage(plan.epsilon, plan.delta)
    lines = [
        plan.statement(),
        "",
        # All digits: a rounded number that is typed in elsewhere may be too little noise.
        f"noise multiplier      {exact(mechanism.noise_multiplier)}   (noise std per unit of clip norm)",
        f"epsilon, delta        {exact(plan.epsilon)}, {exact(plan.delta)}",
        f"advantage             at most {exact(advantage)}   (true minus false positive rate of any test)",
        f"scheme                {mechanism.scheme}",
        f"strategy              {_strategy_line(mechanism)}",
        f"prefix-sum error      {plan.prefix_sum_error:.6g}",
    ]
    if plan.expected_batch_size is not None:
        lines.append(
            f"batch size            {plan.expected_batch_size:.6g} expected, {plan.max_batch_size} at most"
            + (
                ""
                if plan.truncation_delta is None
                else f", larger ones cut: {plan.truncation_delta:.3g} of delta"
            )
        )
    if verbose:
        lines += text.verdict_lines(plan.verdict, verbose=True)
        items = text.budget_items(plan)
        spent = math.fsum(delta for _, delta in items)
        for name, delta in [*items, ("left over", max(0.0, plan.delta - spent))]:
            lines.append(f"{'':<22}{delta:.6g} of delta: {name}")
        lines += [f"{'':<22}{line}" for line in text.checked(plan)]
    else:
        lines += text.verdict_lines(plan.verdict)
        more = "all budget items, the proposal distribution, and what was computed again"
        lines.append(f"{'more':<22}--verbose: {more}")
    choice = choice_of(plan)
    if choice is not None:
        lines += ["", choice.statement()]
    return "\n".join(lines)


DICE = "jaxacct-dice"


def _of_another_kind(plan: str) -> str | None:
    """The schema of a trade-off or DiceSGD plan; None for anything else, which `Plan.load` judges."""
    from jaxacct.common.files import read_json

    data = read_json(plan, "plan")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == "jaxacct-plan" or not isinstance(schema, str):
        return None
    from jaxacct.accountants.tradeoff.plan import PLANS

    return schema if schema in (*PLANS, DICE) else None


def _show_other(plan: str, json: bool) -> int:
    from jaxacct.cli import tradeoff as command

    if _of_another_kind(plan) != DICE:
        return command.show_command(plan, json)
    from jaxacct.accountants.dice_plan import DicePlan

    read = DicePlan.load(plan)
    command.tell({"statement": read.statement(), "steps": read.iterations}, json)
    return 0


def _strategy_line(mechanism: "jaxacct.Mechanism") -> str:
    strategy = mechanism.strategy
    copies = ""
    if strategy.is_toeplitz:
        copies = f"; training keeps {strategy.noise_copies} more noise copies of the parameters"
    bound = "; the noise multiplier is an upper bound" if mechanism.is_upper_bound else ""
    return f"{strategy.describe()}, column norm 1{copies}{bound}"


PLAN, PART, COEFFICIENTS = "a plan", "a part", "a file of coefficients"


def _check_out(out: str | None, kind: str, force: bool) -> None:
    """Refuse what cannot be written to, and a file of another kind unless `force`."""
    from jaxacct.common import files

    def is_ours(path: Path) -> bool:
        if kind == COEFFICIENTS:
            try:
                return bool(jaxacct.BandedToeplitz.from_file(path).bands)
            except ValueError:
                return False
        return files.holds_schema(path, "jaxacct-plan" if kind == PLAN else "jaxacct-part")

    if force and out is None:
        raise ValueError("force must not be given without out")
    files.check_target(out, None if force else is_ours, kind)


def _check_plot(plot: str | None, out: str | None = None) -> None:
    """Refuse what no picture can be written to, and the file that the result goes to."""
    if plot is None:
        return
    from jaxacct.report.figure import check_plot

    if out is not None and os.path.realpath(plot) == os.path.realpath(out):
        raise ValueError(f"plot must be another file than out, both were {out!r}")
    check_plot(plot)


def _draw(plot: str | None, picture: str, *of) -> None:
    """Write the picture of that name in `jaxacct.report.plots`, or say that there is nothing to show."""
    if plot is None:
        return
    from jaxacct.report import plots as pictures

    figure = getattr(pictures, picture)(*of)
    if figure is None:
        _complain(f"{plot} was not written: nothing was drawn, so there is nothing to show")
    else:
        pictures.save(figure, plot)


def _refuse(when: str, **values) -> None:
    """Refuse arguments that would be ignored."""
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name} must not be given {when}")


def _print(value, as_json: bool) -> None:
    print(json.dumps(value) if as_json else value)


UNREAD = 141  # what a shell reports for a process that was ended by SIGPIPE

COMMANDS = {
    "recommend": recommend_command,
    "calibrate": calibrate_command,
    "verify": verify_command,
    "run-key": run_key_command,
    "merge": merge_command,
    "estimate": estimate_command,
    "strategy": strategy_command,
    "show": show_command,
    "check": check_command,
    "report": report_command,
    "bench": bench_command,
    "tradeoff": tradeoff_command,
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits with the codes in the module's docstring."""
    arguments = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with `>&-`: what is printed goes nowhere
            setattr(sys, name, open(os.devnull, "w"))
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. What is still held back goes nowhere, or Python would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = UNREAD
    raise SystemExit(code)


def _run(arguments: list[str]):
    if arguments == ["--version"]:
        print(f"jaxacct {jaxacct.__version__}")
        return 0
    keep_compiled_programs()
    try:
        if arguments[:1] == ["tradeoff"] and len(arguments) > 1:
            from jaxacct.cli import tradeoff as command

            return command.run(arguments[1:])
        return parse(COMMANDS, arguments, prog="jaxacct", description=__doc__)()
    except SystemExit as stop:  # of --help: the errors below would load what it has no need of
        return stop.code
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        leave("jaxacct: interrupted; finished batches are in the checkpoint folder, if one was given")
    except jaxacct.NotCertifiedError as error:
        _complain(f"not certified: {error}")
        return 1
    except (ValueError, jaxacct.NonFiniteLossError) as error:
        _complain(str(error))
    except OSError as error:
        _complain(f"{error.strerror}: {error.filename}")
    except MemoryError:
        _complain("out of memory: iterations or samples must be smaller for this machine")
    return 2


def _complain(message: str) -> None:
    print("jaxacct: " + " ".join(message.split()), file=sys.stderr)


if __name__ == "__main__":
    main()
