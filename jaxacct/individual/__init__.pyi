"""Public names of `jaxacct.individual`, as type checkers and the package itself read them."""

from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp as compose_gdp
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_delta as gdp_delta
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_epsilon as gdp_epsilon
from jaxacct.accountants.tradeoff.curves.gaussian import gdp_mu as gdp_mu
from jaxacct.individual.accountants import GDPIndividualAccountant as GDPIndividualAccountant
from jaxacct.individual.accountants import PLDIndividualAccountant as PLDIndividualAccountant
from jaxacct.individual.accountants import RDPIndividualAccountant as RDPIndividualAccountant
from jaxacct.individual.blackwell import ApproximateBlackwell as ApproximateBlackwell
from jaxacct.individual.buckets import SigmaGrid as SigmaGrid
from jaxacct.individual.filters import FilterState as FilterState
from jaxacct.individual.filters import GDPFilter as GDPFilter
from jaxacct.individual.filters import IndividualGDPFilter as IndividualGDPFilter
from jaxacct.individual.filters import IndividualRDPFilter as IndividualRDPFilter
from jaxacct.individual.fourier import FourierAccountant as FourierAccountant
from jaxacct.individual.fourier import subsampled_gaussian_delta as subsampled_gaussian_delta
from jaxacct.individual.odometer import PrivacyOdometer as PrivacyOdometer
from jaxacct.individual.rdp import rdp_to_epsilon as rdp_to_epsilon
from jaxacct.individual.rdp import subsampled_gaussian_rdp as subsampled_gaussian_rdp

__all__: list[str]
