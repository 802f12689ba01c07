"""Families of proposal distributions, one per file."""
