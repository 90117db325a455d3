"""How a kernel is launched: blocks, threads, shared memory, and what each block takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .expression import Constant, Expression, Name, divided_up, maximum
from .limits import PORTABLE_CLUSTER, WARP
from .operation import Sizes

BATCH, Q_HEADS, KV_HEADS, ROWS, KEYS = (
    Name(each, positive=True) for each in ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
)
#: The first compute capability, times ten, on which a launch may begin before the one in front of it ends.
DEPENDENT_ARCH = 90
#: The role of the launch that makes the products.
MAIN_ROLE = "kernel"
#: The role of the launch that lists tiles of keys for it.
LISTS_ROLE = "lists"
#: The role of the launch that says which block takes what, where sequences have lengths of their own.
PLAN_ROLE = "plan"
#: The role of the launch that writes new keys and values into caches.
APPEND_ROLE = "append"
#: The role of the launch that says nobody has handed on anything, where blocks share the keys of a last turn.
CLEAR_ROLE = "clear"
#: The role of the launch that puts together what blocks have left of shares of the keys.
COMBINE_ROLE = "combine"
#: Of the backward pass: the role of the launch that makes what each row of it shares, and of that which makes
#: the gradients of the queries, where the main one makes those of keys and values.
STATISTICS_ROLE, QUERIES_ROLE = "statistics", "queries"
#: The role of the launch behind the main one, which finishes what its blocks have added up in memory.
POSTPROCESS_ROLE = "postprocess"
#: What the roles of launches begin with that make the gradients of arrays which scores read, before the name.
BUFFER_ROLE = "gradient_of_"
#: The roles of launches in front of it, which split float32 arrays of query rows, and of keys, into parts.
QUERY_PARTS_ROLE, KEY_PARTS_ROLE = "query_parts", "key_parts"
#: And of those that split them into whole tiles of parts.
QUERY_TILES_ROLE, KEY_TILES_ROLE = "query_tiles", "key_tiles"
#: And of that which does so to keys and values by tiles as they are walked.
WALKED_TILES_ROLE = "walked_tiles"
#: The roles of those that find how long rows of keys are, and how far from their own places rows must look.
KEY_LENGTHS_ROLE, REACH_ROLE = "key_lengths", "reach"
#: What kernels call the rows of a block's tile, by the role of a launch other than the main one.
_TILE_NAMES = {
    LISTS_ROLE: "kListRows",
    STATISTICS_ROLE: "kStatisticsRows",
    POSTPROCESS_ROLE: "kPostprocessRows",
    QUERY_PARTS_ROLE: "kSplitRows",
    KEY_PARTS_ROLE: "kSplitRows",
    QUERY_TILES_ROLE: "kTileRows",
    KEY_TILES_ROLE: "kTileRows",
    KEY_LENGTHS_ROLE: "kLengthKeys",
    REACH_ROLE: "kReachRows",
}
#: What the host launcher and emitted modules must know to count blocks.
GRID_SIZES = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q")
#: Of packed sequences also the queries of all of them.
TOTAL_ROWS = Name("total_q", positive=True)
#: And of the backward pass the keys.
TOTAL_KEYS = Name("total_k", positive=True)
#: New rows of each sequence, or of all packed ones, where they are appended.
NEW_ROWS, TOTAL_NEW = (Name(each, nonnegative=True) for each in ("seqlen_new", "total_new"))


@dataclass(frozen=True)
class TensorMap:
    """One array as the copy engine of sm_90 and later reads or writes it, a box of rows at a time.

    A box has ``columns`` elements of each of ``rows`` positions in the sequence; its rows are swizzled in
    shared memory within ``swizzle`` bytes, which a row fills; 16 are none. ``l2_promotion`` is the bytes that
    a miss brings to L2, 0 for no more than are asked for.
    """

    array: str
    rows: int
    columns: int = 64
    swizzle: int = 128
    l2_promotion: int = 128


@dataclass(frozen=True)
class Launch:
    """One launch of a ``__global__`` function.

    ``threads`` are those of a block, ``smem_bytes`` its dynamic shared memory, ``rows_per_block`` the query
    rows that it covers (None: it walks all rows of its head), ``heads_per_block`` the heads of a batch that
    it takes along. ``tensor_maps`` are the function's second parameter. ``max_blocks`` limits the blocks
    there are, each of which then covers several tiles.

    ``cluster`` neighbouring tiles make a cluster, for whose sake the tiles of a head are filled up with empty
    ones; without ``rows_per_block`` it takes all of a head, and as many heads as a block would. With
    ``pack_heads`` rows are those of all query heads that share keys, and heads those of keys. ``splits``
    blocks, a cluster, take one tile, each with a range of keys. ``heads_per_cluster`` are query heads that
    share keys, a block for each; those of one head of keys are filled up with empty ones. ``heads_together``
    are neighbouring heads with a block each, whoever's keys they have; all of a batch are filled up so.

    With ``keys_per_block`` each tile of rows has a block for each tile of so many keys, whichever are seen.

    ``makes`` is the optional output without which nobody needs it.

    ``of_keys``: tiles are not of query rows but of keys, a block takes them for all query heads that share
    them.

    Where sequences are ``packed``, a block takes a tile of rows and a head of what a plan has listed.

    ``workspace_splits`` blocks of no cluster take one tile, each with a range of keys, and leave what they
    make of it in memory; of packed sequences as many at most, and of all sequences together no more than
    ``wanted_blocks``, which fill the card, unless there are more tiles.

    With ``shares_turn`` the blocks that ``max_blocks`` leaves share the keys of the tiles that are too few
    for another turn of theirs.

    A ``dependent`` one may begin before the launch in front of it in the same call has ended, and waits for
    that itself before it reads what others have written, or before it ends if that leaves nothing for it
    (`in_turn`).

    ``role`` is what the launch is for, and ends the function's name: ``kernel`` makes the products. Where
    batches or heads are alike, what it makes for one serves all. One that appends and ``rotates`` takes
    queries, too.
    """

    threads: int
    smem_bytes: int
    rows_per_block: int | None
    heads_per_block: int = 1
    tensor_maps: tuple[TensorMap, ...] = ()
    max_blocks: int | None = None
    cluster: int = 1
    pack_heads: bool = False
    splits: int = 1
    heads_per_cluster: int = 1
    heads_together: int = 1
    role: str = MAIN_ROLE
    alike_batches: bool = False
    alike_heads: bool = False
    packed: bool = False
    rotates: bool = False
    of_keys: bool = False
    keys_per_block: int | None = None
    makes: str = ""
    workspace_splits: int = 1
    wanted_blocks: int = 0
    shares_turn: bool = False
    dependent: bool = False

    @property
    def smem_alignment(self) -> int:
        """The multiple of bytes at which shared memory must start, as swizzles go by addresses."""
        return 1024 if self.tensor_maps else 16

    @property
    def blocks_per_cluster(self) -> int:
        """Blocks that start together and reach each other's shared memory."""
        return self.cluster * self.heads_per_cluster * self.heads_together * self.splits

    @property
    def exceeds_portable_cluster(self) -> bool:
        """Whether the driver must be told that such clusters are wanted, which not all cards can form."""
        return self.blocks_per_cluster > PORTABLE_CLUSTER

    @cached_property
    def rows(self) -> Expression:
        """The query rows, or keys, that are dealt out in tiles, for each of `heads`."""
        if self.of_keys:
            return TOTAL_KEYS if self.packed else KEYS
        rows = TOTAL_ROWS if self.packed else ROWS
        return rows * (Q_HEADS // KV_HEADS) if self.pack_heads else rows

    @cached_property
    def heads(self) -> Expression:
        """The heads of one batch that have tiles of rows of their own."""
        if self.alike_heads:
            return Constant(1)
        if self.pack_heads or self.of_keys:
            return KV_HEADS
        if self.heads_per_cluster > 1:
            together = Constant(self.heads_per_cluster, "kCluster")
            return divided_up(Q_HEADS // KV_HEADS, together) * KV_HEADS * together
        if self.heads_together > 1:
            together = Constant(self.heads_together, "kBiasHeads")
            return divided_up(Q_HEADS, together) * together
        return Q_HEADS

    @cached_property
    def tiles(self) -> Expression:
        """The tiles of rows of one head that have a block each, empty ones that fill a cluster included; of
        packed sequences, of all together, and as many as there may be whatever their lengths."""
        if self.packed and self.role != STATISTICS_ROLE:  # which knows of rows alone, not whose they are
            assert self.rows_per_block is not None and self.cluster == 1
            # Each sequence's last tile may have a single row.
            return self.rows // Constant(self.rows_per_block, self._tile_name) + BATCH
        if self.rows_per_block is None:
            return Constant(self.cluster, "kCluster" if self.cluster > 1 else "")
        if self.cluster > 1:
            name = "kClusterKeys" if self.of_keys else "kClusterRows"
            rows = Constant(self.rows_per_block * self.cluster, name)
            return divided_up(self.rows, rows) * Constant(self.cluster, "kCluster")
        return divided_up(self.rows, Constant(self.rows_per_block, self._tile_name))

    @property
    def _tile_name(self) -> str:
        """What the kernel calls the rows of a tile."""
        if self.keys_per_block is not None:
            return "kPairRows"
        return _TILE_NAMES.get(self.role, "kBc" if self.of_keys else "kBr")

    @property
    def _splits_name(self) -> str:
        """What the kernel calls the number of blocks that take one tile."""
        return "kListBlocks" if self.role == LISTS_ROLE else "kSplits"

    @cached_property
    def items(self) -> Expression:
        """The most that a plan of packed sequences lists: tiles of rows, or shares of their keys, each of
        which all heads have."""
        if not self.wanted_blocks:
            return self.tiles
        heads = KV_HEADS if self.pack_heads else Q_HEADS
        return maximum(self.tiles, Constant(self.wanted_blocks, "kWantedBlocks") // heads)

    @cached_property
    def blocks(self) -> Expression:
        """Blocks of the grid along x before ``max_blocks`` limits them, in the sizes `GRID_SIZES`.

        y and z stay 1, since only x reaches beyond 65535.
        """
        if self.role == PLAN_ROLE:
            return divided_up(BATCH, Constant(self.threads))
        if self.role == APPEND_ROLE:
            return divided_up(self.rows_appended, Constant(self.threads // WARP))
        if self.packed:
            return self.items * self.heads * Constant(self.splits, "kSplits" if self.splits > 1 else "")
        if self.heads_per_block > 1:
            together = Constant(self.heads_per_block, "kHeadsPerBlock")
            return divided_up(self.heads * BATCH, together) * self.tiles
        alone = self.rows_per_block is None and self.cluster == 1
        tiles = self.heads if alone else self.tiles * self.heads
        if self.keys_per_block is not None:
            tiles = tiles * divided_up(KEYS, Constant(self.keys_per_block, "kPairKeys"))
        batches = Constant(1) if self.alike_batches else BATCH
        splits = self.splits * self.workspace_splits
        return tiles * batches * Constant(splits, self._splits_name if splits > 1 else "")

    @property
    def rows_appended(self) -> Expression:
        """The rows that a launch which appends takes, of all heads: of new keys and values, and of queries if
        it rotates."""
        of_keys = (TOTAL_NEW if self.packed else BATCH * NEW_ROWS) * (KV_HEADS * 2)
        of_queries = (TOTAL_ROWS if self.packed else BATCH * ROWS) * Q_HEADS
        return of_keys + of_queries if self.rotates else of_keys

    @property
    def sizes_of_grid(self) -> tuple[str, ...]:
        """The sizes of which the number of blocks is made, by name."""
        used = self.blocks.names()
        counted = (*GRID_SIZES, KEYS.name, TOTAL_ROWS.name, TOTAL_KEYS.name, NEW_ROWS.name, TOTAL_NEW.name)
        return tuple(name for name in counted if name in used)

    def grid(self, sizes: Sizes) -> int:
        """Returns how many blocks are launched for a problem of these sizes."""
        return self.grid_of({name: getattr(sizes, name) for name in self.sizes_of_grid})

    def grid_of(self, sizes: Mapping[str, int]) -> int:
        """Returns how many blocks are launched for these sizes, by name."""
        blocks = self.blocks.value(sizes)
        return blocks if self.max_blocks is None else min(blocks, self.max_blocks)


def in_turn(launches: tuple[Launch, ...], arch: int) -> tuple[Launch, ...]:
    """Returns the launches of one kernel as cards of that compute capability, times ten, make them: where
    these can, all but the first are `dependent`.

    Each of those waits for the one in front of it, and so for all before; or it ends behind that, which had
    waited before it let the next one begin. The first waits for whatever kernels others have launched, as it
    is ordinary.
    """
    if arch < DEPENDENT_ARCH:
        return launches
    return (*launches[:1], *(replace(each, dependent=True) for each in launches[1:]))


def repeats_bits(launches: Iterable[Launch]) -> bool:
    """Tells whether a kernel of those launches makes the same bits every run: no blocks add to the same
    memory as they come along."""
    return all(each.role != POSTPROCESS_ROLE for each in launches)
