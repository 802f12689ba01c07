"""Trade-off functions, and two deterministic accountants that are stated in them: public names.

* Generalised DP-SGD (arXiv 2212.05796): shuffled or fixed-size batches, individual, batch or mixed clipping,
  groups of records; against an adversary who sees the sampling.
* Shifted interpolation (arXiv 2403.00278): noisy gradient descent on convex losses, full, cyclic or
  stochastic batches, of which only the last iterate is released.

Every result has its adversary, adjacency, group size, noise convention and kind (`Terms`). All in
float64.
"""

from jaxacct.common.lazy_names import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
