"""`jaxacct check-run`."""

from jaxacct.cli.output import show
from jaxacct.report.run_card import ON_TRUST, RunCard, about_plan, read_plan


def command(run: str, plan: str, /, *, json: bool = False) -> int:
    """Check that the model, the card (result.json) and the plan of a run belong together.

    For example:

        jaxacct check-run run/ plan.json

    Args:
      run: folder of a finished run, or a copy of its model and result.json.
      plan: file of the plan that it should have followed.
      json: print one JSON object: belong, flaws, the plan's digest, the guarantee, what is taken on trust.
    """
    loaded, card = read_plan(plan), RunCard.load(run)
    flaws, adds = card.flaws(run, loaded), card.adds(loaded)
    trust = [*ON_TRUST, *([f"what the run adds to its plan: {adds}"] if adds and not flaws else [])]
    digest = about_plan(loaded)["digest"]
    if json:
        about = {"plan": digest, "guarantee": loaded.statement(), "steps": card.steps, "on_trust": trust}
        show({"belong": not flaws, "flaws": flaws} | about, True)
        return 1 if flaws else 0
    if flaws:
        print("\n".join(["model, card and plan do NOT belong together:", *(f"  {line}" for line in flaws)]))
        return 1
    print(f"model, card and plan belong together\nplan {digest}\n{loaded.statement()}")
    print(f"{card.steps} of {loaded.iterations} steps, clip norm {card.clip_norm:g}\ntaken on trust:")
    print("\n".join(f"  {line}" for line in trust))
    return 0
