"""Individual privacy accounting: the privacy loss of each example, and filters that bound it.

Individual values are functions of the data. They are **private**: a guarantee covers the trained model, not a
table, histogram or mean of individual epsilons, nor the number of examples that are still active.

Sources: arXiv 2209.15596 (GDP filters, the Fourier accountant); proofs/individual.md states what is proven
here and which printed statements it corrects.
"""

from jaxacct.common.lazy_names import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
