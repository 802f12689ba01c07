"""Scores of the outputs, their privacy loss, and the bound on its float32 rounding error."""
