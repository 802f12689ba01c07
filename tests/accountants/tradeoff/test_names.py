"""The names that the two papers' specifications fix, each with its parameters in order."""

import inspect

import pytest

import train
from jaxacct.accountants import tradeoff

SIZES = "dataset_size num_microbatches microbatch_size num_epochs group_size sampling"
# After the bar what must be given by name; a trailing = marks what may be left out.
ACCOUNTING = {
    "gdp_tradeoff": "alpha mu",
    "gdp_delta": "epsilon mu",
    "gdp_epsilon": "delta mu",
    "gdp_mu": "epsilon delta",
    "compose_gdp": "mus",
    "gdp_to_zcdp": "mu",
    "gdp_to_rdp": "mu order",
    "dp_tradeoff": "alpha epsilon delta",
    "group_gdp": "mu g",
    "group_tradeoff": "f g",
    "subsampled_gdp_tradeoff": "alpha mu sampling_prob",
    "participation_pmf": SIZES,
    "sample_participation": f"key {SIZES} num_samples",
    "mixture_tradeoff": "alpha pmf sigma",
    "mixture_delta": "epsilon pmf sigma",
    "mixture_epsilon": "delta pmf sigma",
    "compose_pmf": "a b",
    "self_compose_pmf": "a num_epochs",
    "mc_mixture_delta": f"key epsilon sigma {SIZES} num_samples confidence=",
    "tail_lower_tradeoff": "alpha mu tail_mass | symmetrize=",
    "tail_upper_tradeoff": "alpha mu head_mass | symmetrize=",
    "shuffled_batch_clip_mu": "num_epochs group_size sigma num_rounds_per_epoch=",
    "calibrate_sigma": "target_epsilon target_delta | dataset_size num_microbatches microbatch_size "
    "num_epochs group_size= sampling=",
    "ParticipationPMF": "squared_sensitivity prob truncated_mass=",
    "contraction_factor": "stepsize strong_convexity smoothness",
    "noisy_gd_gdp": "| steps stepsize noise_std grad_sensitivity num_examples strong_convexity= smoothness "
    "diameter=",
    "noisy_cgd_gdp": "| epochs batches_per_epoch batch_size stepsize noise_std grad_sensitivity "
    "strong_convexity= smoothness diameter= num_examples= batch_index=",
    "noisy_cgd_gdp_lower_bound": "| epochs batches_per_epoch batch_size stepsize noise_std grad_sensitivity "
    "strong_convexity smoothness",
    "noisy_sgd_accountant": "| steps batch_size num_examples stepsize noise_std grad_sensitivity "
    "strong_convexity= smoothness diameter= window= noise_split=",
    "composition_gdp": "sensitivity steps",
    "shifted_interpolation_gdp": "contractions sensitivities noise_stds initial_gap=",
    "rdp_to_epsilon": "rho delta method=",
    "subsampled_gdp_clt": "p steps mu",
    "calibrate_noise": "target_eps delta | method tolerance= **run",
    "langevin_gdp": "| steps stepsize lipschitz strong_convexity smoothness",
    "exponential_mechanism_gdp": "| lipschitz strong_convexity= diameter=",
}
TRAINING = {
    "epoch_batches": "key dataset_size num_microbatches microbatch_size sampling",
    "clip_by_l2_norm": "tree clip_norm",
    "aggregate": "per_group_updates clip_norm mode",
    "private_round_update": "key params batch inner_fn clip_norm sigma | diagnostics=",
    "outer_update": "params released stepsize",
    "noisy_gd": "loss_fn data key= | steps **options",
    "noisy_cgd": "loss_fn data key= | epochs batch_size **options",
    "noisy_sgd": "loss_fn data key= | steps batch_size **options",
    "project_l2_ball": "radius center=",
    "project_box": "low high size",
}
METHODS = {
    tradeoff.TradeoffBound: "epsilon delta tradeoff clt_mu",
    tradeoff.BestTradeoffBound: "epsilon delta tradeoff",
    tradeoff.GDPBound: "epsilon delta tradeoff",
}


def signature(function) -> str:
    words, named = [], False
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not named:
            words, named = [*words, "|"], True
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        words.append(f"{stars}{one.name}{'' if one.default is one.empty else '='}")
    return " ".join(words)


@pytest.mark.parametrize("package", [tradeoff, train], ids=["accounting", "training"])
def test_names_and_parameters(package):
    for name, expected in (ACCOUNTING if package is tradeoff else TRAINING).items():
        assert name in package.__all__ and name in dir(package)
        assert signature(getattr(package, name)) == expected, name
    with pytest.raises(AttributeError, match="no attribute"):
        package.nonsense  # noqa: B018


def test_methods_of_results():
    for kind, names in METHODS.items():
        assert all(callable(getattr(kind, name)) for name in names.split()), kind
    assert {"mu", "theorem", "window", "exact"} <= set(tradeoff.GDPBound.__dataclass_fields__)
    assert {"gaussian_mu", "subsampled"} <= set(tradeoff.TradeoffBound.__dataclass_fields__)
    assert tradeoff.Shifts._fields == ("mu", "shifts", "gaps", "lambdas")
