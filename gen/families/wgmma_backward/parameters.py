"""The parameters of a gradient kernel of Hopper's warpgroups, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ...handover.reach import FAR_KEYS, LEFT_OUT, WALKED
from ...launch import TensorMap
from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...variant import param
from ..gradients import GradientVariant
from ..wgmma.parameters import GROUP, GROUP_ROWS, SHARED, WHOLE, is_split
from ..wgmma.shared_memory import CHUNK, CHUNK_BYTES, chunks

#: Columns of a step of products, and rows of what a warp has of one.
STEP = 16
#: Of a map whose rows lie in shared memory as they are.
UNSWIZZLED = 16
#: When weights are made and multiplied: once their gradients are there, too; or made beside the making of
#: these, or multiplied as well; or that, with scores made a tile ahead, beside what is stored and added.
TOGETHER, MADE_FIRST, WEIGHTS_FIRST, AHEAD = "together", "made_first", "weights_first", "ahead"
#: Where products of scores and of their gradients find what a consumer keeps: both in shared memory, values
#: in registers, or keys as well.
IN_SHARED, VALUES, IN_REGISTERS = "shared", "values", "registers"
#: Where the gradients of queries are made: by a launch that keeps these, the same bits every run, or by the
#: blocks that keep keys, which add them up in memory, by the copy engine or by instructions of threads, or
#: send them to each other within a cluster that walks a head's keys, the same bits every run.
LAUNCH, BULK, ATOMICS, CLUSTER = "launch", "bulk", "atomics", "cluster"
#: Rows and columns of the tiles in which tensor cores leave sums, each lane four neighbouring numbers.
SUM_ROWS, SUM_COLUMNS = 16, 8
#: In which order blocks start: all tiles of a head one behind the other, those of all heads by weight,
#: or the heaviest of as many heads as have what passes by in L2 together.
BY_HEAD, HEAVIEST_FIRST, BY_SECTION = "by_head", "heaviest_first", "by_section"
#: When consumers await each other's gradients of scores: once they have stored theirs, or with other products
#: begun in between.
AT_ONCE, LATE = "at_once", "late"
#: What a mask is told by: of each row the keys that it sees, or of each key that is kept the rows that see
#: it.
OF_ROWS, OF_KEYS = "of_rows", "of_keys"
#: The tiles of keys that a block takes: one; or it stays, as many as run at once, and takes those that are a
#: multiple of their number apart, or whenever it is free the next that nobody has taken.
ONE, FIXED, FREE = "one", "fixed", "free"
#: In which order blocks add to a row's gradients in memory: whoever comes; or in one of keys, each handing on
#: what there is, so that the first to come stores it, the last one writes gradients, and every run makes the
#: same bits; or only the first and the last are those of keys, and between them whoever comes adds.
ANY_ORDER, HANDED_ON, ENDS_IN_ORDER = "any_order", "handed_on", "ends_in_order"
#: Where sums are handed on, whether rows pass by from the last down to the first, while keys are taken from
#: the first on, or up, while these are taken from the last on.
DOWN, UP = "down", "up"
#: Where query rows have a launch, which the one of keys follows: whether blocks of this second one begin once
#: the first has ended, or as soon as the last blocks of that leave multiprocessors idle. They read nothing of
#: it.
BEHIND, BESIDE = "behind", "beside"
#: Who makes gradients of a tile of rows whose sums end with a block's keys: its consumers, who wait for all
#: others' sums; or, once they are there, a warp of the producer that has nothing else to do.
#: And who has gradients of keys and values written where sums are handed on: movers of the `PRODUCER`, from
#: where sums are moved, behind those of a turn; or `CONSUMERS`, from where gradients of scores come next.
CONSUMERS, PRODUCER = "consumers", "producer"
#: The share of L2 that heads of a section fill, and the heads of a wide and a narrow one for each of those.
SECTION_SHARE, HEADS_OF_WIDE, HEADS_OF_NARROW = 0.6, 3, 0.5
#: Whether sections are of the heads that L2 holds, or of more. Where sums are handed on, a head's blocks
#: begin one behind the other: of more heads fewer do at once, and what they read is not far apart. Or of as
#: many each, so that none has few heads, all of whose tiles of keys are under way at once.
#: Or of half as many, which leaves room for what these write.
HELD, WIDE, EVEN, NARROW = "held", "wide", "even", "narrow"


@dataclass(frozen=True)
class Parameters(GradientVariant):
    """A kernel's parameters, what they imply and what of a card they need."""

    bc: int = param(128, 64, 192, doc="keys that a block keeps, whose gradients it makes")
    apart: bool = param(
        False, True, doc="of 64 keys one warpgroup makes dv and another dk, which takes fewer registers"
    )
    br: int = param(64, 128, 80, 96, 112, 48, 32, doc="query rows that pass by them")
    schedule: str = param(
        TOGETHER,
        WEIGHTS_FIRST,
        AHEAD,
        MADE_FIRST,
        doc="when weights are made and multiplied: beside their gradients, after, or a tile ahead",
    )
    parts: int = param(1, 2, doc="parts of them whose weights are made one behind the other")
    kept: str = param(
        IN_SHARED, VALUES, IN_REGISTERS, doc="what products read from registers: values, or keys as well"
    )
    q_stages: int = param(2, 1, 3, doc="tiles of queries in shared memory")
    dout_stages: int = param(2, 1, 3, doc="tiles of gradients of outputs in shared memory")
    dq_path: str = param(
        LAUNCH,
        BULK,
        ATOMICS,
        CLUSTER,
        doc="who makes queries' gradients: a launch, or blocks of keys by sums in memory",
    )
    cluster: int = param(
        1,
        2,
        4,
        8,
        doc="blocks that send each other queries' gradients, or get the same rows by one copy",
        implied=True,
    )
    sum_stages: int = param(2, 1, doc="tiles of these in shared memory, on their way", implied=True)
    heads: int = param(1, 2, 4, 8, doc="heads of keys that a cluster takes one after the other", implied=True)
    ds_stages: int = param(2, 1, doc="tiles of gradients of scores in shared memory, where blocks of keys do")
    rows: int = param(128, 64, 192, doc="query rows that a block of the other launch keeps")
    keys: int = param(64, 128, 80, 96, 112, 48, 32, doc="keys that pass by them")
    k_stages: int = param(2, 1, 3, doc="tiles of keys in shared memory")
    v_stages: int = param(2, 1, 3, doc="tiles of values in shared memory")
    order: str = param(
        BY_HEAD,
        HEAVIEST_FIRST,
        BY_SECTION,
        doc="blocks that start together: of a head, or the heaviest of all, or of heads that L2 holds",
    )
    meeting: str = param(
        AT_ONCE,
        LATE,
        doc="when consumers await each other's gradients of scores: at once, or with other products begun",
        implied=True,
    )
    ranges: str = param(
        OF_ROWS,
        OF_KEYS,
        doc="what masks are told by: the keys that each row sees, or the rows that see each key",
        implied=True,
    )
    min_blocks: int = param(1, 2, doc="blocks per SM, of those that keep keys", implied=True)
    turns: str = param(
        ONE,
        FIXED,
        FREE,
        doc="tiles of keys that a block takes: one, or each so-manieth, or the next whenever it is free",
        implied=True,
    )
    sums: str = param(
        ANY_ORDER,
        HANDED_ON,
        ENDS_IN_ORDER,
        doc="who adds to queries' gradients next: whoever comes, whose keys are next, or ends alone in order",
        implied=True,
    )
    walk: str = param(
        DOWN,
        UP,
        doc="rows that pass by, where sums are handed on: from the last one down, or up",
        implied=True,
    )
    far_keys: str = param(WALKED, LEFT_OUT, doc=FAR_KEYS, implied=True)
    last_turn: str = param(
        WHOLE,
        SHARED,
        doc="tiles of keys left for fewer blocks than stay: one takes each, or several share its rows",
        implied=True,
    )
    second: str = param(
        BEHIND,
        BESIDE,
        doc="when blocks of keys begin: behind the launch of query rows, or beside its last blocks",
        implied=True,
    )
    sections: str = param(
        HELD,
        WIDE,
        EVEN,
        NARROW,
        doc="heads of a section: as many as L2 holds, thrice or half that, or at most that, as many in each",
        implied=True,
    )
    finisher: str = param(
        CONSUMERS,
        PRODUCER,
        doc="who turns sums that end into gradients: consumers, or a warp of the producer behind them",
        implied=True,
    )
    writer: str = param(
        PRODUCER,
        CONSUMERS,
        doc="who has gradients of keys written, where sums are handed on: the producer, or consumers",
        implied=True,
    )

    @property
    def consumers(self) -> int:
        """The warpgroups of a block that compute beside the producer, where keys are kept."""
        return self.bc // GROUP_ROWS * (2 if self.apart else 1)

    @property
    def row_consumers(self) -> int:
        """The warpgroups that compute, where query rows are kept."""
        return self.rows // GROUP_ROWS

    def section_bytes(self, limits: DeviceLimits) -> int:
        """Returns the bytes that pass by the blocks of a section's heads."""
        share = {WIDE: HEADS_OF_WIDE, NARROW: HEADS_OF_NARROW}.get(self.sections, 1)
        return int(int(SECTION_SHARE * limits.l2_bytes) * share)

    @property
    def sums_queries(self) -> bool:
        """Whether blocks of keys make the gradients of queries, each what its own keys add to them."""
        return self.dq_path != LAUNCH

    @property
    def sums_in_cluster(self) -> bool:
        """Whether they add them up among themselves, and write them."""
        return self.dq_path == CLUSTER

    @property
    def shares_copies(self) -> bool:
        """Whether blocks of a cluster, with neighbouring keys, each copy a part of what passes by to all."""
        return self.cluster > 1 and not self.sums_in_cluster

    @property
    def takes_turns(self) -> bool:
        """Whether a block takes tiles of keys one after the other."""
        return self.sums_in_cluster or self.persistent

    @property
    def persistent(self) -> bool:
        """Whether blocks stay until all tiles of keys are taken."""
        return self.turns != ONE

    @property
    def counts_turns(self) -> bool:
        return self.turns == FREE

    @property
    def hands_on_sums(self) -> bool:
        """Whether blocks hand sums on, so that the first one stores them and the last writes gradients."""
        return self.sums != ANY_ORDER

    @property
    def adds_in_between(self) -> bool:
        """Whether those between the first and the last add to them as they come, and are counted."""
        return self.sums == ENDS_IN_ORDER

    @property
    def finishes_behind(self) -> bool:
        """Whether a warp of the producer makes gradients of sums that end with the block's keys."""
        return self.finisher == PRODUCER

    @property
    def writes_by_consumers(self) -> bool:
        """Whether consumers have gradients of keys and values written, where sums are handed on: from where
        gradients of scores come next, so that they wait for no mover at a turn's end."""
        return self.writer == CONSUMERS

    def starts_together(self, problem: Problem) -> bool:
        """Tells whether blocks that hand on sums start where they wait for each other: those of a head one
        behind the other, unless a causal mask has each begin a tile of rows before the next, or at rows that
        all of them begin with."""
        if self.sums != HANDED_ON:
            return False
        if self.walk == UP and not problem.causal:
            return True
        return self.order == BY_HEAD and not (self.walk == UP and self.br < self.bc)

    def shares_last_turn(self) -> bool:
        """Tells whether blocks that stay share the rows of tiles of keys that are left for fewer of them."""
        return self.last_turn == SHARED

    def handed_floats(self, problem: Problem) -> int:
        """Returns the floats that a consumer hands on: its sums of keys' and of values' gradients."""
        return GROUP_ROWS * (problem.head_dim + problem.head_dim_v)

    @property
    def begins_beside(self) -> bool:
        """Whether blocks of keys begin while the last ones that keep query rows are under way."""
        return self.second == BESIDE

    @property
    def reads_sums(self) -> bool:
        return not self.sums_in_cluster and not self.hands_on_sums

    def sums_of_block(self, problem: Problem) -> int:
        """Returns how many tiles of 16 rows by 8 columns a block of a cluster adds up and writes of each
        tile of rows that passes by; 0 where blocks cannot share it so that whoever makes some of it sends all
        that a warp has of 64 rows to one of them."""
        row_tiles, of_row = self.br // SUM_ROWS, problem.head_dim // SUM_COLUMNS
        if row_tiles % self.cluster == 0:
            return row_tiles // self.cluster * of_row
        _, columns = self.query_share(problem)
        shares = problem.head_dim // columns if columns and problem.head_dim % columns == 0 else 1
        if row_tiles * shares % self.cluster == 0 and problem.head_dim % (4 * SUM_COLUMNS) == 0:
            return row_tiles * of_row // self.cluster
        return 0

    @property
    def sums_across(self) -> bool:
        """Whether tensor cores leave queries' gradients the other way round, a row for each column of these:
        where the rows that pass by are no tiles of 64, as products have them along their left factor."""
        return self.sums_queries and self.br % GROUP_ROWS > 0

    @property
    def sums_by_tiles(self) -> bool:
        return self.hands_on_sums or self.sums_across

    def summed_columns(self, problem: Problem) -> int:
        if not self.sums_queries:
            return 0
        return -(-problem.head_dim // STEP) * STEP if self.sums_across else problem.head_dim

    def float32_products(self, problem: Problem) -> str:
        return "3xf16" if is_split(problem) else ""

    def query_share(self, problem: Problem) -> tuple[int, int]:
        """Returns what a consumer makes of the gradients of the rows that pass by: so many times 64 rows, and
        so many columns at once, which may be more than there are; nothing of either where they cannot be
        shared. Where it makes them across, so many times 64 columns, of so many rows."""
        tiles, columns = self.br // GROUP_ROWS, chunks(problem.head_dim)
        if self.sums_across:
            return (0, 0) if columns % self.consumers else (columns // self.consumers, self.br)
        if tiles % self.consumers == 0:
            return tiles // self.consumers, problem.head_dim
        if columns % self.consumers == 0:
            # Apart, there are registers for the columns of one chunk.
            return tiles, CHUNK if self.apart else columns // self.consumers * CHUNK
        return 0, 0

    def query_passes(self, problem: Problem) -> int:
        """Returns how often a consumer makes as many columns of them, one set behind the other."""
        if not self.apart or self.br // GROUP_ROWS % self.consumers == 0:
            return 1
        return max(1, chunks(problem.head_dim) // self.consumers)

    @property
    def weighed_rows(self) -> int:
        """The query rows whose weights are made at a time."""
        return self.br // self.parts

    @property
    def statistics_tile(self) -> int:
        return self.br

    def threads(self) -> int:
        return GROUP * (1 + self.consumers)

    def rows_per_block(self) -> int:
        return self.bc

    def heads_per_block(self) -> int:
        return self.heads

    def key_shares(self) -> int:
        return self.cluster

    def access_width(self, problem: Problem) -> int:
        """Returns as many elements as the copy engine's strides are multiples of: 16 bytes."""
        return CHUNK_BYTES // 8 // ITEM_BYTES[problem.dtype]

    @property
    def row_box(self) -> int:
        """The query rows that one copy brings: both launches tile them by whole ones."""
        return self.br if self.sums_queries else gcd(self.br, self.rows)

    @property
    def key_box(self) -> int:
        """The keys that one copy brings."""
        return self.bc if self.sums_queries else gcd(self.keys, self.bc)

    def tensor_maps(self, problem: Problem) -> tuple[TensorMap, ...]:
        """Returns the arrays as the copy engine reads them, for both launches alike; none where it takes
        tiles in parts, which lie in the workspace as they shall in shared memory."""
        if is_split(problem):
            return ()
        of_rows = (TensorMap(name, self.row_box) for name in ("q", "dout"))
        read = (*of_rows, *(TensorMap(name, self.key_box) for name in ("k", "v")))
        return (*read, *self._written_maps(problem))

    def _written_maps(self, problem: Problem) -> tuple[TensorMap, ...]:
        """Returns the gradients as the copy engine writes them: by what a warp makes, or all of a turn's
        keys. Rows of any other width than a chunk's lie in shared memory as they are."""
        if self.hands_on_sums:
            _, columns = self.query_share(problem)
            swizzle = CHUNK_BYTES if columns == CHUNK else UNSWIZZLED
            rows = STEP if self.writes_by_consumers else self.bc
            return (
                TensorMap("dq", STEP, columns, swizzle),
                TensorMap("dk", rows),
                TensorMap("dv", rows),
            )
        of_queries = ("dq",) if self.sends_queries(problem) else ()
        of_keys = ("dk", "dv") if self.sends_keys(problem) else ()
        return tuple(TensorMap(name, STEP) for name in (*of_queries, *of_keys))

    def sends_queries(self, problem: Problem) -> bool:
        """Returns whether the copy engine writes gradients that a launch of query rows makes."""
        return not self.sums_queries and not is_split(problem) and not problem.layout.is_packed

    def sends_keys(self, problem: Problem) -> bool:
        """Returns whether the copy engine writes gradients of keys and values, from shared memory whose
        use has ended by then."""
        if is_split(problem) or problem.layout.is_packed or self.sums_in_cluster:
            return False
        if self.hands_on_sums:
            return True
        d, dv = chunks(problem.head_dim), chunks(problem.head_dim_v)
        if not self.sums_queries:
            # Warpgroups apart take the tile that the other one has no need of.
            return d == dv or not self.apart
        # What a warp has for its share of queries' sums.
        tiles, columns = self.query_share(problem)
        room = ITEM_BYTES["f32"] * tiles * STEP * columns
        return self.dq_path == BULK and columns % STEP == 0 and STEP * CHUNK_BYTES * max(d, dv) <= room

    def kept_columns(self, problem: Problem) -> tuple[int, int]:
        """Returns the columns of keys and of values that consumers have in registers."""
        keys = problem.head_dim if self.kept == IN_REGISTERS else 0
        return keys, problem.head_dim_v if self.kept != IN_SHARED else 0
