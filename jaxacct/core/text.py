"""Text of a verdict; no code reads it back."""

import dataclasses
import math
from typing import Any

from jaxacct.common.records import exact
from jaxacct.core.check import DirectionVerdict, Outcome, Verdict
from jaxacct.core.claim import ClaimedTarget
from jaxacct.core.evidence import Bound, Evidence, Sampled
from jaxacct.mechanisms.mechanism import Mechanism
from jaxacct.statistics.lines import total

INDENT = " " * 22
_WITHOUT_NUMBERS = (Outcome.NOT_RUN, Outcome.DOMINATED)
_OUTCOMES = {
    Outcome.WEIGHT_BOUND: "certified: the bound on terms is below delta_v; no samples needed",
    Outcome.MEAN_BELOW: "certified: mean term {mean:.3g} < threshold {threshold:.3g}, {drawn:,} samples",
    Outcome.MEAN_ABOVE: "not certified: mean term {mean:.3g} >= threshold {threshold:.3g}, {drawn:,} samples",
    Outcome.UNDECIDED: "not certified: undecided after {drawn:,} samples",
    Outcome.NOT_RUN: "not run: the remove direction was not certified",
    Outcome.DOMINATED: "at most that of the remove direction",
}


def statement(verdict: Verdict) -> str:
    """Return the guarantee in a sentence for a privacy review."""
    if not verdict.certified:
        return "NOT CERTIFIED: the stored evidence does not support the stated guarantee."
    claim = verdict.claim
    mechanism, scheme, target = claim.mechanism, claim.mechanism.scheme, claim.target
    unit = unit_in_words(scheme, verdict.reveals_all_participations)
    sizes = ""
    if mechanism.is_add_or_remove and claim.dataset_size is not None:
        sizes = f" (data sets of 1 to {claim.dataset_size} examples; and so under zero-out adjacency)"
    if mechanism.is_replace_one:  # its pair dominates that of zero-out, too
        sizes = " (and so under zero-out adjacency)"
    together = f", composed with {target.compose_with!r}" if target.composed else ""
    truncated = ""
    if scheme.batch_size_cap is not None:
        truncated = (
            f"batches above {scheme.batch_size_cap} are truncated to uniformly random subsets of that size, "
            "that no batch size, time of an abort or run time is published, "
        )
    if claim.truncation_delta is not None:
        truncated = (
            f"batches above {claim.truncate_to} are truncated to random subsets of that size (which uses "
            f"{claim.truncation_delta:.3g} of delta), "
        )
    order = f"batches are drawn exactly as the {scheme.name} scheme says"
    if scheme.patterns is not None:
        order = _fixed_order(mechanism)
    rescaled = ""
    if mechanism.strategy.given_norm != 1:
        sizes_of_c = noise_multipliers(mechanism)
        rescaled = f" The strategy matrix C is normalised: the noise multiplier is {sizes_of_c}."
    return (
        f"A run of this plan is ({exact(target.epsilon)}, {exact(target.delta)})-differentially private for "
        f"one {unit} under {mechanism.adjacency} adjacency{sizes}{together}, certified {how(verdict)}."
        f"{_risk(target, unit)} It assumes that {order}, that each "
        f"example's gradient is clipped, {truncated}and that only the noisy sums and what "
        f"follows from them are released.{_upper_bound(mechanism)}{rescaled}"
    )


def noise_multipliers(mechanism: Mechanism) -> str:
    """Return the noise multiplier, and that of the strategy matrix as given where it was rescaled."""
    strategy, scaled = mechanism.strategy, exact(mechanism.noise_multiplier)
    if strategy.given_norm == 1:
        return scaled
    as_given = exact(strategy.noise_as_given(mechanism.noise_multiplier))
    return f"{scaled} for C divided by {exact(strategy.given_norm)}; {as_given} for the matrix as given"


