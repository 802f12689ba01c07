"""`train.fit` with options as keywords, for tests that change one argument or option at a time."""

import inspect

import train.loop
from train.loop import TrainOptions

_ARGUMENTS = set(inspect.signature(train.loop.fit).parameters)


def fit(*args, **given):
    """`train.fit`; whatever is no argument of it is an option."""
    options = {name: given.pop(name) for name in set(given) - _ARGUMENTS}
    return train.loop.fit(*args, **given, options=TrainOptions(**options))
