"""Estimates with intervals; never a guarantee."""
