"""Bounds on means, histograms and the hockey-stick divergence: NumPy and SciPy only."""
