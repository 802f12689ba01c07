"""Clipped gradient sums."""
