"""TEMPORARY stand-in until the real module lands."""


def add_candidates(mechanism, epsilon):
    return []
