"""Text that a terminal shows and does not obey: what files, folders and compilers say is anybody's.

`printable` is for a text on its way to a terminal, `is_plain` tells which names of a file are taken at all.
"""

from __future__ import annotations

import re

#: What moves a cursor, colours, rings, hides or reorders what stands around it, or is no character at all:
#: control characters but the line break and the tab, marks of writing direction, line and paragraph
#: separators, and half of a surrogate pair.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
#: How a program colours what it prints: a control sequence from its introducer to its final byte.
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def printable(text: str) -> str:
    r"""Returns a text with whatever a terminal would obey written as Python escapes it, ``\x1b``."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def is_plain(text: str) -> bool:
    """Tells whether a text is one line of printable characters, as names of cards, drivers and tools are."""
    return not UNPRINTABLE.search(text) and "\n" not in text and "\t" not in text


def without_colours(text: str) -> str:
    """Returns what a program printed without the sequences that colour it."""
    return CONTROL_SEQUENCE.sub("", text)
