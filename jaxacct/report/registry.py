"""Entry of a plan for the registry of DP deployments (https://registry.opendp.org), as JSON, which is YAML.

The fields are those of `schemas/deployments-schema.yaml` of github.com/opendp/deployments-registry-data, by
Ghazi, Nanayakkara and Vadhan (arXiv 2509.13509).
"""

from typing import Any

from jaxacct.common.records import exact
from jaxacct.common.version import VERSION
from jaxacct.core import text
from jaxacct.core.plan import Plan
from jaxacct.report.facts import adjacency_in_words
from jaxacct.report.page import NOT_COVERED
from jaxacct.report.run_card import RunCard

FILL_IN = "FILL IN"
"""What only the publisher has: it begins each such text."""


def entry(plan: Plan, run: RunCard | None = None) -> dict[str, Any]:
    """Return the entry of a model that is trained under a plan; texts of `FILL_IN` are the publisher's.

    Args:
      plan: certified.
      run: card of the run that made the model, without `flaws`; the entry then names both digests.
    """
    mechanism, scheme = plan.mechanism, plan.mechanism.scheme
    steps = scheme.iterations if run is None else run.steps
    digests = f"Plan SHA-256 {plan.digest}" + ("" if run is None else f", model SHA-256 {run.model}")
    return {
        "url_slug": "fill-in",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": f"{FILL_IN}: name of the model",
                "data_curators": [f"{FILL_IN}: publisher"],
                "intended_use": f"{FILL_IN}: what the model is for",
                "data_product_type": "Machine learning model",
                "data_product_region": f"{FILL_IN}: region of the data",
                "description": f"{FILL_IN}: what the model is",
                "publication_date": "1900-01-01",
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"{FILL_IN}: what an example is",
                "unprotected_quantities": f"Not covered: {'; '.join(NOT_COVERED)}.",
            },
            "privacy_loss": {
                "privacy_unit": text.unit_in_words(scheme, plan.reveals_all_participations),
                "privacy_unit_details": adjacency_in_words(plan),
                "privacy_parameters": {"epsilon": plan.epsilon, "delta": plan.delta},
                "privacy_parameters_details": plan.statement(),
            },
            "deployment_model": {
                "model_name": "Central",
                "actors": f"{FILL_IN}: the trainer sees the data; who sees the model?",
                "release_type": "One release",
                "release_type_details": f"{FILL_IN}: is it trained again on the same data?",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Optimizer, averages and evaluations are functions of the noisy sums.",
                "composition": f"{steps:,} steps are accounted for together, {text.how(plan.verdict)}"
                + (f", composed with {plan.compose_with!r}." if plan.compose_with else "."),
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"{FILL_IN}: the plan covers none of it",
                "mechanisms": (
                    f"Gaussian noise, multiplier {exact(plan.noise_multiplier)}, correlated over steps by "
                    f"{mechanism.strategy.describe()}; clipped gradients; {scheme.name} batches. jaxacct "
                    f"{VERSION}; gradients and noise are integers, which protects against floating-point "
                    f"attacks. {digests}."
                ),
            },
            "administrative": {
                "registry_authors": [f"{FILL_IN}: author of this entry"],
                "notes": f"{FILL_IN}: url_slug, tier and publication_date, which are placeholders here",
            },
        },
    }
