"""Mechanism: a scheme, a strategy and a noise multiplier."""
