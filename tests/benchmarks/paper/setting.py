"""What is swept in section 7 of arXiv 2602.09338: bands, separations, epoch lengths, epsilons."""

from dataclasses import dataclass

EXAMPLES_A_BATCH = 1000  # on average; errors do not depend on it, only the sizes that plans state do
METHODS = ("b-min-sep", "balls-in-bins", "cyclic-poisson", "dp-sgd")


@dataclass(frozen=True)
class Cell:
    """One mechanism of the sweep, and its target.

    Attributes:
      scheme: its name in `jaxacct.SCHEMES`; balls-in-bins is b-min-sep with a separation of one epoch.
      iterations: steps.
      epoch_length: |D| / B.
      bands, separation: of the matrix and of the scheme.
      epsilon, delta: the target.
    """

    scheme: str
    iterations: int
    epoch_length: int
    bands: int
    separation: int
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Setting:
    """A sweep.

    Attributes:
      iterations, delta: of all cells.
      epochs: epoch lengths |D| / B.
      epsilons: targets, the cheap ones first.
      bands: of the matrices, each optimal without amplification.
      separations: of b-min-sep besides the number of bands; None for its doublings up to the epoch.
    """

    iterations: int
    delta: float
    epochs: tuple[int, ...]
    epsilons: tuple[float, ...]
    bands: tuple[int, ...]
    separations: tuple[int, ...] | None = None

    def points(self) -> list[tuple[int, float]]:
        """(epoch length, epsilon) of every point."""
        return [(epoch, epsilon) for epsilon in self.epsilons for epoch in self.epochs]

    def cells(self, method: str, epoch: int, epsilon: float) -> list[Cell]:
        """All that one of `METHODS` is swept over at a point; the best one stands for it."""

        def cell(scheme, bands, separation):
            return Cell(scheme, self.iterations, epoch, bands, separation, epsilon, self.delta)

        fits = [bands for bands in self.bands if bands <= min(epoch, self.iterations)]
        if method == "dp-sgd":
            return [cell("poisson", 1, 1)]
        if method == "cyclic-poisson":
            return [cell("cyclic-poisson", bands, bands) for bands in fits]
        if method == "balls-in-bins":
            return [cell("b-min-sep", bands, epoch) for bands in fits]
        return [cell("b-min-sep", b, s) for b in fits for s in self._separations(b, epoch)]

    def _separations(self, bands: int, epoch: int) -> list[int]:
        wanted = self.separations
        if wanted is None:
            wanted = tuple(bands << k for k in range((epoch // bands).bit_length()))
        return sorted({bands, epoch, *(s for s in wanted if bands <= s <= epoch)})


SECTION_7_1 = Setting(1024, 1e-3, (128, 256, 512, 1024), (16.0, 8.0, 4.0, 2.0, 1.0, 0.5), (2, 4, 8, 16, 32))
SECTION_7_2 = Setting(1500, 2.8e-6, (300,), (8.0, 4.0, 2.0, 1.0, 0.5), (2, 4, 8, 16, 32, 64), (150, 300))
# The same questions of fewer steps: several epochs and one, a large epsilon and a small one.
SHORT_7_1 = Setting(64, 1e-3, (16, 64), (4.0,), (2, 4))
SHORT_7_2 = Setting(75, 1e-3, (15,), (4.0, 1.0), (2, 4), (8, 15))
