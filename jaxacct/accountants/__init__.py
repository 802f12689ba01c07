"""Deterministic bounds: no draws."""
