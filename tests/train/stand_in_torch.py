"""PyTorch in what a page of `guides/questions` uses of it, for machines without it.

`DataLoader` yields what the real one does: a list [images, labels] of tensors. Slow tests run the same pages
with the real library.
"""

import types

import numpy as np


class Tensor:
    """Array in which the trainer sees `__array__` and `ndim` alone."""

    def __init__(self, values):
        self.values, self.ndim = np.asarray(values), np.ndim(values)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)


class Generator:
    """Source of a loader's order."""

    def manual_seed(self, seed: int) -> "Generator":
        self.drawn = np.random.default_rng(seed)
        return self


class Dataset:
    """Base class of data sets."""


class BatchSampler:
    """Lists of ids of one epoch, another order in every epoch."""

    def __init__(self, length, batch_size, generator):
        self.length, self.batch_size, self.generator = length, batch_size, generator

    def __len__(self):
        return self.length // self.batch_size

    def __iter__(self):
        order = self.generator.drawn.permutation(self.length).tolist()
        for step in range(len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


class DataLoader:
    """Loader that shuffles and drops the last batch."""

    def __init__(self, dataset, batch_size, *, shuffle, drop_last, generator):
        assert shuffle and drop_last
        self.dataset, self.batch_sampler = dataset, BatchSampler(len(dataset), batch_size, generator)

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        for ids in self.batch_sampler:
            yield [
                Tensor(np.stack(column)) for column in zip(*map(self.dataset.__getitem__, ids), strict=True)
            ]


def module() -> types.ModuleType:
    """Return the stand-in as `import torch` would."""
    torch = types.ModuleType("torch")
    data = types.SimpleNamespace(Dataset=Dataset, DataLoader=DataLoader)
    vars(torch).update(Generator=Generator, Tensor=Tensor, utils=types.SimpleNamespace(data=data))
    return torch
