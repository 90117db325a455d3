"""Labels along a line: which of them fit beside each other, and where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Widths of characters over the font's size, wide rather than narrow: of DejaVu Sans, the widest of the
#: fonts that pages are shown in.
NARROW_CHARS, NARROW_EM = frozenset("iljtfrI.,:;'|!()[] "), 0.42
WIDE_CHARS, WIDE_EM = frozenset("mwMW%@µ"), 0.98
CHAR_EM = 0.64
#: How much wider bold characters are.
BOLD = 1.15
#: Free space between two labels.
GAP = 6.0


@dataclass(frozen=True)
class Label:
    """Words that begin at ``left`` and end at ``right``."""

    words: str
    left: float
    right: float

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    def touches(self, other: Label) -> bool:
        return self.left < other.right + GAP and other.left < self.right + GAP


def text_width(words: str, size: float) -> float:
    """Returns about how wide a text is at a font size, rather more than less."""
    ems = (
        NARROW_EM if char in NARROW_CHARS else WIDE_EM if char in WIDE_CHARS else CHAR_EM for char in words
    )
    return size * sum(ems)


def fitted(
    stops: Sequence[tuple[float, str]],
    low: float,
    high: float,
    size: float,
    first: int | None = None,
) -> list[Label]:
    """Returns the labels of ``(place, words)`` stops, in their order, that fit between ``low`` and ``high``
    without touching: the ``first``, which is written bold, and both ends before others, of which evenly many
    are left out. A label stands in the middle of its place where there is room."""
    ends = (0, len(stops) - 1)
    order = sorted(range(len(stops)), key=lambda i: (i != first, i not in ends, -(i & -i), i))
    kept: dict[int, Label] = {}
    for i in order:
        place, words = stops[i]
        width = min(text_width(words, size) * (BOLD if i == first else 1.0), high - low)
        left = min(max(place - width / 2, low), high - width)
        label = Label(words, left, left + width)
        if not any(label.touches(other) for other in kept.values()):
            kept[i] = label
    return [kept[i] for i in sorted(kept)]
