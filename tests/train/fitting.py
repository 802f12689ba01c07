"""`train.fit` with options as keywords, for tests that change one argument or option at a time."""

import inspect

import train.training
from train.training import TrainOptions

_ARGUMENTS = set(inspect.signature(train.training.fit).parameters)


def fit(*args, **given):
    """`train.fit`; whatever is no argument of it is an option."""
    options = {name: given.pop(name) for name in set(given) - _ARGUMENTS}
    return train.training.fit(*args, **given, options=TrainOptions(**options))
