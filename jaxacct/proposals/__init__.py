"""Distributions to draw from, and the bound on their weighted terms."""
