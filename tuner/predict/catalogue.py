"""The legal variants of one family as a matrix of choice indices.

A space has 10^4 to 10^6 members, far too many to hold as objects or to loop over for each proposal: here a
variant is a column of small integers, and every question about all of them is one pass of numpy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.space import Space, enumerate_space
from ...gen.variant import Value, Variant


@dataclass
class Catalogue:
    """``codes[p, i]`` is the index of variant i's value among parameter p's choices; columns are sorted by
    ``keys``, the codes read as one mixed-radix number. ``unseen`` marks what no trial has taken yet.
    ``waived`` is as in `Space`."""

    family: type[Variant]
    problem: Problem
    limits: DeviceLimits
    total: int
    removed: Mapping[str, int]
    codes: np.ndarray
    waived: tuple[str, ...] = ()
    keys: np.ndarray = field(init=False)
    unseen: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._radices = _radices(self.family)
        self.keys = np.zeros(self.codes.shape[1], dtype=np.int64)
        for codes, radix in zip(self.codes, self._radices.tolist(), strict=True):
            self.keys += np.multiply(codes, radix, dtype=np.int64)
        if (self.keys[1:] < self.keys[:-1]).any():  # a walk has sorted them, unless something is held
            order = np.argsort(self.keys, kind="stable")
            self.codes, self.keys = np.ascontiguousarray(self.codes[:, order]), self.keys[order]
        self.unseen = np.ones(len(self.keys), dtype=bool)
        self.num_unseen = len(self.keys)
        #: What each value of a parameter adds to a variant's key.
        self._weights = {
            p.name: {choice: code * int(radix) for code, choice in enumerate(p.choices)}
            for p, radix in zip(self.family.parameters(), self._radices, strict=True)
        }
        self._added = [tuple(added.values()) for added in self._weights.values()]
        self._steps = [_distances(p.choices) for p in self.family.parameters()]

    def __len__(self) -> int:
        return len(self.keys)

    def variant(self, row: int) -> Variant:
        parameters = self.family.parameters()
        codes = self.codes[:, row].tolist()
        return self.family.with_values({p.name: p.choices[c] for p, c in zip(parameters, codes, strict=True)})

    def row(self, variant: Variant) -> int | None:
        """Returns the row of a variant, None when it is not legal here or of another family."""
        if type(variant) is not self.family:
            return None
        try:
            key = sum(weights[getattr(variant, name)] for name, weights in self._weights.items())
        except KeyError as error:
            raise ValueError(f"{variant.name} has the value {error}, which is no choice") from None
        at = int(np.searchsorted(self.keys, key))
        return at if at < len(self.keys) and self.keys[at] == key else None

    def row_of(self, parameters: Mapping[str, Value]) -> int | None:
        """Returns the row that a trial's parameters name, None while they are incomplete, and outside."""
        if parameters.keys() != self._weights.keys():
            return None
        return self.row(self.family.with_values(parameters))

    def take(self, row: int) -> None:
        """Marks a variant as tried."""
        if self.unseen[row]:
            self.unseen[row] = False
            self.num_unseen -= 1

    def release(self, row: int) -> None:
        """Makes a variant that was taken one to try again."""
        if not self.unseen[row]:
            self.unseen[row] = True
            self.num_unseen += 1

    def nearest(self, variant: Variant, *, among_unseen: bool = True) -> int | None:
        """Returns the row closest to ``variant``, legal or not; None when there is none left.

        Numbers are as far apart as their ranks among the choices, other values 1 or 0.
        """
        if (self.num_unseen if among_unseen else len(self)) == 0:
            return None
        distance = np.zeros(len(self), dtype=np.float32)
        for codes, table, code in zip(self.codes, self._steps, self.encode(variant), strict=True):
            distance += table[code][codes]
        if among_unseen:
            distance[~self.unseen] = np.inf
        return int(distance.argmin())

    def neighbours(self, row: int) -> np.ndarray:
        """Returns the unseen rows that differ from ``row`` in one parameter."""
        key = int(self.keys[row])
        near = np.array(
            [
                key + added - own[code]
                for own, code in zip(self._added, self.codes[:, row].tolist(), strict=True)
                for added in own
                if added != own[code]
            ],
            dtype=np.int64,
        )
        at = np.minimum(np.searchsorted(self.keys, near), len(self) - 1)
        return np.sort(at[(self.keys[at] == near) & self.unseen[at]])

    def sample(self, count: int, rng: random.Random) -> list[int]:
        """Returns up to ``count`` different unseen rows, drawn at random."""
        if self.num_unseen <= 4 * count:
            rows = np.flatnonzero(self.unseen).tolist()
            return rng.sample(rows, min(count, len(rows)))
        found: dict[int, None] = {}
        while len(found) < count:
            # Redrawing is cheap until nearly all is seen; then a list of the rest is.
            row = rng.randrange(len(self))
            if self.unseen[row]:
                found[row] = None
            elif self.num_unseen < len(self) // 8:
                return rng.sample(np.flatnonzero(self.unseen).tolist(), count)
        return list(found)

    def encode(self, variant: Variant) -> list[int]:
        """Returns the index of the variant's value among the choices of each parameter."""
        return [p.choices.index(getattr(variant, p.name)) for p in self.family.parameters()]


def build_catalogue(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    fixed: Mapping[str, Value] | None = None,
) -> Catalogue:
    """Enumerates the legal variants with ``fixed`` parameters held."""
    space = enumerate_space(family, problem, limits, fixed)
    return Catalogue(family, problem, limits, space.total, space.removed, encode(space), space.waived)


def encode(space: Space) -> np.ndarray:
    """Returns the choice indices of a space's legal variants, shape (parameters, variants).

    A parameter may be held at a value that is none of its choices; no variant is legal then.
    """
    codes = np.empty_like(space.codes)
    if not len(space):
        return codes
    parameters = zip(space.family.parameters(), space.choices, strict=True)
    for row, walked, (parameter, values) in zip(codes, space.codes, parameters, strict=True):
        row[:] = np.array([parameter.choices.index(value) for value in values], dtype=np.uint8)[walked]
    return codes


def _radices(family: type[Variant]) -> np.ndarray:
    """Weight of each parameter's code in the key; the first parameter weighs most."""
    sizes = [len(p.choices) for p in family.parameters()]
    if prod(sizes) >= 2**63:
        raise ValueError(f"family {family.family!r} has more combinations than a 64-bit key can number")
    return np.array([prod(sizes[i + 1 :]) for i in range(len(sizes))], dtype=np.int64)


def _distances(choices: Iterable[Value]) -> np.ndarray:
    """Distance between any two choices of one parameter, at most 1; shape (choices, choices)."""
    values = list(choices)
    if len(values) > 1 and all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        rank = np.argsort(np.argsort(np.array(values, dtype=np.int64)))
        return (np.abs(rank[:, None] - rank[None, :]) / (len(values) - 1)).astype(np.float32)
    return (1 - np.eye(len(values))).astype(np.float32)
