"""The plan of packed sequences: which block takes what, listed on the card by a launch of its own.

A block takes a tile of query rows of one head of one sequence. Only the card knows how long sequences are,
so that a grid has blocks for whatever lengths as many rows may have; the plan lists what there is to take,
those sequences first that have the most keys, and blocks beyond it end at once. It stands for as long as the
lengths do: all layers of a model may use one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expression import Expression
from .launch import PLAN_ROLE, Launch

#: Threads of a block that plans, one for each sequence, and what it keeps of each in shared memory.
THREADS, BYTES_OF_SEQUENCE = 128, 8
#: 32-bit integers of an item: `Item` in templates/common/sequences.cu.jinja.
ITEM_INTS = 8


@dataclass(frozen=True)
class Plan:
    """The plan of kernels with such a ``main`` launch."""

    main: Launch
    threads: int = THREADS
    item_ints: int = ITEM_INTS

    @property
    def launch(self) -> Launch:
        """The launch that makes it."""
        return Launch(
            self.threads,
            self.threads * BYTES_OF_SEQUENCE,
            self.main.rows_per_block,
            pack_heads=self.main.pack_heads,
            role=PLAN_ROLE,
            packed=True,
        )

    @property
    def items(self) -> Expression:
        """How many items there may be, in the sizes of a problem."""
        return self.main.tiles

    @property
    def ints(self) -> Expression:
        """How many 32-bit integers it takes, in the sizes of a problem: the items behind their number."""
        return (self.items + 1) * self.item_ints

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes of which that is made, by name."""
        used = self.ints.names()
        return tuple(name for name in self.main.sizes_of_grid if name in used)
