"""The parameters of a tensor-core kernel that is fed by warps, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from ...columns import least
from ...handover.reach import FAR_KEYS, LEFT_OUT, WALKED
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scoring.values import keys_in_reach
from ...variant import Variant, param
from .layouts import (
    CHUNK_BYTES,
    KEY_COLUMNS,
    PADDED,
    SWIZZLED,
    TILE_COLUMNS,
    TILE_ROWS,
    Fetch,
    Tile,
    plan_fetch,
    tile_of,
    whole,
)

#: What float32 is split into for `Mma.parts`.
TF32, F16 = "tf32", "f16"
#: How partial results meet for `Mma.merge`.
BY_HALVES, AT_ONCE = "by_halves", "at_once"
#: From which architecture on instructions multiply e4m3 and make f16 of it.
WIDENS_FROM = 89
#: Architectures whose warps multiply e4m3, at twice the rate of f16: elsewhere compilers make f16 of it.
MULTIPLIES_EIGHT_BITS = (89, 120)
#: What products of e4m3 are made of, and those of 16 bits with keys and values of e4m3.
EIGHT_BITS, WIDENED_KEYS = "e4m3", "e4m3 keys"
#: Columns of a step of q k^T of e4m3.
E4M3_STEP = 32
#: Lanes that have sums of a row each.
PARTIAL_SUMS = 4


@dataclass(frozen=True)
class Parameters(Variant):
    """A kernel's parameters, what they imply and what of a card they need."""

    parts: str = param(
        TF32, F16, doc="float32: what each factor's two parts are, TF32 or f16 numbers", implied=True
    )
    pack_heads: bool = param(
        False, True, doc="query heads that share keys fill one tile's rows together", implied=True
    )
    br: int = param(128, 16, 32, 48, 64, 80, 96, 112, 160, 192, 208, 224, 256, doc="query rows per block")
    rows_per_warp: int = param(16, 32, doc="query rows that one warp owns")
    key_warps: int = param(
        1, 2, 4, 8, doc="warps with the same rows, which take tiles of keys in turns", implied=True
    )
    splits: int = param(
        1, 2, 4, 8, 16, doc="blocks of a cluster that share the keys of a tile of rows", implied=True
    )
    workspace_splits: int = param(
        1, 2, 4, 8, 16, 32, 64, doc="blocks of no cluster that do so by way of the workspace", implied=True
    )
    merge: str = param(
        BY_HALVES,
        AT_ONCE,
        doc="how results of shares of keys meet: by halves of the warps, or all at once",
        implied=True,
    )
    bc: int = param(64, 16, 32, 40, 48, 56, 72, 80, 96, 104, 112, 128, 208, doc="keys per tile")
    layout: str = param(PADDED, SWIZZLED, doc="how rows in shared memory avoid bank conflicts")
    d_steps: str = param(
        "exact", "whole", doc="q k^T's last step: of 8 columns where the head dim ends, or of 16"
    )
    q_in_registers: bool = param(True, False, doc="keep Q in registers for the whole block")
    q_whole: bool = param(
        False, True, doc="3xtf32: split Q for each tile of keys, which halves its shared memory", implied=True
    )
    stages: int = param(2, 1, 3, 4, doc="K/V tiles in shared memory; 1: K and V are fetched in turns")
    far_keys: str = param(WALKED, LEFT_OUT, doc=FAR_KEYS, implied=True)
    evict_first: bool = param(
        False, True, doc="what is copied leaves L2 before anything else does", implied=True
    )
    rescale: str = param(
        "lazy", "always", doc="when outputs follow the running maximum: once it grew, or always"
    )
    poly_exp: int = param(0, 2, 3, 4, 8, doc="one exponential in so many is a polynomial, 0 none")
    heads: int = param(
        1, 2, 4, 8, doc="heads that one block takes in turn, one's copies beside another's products"
    )
    min_blocks: int = param(1, 2, 3, 4, 6, 8, doc="blocks per SM the compiler must leave registers for")
    block_order: str = param(
        "by_head", "heaviest_first", doc="what neighbouring blocks share: a head, or a length"
    )

    # -- what the parameters imply -----------------------------------------------------------------------

    def threads(self) -> int:
        return self.warps * WARP

    def rows_per_block(self) -> int:
        return self.br

    def heads_per_block(self) -> int:
        return self.heads

    def packs_heads(self) -> bool:
        return self.pack_heads

    def blocks_per_tile(self) -> int:
        return self.splits

    def query_rows(self, problem: Problem) -> int:
        """Returns the query rows that fill tiles one by one: of a head, or of all that share keys."""
        return problem.seqlen_q * (problem.group if self.pack_heads else 1)

    def keys_walked(self, problem: Problem) -> int:
        """Returns the keys that a block walks at most: what one of its rows sees, and what later ones do."""
        rows = -(-self.br // problem.group) if self.pack_heads else self.br
        moved = least(rows, problem.seqlen_q) - 1
        return least(problem.seqlen_k, keys_in_reach(problem) + moved)

    def key_shares(self) -> int:
        return self.splits * self.workspace_splits * self.key_warps

    def splits_by_workspace(self) -> int:
        return self.workspace_splits

    def wanted_blocks(self, limits: DeviceLimits) -> int:
        return limits.num_sms * self.min_blocks

    def partial_floats(self, problem: Problem) -> int:
        """Returns the floats of a partial result: of each row outputs, sums of four lanes, the maximum."""
        return self.br * (self.partial_stride(problem) + PARTIAL_SUMS + 1)

    @property
    def warps(self) -> int:
        return self.br // self.rows_per_warp * self.key_warps

    @property
    def num_partial_results(self) -> int:
        """The partial results in shared memory at a time: other warps', and what other blocks want."""
        if self.merge == AT_ONCE:
            return self.key_warps
        return self.key_warps - 1 + (self.splits > 1)

    def partial_width(self, problem: Problem) -> int:
        """Returns the columns of a row that a thread puts together at once."""
        return min(4, self.access_width(problem))

    def own_columns(self, problem: Problem) -> int:
        """Returns the columns of outputs that a block of a cluster writes where others bring it theirs."""
        width = self.partial_width(problem)
        return -(-problem.head_dim_v // (width * self.splits)) * width

    def received_floats(self, problem: Problem) -> int:
        """Returns the floats that a block receives of its cluster: of each row its columns, the sum and the
        maximum."""
        if self.merge != AT_ONCE or self.splits == 1:
            return 0
        return self.splits * self.br * (self.own_columns(problem) + 2)

    @property
    def tiles_ahead(self) -> float:
        """The tiles of K and V under way to a block while it computes; half of one with a single stage."""
        return self.key_warps * max(self.stages - 1, 0.5)

    def partial_stride(self, problem: Problem) -> int:
        """Returns the floats between rows of a part: eight banks, as a warp stores eight columns of each of
        four rows; where it stores sixteen of each of two, sixteen."""
        columns = self.value_columns(problem)
        return columns + ((16 if self.widens(problem) else 8) - columns) % 32

    @property
    def row_tiles(self) -> int:
        return self.rows_per_warp // TILE_ROWS

    @property
    def key_tiles(self) -> int:
        return self.bc // TILE_COLUMNS

    def arithmetic(self, problem: Problem) -> str:
        """Returns what the products are made of: ``16-bit``, ``3xtf32``, ``3xf16``, ``tf32`` or ``e4m3``;
        ``e4m3 keys`` where these become f16 on the way."""
        if problem.kv_dtype:
            return WIDENED_KEYS
        if problem.dtype == "e4m3":
            return EIGHT_BITS
        if problem.dtype != "f32":
            return "16-bit"
        if self.parts == F16:
            return "3xf16"
        return "tf32" if problem.precision == "tf32" else "3xtf32"

    def float32_products(self, problem: Problem) -> str:
        return self.arithmetic(problem) if problem.dtype == "f32" else ""

    def oldest_arch(self, problem: Problem, arch: int) -> int:
        """Returns 90 where blocks form clusters. What is rendered for sm_80 and newer uses the deeper
        products and the types that came with it; for sm_89 and newer, of keys of eight bits, the
        instructions that widen and multiply these."""
        if self.blocks_per_tile() > 1:
            return 90
        if self.widens(problem) and arch >= WIDENS_FROM:
            return WIDENS_FROM
        return 80 if arch >= 80 else 75

    def in_pairs(self, problem: Problem) -> bool:
        """Tells whether an operand's registers hold two numbers each."""
        return self.arithmetic(problem) in ("16-bit", "3xf16", WIDENED_KEYS)

    def widens(self, problem: Problem) -> bool:
        """Tells whether values are of eight bits and become f16 in registers."""
        return problem.key_dtype == "e4m3"

    def access_width(self, problem: Problem) -> int:
        """Returns the widest access, up to 16 bytes, that divides the rows of all tensors."""
        return _widest_access(problem, problem.dtype)

    def key_access_width(self, problem: Problem) -> int:
        return _widest_access(problem, problem.key_dtype)

    def key_access_bytes(self, problem: Problem) -> int:
        """Returns the bytes of an access of keys or values."""
        return self.key_access_width(problem) * ITEM_BYTES[problem.key_dtype]

    def d_columns(self, problem: Problem) -> int:
        """Returns the columns of Q and K, filled up to whole steps of their product."""
        if self.arithmetic(problem) == EIGHT_BITS:
            return whole(problem.head_dim, E4M3_STEP)
        unit = 16 if self.d_steps == "whole" and problem.dtype != "f32" else TILE_COLUMNS
        return whole(problem.head_dim, KEY_COLUMNS if problem.kv_dtype else unit)

    def value_columns(self, problem: Problem) -> int:
        """Returns the columns of V and O, filled up to whole tiles of their product."""
        return whole(problem.head_dim_v, KEY_COLUMNS if self.widens(problem) else TILE_COLUMNS)

    def tiles(self, problem: Problem) -> dict[str, Tile]:
        """Returns the layouts of Q, K and V in shared memory."""
        d = self.d_columns(problem)
        dv = self.value_columns(problem)
        columns = {"q": (d, problem.dtype), "k": (d, problem.key_dtype), "v": (dv, problem.key_dtype)}
        return {
            name: tile_of(self.layout, n, CHUNK_BYTES // ITEM_BYTES[dtype])
            for name, (n, dtype) in columns.items()
        }

    def copy_plan(self, name: str, problem: Problem) -> Fetch:
        """Returns how the block copies its tile of Q, or those who share one a tile of K or of V."""
        of_queries = name == "q"
        return plan_fetch(
            self.br if of_queries else self.bc,
            problem.head_dim_v if name == "v" else problem.head_dim,
            self.access_width(problem) if of_queries else self.key_access_width(problem),
            self.threads() if of_queries else self.threads() // self.key_warps,
            split=not of_queries and self.arithmetic(problem) == "3xf16",
        )

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.tiles(problem)
        q_parts = 2 if self.arithmetic(problem) == "3xtf32" and not self.q_whole else 1
        of_queries = 0 if self.q_in_registers else q_parts * self.br * tiles["q"].stride
        of_keys = self.key_warps * self.stages * self.bc * (tiles["k"].stride + tiles["v"].stride)
        of_tiles = ITEM_BYTES[problem.dtype] * of_queries + ITEM_BYTES[problem.key_dtype] * of_keys
        if self.finds_units_together(problem):
            of_tiles += whole(2 * 4 * self.warps, CHUNK_BYTES)
        of_partial_results = self.num_partial_results * 4 * self.partial_floats(problem)
        return max(of_tiles, of_partial_results) + 4 * self.received_floats(problem)

    def finds_units_together(self, problem: Problem) -> bool:
        """Tells whether warps tell each other the largest elements of K and V that they met."""
        return self.arithmetic(problem) == "3xf16" and self.key_warps == 1

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns an estimate of the registers per thread with fewer than which a kernel spills. Where it
        may, the compiler takes some 50 more, for float32 some 30."""
        d, dv = whole(problem.head_dim, TILE_COLUMNS), whole(problem.head_dim_v, TILE_COLUMNS)
        outputs, scores = dv / 2, self.bc / 2
        queries = d * ITEM_BYTES[problem.dtype] / 8 if self.q_in_registers else 0.0
        if self.arithmetic(problem) == EIGHT_BITS and limits.arch not in MULTIPLIES_EIGHT_BITS:
            queries = 2 * queries + 12  # they and fragments of keys become f16
        match self.arithmetic(problem):
            case "16-bit" | "e4m3 keys" | "e4m3":
                needed = 14 + self.row_tiles * (1.16 * (outputs + scores) + 0.8 * queries)
            case "3xf16":  # scores in two sums, then in two parts; fitted to 264 kernels built for two cards
                needed = 34 + self.row_tiles * (1.4 * outputs + 2.85 * scores + 1.18 * queries - 13)
                needed += 9 if self.layout == SWIZZLED else 0
            case "3xtf32":  # scores in two sums, then in two parts; queries are split tile by tile
                needed = 40 + self.row_tiles * (12 + 0.9 * outputs + 2.4 * scores + 1.4 * queries)
            case _:
                needed = 8 + self.row_tiles * (12 + 1.05 * outputs + 1.9 * scores + 0.75 * queries)
        needed += 8 if self.layout == SWIZZLED else 0  # addresses
        needed += 8 if self.heads > 1 else 0
        needed += 8 if self.widens(problem) else 0  # scales, and fragments on their way to f16
        needed += 5 if problem.layout.is_paged else 0  # where its pages are
        needed += 6 if problem.layout.is_packed else 0  # where its sequence is, for rows computed again
        return floor(needed) + _scoring_registers(problem)


def _widest_access(problem: Problem, dtype: str) -> int:
    """The widest access, up to 16 bytes, that divides rows of that type."""
    dims = problem.head_dim | problem.head_dim_v
    return min(CHUNK_BYTES // ITEM_BYTES[dtype], dims & -dims)


def _scoring_registers(problem: Problem) -> int:
    """Those that masks and changes of scores hold: the warp's tiles, where a row is and what it reads."""
    scores = problem.scores
    if scores.is_plain:
        return 0
    return 4 if scores.predicate is None and scores.change is None else 12
