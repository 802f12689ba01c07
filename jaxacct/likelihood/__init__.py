"""Scores of the outputs, their privacy loss, and what float32 costs it."""
