"""Estimate, verify, release: the smallest noise multiplier that can be certified.

Source: arXiv 2602.09338, algorithm 5.
"""

import dataclasses
from concurrent.futures import Executor
from pathlib import Path

from jaxacct.accountants import ACCOUNTANTS, AccountantName
from jaxacct.calibration import targets
from jaxacct.calibration.choice import Choice
from jaxacct.calibration.problem import Problem
from jaxacct.calibration.route import BOUND_RATIO, SAMPLE_RATIO, NotCertifiedError, Route
from jaxacct.calibration.search import Clock, Search
from jaxacct.calibration.smallest_target import SmallestTarget
from jaxacct.common import validate
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import Progress
from jaxacct.core.blocks import check_executor
from jaxacct.core.evidence import RULES, RuleName
from jaxacct.core.plan import Plan
from jaxacct.kernels import randomness
from jaxacct.kernels.programs import check_arithmetic
from jaxacct.mechanisms.mechanism import ADJACENCIES, AdjacencyName, check_pair
from jaxacct.proposals import registry
from jaxacct.schemes import Scheme
from jaxacct.schemes.batch_sizes import check_dataset_size
from jaxacct.strategies import Strategy, ending

__all__ = ["NotCertifiedError", "calibrate", "check_options"]


SECONDS = 60.0
"""Default time for samples of a calibration."""
MIN_RATIO = 1.00001
"""Smallest ratio of a grid of noise multipliers."""


def calibrate(
    scheme: Scheme,
    strategy: Strategy,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
    mu: float | None = None,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    noise_multiplier: float | None = None,
    seconds: float = SECONDS,
    grid_ratio: float | None = None,
    failure_fraction: float = 0.01,
    rule: RuleName = "anytime",
    max_samples: int | None = None,
    proposal: str | None = None,
    accountant: AccountantName | None = None,
    compose_with=None,
    adjacency: AdjacencyName = ADJACENCIES[0],
    checkpoint_dir=None,
    choice: Choice | None = None,
    estimate: float | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    key=None,
) -> Plan:
    """Find and certify a noise multiplier for an (epsilon, delta) target.

    A bound comes first: the smallest noise multiplier that an accountant certifies without samples. It is
    released where it is exact (independent noise and Poisson sampling), and where pilots do not predict at
    least 3 % less noise within `seconds`. Otherwise pilots with a key of their own select the first candidate
    on the grid, which is verified with 0.9 q of the failure probability q; `core.shares` lists the next
    candidates and their shares. Where none is certified, the bound is released. So a false release has
    probability at most q, and by theorem A.1 of arXiv 2602.09338 the whole procedure, calibration and
    training together, is (epsilon, delta_v + q (1 - delta_v))-DP, which is (epsilon, delta).

    Args:
      scheme: sampling scheme of the privacy units.
      strategy: strategy matrix C of the noise correlation. A `BandedToeplitz` with at least a twentieth as
        many bands as there are steps is certified as the n x n matrix that it is in training, a
        `FiniteToeplitz`, with less noise (proofs/finite_horizon.md).
      epsilon: target, in nats, above 0.
      delta: target, in (0, 1).
      advantage: in place of both, in (0, 1): upper bound on TPR - FPR of every membership test. It is the
        target (0, advantage).
      tpr: in place of these, with `fpr`: upper bound on the true positive rate of every membership test with
        false positive rate `fpr`. The plan certifies an (epsilon, delta) that implies it (proofs/risk.md).
      fpr: false positive rate of `tpr`, in (0, 1).
      mu: in place of epsilon: the epsilon that the Gaussian mechanism of this mu has at `delta`.
      dataset_size: number of examples, for the plan's batch sizes.
      max_batch_size: truncate larger batches to this, and account for it (`jaxacct.core.truncation`);
        by default batches are never truncated, and the plan states a size that none exceeds.
      noise_multiplier: certify this value only. With epsilon alone the smallest delta is found and certified,
        with delta alone the smallest epsilon (`calibration.smallest_target`).
      seconds: wall-clock seconds for samples, above 0 or infinite. The bound and a stage in progress are
        finished, so the call may take longer.
      grid_ratio: candidates are powers of this, in [1.00001, 2]; by default 1.0005 for bounds and 1.01 for
        samples.
      failure_fraction: fraction of delta reserved for the verifier's failure probability q.
      rule: "anytime" or "fixed" (see `verify`).
      max_samples: maximum per direction and candidate; by default a few hundred times the minimum of the
        target, as far as `seconds` allow, or half a million or more with `noise_multiplier`.
      proposal: use this proposal ("plain"); by default the cheapest.
      accountant: certify by this bound without samples: "unamplified", "revealed-pattern", "pld",
        "random-allocation" or "redrawn-bins" (`accountants.analytic`), or "analytic" for the best of them.
        The first two hold for `MultiAttribution` on graphs in which examples have several owners. Where a
        bound is close (C = I with Poisson sampling, balls-in-bins, epochwise allocation at separation 1, or k
        of n steps where pairs of patterns have no tables), it is final unless rule, max_samples or proposal
        ask for samples.
      compose_with: a dp-accounting `DpEvent` that the guarantee also covers.
      adjacency: "zero-out" or "add-or-remove-one", which have the same dominating pair where examples are
        sampled independently, or "replace-one" (proofs/adjacency.md); other mechanisms allow the first only.
      checkpoint_dir: folder that stores finished batches; the same call then resumes.
      choice: `Recommendation.choice`, stored in the plan: how scheme and strategy were chosen.
      estimate: noise multiplier at which the search starts, such as `Recommended.noise_multiplier`; the
        search is faster near its result, and nothing else depends on it.
      executor: as of `verify`: its workers draw the samples of verifications; this process draws the pilots.
      progress: called with (what, samples done, samples expected).
      key: JAX key, from the operating system by default. Only tests should fix it.

    Returns:
      A certified `Plan`.

    Raises:
      ValueError: bad arguments, or too few samples for the target.
      NotCertifiedError: a given `noise_multiplier` could not be certified, within `seconds` of samples, or
        no bound exists for the target.
    """
    check_pair(scheme, strategy)
    strategy = ending(strategy, scheme)
    is_open = noise_multiplier is not None and (epsilon is None) != (delta is None)
    is_open = is_open and advantage is tpr is fpr is mu is None
    given = epsilon, delta
    if is_open:  # the other one is what is asked for
        epsilon, delta = targets.implied(1.0 if epsilon is None else epsilon, 0.1 if delta is None else delta)
    else:
        epsilon, delta = targets.implied(epsilon, delta, advantage, tpr, fpr, mu)
    if tpr is not None and fpr is not None and choice is None:
        epsilon, delta = targets.min_noise(scheme, strategy, tpr, fpr)
    if accountant is None and scheme.patterns is not None:  # nothing to sample
        accountant = "unamplified"
    check_options(
        noise_multiplier=noise_multiplier,
        max_batch_size=max_batch_size,
        grid_ratio=grid_ratio,
        rule=rule,
        max_samples=max_samples,
        proposal=proposal,
        accountant=accountant,
        compose_with=compose_with,
        adjacency=adjacency,
        checkpoint_dir=checkpoint_dir,
        executor=executor,
        key=key,
        seconds=seconds,
    )
    if estimate is not None:
        validate.positive_number("estimate", estimate)
    if dataset_size is not None:
        check_dataset_size(scheme, validate.positive_integer("dataset_size", dataset_size))
    if choice is not None:
        if is_open:
            raise ValueError("choice must not be given where epsilon or delta is to be found")
        validate.instance("choice", choice, Choice, "a jaxacct.calibration.choice.Choice")
        other = choice.flaws(scheme, strategy, epsilon, delta, dataset_size)
        if other:
            raise ValueError(other[0])
    problem = Problem(scheme, strategy, adjacency, dataset_size, max_batch_size)
    target = problem.target(epsilon, delta, failure_fraction, compose_with)
    run_key = randomness.fresh_key() if key is None else key
    target.profile  # noqa: B018 - an event that cannot be composed is refused before the search
    clock = Clock(progress, seconds)
    search = Search(problem, target, rule, proposal, max_samples, run_key, clock)
    route = Route(
        search,
        named=None if accountant == "analytic" else accountant,
        may_sample=accountant is None,
        asks_for_samples=rule != "anytime" or max_samples is not None or proposal is not None,
        grids=(BOUND_RATIO, SAMPLE_RATIO) if grid_ratio is None else (grid_ratio, grid_ratio),
        checkpoint=Checkpoint(checkpoint_dir) if checkpoint_dir else None,
        executor=executor,
        key=key,
    )
    try:
        if is_open and noise_multiplier is not None:
            mechanism = search.at(noise_multiplier)
            found = SmallestTarget(route, mechanism, *given, failure_fraction, compose_with).plan()
        elif noise_multiplier is not None:
            found = route.given(search.at(noise_multiplier))
        else:
            found = route.smallest(estimate)
        return found if choice is None else dataclasses.replace(found, choice=choice.to_json())
    finally:
        if route.checkpoint:
            route.checkpoint.close()


