"""The fp32 family on CUDA cores: register micro-tiles fed from shared memory.

A block covers ``br`` query rows and walks the keys in tiles of ``bc``. Each warp owns whole rows, so softmax
needs only shuffles. A warp's 32 lanes stand ``lanes`` wide along keys (then along head dim) and 32 / lanes
tall along rows; a lane holds a micro-tile of S and one of O in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ..banks import wavefronts
from ..limits import WARP, DeviceLimits
from ..problem import Problem
from ..variant import Variant, param, rule

ROW, PADDED, SWIZZLED, TRANSPOSED = "row", "padded", "swizzled", "transposed"
FLOAT_BYTES = 4
#: Keys per step of the PV product: one 16-byte read of P.
KEY_STEP = 4
#: Micro-tile entries per lane beyond which S and O cannot both stay in registers.
MAX_MICRO_TILE = 128


@dataclass(frozen=True)
class Layout:
    """A 2-D tile in shared memory. ``stride`` is in floats, between rows or, transposed, between columns.

    ``swizzle`` is (period, divisor): chunk c of row r is stored as c XOR (r / divisor % period); transposed,
    chunks are of rows and the columns choose.
    """

    kind: str
    stride: int
    floats: int
    chunk: int = 4
    swizzle: tuple[int, int] = (1, 1)

    @property
    def transposed(self) -> bool:
        return self.kind == TRANSPOSED

    def offset(self, row: int, column: int) -> int:
        """Float offset of one element."""
        period, divisor = self.swizzle
        if self.transposed:
            return column * self.stride + (row ^ (column // divisor % period * self.chunk))
        return row * self.stride + (column ^ (row // divisor % period * self.chunk))


@dataclass(frozen=True)
class Copy:
    """How a block moves one K or V tile, ``unit`` floats per access.

    Row by row, ``across`` threads stand side by side along the head dim. Into a transposed tile each warp moves
    a patch of ``tall`` rows by ``wide`` columns, ``across`` warps side by side and ``rows_wide`` rows of warps.
    Threads from ``idle_from`` on have no share; a guard is needed where the last pass reaches past the tile.
    """

    unit: int
    across: int
    row_step: int
    row_passes: int
    x_step: int
    x_passes: int
    row_guard: bool
    x_guard: bool
    idle_from: int = 0
    wide: int = 0
    tall: int = 0
    rows_wide: int = 0


def plan_copy(tile: Layout, rows: int, columns: int, vec: int, threads: int) -> Copy:
    """The copy that touches whole 32-byte sectors of global memory and spreads over the banks.

    Into a transposed tile without padding, half sectors are the better trade.
    """
    if tile.transposed:
        wide = min(8 if tile.stride % 8 else 4, columns & -columns)
        unit, tall, workers, chunks = 1, WARP // wide, threads // WARP, columns // wide
    else:
        wide, unit, tall, workers, chunks = 0, vec, 1, threads, columns // vec
    across = min(chunks, workers)
    rows_wide = workers // across
    row_step, x_step = rows_wide * tall, across * (wide or unit)
    used = across * rows_wide
    return Copy(
        unit=unit,
        across=across,
        row_step=row_step,
        row_passes=-(-rows // row_step),
        x_step=x_step,
        x_passes=-(-columns // x_step),
        row_guard=rows % row_step != 0,
        x_guard=columns % x_step != 0,
        idle_from=used * (threads // workers) if used < workers else 0,
        wide=wide,
        tall=tall,
        rows_wide=rows_wide,
    )


def _padded(extent: int, residue: int, modulus: int) -> int:
    """The least stride >= extent that is congruent to residue."""
    return extent + (residue - extent) % modulus


def make_layout(kind: str, rows: int, columns: int, width: int, group: int) -> Layout:
    """The tile's layout when lanes read ``width`` floats of one row, neighbours ``group`` rows apart.

    Padding makes the stride an odd number of ``width``-float chunks, so that eight rows start in eight
    different 16-byte banks; the swizzle reaches the same without the memory where the row is long enough.
    A transposed tile is read ``group`` rows at a time.
    """
    if kind == TRANSPOSED:
        stride = _padded(rows, 4, 8)
        return Layout(kind, stride, columns * stride)
    if kind == PADDED:
        stride = _padded(columns, width, 2 * width)
        return Layout(kind, stride, rows * stride, width)
    if kind == SWIZZLED:
        chunks = columns // width
        period = min(8, chunks & -chunks)
        return Layout(kind, columns, rows * columns, width, (period, group))
    return Layout(kind, columns, rows * columns, width)


@lru_cache(maxsize=4096)
def make_p_layout(
    kind: str, rows: int, keys: int, lanes: int, row_group: int, col_group: int, roomy: bool
) -> Layout:
    """P's slab, which is written as well as read in every tile: the layout whose stores conflict least.

    A warp stores ``row_group`` rows of one key (transposed) or ``col_group`` keys of one row per lane. Only a
    ``roomy`` slab may be padded when transposed.
    """
    if kind == PADDED:
        # Rows `lanes` banks apart keep apart the stores of single keys too.
        stride = _padded(keys, max(lanes, KEY_STEP), WARP)
        return Layout(PADDED, stride, rows * stride, KEY_STEP)
    if kind != TRANSPOSED:
        return make_layout(kind, rows, keys, KEY_STEP, row_group)
    chunks = rows // row_group
    candidates = [
        Layout(kind, stride, keys * stride, row_group, (period, divisor))
        for stride in ((rows, _padded(rows, 4, 8)) if roomy else (_padded(rows, 0, 4),))
        for period in (1, 2, 4, 8)
        if chunks % period == 0
        # A step reads KEY_STEP keys at one chunk order.
        for divisor in ((1,) if period == 1 else (KEY_STEP, 2 * KEY_STEP))
    ]
    spots = [_lane_spot(lane, lanes) for lane in range(WARP)]

    def stores(tile: Layout) -> int:
        return wavefronts([tile.offset(y * row_group, x * col_group) for x, y in spots], row_group)

    return min(candidates, key=lambda tile: (stores(tile), tile.swizzle[0], tile.stride))


def _lane_spot(lane: int, lanes: int) -> tuple[int, int]:
    """A lane's place (x, y) in a warp that is ``lanes`` wide.

    Sixteen lanes wide, eight lanes are followed by the eight that read the same columns for the other row, so
    that both share a wavefront.
    """
    if lanes == 16:
        return lane % 8 + lane // 16 * 8, lane // 8 % 2
    return lane % lanes, lane // lanes


def _group(extent: int) -> int:
    """Widest vector (4, 2 or 1) that divides a micro-tile's extent."""
    return min(4, extent & -extent)


