"""Correlated noise in whole numbers."""
