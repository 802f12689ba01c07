"""Differentially private training in Flax under a `jaxacct.Plan`: what was certified is what runs.

The package imports `jaxacct` and never the other way round.
"""