@dataclass(frozen=True)
class Simt(Variant):
    """fp32 attention by FFMA."""

    family: ClassVar[str] = "simt"
    template: ClassVar[str] = "simt.cu.jinja"

    br: int = param(64, 16, 32, 48, 80, 96, 112, 128, 160, 192, 256, doc="query rows per block")
    threads_per_block: int = param(128, 32, 64, 96, 160, 192, 224, 256, doc="threads per block")
    lanes: int = param(8, 4, 16, doc="lanes of a warp side by side along keys and head dim")
    bc: int = param(64, 16, 32, 40, 48, 56, 80, 96, 104, 128, doc="keys per tile")
    vec: int = param(4, 2, 1, doc="floats per global access and per shared access along the head dim")
    q_in_registers: bool = param(False, True, doc="keep Q in registers for the whole block")
    q_layout: str = param(SWIZZLED, PADDED, ROW, TRANSPOSED, doc="shared-memory layout of the Q tile")
    k_layout: str = param(PADDED, ROW, SWIZZLED, TRANSPOSED, doc="shared-memory layout of the K tile")
    v_layout: str = param(ROW, PADDED, SWIZZLED, TRANSPOSED, doc="shared-memory layout of the V tile")
    p_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the P tile")
    p_passes: int = param(1, 2, doc="parts in which P passes through its slab, which shrinks as much")
    stages: int = param(1, 2, doc="K/V tiles in flight: shared-memory buffers, or registers before sm_80")
    unroll: int = param(2, 1, 4, doc="unrolled steps of the two products")
    s_sweep: str = param("rows", "columns", doc="side of the S micro-tile that the innermost loop runs along")
    o_sweep: str = param("rows", "columns", doc="side of the O micro-tile that the innermost loop runs along")
    min_blocks: int = param(2, 1, 3, 4, doc="blocks per SM the compiler must leave registers for")
    block_order: str = param("by_head", "heaviest_first", doc="what neighbouring blocks share: a head, or a length")

    # -- the micro-tile that the parameters imply --------------------------------------------------

    def threads(self) -> int:
        return self.threads_per_block

    def rows_per_block(self) -> int:
        return self.br

    @property
    def warps(self) -> int:
        return self.threads_per_block // WARP

    @property
    def lane_rows(self) -> int:
        """Lanes of a warp along the rows."""
        return WARP // self.lanes

    @property
    def rows_per_warp(self) -> int:
        return self.br // self.warps

    @property
    def tm(self) -> int:
        """Rows per lane."""
        return self.rows_per_warp // self.lane_rows

    @property
    def tn(self) -> int:
        """Keys per lane."""
        return self.bc // self.lanes

    @property
    def row_group(self) -> int:
        """Adjacent rows a lane owns, so that a transposed tile is read in vectors."""
        return _group(self.tm) if TRANSPOSED in (self.q_layout, self.p_layout) else 1

    @property
    def col_group(self) -> int:
        """Adjacent keys a lane owns."""
        return _group(self.tn) if self.k_layout == TRANSPOSED else 1

    def o_vec(self, head_dim: int) -> int:
        """Adjacent O columns a lane owns: the widest that pads the head dim least."""
        if self.v_layout == TRANSPOSED:
            return 1
        widths = [w for w in (4, 2, 1) if w <= self.vec]
        return min(widths, key=lambda w: (self._o_columns(head_dim, w), -w))

    def _o_columns(self, head_dim: int, width: int) -> int:
        return -(-head_dim // (width * self.lanes)) * width * self.lanes

    def padded_dim(self, head_dim: int) -> int:
        """O columns a warp computes: head_dim rounded up to whole lane groups."""
        return self._o_columns(head_dim, self.o_vec(head_dim))

    def td(self, head_dim: int) -> int:
        """O columns per lane."""
        return self.padded_dim(head_dim) // self.lanes

    def layouts(self, head_dim: int) -> dict[str, Layout]:
        """The shared tiles by name; Q is absent when it lives in registers."""
        padded_dim = self.padded_dim(head_dim)
        q = make_layout(self.q_layout, self.br, head_dim, self.vec, self.row_group)
        if q.transposed:
            # Written once per block, so conflicts of its stores cost less than padding.
            q = Layout(TRANSPOSED, _padded(self.br, 0, 4), head_dim * _padded(self.br, 0, 4))
        tiles = {
            "q": q,
            "k": make_layout(self.k_layout, self.bc, head_dim, self.vec, self.col_group),
            "v": make_layout(self.v_layout, self.bc, padded_dim, self.o_vec(head_dim), 1),
            "p": make_p_layout(
                self.p_layout,
                self.rows_per_warp,
                self.bc // self.p_passes,
                self.lanes,
                self.row_group,
                self.col_group,
                roomy=self.p_passes == 1,
            ),
        }
        if self.q_in_registers:
            del tiles["q"]
        return tiles

    def smem_buffers(self, limits: DeviceLimits) -> int:
        """K/V tiles in shared memory; before sm_80 the second stage waits in registers."""
        return self.stages if limits.has_async_copy else 1

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.layouts(problem.head_dim)
        q_floats = tiles["q"].floats if "q" in tiles else 0
        kv_floats = (tiles["k"].floats + tiles["v"].floats) * self.smem_buffers(limits)
        return FLOAT_BYTES * (q_floats + kv_floats + self.warps * tiles["p"].floats)

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        d = problem.head_dim
        wide = max(self.tn, self.td(d))
        accumulators = self.tm * (self.tn + self.td(d) + 2)
        # A row-major tile delivers whole vectors along the head dim, a transposed one a column at a time.
        columnwise = self.k_layout == TRANSPOSED and TRANSPOSED in (self.q_layout, self.p_layout)
        fragments = self.tm + wide if columnwise else (wide + 1) * self.vec
        resident_q = self.tm * d if self.q_in_registers else 0
        staged = 0
        if self.stages == 2 and not limits.has_async_copy:
            staged = -(-self.bc * d // self.threads_per_block)
        return accumulators + fragments + resident_q + staged + 40

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        d = problem.head_dim
        return {
            "d": d,
            "tm": self.tm,
            "tn": self.tn,
            "td": self.td(d),
            "o_vec": self.o_vec(d),
            "padded_dim": self.padded_dim(d),
            "row_group": self.row_group,
            "col_group": self.col_group,
            "rows_per_warp": self.rows_per_warp,
            "lane_rows": self.lane_rows,
            "lane_bits": [bit for bit in (1, 2, 4, 16) if bit < self.lanes or bit == self.lanes == 16],
            "warps": self.warps,
            "tiles": self.layouts(d),
            "copies": {
                name: plan_copy(tile, self.bc if name != "q" else self.br, d, self.vec, self.threads_per_block)
                for name, tile in self.layouts(d).items()
                if name != "p"
            },
            "buffers": self.smem_buffers(limits),
            "async_copy": limits.has_async_copy,
            "register_stage": self.stages == 2 and not limits.has_async_copy,
            "key_step": KEY_STEP,
        }

    # -- rules ---------------------------------------------------------------------------------------

    @rule("threads", after="threads_per_block")
    def _rows_split_over_warps(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.br % self.warps:
            return f"br={self.br} rows do not split over {self.warps} warps"
        return None

    @rule("divisibility", after="lanes")
    def _rows_split_over_lanes(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.rows_per_warp % self.lane_rows:
            return f"{self.rows_per_warp} rows per warp do not split over {self.lane_rows} lanes"
        return None

    @rule("short sequence", after="lanes")
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _wasted("br", self.br, problem.seqlen_q, least=16)

    @rule("divisibility", after="bc")
    def _keys_split_over_lanes(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bc % self.lanes:
            return f"bc={self.bc} keys do not split over {self.lanes} lanes"
        return None

    @rule("short sequence", after="bc")
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _wasted("bc", self.bc, problem.seqlen_k, least=16)

    @rule("micro-tile", after="bc")
    def _scores_feed_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _intensity("S", self.tm, self.tn, 1.6)

    @rule("divisibility", after="vec")
    def _vector_divides_head_dim(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.head_dim % self.vec:
            return f"vec={self.vec} does not divide head dim {problem.head_dim}"
        return None

    @rule("registers", after="q_in_registers")
    def _q_fits_in_registers(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_in_registers and self.tm * problem.head_dim > MAX_MICRO_TILE:
            held = self.tm * problem.head_dim
            return f"{self.tm} rows of Q take {held} registers per thread, {MAX_MICRO_TILE} at most"
        return None

    @rule("layout", after="q_layout")
    def _q_layout_serves(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_in_registers:
            return None if self.q_layout == SWIZZLED else f"q_layout={self.q_layout} of a Q held in registers"
        return self._layout_serves("q", self.q_layout, self.br, problem.head_dim, self.vec)

    @rule("layout", after="k_layout")
    def _k_layout_serves(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._layout_serves("k", self.k_layout, self.bc, problem.head_dim, self.vec)

    @rule("layout", after="v_layout")
    def _v_layout_serves(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.v_layout in (PADDED, SWIZZLED):
            return (
                f"v_layout={self.v_layout}: a row of V is read along the head dim, free of conflicts as it is"
            )
        return None

    @rule("micro-tile", after="v_layout")
    def _output_feeds_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _intensity("O", self.tm, self.td(problem.head_dim), min(1.6, problem.head_dim / 20))

    @rule("layout", after="p_layout")
    def _p_layout_serves(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return self._layout_serves("p", self.p_layout, self.rows_per_warp, self.bc, KEY_STEP)

    @rule("divisibility", after="p_passes")
    def _passes_split_the_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tn % (self.p_passes * self.col_group) or self.bc % (self.p_passes * KEY_STEP):
            return f"{self.tn} keys per lane in groups of {self.col_group} do not split over {self.p_passes} passes"
        return None

    @rule("bank conflicts", after="p_passes")
    def _reads_are_conflict_free(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for name, ways in self.read_conflicts(problem.head_dim).items():
            if ways > 1:
                return f"each read of {name.upper()} takes {ways} times its least wavefronts, 1 allowed"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.smem_bytes(problem, limits)
        if needed > limits.smem_per_block:
            return f"needs {needed} bytes, {limits.sm} allows {limits.smem_per_block}"
        return None

    @rule("stages", after="stages")
    def _second_stage_is_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.stages == 2 and problem.seqlen_k <= self.bc:
            return f"{problem.seqlen_k} keys fill one tile of {self.bc}, a second stage would stay empty"
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.registers(problem, limits)
        share = limits.registers_per_sm // (self.threads_per_block * self.min_blocks) // 8 * 8
        allowed = min(limits.max_registers_per_thread, share)
        if needed > allowed:
            return (
                f"about {needed} per thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads_per_block} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _blocks_are_resident(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        resident = limits.blocks_per_sm(self.threads_per_block, 0, smem)
        if self.min_blocks > resident:
            return (
                f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {resident}"
            )
        warps = self.min_blocks * self.warps
        if warps < 4:
            return f"{warps} warps per SM promised, its 4 schedulers need 4"
        return None

    @rule("block order", after="block_order")
    def _blocks_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.block_order == "heaviest_first" and not problem.causal:
            return "block_order=heaviest_first: without a causal mask all blocks are equally long"
        return None

    def _layout_serves(self, name: str, kind: str, rows: int, columns: int, width: int) -> str | None:
        if kind in (ROW, TRANSPOSED):
            return None
        if kind == SWIZZLED and (columns // width) % 2:
            return f"{name}_layout=swizzled: {columns // width} chunks per row have no power of two to XOR"
        return None

    def read_conflicts(self, head_dim: int) -> dict[str, float]:
        """Wavefronts of each operand's fragment read over the least possible, by operand."""
        tiles = self.layouts(head_dim)
        q_ways = 1.0
        if "q" in tiles:
            q_ways = _conflict(tiles["q"], self._row, self.vec, self.row_group, self.lanes)
        return {
            "q": q_ways,
            "k": _conflict(tiles["k"], self._column, self.vec, self.col_group, self.lanes),
            "p": _conflict(tiles["p"], self._row, KEY_STEP, self.row_group, self.lanes),
        }

    def _row(self, lane: int) -> int:
        return _lane_spot(lane, self.lanes)[1] * self.row_group

    def _column(self, lane: int) -> int:
        return _lane_spot(lane, self.lanes)[0] * self.col_group


def _conflict(tile: Layout, row_of: Callable[[int], int], width: int, group: int, lanes: int) -> float:
    """Wavefronts of one fragment read relative to a read without conflicts."""
    rows = tuple(row_of(lane) for lane in range(WARP))
    return _conflict_of_rows(tile, rows, group if tile.transposed else width)


@lru_cache(maxsize=4096)
def _conflict_of_rows(tile: Layout, rows: tuple[int, ...], width: int) -> float:
    words = len(set(rows)) * width
    least = max(1, -(-words // WARP))
    return wavefronts([tile.offset(row, 0) for row in rows], width) / least


def _wasted(name: str, tile: int, length: int, least: int) -> str | None:
    """Why tiles of that size waste a sequence of that length: over a third of what they cover is padding."""
    covered = -(-length // tile) * tile
    if tile > least and covered > 1.5 * max(length, least):
        return (
            f"{name}={tile} covers {covered} for a length of {length}, at most 1.5 times as much is worth it"
        )
    return None


def _intensity(name: str, rows: int, columns: int, least: float) -> str | None:
    """Why a micro-tile starves the FFMA pipe: a step reads rows + columns floats for rows · columns FFMAs."""
    if rows * columns > MAX_MICRO_TILE:
        return (
            f"{rows}x{columns} of {name} per thread take {rows * columns} registers, {MAX_MICRO_TILE} at most"
        )
    fed = rows * columns / (rows + columns)
    if fed < least:
        return f"a {rows}x{columns} tile of {name} feeds {fed:.2f} FFMAs per shared float, {least:.2f} needed"
    return None