def check_options(
    *,
    noise_multiplier: float | None = None,
    max_batch_size: int | None = None,
    seconds: float = SECONDS,
    grid_ratio: float | None = None,
    rule: RuleName = "anytime",
    max_samples: int | None = None,
    proposal: str | None = None,
    accountant: AccountantName | None = None,
    compose_with=None,
    adjacency: AdjacencyName = ADJACENCIES[0],
    checkpoint_dir=None,
    executor: Executor | None = None,
    key=None,
) -> None:
    """Check options of `calibrate` that do not depend on scheme and strategy, before any work.

    ValueError for the first that is invalid, or that another one leaves without effect, and for a compiler
    whose arithmetic has no rounding margin.
    """
    check_arithmetic()
    if noise_multiplier is not None:
        validate.noise_multiplier("noise_multiplier", noise_multiplier)
    for name, size in dict(max_batch_size=max_batch_size, max_samples=max_samples).items():
        if size is not None:
            validate.positive_integer(name, size)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"seconds must be a number above 0, got {seconds!r}")
    if grid_ratio is not None and not MIN_RATIO <= validate.positive_number("grid_ratio", grid_ratio) <= 2:
        raise ValueError(f"grid_ratio must be in [{MIN_RATIO}, 2], got {grid_ratio!r}")
    if checkpoint_dir is not None and Path(checkpoint_dir).exists() and not Path(checkpoint_dir).is_dir():
        raise ValueError(f"checkpoint_dir must be a folder, got the file {checkpoint_dir}")
    check_executor(executor)
    validate.one_of("rule", rule, RULES)
    validate.one_of("adjacency", adjacency, ADJACENCIES)
    if proposal is not None:
        registry.check_name(proposal, compose_with is not None)
    if accountant is not None:
        validate.one_of("accountant", accountant, ("analytic", *ACCOUNTANTS))
        of_draws = dict(max_samples=max_samples, proposal=proposal, checkpoint_dir=checkpoint_dir, key=key)
        of_draws["executor"] = executor
        of_draws |= dict(rule=None if rule == "anytime" else rule)
        for name, value in of_draws.items():
            if value is not None:
                raise ValueError(f"{name} must not be given together with accountant: no samples are drawn")
