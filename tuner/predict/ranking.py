"""What the cost model says of a catalogue's variants: of a small one at once, of a large one bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from .catalogue import Catalogue
from .prior import Prior

#: Spaces up to this size are ranked whole; of larger ones a sample, and what a descent from its best meets.
RANKED_WHOLE, RANKED_SAMPLE, RANKED_BUDGET = 1500, 400, 1200
#: Of how many of the fastest variants a descent looks at all neighbours: one alone leads it astray.
AROUND = 24


class Ranking:
    """Predicted times of a catalogue's variants, each predicted once.

    ``log_us[row]`` is the logarithm of the predicted microseconds, NaN where nobody has looked yet and
    infinite where the cost model says that the variant cannot run.
    """

    def __init__(self, catalogue: Catalogue, prior: Prior, seed: int = 0) -> None:
        self.catalogue = catalogue
        self.log_us = np.full(len(catalogue), np.nan, dtype=np.float64)
        self._prior = prior
        self._seed = seed
        self._unknown: list[int] | None = None

    @property
    def known(self) -> np.ndarray:
        """The rows that were predicted, as an array of truth values."""
        return ~np.isnan(self.log_us)

    def of(self, rows: Iterable[int]) -> np.ndarray:
        """Returns the predictions of those rows, logarithms of microseconds, and makes them where there are
        none yet."""
        wanted = np.fromiter(rows, dtype=np.intp)
        for row in wanted[np.isnan(self.log_us[wanted])].tolist():
            us = self._prior(self.catalogue.variant(row))
            self.log_us[row] = np.log(us) if us > 0 else np.inf
        return self.log_us[wanted]

    def look(self, count: int) -> None:
        """Predicts up to ``count`` more variants, drawn at random."""
        if self._unknown is None:
            self._unknown = list(range(len(self.catalogue)))
            random.Random(self._seed).shuffle(self._unknown)
        self.of(self._unknown[-count:])
        del self._unknown[-count:]

    def descend(self, budget: int) -> None:
        """Predicts the neighbours of the fastest unseen variants known, until those of the `AROUND` fastest
        are all known, or ``budget`` variants are."""
        looked: set[int] = set()
        while self.known.sum() < budget:
            row = next((each for each in self.fastest(AROUND) if each not in looked), None)
            if row is None:
                return
            looked.add(row)
            self.of(self.catalogue.neighbours(row))

    def fastest(self, count: int, among: np.ndarray | None = None) -> list[int]:
        """Returns the fastest rows known that nobody has taken, ``among`` those marked there."""
        rows = np.flatnonzero(self.catalogue.unseen & self.known & (True if among is None else among))
        return rows[np.argsort(self.log_us[rows], kind="stable")[:count]].tolist()


def predicted_fastest(catalogue: Catalogue, prior: Prior, seed: int = 0) -> list[tuple[float, int]]:
    """Returns predicted time and row of the variants looked at, fastest first."""
    ranking = Ranking(catalogue, prior, seed)
    if len(catalogue) <= RANKED_WHOLE:
        ranking.look(len(catalogue))
    else:
        ranking.look(RANKED_SAMPLE)
        ranking.descend(RANKED_BUDGET)
    rows = np.flatnonzero(ranking.known)
    order = rows[np.argsort(ranking.log_us[rows], kind="stable")]
    return [(float(np.exp(ranking.log_us[row])), int(row)) for row in order]
