"""Public names of `jaxacct.accountants.tradeoff`, as type checkers and the package itself read them."""

from jaxacct.accountants.tradeoff.curves.curves import Composed, Gaussian, TradeOff, compose, group_tradeoff
from jaxacct.accountants.tradeoff.curves.gaussian import (
    compose_gdp,
    dp_tradeoff,
    gdp_delta,
    gdp_epsilon,
    gdp_log_delta,
    gdp_mu,
    gdp_to_rdp,
    gdp_to_zcdp,
    gdp_tradeoff,
    group_gdp,
)
from jaxacct.accountants.tradeoff.curves.parametric import (
    Best,
    EpsilonDelta,
    GaussianMixture,
    Subsampled,
    subsampled_gdp_tradeoff,
)
from jaxacct.accountants.tradeoff.curves.subsampling import subsampled_gdp_clt
from jaxacct.accountants.tradeoff.curves.terms import Terms
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import (
    GeneralDPSGD,
    calibrate_sigma,
    mixture_delta,
    mixture_epsilon,
    mixture_tradeoff,
    shuffled_batch_clip_mu,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    ParticipationPMF,
    compose_pmf,
    filtered_participation_pmf,
    participation_pmf,
    self_compose_pmf,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import (
    mc_mixture_delta,
    sample_participation,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.tails import tail_lower_tradeoff, tail_upper_tradeoff
from jaxacct.accountants.tradeoff.last_iterate.bounds import GDPBound
from jaxacct.accountants.tradeoff.last_iterate.calibration import calibrate_noise, composition_gdp
from jaxacct.accountants.tradeoff.last_iterate.contraction import contraction_factor
from jaxacct.accountants.tradeoff.last_iterate.hull import Shifts, shifted_interpolation_gdp
from jaxacct.accountants.tradeoff.last_iterate.langevin import (
    exponential_mechanism_gdp,
    langevin_gdp,
    projected_langevin_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import (
    noisy_cgd_gdp,
    noisy_cgd_gdp_lower_bound,
    noisy_gd_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import (
    BestTradeoffBound,
    TradeoffBound,
    noisy_sgd_accountant,
)
from jaxacct.accountants.tradeoff.last_iterate.renyi import rdp_to_epsilon

__all__ = [
    "Best", "BestTradeoffBound", "Composed", "EpsilonDelta", "GDPBound", "Gaussian", "GaussianMixture",
    "GeneralDPSGD", "ParticipationPMF", "Shifts", "Subsampled", "Terms", "TradeOff", "TradeoffBound",
    "calibrate_noise", "calibrate_sigma", "compose", "compose_gdp", "compose_pmf", "composition_gdp",
    "contraction_factor", "dp_tradeoff", "exponential_mechanism_gdp", "filtered_participation_pmf",
    "gdp_delta", "gdp_epsilon", "gdp_log_delta", "gdp_mu", "gdp_to_rdp", "gdp_to_zcdp", "gdp_tradeoff",
    "group_gdp", "group_tradeoff", "langevin_gdp", "logistic_conditions", "mc_mixture_delta",
    "mixture_delta", "mixture_epsilon", "mixture_tradeoff", "noisy_cgd_gdp", "noisy_cgd_gdp_lower_bound",
    "noisy_gd_gdp", "noisy_sgd_accountant", "participation_pmf", "projected_langevin_gdp",
    "rdp_to_epsilon", "sample_participation", "self_compose_pmf", "shifted_interpolation_gdp",
    "shuffled_batch_clip_mu", "subsampled_gdp_clt", "subsampled_gdp_tradeoff", "tail_lower_tradeoff",
    "tail_upper_tradeoff",
]  # fmt: skip