def _fixed_order(mechanism: Mechanism) -> str:
    """Return what is assumed of batches in a fixed order, a clause."""
    patterns = mechanism.scheme.patterns
    epochs = (
        "" if patterns.steps_per_epoch is None else f", once in {patterns.steps_per_epoch} steps (an epoch)"
    )
    absent = ", in which the place of an absent example stays empty" if mechanism.is_add_or_remove else ""
    return (
        f"batches come in an order that does not depend on the data and may be public{absent}, that each "
        f"example is in at most {patterns.max_participations} of them{epochs} and "
        f"{patterns.min_separation} or more steps apart"
    )


def unit_in_words(scheme, reveals_participations: bool = False) -> str:
    """Return the privacy unit in words, for a bound that may reveal all participations."""
    if scheme.unit == "example":
        return "example"
    unit = f"user with up to {scheme.examples_per_unit} examples"
    if scheme.examples_overlap:
        return unit
    shared = reveals_participations or scheme.holds_for_shared_examples
    owners = "however they are shared" if shared else "each with no other user"
    return f"{unit}, {owners} (and phantoms up to that number)"


def how(verdict: Verdict) -> str:
    """Return how the claim is certified, a clause."""
    if isinstance(verdict.evidence, Bound):
        return f"by the analytic accountant {verdict.evidence.accountant!r}"
    target = verdict.claim.target
    q = target.budget.failure_probability
    return (
        f"by {verdict.num_samples:,} Monte Carlo samples; the {exact(target.delta)} includes the "
        f"verifier's failure probability {q:.3g}"
    )


def _risk(target: ClaimedTarget, unit: str) -> str:
    """Return what (epsilon, delta) says of membership tests, where it says something."""
    test = f"test of whether one {unit} participated"
    if target.epsilon == 0:
        return (
            f" At epsilon 0 this says: no {test} has a true positive rate more than {exact(target.delta)} "
            "above its false positive rate."
        )
    factor = math.exp(min(target.epsilon, 700.0))  # a larger one overflows; both bounds are 1 then
    powers = [
        (rate, min(factor * rate + target.delta, 1 - (1 - target.delta - rate) / factor, 1.0))
        for rate in RATES
    ]
    shown = ", ".join(f"{rounded_up(power)} at {rate:g}" for rate, power in powers if power <= 0.9)
    return (
        shown
        and f" It implies: true positive rates of any {test} are at most, by false positive rate, {shown}."
    )


RATES = (0.001, 0.01, 0.1)  # false positive rates at which risk is stated


def rounded_up(bound: float, digits: int = 3) -> str:
    """Return that many digits of a number of at least 0 that is not above them."""
    shown = float(f"{bound:.{digits - 1}e}")
    if shown < bound:
        shown += 10.0 ** (math.floor(math.log10(bound)) - digits + 1)
    return f"{shown:.{digits}g}"


def _upper_bound(mechanism: Mechanism) -> str:
    if not mechanism.is_upper_bound:
        return ""
    what = "the strategy matrix is not banded and its cross terms were"
    if mechanism.scheme.examples_overlap:
        what = "the likelihood of a user's simultaneous examples was"
    return f" It is an upper bound: {what} bounded."


