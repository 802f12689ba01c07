"""Verification by sampling: the evidence behind a guarantee."""
