"""`jaxacct verify`: fresh samples, or the stored ones again."""

import dataclasses
from typing import Literal

import jax

from jaxacct.cli import output
from jaxacct.cli.usage import Integer
from jaxacct.common import validate
from jaxacct.common.files import Checkpoint
from jaxacct.common.progress import watch
from jaxacct.core.plan import Plan
from jaxacct.verification.replay import replay as drawn_again


def command(
    plan: str,
    /,
    *,
    checkpoint_dir: str | None = None,
    max_samples: Integer | None = None,
    rule: Literal["anytime", "fixed"] | None = None,
    proposal: str | None = None,
    replay: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Verify a plan again with fresh randomness.

    An analytic plan is verified by its accountant.

    For example:

        jaxacct verify plan.json
        jaxacct verify plan.json --replay

    Args:
      plan: file written by calibrate.
      replay: draw the samples of the plan's stored key again, and compare the histograms.
      checkpoint_dir: keep finished batches of samples here; the same command then resumes.
      max_samples: maximum samples for each direction; by default two million, or 8 times those of the plan.
      rule: stop as soon as the evidence suffices (anytime, the default), or draw a fixed number of samples.
      proposal: use this proposal distribution, such as plain.
      verbose: print also all budget items and the proposal distribution.
      json: print the verdict as one JSON object.
    """
    how = dict(max_samples=max_samples, rule=rule, proposal=proposal)
    if max_samples is not None:
        validate.positive_integer("max_samples", max_samples)
    if replay:
        fresh = dict(verbose=verbose, checkpoint_dir=checkpoint_dir)
        output.refuse("together with replay", **how, **fresh)
    loaded = Plan.load(plan)
    if replay:
        return _replay(loaded, json)
    if not loaded.is_sampled:  # loading has computed the bound
        output.refuse("for an analytic plan", **how, checkpoint_dir=checkpoint_dir)
        output.show_verdict(loaded.verdict, True, json)
        return 0
    checkpoint = Checkpoint(checkpoint_dir) if checkpoint_dir else None
    with watch() as progress:
        options = dict(checkpoint=checkpoint, progress=progress)
        verdict = loaded.verify(rule=rule or "anytime", max_samples=max_samples, proposal=proposal, **options)
    output.show_verdict(verdict, verbose, json)
    return 0 if verdict.certified else 1


def _replay(plan: Plan, json: bool) -> int:
    """Draw the stored keys again; 0 where the histograms are the stored ones."""
    here = jax.devices()[0].device_kind
    with watch() as progress:
        directions = drawn_again(plan, progress)
    same_device = plan.provenance.device == here
    same = all(side.moved == 0 for side in directions)
    close = same or (not same_device and all(side.close for side in directions))
    accepted = close and all(side.accepted for side in directions)
    if json:
        summary = {"accepted": accepted, "same_device": same_device}
        output.show(summary | {side.direction: dataclasses.asdict(side) for side in directions}, True)
        return 0 if accepted else 1
    for side in directions:
        supports = "supports" if side.accepted else "does NOT support"
        print(
            f"{side.direction + ' direction':<22}{side.drawn:,} samples of the stored key, {side.moved:,} "
            f"in another bin than stored; the fresh histogram {supports} the verdict"
        )
    if not same and not same_device:
        print(
            f"drawn on {plan.provenance.device}, replayed on {here}: float32 rounding may move a few samples "
            "to the next bin; machines of one kind reproduce the same bits"
        )
    print("replayed" if accepted else "NOT replayed: the stored histograms are not those of the stored key")
    return 0 if accepted else 1
