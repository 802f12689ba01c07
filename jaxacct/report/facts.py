"""The facts of a plan, one table for `jaxacct show`, `jaxacct calibrate` and the page of `report.html`."""

from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu
from jaxacct.accountants.unamplified import sensitivity
from jaxacct.calibration.choice import choice_of
from jaxacct.common.records import exact
from jaxacct.core import text
from jaxacct.core.claim import Claim
from jaxacct.core.plan import Plan
from jaxacct.mechanisms.mechanism import ADD_OR_REMOVE_ONE, REPLACE_ONE, ZERO_OUT
from jaxacct.strategies import BandedInverse

TERMS = {  # what each fact means, for readers of the page
    "epsilon, delta": "no event is more than e^epsilon times as likely with the unit as without, plus delta",
    "advantage": "true minus false positive rate of any membership test",
    "Gaussian equivalent": "to compare plans: the Gaussian mechanism of this mu has the same delta at this "
    "epsilon; the run is not claimed to be mu-GDP",
    "privacy unit": "what the guarantee protects, and which data set is compared with which",
    "data set": "number of examples, which is public",
    "steps": "number of noisy sums that are released",
    "participations": "of one example or client in a fixed order, which the run must keep",
    "zCDP": "Renyi divergences of order a are at most rho a, for every a above 1; rhos of runs add up",
    "clip norm": "each gradient is scaled to at most this length; noise is the noise multiplier times it",
    "noise multiplier": "standard deviation of the noise per unit of clip norm",
    "scheme": "how examples are drawn into batches",
    "strategy": "matrix that correlates the noise of the steps",
    "prefix-sum error": "mean squared noise in the running sum of gradients; smaller is better",
    "batch size": "mean, and the largest that the trainer accepts",
    "composed with": "another mechanism on the same data that the guarantee includes",
    "certified": "when and where the evidence was made; the guarantee does not depend on it",
    "versions": "of the packages that made the evidence",
    "plan": "SHA-256 of claim and evidence: identifies the file",
}


_NEIGHBOURS: dict[str, str] = {
    ZERO_OUT: "the gradients of one {unit} count as zero; the size of the data set is public. Example: "
    "nothing released is much likelier where Ada's photo was trained on than where it was skipped",
    ADD_OR_REMOVE_ONE: "one {unit} is missing; the size of the data set is private. Example: nothing "
    "released is much likelier where Ada's photo is in the data set than where it is not",
    REPLACE_ONE: "another {unit} is in the place of one; the size of the data set is public. Example: "
    "nothing released is much likelier where the photo is Ada's than where it is Ben's",
}


def adjacency_in_words(plan: Plan) -> str:
    """Return what is compared with what under the plan's adjacency, with an example."""
    unit = plan.mechanism.unit
    words = _NEIGHBOURS[plan.mechanism.adjacency].format(unit=unit)
    owned = "" if unit == "example" else " (all photos of a user together)"
    return f"Compared are a data set and the same one in which {words}{owned}."


