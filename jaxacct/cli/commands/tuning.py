"""`jaxacct tuning`."""

import decimal
from typing import Literal

from jaxacct.accountants.selection import DISTRIBUTIONS, RunCount, target_of_a_run, with_mean
from jaxacct.calibration.tuning import tuning
from jaxacct.cli import output
from jaxacct.cli.usage import Integer, Number
from jaxacct.common import validate
from jaxacct.common.progress import watch
from jaxacct.common.records import exact
from jaxacct.core.plan import Plan

DistributionName = Literal["half", "logarithmic", "geometric", "poisson"]


def command(
    *plans: str,
    mean_runs: Number,
    distribution: DistributionName | None = None,
    epsilon: Number | None = None,
    delta: Number | None = None,
    candidates: Integer | None = None,
    out: str | None = None,
    json: bool = False,
) -> int:
    """Account for tuning: the privacy of releasing the best of K runs, K random.

    With plans, print the guarantee of the best of K runs under them. Without plans, print the target that
    each run needs for --epsilon and --delta to hold for the best one.

    Args:
      plans: files written by calibrate: of one mechanism at several epsilons, or of several mechanisms among
        which tuning chooses.
      mean_runs: mean of K, such as 20.
      distribution: of K; without it all are shown. half, logarithmic and geometric are negative binomial with
        shapes -1/2, 0 and 1: a smaller shape costs less epsilon and has more often few runs. poisson is for
        plans with a small epsilon.
      epsilon: without plans, of the best run.
      delta: of the best run; with plans the mean of K times theirs by default.
      candidates: with --out, number of hyperparameter settings; each run draws one of them.
      out: draw K and the setting of each run from the operating system's randomness, and write them to this
        new private file. A second draw changes the distribution of K and voids the guarantee.
      json: print one JSON object.
    """
    kinds = {name: with_mean(name, mean_runs) for name in DISTRIBUTIONS if distribution in (None, name)}
    if (candidates is None) != (out is None):
        raise ValueError("candidates and out must be given together")
    if out is not None and (distribution is None or not plans):
        raise ValueError("out must be given together with plans and a distribution")
    statements: dict[str, str] = {}
    if plans:
        output.refuse("together with plans", epsilon=epsilon)
        loaded = [Plan.load(plan) for plan in plans]

        def row(name: str, runs: RunCount) -> tuple[float, float]:
            with watch(unit="points") as progress:
                found = tuning(loaded, runs, delta, progress=progress)
            statements[name] = found.statement()
            if candidates is not None:
                found.draw(candidates, out)
            return found.epsilon, found.delta

        title = "the best of K runs under these plans"
    else:
        if epsilon is None or delta is None:
            raise ValueError("plans, or epsilon and delta, must be given")
        validate.target(epsilon, delta)
        title = f"target of each run for the best of K to be ({exact(epsilon)}, {exact(delta)})"

        def row(name: str, runs: RunCount) -> tuple[float, float]:
            return target_of_a_run(epsilon, delta, runs)

    found, flaws = {}, {}
    for name, runs in kinds.items():
        try:
            found[name] = row(name, runs)
        except ValueError as error:
            flaws[name] = str(error)
    if not found:
        raise ValueError(next(iter(flaws.values())))
    for name, flaw in flaws.items():
        output.complain(f"{name}: {flaw}")
    if json:
        rows = [dict(distribution=name, epsilon=e, delta=d) for name, (e, d) in found.items()]
        output.show({"mean_runs": mean_runs, "distributions": rows, "statements": statements}, True)
        return 0
    print(f"{title}; K has mean {mean_runs:g}\n")
    print(f"{'distribution of K':<20}{'epsilon':>10}{'delta':>12}{'K: 5 %':>10}{'median':>8}{'95 %':>8}")
    for name, values in found.items():
        shares = "".join(f"{kinds[name].quantile(share):>8}" for share in (0.05, 0.5, 0.95))
        numbers = (_rounded(value, up=bool(plans)) for value in values)
        print("{:<20}{:>10}{:>12}  {}".format(name, *numbers, shares))
    if distribution is not None and statements:
        print(f"\n{statements[distribution]}")
    if out is not None:
        print(f"\n{out} is private: do the runs that it lists, and never draw again")
    return 0


def _rounded(value: float, up: bool) -> str:
    """Return four digits of a guarantee, not below it, or of a target, not above it."""
    rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
    return f"{float(decimal.Context(prec=4, rounding=rounding).create_decimal(repr(value))):.4g}"
