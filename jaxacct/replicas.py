"""TEMPORARY stand-in until the real module lands."""


def replica_candidates(mechanism, epsilon, max_table_bytes=1e9):
    return []


def replica_proposal(mechanism, m, epsilon):
    raise NotImplementedError