def warning(plan: Plan) -> str | None:
    """Return what is wrong with a delta that is not below one over the number of examples, or None."""
    size = plan.dataset_size
    if size is None or plan.epsilon == 0 or plan.delta * size < 1:
        return None
    return (
        f"delta {exact(plan.delta)} is not below 1/n = {1 / size:.3g} for {size:,} examples: even publishing "
        "one example at random is (0, 1/n)-private; choose a smaller delta"
    )


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, value) of target, mechanism and batch sizes.

    Numbers that bear on the guarantee have all digits: a rounded one may be too little noise elsewhere.
    """
    scheme, sizes = plan.mechanism.scheme, []
    if plan.dataset_size is not None:
        sizes = [("data set", f"{plan.dataset_size:,} examples")]
    if plan.epsilon == 0:
        risk = ("advantage", f"at most {exact(plan.delta)}   (true minus false positive rate of any test)")
    else:
        mu = gdp_mu(plan.epsilon, plan.delta)
        risk = ("Gaussian equivalent", f"mu {mu:.4g}   (same delta at this epsilon; no claim of mu-GDP)")
    return [
        ("epsilon, delta", f"{exact(plan.epsilon)}, {exact(plan.delta)}"),
        risk,
        ("privacy unit", f"{text.unit_in_words(scheme)}, {plan.mechanism.adjacency} adjacency"),
        *sizes,
        ("steps", f"{plan.iterations:,}"),
        *_revealed(plan),
        *mechanism_rows(plan.claim),
    ]


def mechanism_rows(claim: Claim) -> list[tuple[str, str]]:
    """Return (name, value) of the mechanism and its batch sizes."""
    mechanism, strategy = claim.mechanism, claim.mechanism.strategy
    matrix = f"{strategy.describe()}, column norm 1"
    if strategy.is_toeplitz:
        copies = strategy.memory_copies
        noise = "1 copy" if copies == 1 else f"{copies} copies"
        matrix += f"; training keeps {noise} of the parameters for the noise"
        if strategy.kind == BandedInverse.kind and copies > 1:
            matrix += ", or none (`TrainOptions(noise_memory='recompute')`)"
    if mechanism.is_upper_bound:
        matrix += "; the noise multiplier is an upper bound"
    rows = [
        ("noise multiplier", f"{text.noise_multipliers(mechanism)}   (noise std per unit of clip norm)"),
        ("scheme", repr(mechanism.scheme)),
        ("strategy", matrix),
        ("prefix-sum error", f"{mechanism.prefix_sum_error:.6g}"),
    ]
    expected, largest = claim.batch_sizes
    if expected is not None:
        sizes = f"{expected:.6g} expected, {largest} at most"
        if claim.truncation_delta is not None:
            sizes += f", larger ones truncated: {claim.truncation_delta:.3g} of delta"
        rows.append(("batch size", sizes))
    if claim.target.composed:
        rows.append(("composed with", repr(claim.target.compose_with)))
    return rows


def _revealed(plan: Plan) -> list[tuple[str, str]]:
    """Return the limits of a fixed order, and rho-zCDP where the guarantee is a Gaussian mechanism's."""
    patterns, rows = plan.mechanism.scheme.patterns, []
    if patterns is not None:
        limits = f"at most {patterns.participations}, at least {patterns.min_separation} steps apart"
        if patterns.steps_per_epoch is not None:
            limits += f", one in an epoch of {patterns.steps_per_epoch} steps"
        rows = [("participations", limits)]
    evidence = plan.evidence
    if (
        plan.certified
        and plan.compose_with is None
        and getattr(evidence, "accountant", None) == "unamplified"
    ):
        rho = (sensitivity(plan.mechanism) / plan.noise_multiplier) ** 2 / 2 * (1 + 1e-12)
        rows.append(("zCDP", f"rho = {exact(rho)}"))
    return rows


def whole(plan: Plan) -> list[tuple[str, str]]:
    """Return `facts`, the clip norm, and what identifies the plan."""
    made = plan.provenance
    return [
        *facts(plan),
        ("clip norm", "chosen in training; the guarantee holds for any"),
        ("certified", f"{made.created}, {made.device}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("plan", plan.digest),
    ]


def budget(plan: Plan) -> list[tuple[str, float]]:
    """Return (budget item, delta) of all items and what is left over; they sum to the plan's delta."""
    items = text.budget_items(plan.verdict)
    return [*items, ("left over", max(0.0, plan.delta - sum(delta for _, delta in items)))]


def describe(plan: Plan, verbose: bool = False) -> str:
    """Return a plan as text, with every budget item and the proposal distribution if `verbose`."""
    lines = [plan.statement(), "", *(f"{name:<22}{value}" for name, value in facts(plan))]
    if warned := warning(plan):
        lines.append(f"{'warning':<22}{warned}")
    lines += text.verdict_lines(plan.verdict, verbose)
    if verbose:
        lines += [f"{text.INDENT}{delta:.6g} of delta: {name}" for name, delta in budget(plan)]
        lines += [f"{text.INDENT}{line}" for line in text.checked(plan.evidence, plan.choice is not None)]
    else:
        more = "all budget items, the proposal distribution, and which fields were recomputed"
        lines.append(f"{'more':<22}--verbose: {more}")
    choice = choice_of(plan)
    return "\n".join(lines if choice is None else [*lines, "", choice.statement()])
