"""Shared-memory bank conflicts of one warp-wide access, counted from its addresses.

32 banks of 4 bytes. A request of 8 or 16 bytes per lane is served by half or quarter warps; neighbouring
parts that touch no bank twice share a wavefront, and lanes reading the same word are broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_BANKS = 32


def wavefronts(offsets: Sequence[int], width: int) -> int:
    """Returns the wavefronts of a warp whose lane i accesses ``width`` floats at float offset
    ``offsets[i]``."""
    lanes_per_part = len(offsets) // width
    total = 0
    words: set[int] = set()
    for first in range(0, len(offsets), lanes_per_part):
        part = {offset + w for offset in offsets[first : first + lanes_per_part] for w in range(width)}
        merged = words | part
        if words and _depth(merged) == 1:
            words = merged
            continue
        total += _depth(words)
        words = part
    return total + _depth(words)


def _depth(words: set[int]) -> int:
    """Distinct words in the busiest bank."""
    load = [0] * NUM_BANKS
    for word in words:
        load[word % NUM_BANKS] += 1
    return max(load)
