"""The picture of an audit's findings."""

import numpy as np

from jaxacct.report.figure import blank


def picture(findings):
    """Return a matplotlib figure of the scores of each finding, and its bound beside the claim."""
    from jaxacct.report.plots import DARK, LIGHT  # imports matplotlib

    figure = blank(4.6 * len(findings) + 3.4, 3.6)
    axes = figure.subplots(1, len(findings) + 1)
    for each, finding in zip(axes, findings, strict=False):
        scores, present = finding.private_scores, finding.private_present
        edges = np.histogram_bin_edges(scores[np.isfinite(scores)], bins=25)
        for members, style, colour, label in (
            (present, "-", DARK, "canary in"),
            (~present, "--", LIGHT, "canary silent"),
        ):
            counts, _ = np.histogram(scores[members], edges)
            each.stairs(counts, edges, linestyle=style, linewidth=1.5, color=colour, label=label)
        each.set(
            xlabel="score: privacy loss at a third of the noise",
            ylabel="canaries",
            title=f"{finding.kind} audit",
        )
        each.grid(alpha=0.3)
        each.legend(fontsize=8, frameon=False)
    last, claim = axes[-1], findings[0].epsilon
    limit = 1.5 * max(claim, *(finding.lower for finding in findings))
    for place, finding in enumerate(findings):
        colour = LIGHT if finding.contradicts else DARK
        last.barh(place, limit - finding.lower, left=finding.lower, height=0.25, color=colour, alpha=0.35)
        last.plot([finding.lower], [place], marker="|", markersize=22, markeredgewidth=2.5, color=colour)
        note = f"at least {finding.lower:.3g}" + (": CONTRADICTED" if finding.contradicts else "")
        last.text(
            0.02 * limit, place + 0.24, note, fontsize=8, bbox=dict(facecolor="white", linewidth=0, pad=1)
        )
    last.axvline(claim, color="0.35", linestyle=":", zorder=1)
    last.text(claim - 0.02 * limit, -0.6, f"the plan's {claim:.4g}", fontsize=8, ha="right")
    last.set(yticks=range(len(findings)), yticklabels=[finding.kind for finding in findings])
    last.set(xlim=(0, limit), ylim=(-0.7, len(findings) - 0.3), xlabel="epsilon")
    last.set(title=f"what epsilon may be, confidence {findings[0].confidence:.6g}")
    last.grid(alpha=0.3)
    return figure
