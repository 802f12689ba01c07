"""Sampling schemes: who takes part when. One file a scheme, and all that is peculiar to it.

A scheme is a frozen dataclass of public numbers with

* `name`: its name on the command line and in JSON;
* `iterations`, `min_separation`, `max_participations`, `participation_rate`: what every stage may ask;
* `from_batch_size(...)`: the same scheme from a data set size and an expected batch size;
* `draw_participation(key, num_samples)`: participation vectors, (num_samples, iterations) float32;
* `draw_error()`: a bound on the relative error of the density they are drawn from;
* `log_likelihood_ratio(log_ratios, half_square_norms)`: ln P/Q of one sample from the (iterations,)
  log-likelihood ratios `r_i` of a single participation at each step; unbatched, jittable. `j` examples at
  once have `j r_i - j (j-1) h_i`, `h` the half square norms of the columns over sigma^2, () or (iterations,);
* `participation_probabilities()`: the exact probability of taking part at each step;
* `expected_batch_sizes(dataset_size)`: the mean batch size at each step.

`TruncatedBMinSep` differs in that the adversary sees batch sizes: its likelihood takes them as a third
argument, and both P and Q are mixtures.

`BMinSep` and `MultiAttribution` also have `log_likelihood_ratios` of (num_samples, iterations) log-ratios,
faster together than one by one. `BMinSep.draw_positions` is `draw_participation` as the steps taken part in.

A new scheme is one new file and one line in `SCHEMES`.
"""

import dataclasses

from jaxacct.schemes.b_min_sep import BMinSep
from jaxacct.schemes.balls_in_bins import BallsInBins
from jaxacct.schemes.cyclic_poisson import CyclicPoisson
from jaxacct.schemes.multi_attribution import MultiAttribution
from jaxacct.schemes.poisson import Poisson
from jaxacct.schemes.truncated_b_min_sep import TruncatedBMinSep

Scheme = Poisson | CyclicPoisson | BallsInBins | BMinSep | MultiAttribution | TruncatedBMinSep

_ALL = (Poisson, CyclicPoisson, BallsInBins, BMinSep, MultiAttribution, TruncatedBMinSep)
SCHEMES = {scheme.name: scheme for scheme in _ALL}


def scheme_to_json(scheme: Scheme) -> dict:
    """The scheme's name and fields as plain JSON values."""
    return {"name": scheme.name, **dataclasses.asdict(scheme)}


def scheme_from_json(data: dict) -> Scheme:
    """The inverse of `scheme_to_json`; ValueError for an unknown scheme or other fields than its own."""
    fields = dict(data)
    name = fields.pop("name", None)
    if name not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, was {name!r}")
    known = {field.name for field in dataclasses.fields(SCHEMES[name])}
    if set(fields) != known:
        raise ValueError(f"scheme {name} must have the fields {sorted(known)}, had {sorted(fields)}")
    return SCHEMES[name](**fields)


__all__ = [
    "SCHEMES",
    "BMinSep",
    "BallsInBins",
    "CyclicPoisson",
    "MultiAttribution",
    "Poisson",
    "Scheme",
    "TruncatedBMinSep",
    "scheme_from_json",
    "scheme_to_json",
]
