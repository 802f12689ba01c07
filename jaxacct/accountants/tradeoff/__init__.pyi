"""Public names of `jaxacct.accountants.tradeoff`, as type checkers and the package itself read them."""

from jaxacct.accountants.tradeoff.curves.curves import Composed as Composed
from jaxacct.accountants.tradeoff.curves.curves import Gaussian as Gaussian
from jaxacct.accountants.tradeoff.curves.curves import TradeOff as TradeOff
from jaxacct.accountants.tradeoff.curves.curves import compose as compose
from jaxacct.accountants.tradeoff.curves.curves import group_tradeoff as group_tradeoff
from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp as compose_gdp
from jaxacct.accountants.tradeoff.curves.gaussian import dp_tradeoff as dp_tradeoff
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta as gdp_delta
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon as gdp_epsilon
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_log_delta as gdp_log_delta
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu as gdp_mu
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_to_rdp as gdp_to_rdp
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_to_zcdp as gdp_to_zcdp
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_tradeoff as gdp_tradeoff
from jaxacct.accountants.tradeoff.curves.gaussian import group_gdp as group_gdp
from jaxacct.accountants.tradeoff.curves.parametric import Best as Best
from jaxacct.accountants.tradeoff.curves.parametric import EpsilonDelta as EpsilonDelta
from jaxacct.accountants.tradeoff.curves.parametric import GaussianMixture as GaussianMixture
from jaxacct.accountants.tradeoff.curves.parametric import Subsampled as Subsampled
from jaxacct.accountants.tradeoff.curves.parametric import subsampled_gdp_tradeoff as subsampled_gdp_tradeoff
from jaxacct.accountants.tradeoff.curves.subsampling import subsampled_gdp_clt as subsampled_gdp_clt
from jaxacct.accountants.tradeoff.curves.terms import Terms as Terms
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import GeneralDPSGD as GeneralDPSGD
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import calibrate_sigma as calibrate_sigma
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import mixture_delta as mixture_delta
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import mixture_epsilon as mixture_epsilon
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import mixture_tradeoff as mixture_tradeoff
from jaxacct.accountants.tradeoff.generalized_dpsgd.batch_clipping import (
    shuffled_batch_clip_mu as shuffled_batch_clip_mu,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import ParticipationPMF as ParticipationPMF
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import compose_pmf as compose_pmf
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    filtered_participation_pmf as filtered_participation_pmf,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import (
    participation_pmf as participation_pmf,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.participation import self_compose_pmf as self_compose_pmf
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import (
    mc_mixture_delta as mc_mixture_delta,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.sampled_participation import (
    sample_participation as sample_participation,
)
from jaxacct.accountants.tradeoff.generalized_dpsgd.tails import tail_lower_tradeoff as tail_lower_tradeoff
from jaxacct.accountants.tradeoff.generalized_dpsgd.tails import tail_upper_tradeoff as tail_upper_tradeoff
from jaxacct.accountants.tradeoff.last_iterate.bounds import GDPBound as GDPBound
from jaxacct.accountants.tradeoff.last_iterate.calibration import calibrate_noise as calibrate_noise
from jaxacct.accountants.tradeoff.last_iterate.calibration import composition_gdp as composition_gdp
from jaxacct.accountants.tradeoff.last_iterate.contraction import contraction_factor as contraction_factor
from jaxacct.accountants.tradeoff.last_iterate.hull import Shifts as Shifts
from jaxacct.accountants.tradeoff.last_iterate.hull import (
    shifted_interpolation_gdp as shifted_interpolation_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.langevin import (
    exponential_mechanism_gdp as exponential_mechanism_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.langevin import langevin_gdp as langevin_gdp
from jaxacct.accountants.tradeoff.last_iterate.langevin import (
    projected_langevin_gdp as projected_langevin_gdp,
)
from jaxacct.accountants.tradeoff.last_iterate.losses import logistic_conditions as logistic_conditions
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import noisy_cgd_gdp as noisy_cgd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import (
    noisy_cgd_gdp_lower_bound as noisy_cgd_gdp_lower_bound,
)
from jaxacct.accountants.tradeoff.last_iterate.noisy_gd import noisy_gd_gdp as noisy_gd_gdp
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import BestTradeoffBound as BestTradeoffBound
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import TradeoffBound as TradeoffBound
from jaxacct.accountants.tradeoff.last_iterate.noisy_sgd import noisy_sgd_accountant as noisy_sgd_accountant
from jaxacct.accountants.tradeoff.last_iterate.renyi import rdp_to_epsilon as rdp_to_epsilon

__all__: list[str]
