"""Public names of `jaxacct.individual`, as type checkers and the package itself read them."""

from jaxacct.accountants.tradeoff.curves.gaussian import compose_gdp, gdp_delta, gdp_epsilon, gdp_mu
from jaxacct.individual.accountants import (
    GDPIndividualAccountant,
    PLDIndividualAccountant,
    RDPIndividualAccountant,
)
from jaxacct.individual.blackwell import ApproximateBlackwell
from jaxacct.individual.buckets import SigmaGrid
from jaxacct.individual.filters import FilterState, GDPFilter, IndividualGDPFilter, IndividualRDPFilter
from jaxacct.individual.fourier import FourierAccountant, subsampled_gaussian_delta
from jaxacct.individual.odometer import PrivacyOdometer
from jaxacct.individual.rdp import rdp_to_epsilon, subsampled_gaussian_rdp

__all__ = [
    "ApproximateBlackwell", "FilterState", "FourierAccountant", "GDPFilter", "GDPIndividualAccountant",
    "IndividualGDPFilter", "IndividualRDPFilter", "PLDIndividualAccountant", "PrivacyOdometer",
    "RDPIndividualAccountant", "SigmaGrid", "compose_gdp", "gdp_delta", "gdp_epsilon", "gdp_mu",
    "rdp_to_epsilon", "subsampled_gaussian_delta", "subsampled_gaussian_rdp",
]  # fmt: skip
