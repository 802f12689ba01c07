"""Terms of a result: its adversary, and whether it is exact, a bound or an estimate."""

from dataclasses import asdict, dataclass

KINDS = ("exact", "certified", "approximation")


@dataclass(frozen=True)
class Terms:
    """Conditions of a result.

    Attributes:
      adversary: view of the adversary.
      adjacency: which data sets are neighbours.
      group_size: how many records may differ.
      noise_convention: reference of the noise parameter.
      kind: "exact" (attained), "certified" (a bound) or "approximation" (no guarantee).
    """

    adversary: str
    adjacency: str
    group_size: int
    noise_convention: str
    kind: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")

    def to_json(self) -> dict:
        """Return the fields as JSON values."""
        return asdict(self)


def last_iterate(kind: str) -> Terms:
    """Return the terms of noisy gradient descent with hidden iterates (arXiv 2403.00278)."""
    return Terms("last-iterate", "replace-one", 1, "noise std on the mean gradient of a batch", kind)
