"""The mean squared errors of arXiv 2602.09338 (section 7) rebuilt, beside the printed ones.

    python -m tests.benchmarks.paper figure-2 --out runs/paper     # b-min-sep against cyclic Poisson
    python -m tests.benchmarks.paper figure-3 --out runs/paper     # b-min-sep against balls-in-bins
    python -m tests.benchmarks.paper cinic-10 --out runs/paper     # section 7.2: all of them, and DP-SGD
    python -P -m tests.benchmarks.figure_4 --out runs/digits # the protocol of figure 4, on digits

`--short` is the same with fewer steps, in seconds. Every point that is finished is kept.
"""