def verdict_lines(verdict: Verdict, verbose: bool = False) -> list[str]:
    """Return the verdict in lines: the budget and both directions, with every budget item if `verbose`."""
    claim = verdict.claim
    if isinstance(verdict.evidence, Bound):
        bound = "not computed"
        if verdict.bound is not None:
            bound = f"delta({exact(claim.target.epsilon)}) <= {exact(verdict.bound)}"
        return [f"{'evidence':<22}accountant {verdict.evidence.accountant}: {bound}", *_flaws(verdict)]
    budget = claim.target.budget
    lines = [
        f"{'budget':<22}delta_v {budget.delta_v:.6g} + failure probability "
        f"{budget.failure_probability:.3g} = {budget.delta:.6g} ({verdict.evidence.rule} rule)"
    ]
    for each in verdict.directions:
        lines.append(f"{each.direction + ' direction':<22}{outcome_in_words(each)}")
        if verbose:
            lines += _details(each)
    return [*lines, *_flaws(verdict)]


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as plain JSON values, for programs."""
    fields: dict[str, Any] = {"certified": verdict.certified, "flaws": list(verdict.flaws)}
    if isinstance(verdict.evidence, Bound):
        return fields | {"accountant": verdict.evidence.accountant, "delta": verdict.bound}
    fields |= {"num_samples": verdict.num_samples, "rule": verdict.evidence.rule}
    for each in verdict.directions:
        numbers = {name: getattr(each, name) for name in ("scale", "margin", "threshold", "estimate")}
        numbers["relative_error"] = total(each.items, "relative")
        numbers["total_variation"] = total(each.items, "total variation")
        fields[each.direction] = {
            "certified": each.certified,
            "outcome": str(each.outcome),
            "proposal": each.proposal,
            "num_samples": each.num_samples,
            "items": [dataclasses.asdict(item) | {"name": item.name} for item in each.items],
        } | (dict.fromkeys(numbers) if each.outcome in _WITHOUT_NUMBERS else numbers)
    return fields


def _flaws(verdict: Verdict) -> list[str]:
    return [f"{'not certified':<22}{flaw}" for flaw in verdict.flaws]


def _details(of: DirectionVerdict) -> list[str]:
    if of.outcome in _WITHOUT_NUMBERS:
        return []
    lines = [
        f"{INDENT}proposal {of.proposal}, scale {of.scale:.3g}, estimate {of.estimate:.3g}, rounding margin "
        f"{of.margin:.2g}"
    ]
    return lines + [f"{INDENT}{item.in_words}" for item in of.items if item.amount > 0]


def outcome_in_words(of: DirectionVerdict) -> str:
    """Return the outcome of one direction in words, with the numbers that decide it."""
    mean = of.estimate / of.scale if of.scale else 0.0
    return _OUTCOMES[of.outcome].format(mean=mean, threshold=of.threshold, drawn=of.num_samples)


def budget_items(verdict: Verdict) -> list[tuple[str, float]]:
    """Return (item, delta) for every item of the budget of delta."""
    claim, budget = verdict.claim, verdict.claim.target.budget
    if isinstance(verdict.evidence, Sampled):
        wrong = budget.failure_probability * (1 - budget.delta_v)
        items = [("delta_v, the divergence verified", budget.delta_v), ("failure probability", wrong)]
    else:
        items = [(f"bound of {verdict.evidence.accountant}", verdict.bound or 0.0)]
    if claim.truncation_delta is not None:
        items.append(("truncated batches", claim.truncation_delta))
    if claim.overflow is not None:
        items.append(("runs stopped by a batch too large", claim.overflow.delta))
    return items


def checked(evidence: Evidence, chosen: bool) -> list[str]:
    """Return which fields loading recomputed, and which only drawing can show, one line each.

    Args:
      evidence: of the plan.
      chosen: whether the plan says how a search chose its scheme and matrix.
    """
    if isinstance(evidence, Sampled):
        lines = [
            "computed again: scale, budget items, rounding margin, threshold, the verdict from the stored "
            "counts, batch sizes",
            "shown by drawing only: that the counts are those of the stored key (`jaxacct verify --replay`) "
            "and that neither key, rule nor bets were chosen afterwards (`jaxacct verify`)",
        ]
    else:
        lines = [f"computed again: the bound of the accountant {evidence.accountant!r}, batch sizes"]
    lines.append("as written, without bearing on the guarantee: time, device, versions")
    if chosen:
        lines.append("as written: that a search chose; the command in its statement searches again")
    return lines


def notes(verdict: Verdict) -> dict[str, Any]:
    """Return the notes of a plan file, all of which follow from claim and evidence.

    Loading ignores them; `jaxacct.checker` compares the numbers with its own.
    """
    claim = verdict.claim
    expected, largest = claim.batch_sizes
    return {
        "statement": statement(verdict),
        "prefix_sum_error": claim.mechanism.prefix_sum_error,
        "expected_batch_size": expected,
        "max_batch_size": largest,
        "overflow_delta": None if claim.overflow is None else claim.overflow.delta,
        "truncation_delta": claim.truncation_delta,
        "verdict": verdict_to_json(verdict),
    }
