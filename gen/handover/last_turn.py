"""The last turn of blocks that stay for several tiles of rows, where fewer are left than there are blocks.

All blocks then share the keys of these tiles: each takes as many tiles of keys, from where the one before it
ends, of one tile of rows or of several (Osama et al. 2023, "Stream-K"). Whoever has the last keys of a tile
of rows writes it. The blocks before it hand on what theirs make of the rows, each in a place of its own, and
leave a number once that is there; as a block begins with what it hands on, and ends with what it takes over,
nobody waits for long, and only for blocks that began before. A launch in front sets the numbers to zero.

An item is a tile of rows or, where later rows see more keys, two of one head, the longest and the shortest
that are left, so that items are of one length.

Blocks that keep keys, of gradients, share rows instead, and hand on gradients of keys and values: see
`families.wgmma_backward`.
"""

from __future__ import annotations

from dataclasses import replace

from ..expression import Constant
from ..launch import CLEAR_ROLE, Launch
from .workspace import Region

#: The most blocks for each item, lest they hand on more than they multiply.
MOST_SHARES = 8
#: Threads of the launch in front.
CLEAR_THREADS = 128
#: The regions of the workspace.
HANDED_NUMBERS, HANDED_RESULTS = "handed_numbers", "handed_results"


def clear_launch(main: Launch) -> Launch:
    """Returns the launch in front of ``main``, of one block."""
    return replace(main, threads=CLEAR_THREADS, smem_bytes=0, tensor_maps=(), max_blocks=1, role=CLEAR_ROLE)


def handed_regions(main: Launch, groups: int, floats: int) -> tuple[Region, ...]:
    """Returns where numbers and results are, of whose blocks ``groups`` of threads hand on ``floats`` 32-bit
    words each."""
    places = (main.max_blocks or 0) * groups
    return (
        Region(HANDED_NUMBERS, Constant(places), "how much blocks have handed on"),
        Region(HANDED_RESULTS, Constant(places * floats), "what blocks make of tiles of others"),
    )
