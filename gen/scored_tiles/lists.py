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

from ..expression import Constant, Expression, Name, divided_up, loads_of, replaced
from ..launch import BATCH as BATCHES
from ..launch import KV_HEADS, LISTS_ROLE, Q_HEADS, Launch
from ..limits import PORTABLE_CLUSTER, WARP
from ..scoring.scores import BATCH, HEAD, NUM_KEYS, Scores
from .arrays import TileArray, bytes_that_say, tile_arrays
from .period import Period, split_period

#: Threads of a block that makes lists, and the tiles of keys that it classifies at a time.
THREADS, TILES_AT_ONCE = 512, 32
#: The cluster of those that make a list with bits together where lists are few: what they read of a mask is
#: all of it.
BITS_BLOCKS = PORTABLE_CLUSTER
#: The most blocks there are, each of which then makes several lists: some times as many as a card runs at
#: once, a multiple of a cluster. Where batches or heads turn out to see alike, most have nothing to do.
MOST_BLOCKS = 1024
#: Rows of a warpgroup's products, and its threads, each of which has every other score of half a row.
GROUP_ROWS, GROUP = 64, 128
#: The bytes of an array that are read at once.
BYTES_AT_ONCE = 16
#: Bytes of a word of bits.
WORD = 4


@dataclass(frozen=True)
class TileLists:
    """Which lists there are: one for every ``rows`` query rows, of tiles of ``keys`` keys, for each batch and
    head or for all alike.

    Where rows are ``packed``, those of all query heads that share keys, heads are those of keys. Lists
    ``by_plan`` are of the items that a plan lists of packed sequences, of so many that they make
    ``wanted_blocks``.

    Batches that turn out to see alike, by ``batch_strides`` of zero, share the lists of the first one, and so
    do heads by ``head_strides``. With ``bits`` what rows see of single keys is there, too. Where an array of
    bytes says all, ``by_bytes``, sixteen of these are read at once; where a ``period`` does, no key is asked
    for.
    """

    rows: int
    keys: int
    by_batch: bool
    by_head: bool
    packed: bool
    by_plan: bool = False
    wanted_blocks: int = 0
    bits: bool = False
    batch_strides: tuple[str, ...] = ()
    head_strides: tuple[str, ...] = ()
    by_bytes: TileArray | None = None
    period: Period | None = None

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
        """The blocks that make one of them together where there are few, each of which asks of some tiles of
        keys."""
        return BITS_BLOCKS if self.bits else 1

    @property
    def launch(self) -> Launch:
        """The launch that makes them."""
        return Launch(
            THREADS,
            # Two flags of each tile; of a cluster also what other blocks read of two turns.
            2 * TILES_AT_ONCE + (2 * WORD if self.blocks > 1 else 0),
            self.rows,
            max_blocks=None if self.by_plan else MOST_BLOCKS,
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
        counted = dict(sizes)
        if _are_zero(self.batch_strides, values):
            counted[BATCHES.name] = 1
        if _are_zero(self.head_strides, values):
            group = (Q_HEADS // KV_HEADS).value(sizes) if self.packed else 1
            counted |= {Q_HEADS.name: group, KV_HEADS.name: 1}
        return self.ints.value(counted)


def _are_zero(strides: tuple[str, ...], values: Mapping[str, object]) -> bool:
    return bool(strides) and all(values.get(each) == 0 for each in strides)


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
    in_bytes = not main.packed and keys % BYTES_AT_ONCE == 0
    period, rest = split_period(scores.predicate)
    return TileLists(
        rows,
        keys,
        scores.pairs_vary_by_batch,
        scores.vary_by_head,
        main.pack_heads,
        main.packed,
        main.wanted_blocks,
        bits,
        () if main.packed or scores.vary_by_batch else _strides_along(BATCH, scores),
        () if main.packed else _strides_along(HEAD, scores),
        bytes_that_say(scores.predicate, tile_arrays(scores)) if in_bytes else None,
        period if rest is None and not bits else None,
    )


def _strides_along(axis: Name, scores: Scores) -> tuple[str, ...]:
    """The strides, as arguments, by which alone the keys that a predicate shows rows are others along an
    axis; none where they are so by more than arrays, or not at all."""
    if scores.predicate is None or axis.name not in scores.predicate.names():
        return ()
    buffers = {each.name: each for each in scores.buffers}
    loads = loads_of(scores.predicate)
    along = [(each, i) for each in loads for i, index in enumerate(each.indices) if index == axis]
    named = sum(1 for each in loads for index in each.indices if axis.name in index.names())
    alone = replaced(scores.predicate, {each: Constant(0) for each in loads})
    if axis.name in alone.names() or named > len(along):
        return ()
    return tuple(dict.fromkeys(buffers[each.buffer].strides[i] for each, i in along))
