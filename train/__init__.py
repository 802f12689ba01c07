"""Differentially private training in Flax under a `jaxacct.Plan`: what was certified is what runs.

Installed as `jaxacct.train` (the extra `jaxacct[train]`); in a checkout the folder is the package `train`. It
imports `jaxacct` and never the other way round.
"""
