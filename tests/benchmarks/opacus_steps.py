"""Opacus' private steps over torch's plain ones: models, batch and optimizer of `training.py costs`.

Not a dependency of anything: in an environment of its own,
    python3 -m venv opacus && opacus/bin/pip install torch opacus
    opacus/bin/python tests/benchmarks/opacus_steps.py

Ghost clipping ("ghost") and gradients of examples ("hooks"), with Opacus' own noise: torch's generator in
float32, which is neither cryptographic nor on a grid (its `secure_mode` wants one more package).
"""

import itertools
import time
import warnings

import numpy as np
import opacus
import torch
from torch import nn

BATCH, TURNS = 64, 41


class Perceptron(nn.Sequential):
    """Dense layers of 784, 512, 512 and 10."""

    def __init__(self):
        sizes = itertools.pairwise((784, 512, 512, 10))
        layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.Tanh())]
        super().__init__(*layers[:-1])


class CNN(nn.Sequential):
    """`train.models.networks.SmallCNN` on 8 x 8."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )


class Block(nn.Module):
    """`train.models.networks.Block` of width 64 and 4 heads."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.attention_in, self.attention_out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        split = self.attention_in(self.attention_norm(x)).reshape(*x.shape[:2], 3, 4, 16)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(found.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x)), approximate="tanh"))


class Transformer(nn.Module):
    """`train.models.networks.Transformer` of `training.py`: 128 tokens, 64 positions, two blocks."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, 64), nn.Embedding(64, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 128)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        return self.last(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


class MeanOfTokens:
    """Cross entropy of every example, its mean over tokens: a loss as Opacus asks for one."""

    reduction = "mean"

    def __call__(self, scores, labels):
        losses = nn.functional.cross_entropy(scores.movedim(-1, 1), labels, reduction="none")
        each = losses.reshape(len(losses), -1).mean(1)
        return each if self.reduction == "none" else each.mean()


def _text():
    tokens = torch.randint(0, 128, (BATCH, 65))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


KINDS = {
    "perceptron": (Perceptron, lambda: (torch.randn(BATCH, 784), torch.zeros(BATCH, dtype=torch.long))),
    "CNN on 8 x 8": (CNN, lambda: (torch.randn(BATCH, 1, 8, 8), torch.zeros(BATCH, dtype=torch.long))),
    "transformer": (Transformer, _text),
}


def step_of(make, rows, mode: str | None):
    """A call that takes one step of SGD; with `mode` a private one."""
    model = make()
    optimizer, criterion = torch.optim.SGD(model.parameters(), 0.1), MeanOfTokens()
    if mode is not None:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), BATCH)
        private = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = private[:2]
        criterion = private[2] if mode == "ghost" else criterion

    def step():
        optimizer.zero_grad()
        criterion(model(rows[0]), rows[1]).backward()
        optimizer.step()

    return step


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, opacus {opacus.__version__}, {torch.get_num_threads()} threads")
    for name, (make, rows_of) in KINDS.items():
        rows = rows_of()
        steps = {mode: step_of(make, rows, mode) for mode in (None, "hooks", "ghost")}
        taken = {mode: [] for mode in steps}
        for turn, (mode, step) in itertools.product(range(TURNS), steps.items()):
            started = time.process_time()
            for _ in range(4):
                step()
            if turn:
                taken[mode].append(1e3 * (time.process_time() - started) / 4)
        quartile = {mode: float(np.quantile(times, 0.25)) for mode, times in taken.items()}
        shown = (
            f"{quartile[mode]:.1f} ({quartile[mode] / quartile[None]:.1f})" for mode in ("hooks", "ghost")
        )
        size = sum(each.numel() for each in make().parameters())
        print(f"| {name}, {size:,} | {quartile[None]:.1f} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
