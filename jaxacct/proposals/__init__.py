"""Proposal distributions, and the bounds on their weighted terms."""
