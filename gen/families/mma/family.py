"""The tensor-core family: mma.sync fed by ldmatrix and cp.async, for f16, bf16 and float32.

A block covers ``br`` query rows and walks the keys in tiles of ``bc``. Each warp owns ``rows_per_warp`` whole
rows, so that softmax stays within it, as fragments of the 16-row tiles that an mma takes. Scores are summed
in steps of the instruction's depth and outputs in columns of eight, so that any head dim pays for itself, not
for the next power of two.

float32 is multiplied as TF32 or as f16. The class ``3xtf32`` writes each factor as the sum of two TF32
numbers and keeps three of the four products, which loses 2^-22 (Markidis et al. 2018, "NVIDIA Tensor Core
Programmability, Performance & Precision"). The class ``3xf16`` does so with f16 numbers, which have as many
bits and multiply twice as fast, but reach from 2^-24 to 2^16 only: a power of two for each tensor, its unit,
which follows the largest element met so far, brings tiles into that range (Ootomo and Yokota 2022,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
performance", scale the small parts instead). Elements of at least 2^-14 of the largest keep 22 bits; what
smaller ones lose is up to 2^-37 of the largest. The class ``tf32`` rounds the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from ...limits import MEMORY_LATENCY_NS, WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...shared_memory.tiles import wasted
from ...variant import Variant, param, rule
from ..arithmetic import EXP2_CUBIC, TOP_EXPONENT, WEIGHT_EXPONENT
from .decoding import FEW_ROWS, decodes

#: Rows of an mma's left operand, and columns of its right one.
TILE_ROWS, TILE_COLUMNS = 16, 8
CHUNK_BYTES = 16
#: Warps per SM below which the tensor cores wait: two for each scheduler.
MIN_WARPS = 8
PADDED, SWIZZLED = "padded", "swizzled"
#: The template of what is multiplied, by `Mma.arithmetic`.
PRODUCTS = {
    "16-bit": "families/mma/products_16bit.cu.jinja",
    "3xf16": "families/mma/split_f32_f16.cu.jinja",
    "3xtf32": "families/mma/split_f32_tf32.cu.jinja",
    "tf32": "families/mma/split_f32_tf32.cu.jinja",
}
#: Steps of a TF32 product after which its accumulator, which cuts off what it cannot hold, starts afresh.
RESTART_STEPS = 8
RESTART_KEY_TILES = 4
#: What float32 is split into for `Mma.parts`.
TF32, F16 = "tf32", "f16"
#: Power of two in the units of 3xf16 to which an element may grow before a tensor's unit is found anew.
LIMIT_EXPONENT = 15
#: Head dim beyond which Q in two parts leaves no room for rows enough: one warp for each scheduler at 256.
WIDE_HEAD_DIM = 128
#: Blocks per SM, of those that share keys, beyond which more of them only make shares smaller.
ENOUGH_BLOCKS = 8
#: Keys per tile of a decoding block up to which its one warp per ring holds the scores.
DECODING_KEYS = 64


@dataclass(frozen=True)
class Tile:
    """Rows of ``stride`` elements in shared memory, whose 16-byte chunks a swizzle XORs with
    row / ``divisor`` % ``period``."""

    stride: int
    period: int = 1
    divisor: int = 1


@dataclass(frozen=True)
class Fetch:
    """How a block copies a tile: ``across`` threads side by side, ``row_step`` rows at a time."""

    across: int
    row_step: int
    row_passes: int
    x_step: int
    row_guard: bool
    idle_from: int


@dataclass(frozen=True)
class Mma(Variant):
    """Attention by mma.sync."""

    family: ClassVar[str] = "mma"

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

    def template_for(self, problem: Problem) -> str:
        if self.key_shares() > 1:
            return "families/mma/decode.cu.jinja"
        return f"families/mma/{'heads_in_turn' if self.heads > 1 else 'main'}.cu.jinja"

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
        """That fill tiles one after the other: of a head, or of all that share keys."""
        return problem.seqlen_q * (problem.group if self.pack_heads else 1)

    def key_shares(self) -> int:
        return self.splits * self.key_warps

    @property
    def warps(self) -> int:
        return self.br // self.rows_per_warp * self.key_warps

    @property
    def num_parts(self) -> int:
        """Of the result, in shared memory at a time: what other warps have, and what other blocks want."""
        return self.key_warps - 1 + (self.splits > 1)

    @property
    def tiles_ahead(self) -> float:
        """Of K and V under way to a block while it computes; of a single tile K or V."""
        return self.key_warps * max(self.stages - 1, 0.5)

    def part_stride(self, problem: Problem) -> int:
        """Floats between rows of a part: eight banks, as a warp stores eight columns of each of four rows."""
        columns = _whole(problem.head_dim_v, TILE_COLUMNS)
        return columns + (8 - columns) % 32

    @property
    def row_tiles(self) -> int:
        return self.rows_per_warp // TILE_ROWS

    @property
    def key_tiles(self) -> int:
        return self.bc // TILE_COLUMNS

    def arithmetic(self, problem: Problem) -> str:
        """What the products are made of: ``16-bit``, ``3xtf32``, ``3xf16`` or ``tf32``."""
        if problem.dtype != "f32":
            return "16-bit"
        if self.parts == F16:
            return "3xf16"
        return "tf32" if problem.precision == "tf32" else "3xtf32"

    def float32_products(self, problem: Problem) -> str:
        return self.arithmetic(problem) if problem.dtype == "f32" else ""

    def oldest_arch(self, arch: int) -> int:
        """Returns 90 where blocks form clusters. What is rendered for sm_80 and newer uses the deeper
        products and the types that came with it."""
        return 90 if self.blocks_per_tile() > 1 else 80 if arch >= 80 else 75

    def in_pairs(self, problem: Problem) -> bool:
        """Whether an operand's registers hold two numbers each."""
        return self.arithmetic(problem) in ("16-bit", "3xf16")

    def access_width(self, problem: Problem) -> int:
        """The widest access, up to 16 bytes, that divides the rows of all tensors."""
        dims = problem.head_dim | problem.head_dim_v
        return min(CHUNK_BYTES // ITEM_BYTES[problem.dtype], dims & -dims)

    def d_columns(self, problem: Problem) -> int:
        """Columns of Q and K in whole steps of their product."""
        whole = 16 if self.d_steps == "whole" and problem.dtype != "f32" else TILE_COLUMNS
        return _whole(problem.head_dim, whole)

    def tiles(self, problem: Problem) -> dict[str, Tile]:
        """The layouts of Q, K and V in shared memory."""
        d = self.d_columns(problem)
        dv = _whole(problem.head_dim_v, TILE_COLUMNS)
        chunk = CHUNK_BYTES // ITEM_BYTES[problem.dtype]
        return {name: _tile(self.layout, n, chunk) for name, n in (("q", d), ("k", d), ("v", dv))}

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.tiles(problem)
        q_parts = 2 if self.arithmetic(problem) == "3xtf32" and not self.q_whole else 1
        rows = {
            "q": 0 if self.q_in_registers else q_parts * self.br,
            "k": self.key_warps * self.stages * self.bc,
            "v": self.key_warps * self.stages * self.bc,
        }
        of_tiles = ITEM_BYTES[problem.dtype] * sum(rows[name] * tile.stride for name, tile in tiles.items())
        if self.finds_units_together(problem):
            of_tiles += _whole(2 * 4 * self.warps, CHUNK_BYTES)
        # A row's outputs, its sum by four lanes, its maximum.
        of_parts = self.num_parts * self.br * 4 * (self.part_stride(problem) + 4 + 1)
        return max(of_tiles, of_parts)

    def finds_units_together(self, problem: Problem) -> bool:
        """Whether warps tell each other the largest elements of K and V that they met."""
        return self.arithmetic(problem) == "3xf16" and self.key_warps == 1

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """With fewer a kernel spills; where it may, the compiler takes some 50 more, of float32 some 30."""
        d, dv = _whole(problem.head_dim, TILE_COLUMNS), _whole(problem.head_dim_v, TILE_COLUMNS)
        outputs, scores = dv / 2, self.bc / 2
        queries = d * ITEM_BYTES[problem.dtype] / 8 if self.q_in_registers else 0.0
        match self.arithmetic(problem):
            case "16-bit":
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
        return int(needed)

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        size = ITEM_BYTES[problem.dtype]
        chunk = CHUNK_BYTES // size
        d = self.d_columns(problem)
        value_tiles = _whole(problem.head_dim_v, TILE_COLUMNS) // TILE_COLUMNS
        tiles = self.tiles(problem)
        arithmetic = self.arithmetic(problem)
        half, in_pairs = problem.dtype != "f32", self.in_pairs(problem)
        wide_steps, narrow_steps = divmod(d, 16) if in_pairs else (d // 8, 0)
        wide_keys, narrow_keys = divmod(self.key_tiles, 2) if in_pairs else (0, 0)
        narrow_steps //= 8
        if in_pairs and not limits.has_async_copy:  # sm_75 multiplies eight deep
            wide_steps, narrow_steps = 0, d // 8
            wide_keys, narrow_keys = 0, self.key_tiles
        operand_keys = 16 if half and wide_keys else 8
        operands = -(-self.bc // operand_keys)
        # float32 splits all weights before its products with V; 16-bit weights are made beside them.
        weighed_ahead = 1 if half else operands
        at_once = _widest(self.key_tiles)
        plain = {at_once} if narrow_steps else set()
        trans = {_widest(value_tiles)} if narrow_keys and half else set()
        if wide_steps:
            plain |= {4 if self.key_tiles % 2 == 0 else 2}
        if not self.q_in_registers:
            plain |= {4} if wide_steps else set()
            plain |= {2} if narrow_steps else set()
        if wide_keys:
            trans |= {4} if value_tiles > 1 else set()
            trans |= {2} if value_tiles % 2 else set()
        if narrow_keys and not half:
            trans |= {2} if value_tiles > 1 else set()
            trans |= {1} if value_tiles % 2 else set()
        instructions = [16] if in_pairs and (wide_steps or wide_keys) else []
        instructions += [8] if not in_pairs or narrow_steps or narrow_keys else []
        number = F16 if arithmetic == "3xf16" else TF32
        # Of terms that are summed apart; a step of f16 is as deep as two of TF32.
        restart_after = {"3xtf32": 2 * RESTART_STEPS, "3xf16": RESTART_STEPS}
        restart_keys = {"3xtf32": RESTART_KEY_TILES, "3xf16": min(2 * RESTART_KEY_TILES, self.key_tiles)}
        return {
            "arithmetic": arithmetic,
            "number": problem.dtype if half else number,
            "instructions": instructions,
            "ldmatrix_counts": {"plain": plain, "trans": trans},
            "heads_per_block": self.heads,
            "row_tiles": self.row_tiles,
            "key_tiles": self.key_tiles,
            "value_tiles": value_tiles,
            "wide": 16 if in_pairs else 8,
            "wide_steps": wide_steps,
            "narrow_steps": narrow_steps,
            "wide_keys": wide_keys,
            "narrow_keys": narrow_keys,
            "q_fragments": d // 4 if in_pairs else d // 2,
            "chunk": chunk,
            "half_step": 8 if in_pairs else 4,
            "wide_rows": half and self.access_width(problem) == chunk,
            "operand_keys": operand_keys,
            "weighed_ahead": weighed_ahead,
            "restart_steps": RESTART_STEPS,
            "restart_keys": restart_keys.get(arithmetic, self.key_tiles),
            "restarts": arithmetic in restart_after and wide_steps > restart_after[arithmetic],
            # A few columns average nothing: what is left out must have no bias on either side.
            "split_k": "split_rounded" if problem.head_dim < 8 else "split",
            "d_columns": d,
            "padded_columns": self._padded_columns(problem),
            "strides": {name: tile.stride for name, tile in tiles.items()},
            "layouts": tiles,
            "plans": {
                name: _plan_fetch(
                    rows,
                    columns,
                    self.access_width(problem),
                    threads,
                    split=name != "q" and arithmetic == "3xf16",
                )
                for name, rows, columns, threads in (
                    ("q", self.br, problem.head_dim, self.threads()),
                    ("k", self.bc, problem.head_dim, self.threads() // self.key_warps),
                    ("v", self.bc, problem.head_dim_v, self.threads() // self.key_warps),
                )
            },
            "products": PRODUCTS[arithmetic],
            "q_in_terms": arithmetic == "3xtf32" and not (self.q_in_registers or self.q_whole),
            "finds_units_together": self.finds_units_together(problem),
            "num_parts": self.num_parts,
            "part_stride": self.part_stride(problem),
            "part_width": min(4, self.access_width(problem)),
            "async_copy": limits.has_async_copy,
            "poly": EXP2_CUBIC,
            "top_exponent": TOP_EXPONENT,
            "limit_exponent": LIMIT_EXPONENT,
            "weight_exponent": WEIGHT_EXPONENT if arithmetic == "3xf16" else 0,
        }

    def _padded_columns(self, problem: Problem) -> list[tuple[str, str, int, str]]:
        """Shared tiles whose rows end in columns that no copy fills: name, rows, columns, from where."""
        extra = self.d_columns(problem) - problem.head_dim
        tiles = [] if self.q_in_registers else [("q", "kBr", extra, "kD")]
        tiles += [("k", "kBc", extra, "kD"), ("v", "kBc", -problem.head_dim_v % TILE_COLUMNS, "kDv")]
        return [tile for tile in tiles if tile[2]]

    # -- limits: what cannot run -----------------------------------------------------------------------

    @rule("arithmetic", after="parts")
    def _parts_are_asked_for(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.dtype != "f32":
            return f"parts={self.parts}: {problem.dtype} is multiplied whole" if self.parts != TF32 else None
        asked = {"3xtf32": TF32, "tf32": TF32, "3xf16": F16}.get(problem.precision, self.parts)
        if self.parts != asked:
            return f"parts={self.parts}: precision {problem.precision} is asked for"
        return None

    @rule("arithmetic", after="parts")
    def _tensor_cores_serve(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.has_scales:
            return f"family mma multiplies f16, bf16 and f32, this problem is {problem.dtype}"
        number = self.parts if problem.dtype == "f32" else problem.dtype
        needed = 75 if number == F16 else 80
        if limits.arch < needed:
            return f"tensor cores multiply {number} from sm_{needed} on, this is {limits.sm}"
        if problem.precision == "ieee":
            return "family mma multiplies float32 as TF32 or f16, precision ieee is asked for"
        return None

    @rule("arithmetic", after="parts")
    def _parts_fill_chunks(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for dim in (problem.head_dim, problem.head_dim_v):
            if self.parts == F16 and dim % TILE_COLUMNS:
                return f"parts=f16: tiles are split by {TILE_COLUMNS} columns, no divisor of head dim {dim}"
        return None

    @rule("divisibility", after="rows_per_warp")
    def _rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.br % self.rows_per_warp:
            return f"br={self.br} rows do not split into warps of {self.rows_per_warp}"
        return None

    @rule("divisibility", after="key_warps")
    def _warps_share_rows(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.key_warps > 1 and self.br != self.rows_per_warp:
            more = f"br={self.br} rows are more than the {self.rows_per_warp} of a warp"
            return f"key_warps={self.key_warps}: {more}"
        return None

    @rule("clusters", after="splits")
    def _clusters_form(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits > limits.max_cluster:
            return f"splits={self.splits}: {limits.sm} forms clusters of {limits.max_cluster} blocks at most"
        return None

    @rule("layout", after="layout")
    def _rows_swizzle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.layout == SWIZZLED and (dim := _unswizzled(problem)):
            return f"layout=swizzled: a row of {dim} elements is not made of four 16-byte chunks each"
        return None

    @rule("copies", after="stages")
    def _stages_need_async_copy(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.stages > 1 and not limits.has_async_copy:
            return f"stages={self.stages}: {limits.sm} has no asynchronous copies to fill them"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.smem_bytes(problem, limits)
        if needed > limits.smem_per_block:
            return f"needs {needed} bytes, {limits.sm} allows {limits.smem_per_block}"
        return None

    @rule("copies", after="evict_first")
    def _copies_are_hinted(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.evict_first:
            return None
        if not limits.has_async_copy:
            return f"evict_first=True: {limits.sm} has no asynchronous copies to hint"
        access_bytes = self.access_width(problem) * ITEM_BYTES[problem.dtype]
        if access_bytes < CHUNK_BYTES:
            return f"evict_first=True: copies of {access_bytes} bytes take no hint, those of {CHUNK_BYTES} do"
        return None

    @rule("combination", after="poly_exp")
    def _options_of_half_precision(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.dtype == "f32" and self.poly_exp:
            return f"poly_exp={self.poly_exp} is good to 1e-4, which float32 is not content with"
        return None

    @rule("combination", after="q_whole")
    def _queries_have_parts(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_whole and (self.q_in_registers or self.arithmetic(problem) != "3xtf32"):
            where = "in registers" if self.q_in_registers else f"of class {self.arithmetic(problem)}"
            return f"q_whole=True: Q {where} is never kept in two parts"
        return None

    @rule("combination", after="heads")
    def _heads_follow_each_other(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and (self.stages == 1 or self.q_in_registers):
            return f"heads={self.heads}: the next head arrives in a second stage, and its Q in shared memory"
        return None

    @rule("combination", after="heads")
    def _heads_are_packed_or_in_turn(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and self.pack_heads:
            return f"heads={self.heads}: a block with heads side by side takes none in turn"
        if self.heads > 1 and (self.key_warps > 1 or self.splits > 1):
            shared = f"key_warps={self.key_warps} splits={self.splits}"
            return f"heads={self.heads}: keys that others have too ({shared}) are those of one head"
        return None

    @rule("combination", after="block_order")
    def _heads_are_neighbours(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and self.block_order != "by_head":
            return f"heads={self.heads} of a block are neighbours: block_order={self.block_order} is moot"
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = self.registers(problem, limits), self._registers_allowed(limits, self.min_blocks)
        if needed > allowed:
            return (
                f"about {needed} per thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads()} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        room = limits.blocks_per_sm(self.threads(), 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("parts", after="parts", advisory=True)
    def _parts_are_fast(self, problem: Problem, limits: DeviceLimits) -> str | None:
        in_chunks = problem.head_dim % TILE_COLUMNS == problem.head_dim_v % TILE_COLUMNS == 0
        if self.arithmetic(problem) == "3xtf32" and problem.precision == "auto" and in_chunks:
            return "parts=tf32: tensor cores multiply f16 twice as fast, and all warps share tiles in parts"
        return None

    @rule("packing", after="pack_heads", advisory=True)
    def _heads_share_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        together = problem.seqlen_q * problem.group
        if self.pack_heads and problem.group == 1:
            return f"pack_heads=True: {problem.num_q_heads} query heads have as many of keys"
        if self.pack_heads and problem.seqlen_q > FEW_ROWS:
            return f"pack_heads=True: {problem.seqlen_q} query rows fill tiles by themselves"
        if not self.pack_heads and problem.group > 1 and together <= FEW_ROWS:
            return f"pack_heads=False: {problem.group} heads of {problem.seqlen_q} query rows fit one tile"
        return None

    @rule("shares of keys", after="key_warps", advisory=True)
    def _warps_wait_for_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.key_warps > 1 and not decodes(problem):
            rows = problem.seqlen_q * problem.group
            there_are = f"{rows} query rows for {problem.seqlen_k} keys"
            return f"key_warps={self.key_warps}: {there_are} suffice for all warps"
        return None

    # The next three are from times of 480 variants on an H200: eight problems of one query row, bf16.

    @rule("decoding", after="splits", advisory=True)
    def _clusters_leave_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        half = self._blocks(problem) // 2
        if self._is_timed_decoding(problem) and self.splits == 16 and half >= 3 * limits.num_sms // 8:
            return (
                f"splits=16: never within 4 % of the best where 8 make {half} blocks on {limits.num_sms} SMs"
            )
        return None

    @rule("decoding", after="bc", advisory=True)
    def _tiles_are_small(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self._is_timed_decoding(problem) and self.bc > DECODING_KEYS:
            return (
                f"bc={self.bc}: most of more than {DECODING_KEYS} keys spill, others were 3 % slower at least"
            )
        return None

    @rule("decoding", after="layout", advisory=True)
    def _copies_swizzle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self._is_timed_decoding(problem) and self.layout == PADDED and not _unswizzled(problem):
            return "layout=padded: 4 to 16 % slower at best, 7 % where nothing else differs"
        return None

    @rule("shares of keys", after="splits", advisory=True)
    def _multiprocessors_idle(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.splits == 1:
            return None
        alone = self._blocks(problem) // self.splits
        enough = limits.num_sms * (ENOUGH_BLOCKS if decodes(problem) else 1)
        if alone >= limits.num_sms and not decodes(problem):
            return f"splits={self.splits}: {alone} blocks occupy {limits.num_sms} multiprocessors without"
        if self.splits * alone > enough:
            return f"splits={self.splits}: makes {self.splits * alone} blocks of {alone}, {enough} are enough"
        return None

    @rule("shares of keys", after="bc", advisory=True)
    def _keys_suffice_for_all(self, problem: Problem, limits: DeviceLimits) -> str | None:
        shares = self.key_shares()
        if shares > 1 and problem.seqlen_k < shares * self.bc:
            return f"bc={self.bc}: {problem.seqlen_k} keys are no tile for each of {shares} shares"
        return None

    @rule("short sequence", after="br", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, self.query_rows(problem))

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        longest = 8 * self.bc
        if self.bc % 16 and problem.seqlen_k > longest:
            return f"bc={self.bc} fits odd lengths up to {longest}, this one is {problem.seqlen_k}"
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("Q in parts", after="q_whole", advisory=True)
    def _queries_take_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_whole and problem.head_dim <= WIDE_HEAD_DIM:
            return f"q_whole=True: at a head dim of {problem.head_dim} there is room for Q in two parts"
        return None

    @rule("last step", after="d_steps", advisory=True)
    def _last_step_differs(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.d_steps == "whole" and (problem.dtype == "f32" or _whole(problem.head_dim, 8) % 16 == 0):
            return f"d_steps=whole: a head dim of {problem.head_dim} ends with a whole step"
        return None

    @rule("stages", after="stages", advisory=True)
    def _stages_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        tiles = -(-problem.seqlen_k // self.bc)
        if self.stages > max(2, tiles):
            return f"stages={self.stages}, but {problem.seqlen_k} keys are {tiles} tiles of {self.bc}"
        if self.stages == 1 and decodes(problem) and limits.has_async_copy:
            return "stages=1: nothing is under way from device memory while a tile is computed"
        return None

    @rule("copies", after="evict_first", advisory=True)
    def _keys_are_read_once(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if not self.evict_first:
            return None
        if not decodes(problem):
            return f"evict_first=True: {problem.seqlen_q} query rows take longer than their keys to be read"
        tiles = -(-self.query_rows(problem) // self.br) * (1 if self.pack_heads else problem.group)
        if tiles > 1:
            return f"evict_first=True: {tiles} tiles of query rows read the same keys, all but one from L2"
        return None

    @rule("rescaling", after="rescale", advisory=True)
    def _maximum_settles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.rescale == "always" and problem.seqlen_k > 4 * self.bc:
            return f"rescale=always: maxima seldom grow after {self.bc} of {problem.seqlen_k} keys"
        return None

    @rule("exponentials", after="poly_exp", advisory=True)
    def _exponentials_are_many(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.poly_exp and problem.head_dim + problem.head_dim_v > 128:
            return f"poly_exp={self.poly_exp}: with head dims of {problem.head_dim} the products take longer"
        if self.poly_exp and decodes(problem):
            return f"poly_exp={self.poly_exp}: {problem.seqlen_q} query rows wait for memory alone"
        return None

    @rule("short sequence", after="heads", advisory=True)
    def _heads_are_short(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.heads > 1 and problem.seqlen_k > 1024:
            return (
                f"heads={self.heads}: {problem.seqlen_k} keys hide the next head's first copies by themselves"
            )
        return None

    @rule("occupancy", after="min_blocks", advisory=True)
    def _blocks_hide_latency(self, problem: Problem, limits: DeviceLimits) -> str | None:
        room = limits.blocks_per_sm(self.threads(), 0, self.smem_bytes(problem, limits))
        needed = self.registers(problem, limits)
        more = [
            blocks
            for blocks in self._choices("min_blocks")
            if self.min_blocks < blocks <= room and needed <= self._registers_allowed(limits, blocks)
        ]
        if more:
            return f"min_blocks={self.min_blocks}, but {max(more)} blocks fit"
        if decodes(problem):
            return self._too_little_under_way(problem, limits)
        warps = self.min_blocks * self.warps
        if warps < MIN_WARPS:
            return f"{warps} warps per SM promised, {MIN_WARPS} wanted: two for each scheduler take turns"
        return None

    @rule("block order", after="block_order", advisory=True)
    def _blocks_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.block_order == "heaviest_first" and not problem.causal:
            return "block_order=heaviest_first: without a causal mask all blocks are equally long"
        return None

    def _is_timed_decoding(self, problem: Problem) -> bool:
        """Whether it is of the kind that was timed: one tile of 16 rows, of 16-bit numbers, many keys."""
        return self.br == TILE_ROWS and problem.dtype != "f32" and decodes(problem)

    def _too_little_under_way(self, problem: Problem, limits: DeviceLimits) -> str | None:
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES[problem.dtype]
        all_bytes = problem.batch * problem.num_kv_heads * problem.seqlen_k * row_bytes
        wanted = min(limits.dram_gbps * MEMORY_LATENCY_NS, all_bytes) // limits.num_sms
        blocks = self._blocks(problem)
        keys = min(self.tiles_ahead * self.bc, problem.seqlen_k / self.splits)
        under_way = int(min(self.min_blocks, blocks / limits.num_sms) * keys * row_bytes)
        if under_way < wanted:
            return f"{under_way} bytes per SM under way, {wanted} wanted for the bandwidth of device memory"
        return None

    def _blocks(self, problem: Problem) -> int:
        """Of a launch."""
        heads = problem.num_kv_heads if self.pack_heads else problem.num_q_heads
        return problem.batch * heads * -(-self.query_rows(problem) // self.br) * self.splits

    def _registers_allowed(self, limits: DeviceLimits, blocks: int) -> int:
        """Registers per thread with so many blocks resident: a warp lives in one of four partitions."""
        warps_per_partition = -(-blocks * self.warps // 4)
        share = limits.registers_per_sm // 4 // (warps_per_partition * WARP) // 8 * 8
        return min(limits.max_registers_per_thread, share)


def _unswizzled(problem: Problem) -> int:
    """The head dim whose rows no swizzle spreads over the banks, 0 if there is none."""
    chunk = CHUNK_BYTES // ITEM_BYTES[problem.dtype]
    dims = (problem.head_dim, problem.head_dim_v)
    return next((dim for dim in dims if _whole(dim, TILE_COLUMNS) // chunk % 4), 0)


def _whole(extent: int, unit: int) -> int:
    return -(-extent // unit) * unit


def _widest(count: int) -> int:
    """How many of ``count`` tiles to take at once: 4, 2 or 1."""
    return min(4, count & -count)


@cache
def _tile(layout: str, columns: int, chunk: int) -> Tile:
    """Eight rows from one column on start in eight different 16-byte banks: by an odd number of chunks per
    row, or by a swizzle."""
    chunks = columns // chunk
    if layout == SWIZZLED:
        period = min(8, chunks & -chunks)
        return Tile(columns, period, 8 // period)
    return Tile((chunks | 1) * chunk)


def _plan_fetch(rows: int, columns: int, width: int, threads: int, *, split: bool = False) -> Fetch:
    """The copy of fewest passes whose neighbouring threads read at least 64 bytes, or the row. Of a tile that
    they split eight share a row where that can be: sixteen threads then write to all banks."""
    chunks = columns // width
    candidates = [
        n for n in range(1, chunks + 1) if chunks % n == 0 and n <= threads and (n >= 4 or n == chunks)
    ]
    # Of wide rows the addresses would take too many registers.
    if split and 8 in candidates and columns <= WIDE_HEAD_DIM:
        candidates = [8]

    def passes(across: int) -> int:
        return -(-rows // (threads // across)) * (chunks // across)

    across = min(candidates or [1], key=lambda n: (passes(n), -n))
    row_step = threads // across
    used = across * row_step
    return Fetch(
        across=across,
        row_step=row_step,
        row_passes=-(-rows // row_step),
        x_step=across * width,
        row_guard=rows % row_step != 0,
        idle_from=used if used < threads else 0,
    )
