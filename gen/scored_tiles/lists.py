"""Lists of the tiles of keys that tiles of query rows see, where a predicate says it pair by pair.

A launch of its own makes them: for each tile of rows how many there are, and of each tile of keys, in their
order, twice its number, and one more where some of the rows do not see it whole. They stand for as long as
what the predicate reads does, and are the same for all batches or heads for which that is.

Behind a list there may be what single rows see of all tiles, a bit for each pair, in the order in which the
threads of warpgroups have scores: then nothing asks the predicate again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..expression import Constant, Expression, divided_up, loads_of, replaced
from ..launch import LISTS_ROLE, Q_HEADS, Launch
from ..limits import PORTABLE_CLUSTER, WARP
from ..scoring.scores import HEAD, NUM_KEYS, Scores
from .arrays import TileArray, bytes_that_say, tile_arrays

#: Threads of a block that makes a list, and the tiles of keys that it classifies at a time.
THREADS, TILES_AT_ONCE = 128, 32
#: Threads of one that leaves bits as well, and the cluster of those that make a list together: what they read
#: of a mask for bits is all of it.
BITS_THREADS, BITS_BLOCKS = 512, PORTABLE_CLUSTER
#: Rows of a warpgroup's products, and its threads, each of which has every other score of half a row.
GROUP_ROWS, GROUP = 64, 128
#: Bytes of a word of bits.
WORD = 4


@dataclass(frozen=True)
class TileLists:
    """Which lists there are: one for every ``rows`` query rows, of tiles of ``keys`` keys, for each batch and
    head or for all alike.

    Where rows are ``packed``, those of all query heads that share keys, heads are those of keys. Lists
    ``by_plan`` are of the items that a plan lists of packed sequences, of so many that they make
    ``wanted_blocks``.

    With ``bits`` what rows see of single keys is there, too. Then heads that turn out to be alike, by
    ``head_strides`` of zero, share the lists of the first one; and where an array of bytes says all,
    ``by_bytes``, sixteen of these are read at once.
    """

    rows: int
    keys: int
    by_batch: bool
    by_head: bool
    packed: bool
    by_plan: bool = False
    wanted_blocks: int = 0
    bits: bool = False
    head_strides: tuple[str, ...] = ()
    by_bytes: TileArray | None = None

    @property
    def words(self) -> int:
        """The 32-bit words that there are for each tile beside: of each thread as many as hold its scores."""
        return self.rows // GROUP_ROWS * GROUP * self.words_of_thread if self.bits else 0

    @property
    def group_rows(self) -> int:
        """The rows of a warpgroup."""
        return GROUP_ROWS

    @property
    def words_of_thread(self) -> int:
        """Those of them that are a thread's."""
        return words_of_scores(self.keys)

    @property
    def blocks(self) -> int:
        """The blocks that make one of them together, each of which asks of some tiles of keys."""
        return BITS_BLOCKS if self.bits else 1

    @property
    def launch(self) -> Launch:
        """The launch that makes them."""
        return Launch(
            BITS_THREADS if self.bits else THREADS,
            # What is found of each tile; with bits two flags, and what other blocks read of two turns.
            2 * TILES_AT_ONCE + 2 * WORD if self.bits else TILES_AT_ONCE,
            self.rows,
            splits=self.blocks,
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
        key_tiles = divided_up(NUM_KEYS, Constant(self.keys))
        return replace(self.launch, splits=1).blocks * (key_tiles * (1 + self.words) + 1)

    def num_ints(self, sizes: Mapping[str, int], values: Mapping[str, object]) -> int:
        """Returns their number on arrays of those sizes, with such strides of what masks read."""
        return self.ints.value({**sizes, **({Q_HEADS.name: 1} if self.heads_are_alike(values) else {})})

    def heads_are_alike(self, values: Mapping[str, object]) -> bool:
        """Tells whether all heads see what the first one does, by the arguments of a call."""
        return bool(self.head_strides) and all(values.get(each) == 0 for each in self.head_strides)


def words_of_scores(keys: int) -> int:
    """Returns how many 32-bit words hold a bit for each score that a thread of a warpgroup has of so many
    keys."""
    return -(-keys * GROUP_ROWS // (GROUP * WARP))


def tile_lists(scores: Scores, main: Launch, keys: int, *, bits: bool = False) -> TileLists | None:
    """Returns the lists that kernels with such a main launch and tiles of ``keys`` keys walk, with ``bits``
    of single rows or without; None where an interval, or what is asked of the last keys alone, says all."""
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
        bits,
        _head_strides(scores) if bits else (),
        bytes_that_say(scores.predicate, tile_arrays(scores)) if bits else None,
    )


def _head_strides(scores: Scores) -> tuple[str, ...]:
    """The strides, as arguments, by which alone the keys that rows see are others for each head; none where
    they are so by more than arrays, or not at all."""
    if scores.predicate is None or not scores.vary_by_head:
        return ()
    buffers = {each.name: each for each in scores.buffers}
    loads = loads_of(scores.predicate)
    by_head = [(each, i) for each in loads for i, index in enumerate(each.indices) if index == HEAD]
    named = sum(1 for each in loads for index in each.indices if HEAD.name in index.names())
    alone = replaced(scores.predicate, {each: Constant(0) for each in loads})
    if HEAD.name in alone.names() or named > len(by_head):
        return ()
    return tuple(dict.fromkeys(buffers[each.buffer].strides[i] for each, i in by_head))
