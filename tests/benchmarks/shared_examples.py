"""What a guarantee for users who share examples costs, on a made co-authorship graph.

    python tests/benchmarks/shared_examples.py --epsilon 1 2 4 8

About 300,000 examples with one to eight owners, heavy-tailed both ways; every user keeps two examples at
most. n = 1000 steps, mean batch 1024, delta 2e-6, 16 optimal bands at separation 16. One JSON line a row:
the noise multiplier and the mean squared prefix-sum error of

* unamplified: a Gaussian mechanism with the most participations; * revealed pattern: algorithm 3, the
pattern of participations shown to the adversary; * independent draws: `IndependentAttribution`, certified;
* printed theorem: theorem 6.1 of arXiv 2602.09338 for algorithm 3. **Not a guarantee**: it is false on this
graph.
"""

import argparse
import json
import time

import numpy as np

from jaxacct import (
    BandedToeplitz,
    CalibrationOptions,
    IndependentAttribution,
    Mechanism,
    MultiAttribution,
    calibrate,
    prefix_sum_error,
)
from jaxacct.accountants import unamplified
from train.batches.attribution import bound_contributions, find_sampling_probability
from train.batches.graph import from_edges, neighborhood_sizes

ITERATIONS, BATCH, BANDS, EXAMPLES, DELTA = 1000, 1024, 16, 2, 2e-6


def co_authorship(num_examples: int = 300_000, num_users: int = 400_000, seed: int = 0):
    """Examples with 1..8 owners (a power distribution), owners picked by a power distribution too."""
    generator = np.random.default_rng(seed)
    sizes = np.minimum(8, np.floor(generator.pareto(1.3, num_examples) + 1)).astype(int)
    rows = np.repeat(np.arange(num_examples), sizes)
    users = np.floor(num_users * generator.random(rows.size) ** 2).astype(int)
    return from_edges(users, rows, dataset_size=num_examples)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--rows", nargs="+", default=["unamplified", "revealed", "independent", "printed"])
    arguments = parser.parse_args()
    graph = bound_contributions(co_authorship(), EXAMPLES)
    kept, several = graph.num_examples, int((np.diff(graph.first_user) > 1).sum())
    print(
        json.dumps(
            {
                "examples_kept": kept,
                "with_several_owners": several,
                "max_neighborhood": int(neighborhood_sizes(graph).max()),
            }
        ),
        flush=True,
    )
    sizes = dict(batch_size=BATCH, min_separation=BANDS, examples_per_user=EXAMPLES)
    independent = IndependentAttribution.from_batch_size(dataset_size=kept, iterations=ITERATIONS, **sizes)
    printed = MultiAttribution(ITERATIONS, BANDS, find_sampling_probability(graph, **sizes), EXAMPLES)
    strategy = BandedToeplitz.optimal(
        iterations=ITERATIONS,
        bands=BANDS,
        min_separation=BANDS,
        participations=independent.max_participations,
    )

    revealing = Mechanism(printed, strategy, 1.0)

    def worst(epsilon):
        return unamplified.noise_multiplier_for(revealing, epsilon, DELTA), None

    def revealed(epsilon):
        problem = printed, strategy
        plan = calibrate(
            *problem,
            epsilon=epsilon,
            delta=DELTA,
            options=CalibrationOptions(accountant="revealed-pattern", grid_ratio=1.001),
        )
        return plan.mechanism.noise_multiplier, None

    def certified(scheme):
        def find(epsilon):
            plan = calibrate(scheme, strategy, epsilon=epsilon, delta=DELTA)
            return plan.mechanism.noise_multiplier, plan.verdict if plan.is_sampled else None

        return find

    rows = {
        "unamplified": worst,
        "revealed": revealed,
        "independent": certified(independent),
        "printed": certified(printed),
    }
    for epsilon in arguments.epsilon:
        for name in arguments.rows:
            started = time.monotonic()
            sigma, evidence = rows[name](epsilon)
            error = prefix_sum_error(strategy, iterations=ITERATIONS, noise_multiplier=sigma)
            row = {"epsilon": epsilon, "row": name, "noise_multiplier": sigma, "prefix_sum_error": error}
            if evidence is not None:
                row |= {
                    "samples": evidence.num_samples,
                    "proposals": [each.proposal for each in evidence.directions],
                }
            print(json.dumps(row | {"seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
