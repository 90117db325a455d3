"""What the cost model says of a catalogue's variants: of a small one at once, of a large one bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from ...gen.variant import Variant
from .catalogue import Catalogue
from .prior import Prior

#: Spaces up to this size are ranked whole; of larger ones a sample, and what a descent from its best meets.
RANKED_WHOLE, RANKED_SAMPLE, RANKED_BUDGET = 1500, 400, 1200
#: Of how many of the fastest variants a descent looks at all neighbours: one alone leads it astray.
AROUND = 24
#: The same where a call waits: known kernels are a better start than chance, and half the sample does.
QUICK_WHOLE, QUICK_SAMPLE = 500, 200
#: By how much a descent may make a space's fastest faster: of 43 large spaces by a third at most.
GAIN = 1.5


class Ranking:
    """Predicted times of a catalogue's variants, each predicted once.

    ``log_us[row]`` is the logarithm of the predicted microseconds, NaN where nobody has looked yet and
    infinite where the cost model says that the variant cannot run.
    """

    def __init__(self, catalogue: Catalogue, prior: Prior, seed: int = 0) -> None:
        self.catalogue = catalogue
        self.log_us = np.full(len(catalogue), np.nan, dtype=np.float64)
        self._prior = prior
        self._rng = random.Random(seed)
        self._unlooked = len(catalogue)
        self._moved: dict[int, int] = {}
        """Rows that a shuffle of all has moved so far, by where they are: those are few."""

    @property
    def known(self) -> np.ndarray:
        """The rows that were predicted, as an array of truth values."""
        return ~np.isnan(self.log_us)

    def of(self, rows: Iterable[int]) -> np.ndarray:
        """Returns the predictions of those rows, logarithms of microseconds, and makes them where there are
        none yet."""
        wanted = rows if isinstance(rows, np.ndarray) else np.fromiter(rows, dtype=np.intp)
        for row in wanted[np.isnan(self.log_us[wanted])].tolist():
            us = self._prior(self.catalogue.variant(row))
            self.log_us[row] = np.log(us) if us > 0 else np.inf
        return self.log_us[wanted]

    def look(self, count: int) -> None:
        """Predicts up to ``count`` more variants, drawn at random."""
        self.of([self._drawn() for _ in range(min(count, self._unlooked))])

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

    def _drawn(self) -> int:
        """Takes a row that was not taken so: the next step of a shuffle from the last place to the first."""
        last = self._unlooked - 1
        place = self._rng.randrange(self._unlooked)
        moved = self._moved.pop(last, last)
        row = moved if place == last else self._moved.get(place, place)
        if place != last:
            self._moved[place] = moved
        self._unlooked = last
        return row

    @property
    def least_us(self) -> float:
        """The least time that was predicted; infinite before any."""
        known = self.log_us[self.known]
        return float(np.exp(known.min())) if len(known) else np.inf

    def in_order(self) -> list[tuple[float, int]]:
        """Returns predicted time and row of the variants looked at, fastest first."""
        rows = np.flatnonzero(self.known)
        order = rows[np.argsort(self.log_us[rows], kind="stable")]
        return [(float(np.exp(self.log_us[row])), int(row)) for row in order]

    def fastest(self, count: int, among: np.ndarray | None = None) -> list[int]:
        """Returns the fastest rows known that nobody has taken, ``among`` those marked there."""
        known = self.known if among is None else self.known & among
        rows = np.flatnonzero(known)
        rows = rows[self.catalogue.unseen[rows]]
        return rows[np.argsort(self.log_us[rows], kind="stable")[:count]].tolist()


def predicted_fastest(catalogue: Catalogue, prior: Prior, seed: int = 0) -> list[tuple[float, int]]:
    """Returns predicted time and row of the variants looked at, fastest first."""
    ranking = Ranking(catalogue, prior, seed)
    if len(catalogue) <= RANKED_WHOLE:
        ranking.look(len(catalogue))
    else:
        ranking.look(RANKED_SAMPLE)
        ranking.descend(RANKED_BUDGET)
    return ranking.in_order()


def quickly_fastest(
    catalogue: Catalogue, prior: Prior, known: Iterable[Variant], enough_us: float
) -> list[tuple[float, int]]:
    """Returns the same of fewer variants: of those that are ``known`` to be fast elsewhere, some drawn at
    random, and their neighbours unless none of them comes near ``enough_us``."""
    ranking = Ranking(catalogue, prior)
    if len(catalogue) <= QUICK_WHOLE:
        ranking.look(len(catalogue))
        return ranking.in_order()
    ranking.of([row for row in map(catalogue.row, known) if row is not None])
    ranking.look(QUICK_SAMPLE)
    while np.isinf(ranking.least_us) and ranking.known.sum() < min(RANKED_BUDGET, len(catalogue)):
        ranking.look(QUICK_SAMPLE)  # few of them can run, or are asked for
    if ranking.least_us < GAIN * enough_us:
        ranking.descend(RANKED_BUDGET)
    return ranking.in_order()
