"""Lists of the tiles of keys that tiles of query rows see, where a predicate says it pair by pair.

A launch of its own makes them: for each tile of rows how many there are, and of each tile of keys, in their
order, twice its number, and one more where some of the rows do not see it whole. They stand for as long as
what the predicate reads does, and are the same for all batches or heads for which that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expression import Constant, Expression, divided_up
from .launch import LISTS_ROLE, Launch
from .scores import NUM_KEYS, Scores

#: Threads of a block that makes a list, and the tiles of keys that it classifies at a time.
THREADS, TILES_AT_ONCE = 128, 32


@dataclass(frozen=True)
class TileLists:
    """Which lists there are: one for every ``rows`` query rows, of tiles of ``keys`` keys, for each batch and
    head or for all alike.

    Where rows are ``packed``, those of all query heads that share keys, heads are those of keys. Lists
    ``by_plan`` are of the items that a plan lists of packed sequences, of so many that they make
    ``wanted_blocks``.
    """

    rows: int
    keys: int
    by_batch: bool
    by_head: bool
    packed: bool
    by_plan: bool = False
    wanted_blocks: int = 0

    @property
    def launch(self) -> Launch:
        """The launch that makes them: a block for each."""
        return Launch(
            THREADS,
            TILES_AT_ONCE,
            self.rows,
            pack_heads=self.packed,
            role=LISTS_ROLE,
            alike_batches=not self.by_batch,
            alike_heads=not self.by_head,
            packed=self.by_plan,
            wanted_blocks=self.wanted_blocks,
        )

    @property
    def ints(self) -> Expression:
        """How many 32-bit integers they take, in the sizes of a problem."""
        return list_ints(self.launch, self.keys)


def list_ints(lists: Launch, keys: int) -> Expression:
    """Returns how many 32-bit integers the lists take that a launch makes of tiles of ``keys`` keys, in the
    sizes of a problem."""
    return lists.blocks * (divided_up(NUM_KEYS, Constant(keys)) + 1)


def tile_lists(scores: Scores, main: Launch, keys: int) -> TileLists | None:
    """Returns the lists that kernels with such a main launch and tiles of ``keys`` keys walk; None where an
    interval, or what is asked of the last keys alone, says all."""
    if not scores.needs_lists or main.rows_per_block is None:
        return None
    rows = main.rows_per_block * main.cluster
    return TileLists(
        rows,
        keys,
        scores.pairs_vary_by_batch,
        scores.vary_by_head,
        main.pack_heads,
        main.packed,
        main.wanted_blocks,
    )
