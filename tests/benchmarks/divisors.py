"""Divide a step's sum by one constant or by the mean batch of the step? Balanced min-sep on digits.

    python -m tests.benchmarks.divisors 12

Both divisors see the same batches and noise of a seed, in float64 NumPy. Sizes are those of `digits`.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

from jaxacct import BalancedMinSep, BandedToeplitz
from tests.benchmarks.results import record

SIZE, STEPS, BATCH, CLIP, MOMENTUM = 1080, 400, 54.0, 0.3, 0.9
RATES = np.array([0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0])  # learning rate times clip norm
COEFFICIENTS = BandedToeplitz.square_root(16).coefficients


def accuracies(scheme, sigma: float, seed: int, divisors) -> np.ndarray:
    """Return (divisors, rates) test accuracies of softmax regression."""
    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    inputs, labels = np.c_[images[order] / 16, np.ones(len(order))], labels[order]
    batches = scheme.batches(SIZE, rng)
    members = [batches.draw(step, rng) for step in range(STEPS)]
    noise = rng.standard_normal((STEPS, 65, 10))
    for step in range(STEPS):
        for d, c in enumerate(COEFFICIENTS[1 : step + 1], 1):
            noise[step] -= c * noise[step - d]
        noise[step] /= COEFFICIENTS[0]
    found = []
    for divisor in divisors:
        params = velocity = np.zeros((len(RATES), 65, 10))
        for step, batch in enumerate(members):
            x = inputs[batch]
            logits = x @ params
            chances = np.exp(logits - logits.max(axis=2, keepdims=True))
            errors = chances / chances.sum(axis=2, keepdims=True) - np.eye(10)[labels[batch]]
            norms = np.linalg.norm(errors, axis=2) * np.linalg.norm(x, axis=1)
            clipped = errors * np.minimum(1, CLIP / np.maximum(norms, 1e-12))[..., None]
            gradient = (x.T @ clipped + CLIP * sigma * noise[step]) / divisor[step]
            velocity = MOMENTUM * velocity + gradient
            params = params - RATES[:, None, None] / CLIP * (1 - MOMENTUM) * velocity
        found.append((((inputs[SIZE:] @ params).argmax(axis=2)) == labels[SIZE:]).mean(axis=1))
    return np.array(found)


def main(seeds: int) -> None:
    rows = []
    for separation in (8, 16, 20):
        scheme = BalancedMinSep(STEPS, separation, STEPS * BATCH / SIZE)
        means = SIZE * scheme.participation_probabilities()
        divisors = np.full(STEPS, BATCH), np.maximum(means, 1e-3)
        for sigma in (1.0, 3.0):
            found = np.array([accuracies(scheme, sigma, seed, divisors) for seed in range(seeds)])
            best = found.mean(axis=0).argmax(axis=1)
            constant, by_step = (100 * found[:, i, best[i]] for i in (0, 1))
            difference = by_step - constant
            interval = 1.96 * difference.std(ddof=1) / np.sqrt(seeds)
            rows.append([
                separation, f"{means.min():.1f} to {means.max():.1f}", sigma,
                f"{constant.mean():.1f} at {RATES[best[0]]:g}", f"{by_step.mean():.1f} at {RATES[best[1]]:g}",
                f"{difference.mean():+.2f} ± {interval:.2f}",
            ])  # fmt: skip
    record(
        "divisors",
        question="One divisor, or the mean batch of each step?",
        order=45,
        columns=[
            "separation",
            "mean batches",
            "noise multiplier",
            "one constant",
            "mean of the step",
            "difference",
        ],
        rows=rows,
        note=f"Test accuracy of softmax regression on digits in per cent, {seeds} seeds, each divisor at the "
        "best of 7 rates (learning rate times clip norm); paired difference, 95 %. 400 steps, mean batch 54, "
        "20 participations, 16 square-root bands. The trainer divides by the constant "
        "(proofs/fixed_counts.md, section 2).",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
