"""The plan of packed sequences: which block takes what, listed on the card by a launch of its own.

A block takes a tile of query rows of one head of one sequence. Only the card knows how long sequences are,
so that a grid has blocks for whatever lengths as many rows may have; the plan lists what there is to take,
those sequences first that have the most keys, and blocks beyond it end at once. It stands for as long as the
lengths do: all layers of a model may use one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..expression import Expression
from ..launch import MAIN_ROLE, PLAN_ROLE, QUERIES_ROLE, Launch

#: Threads of a block that plans, one for each sequence, and what it keeps of each in shared memory.
THREADS, BYTES_OF_SEQUENCE = 128, 8
#: 32-bit integers of an item: `Item` in templates/common/sequences.cu.jinja.
ITEM_INTS = 8


@dataclass(frozen=True)
class Plan:
    """The plan of kernels with such a ``main`` launch; ``of_keys`` is another one, whose blocks take tiles of
    keys: these are listed behind the others, those sequences first that have the most rows. They are listed
    alone where no other blocks take any."""

    main: Launch
    of_keys: Launch | None = None
    threads: int = THREADS
    item_ints: int = ITEM_INTS

    @classmethod
    def of_launches(cls, launches: Iterable[Launch]) -> Plan | None:
        """Returns the plan of a kernel with such launches; None where they take no items."""
        taking = {each.role: each for each in launches if each.packed}
        if (main := taking.get(MAIN_ROLE)) is None:
            return None
        queries = taking.get(QUERIES_ROLE)
        return cls(main) if queries is None else cls(queries, main)

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
        return self.main.items

    @property
    def ints(self) -> Expression:
        """How many 32-bit integers it takes, in the sizes of a problem: the items behind their number, and
        those of keys behind theirs."""
        rows = (self.items + 1) * self.item_ints
        return rows if self.of_keys is None else rows + (self.of_keys.tiles + 1) * self.item_ints

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes of which that is made, by name."""
        used = self.ints.names()
        grids = (each.sizes_of_grid for each in (self.main, self.of_keys) if each is not None)
        return tuple(dict.fromkeys(name for grid in grids for name in grid if name in used))
