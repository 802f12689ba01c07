"""Shifted interpolation: bounds on the last iterate (arXiv 2403.00278)."""
