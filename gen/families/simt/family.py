"""The fp32 family on CUDA cores: register micro-tiles fed from shared memory.

A block covers ``br`` query rows and walks the keys in tiles of ``bc``. Each warp owns whole rows, so softmax
needs only shuffles. A warp's 32 lanes stand ``lanes`` wide along keys (then along head dim) and 32 / lanes
tall along rows; a lane holds a micro-tile of S and one of O in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...limits import KIB, WARP, DeviceLimits
from ...problem import Problem
from ...serves import IEEE_FLOAT32, Serves
from ...shared_memory.tiles import (
    KEY_STEP,
    PADDED,
    ROW,
    SWIZZLED,
    TRANSPOSED,
    TileLayout,
    lane_corners,
    make_layout,
    make_p_layout,
    plan_copy,
    read_conflict,
    vector_group,
    wasted,
)
from ...variant import Variant, param, rule

FLOAT_BYTES = 4
#: Micro-tile entries per lane beyond which S and O cannot both stay in registers.
MAX_MICRO_TILE = 128


@dataclass(frozen=True)
class Simt(Variant):
    """fp32 attention by FFMA."""

    family: ClassVar[str] = "simt"
    template: ClassVar[str] = "families/simt/main.cu.jinja"
    serves: ClassVar[Serves] = IEEE_FLOAT32

    br: int = param(128, 16, 32, 48, 64, 80, 96, 112, 160, 192, 256, doc="query rows per block")
    threads_per_block: int = param(128, 32, 64, 96, 160, 192, 224, 256, doc="threads per block")
    lanes: int = param(8, 4, 16, doc="lanes of a warp side by side along keys and head dim")
    bc: int = param(64, 8, 16, 32, 40, 48, 56, 80, 96, 104, 128, doc="keys per tile")
    vec: int = param(4, 2, 1, doc="floats per global access and per shared access along the head dim")
    q_in_registers: bool = param(False, True, doc="keep Q in registers for the whole block")
    q_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the Q tile")
    k_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the K tile")
    v_layout: str = param(ROW, PADDED, SWIZZLED, TRANSPOSED, doc="shared-memory layout of the V tile")
    p_layout: str = param(TRANSPOSED, PADDED, ROW, SWIZZLED, doc="shared-memory layout of the P tile")
    p_passes: int = param(1, 2, doc="parts in which P passes through its slab, which shrinks as much")
    stages: int = param(1, 2, doc="K/V tiles in flight: shared-memory buffers, or registers before sm_80")
    min_blocks: int = param(2, 1, 3, 4, 6, 8, doc="blocks per SM the compiler must leave registers for")
    block_order: str = param(
        "by_head", "heaviest_first", doc="what neighbouring blocks share: a head, or a length"
    )
    unroll: int = param(4, 2, doc="unrolled steps of the two products")
    sweep: str = param("rows", "columns", doc="side of a micro-tile that the innermost loop runs along")

    # -- the micro-tile that the parameters imply --------------------------------------------------

    def threads(self) -> int:
        return self.threads_per_block

    def rows_per_block(self) -> int:
        return self.br

    def access_width(self, problem: Problem) -> int:
        return self.vec

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
        """The query rows of a tile that each lane of a warp owns."""
        return self.rows_per_warp // self.lane_rows

    @property
    def tn(self) -> int:
        """The keys of a tile that each lane of a warp owns."""
        return self.bc // self.lanes

    @property
    def row_group(self) -> int:
        """Adjacent rows a lane owns, so that a transposed tile is read in vectors."""
        return vector_group(self.tm) if TRANSPOSED in (self.q_layout, self.p_layout) else 1

    @property
    def col_group(self) -> int:
        """Adjacent keys a lane owns."""
        return vector_group(self.tn) if self.k_layout == TRANSPOSED else 1

    def o_vec(self, head_dim: int) -> int:
        """Returns how many adjacent columns of O a lane owns: the widest that pads the head dim least."""
        if self.v_layout == TRANSPOSED:
            return 1
        widths = [w for w in (4, 2, 1) if w <= self.vec]
        return min(widths, key=lambda w: (self._o_columns(head_dim, w), -w))

    def _o_columns(self, head_dim: int, width: int) -> int:
        return -(-head_dim // (width * self.lanes)) * width * self.lanes

    def padded_dim(self, head_dim: int) -> int:
        """Returns how many columns of O a warp computes: head_dim rounded up to whole lane groups."""
        return self._o_columns(head_dim, self.o_vec(head_dim))

    def td(self, head_dim: int) -> int:
        """Returns how many columns of O a lane owns."""
        return self.padded_dim(head_dim) // self.lanes

    def layouts(self, head_dim: int) -> dict[str, TileLayout]:
        """Returns the layouts of the tiles in shared memory, by name; Q is absent when it lives in
        registers."""
        padded_dim = self.padded_dim(head_dim)
        tiles = {
            "q": make_layout(self.q_layout, self.br, head_dim, self.vec, self.row_group, written_once=True),
            "k": make_layout(self.k_layout, self.bc, head_dim, self.vec, self.col_group),
            "v": make_layout(self.v_layout, self.bc, padded_dim, self.vec, 1),
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
        """Returns how many K/V tiles shared memory holds; before sm_80 the second stage waits in
        registers."""
        return self.stages if limits.has_async_copy else 1

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        tiles = self.layouts(problem.head_dim)
        q_floats = tiles["q"].floats if "q" in tiles else 0
        kv_floats = (tiles["k"].floats + tiles["v"].floats) * self.smem_buffers(limits)
        statistics = -(-self.br // 4) * 4
        return FLOAT_BYTES * (q_floats + kv_floats + self.warps * tiles["p"].floats + statistics)

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
            "td": self.td(d),
            "o_vec": self.o_vec(d),
            "padded_dim": self.padded_dim(d),
            "row_group": self.row_group,
            "col_group": self.col_group,
            "lane_bits": [bit for bit in (1, 2, 4, 16) if bit < self.lanes or bit == self.lanes == 16],
            "warps": self.warps,
            "tiles": self.layouts(d),
            "copies": {
                name: plan_copy(
                    tile, self.bc if name != "q" else self.br, d, self.vec, self.threads_per_block
                )
                for name, tile in self.layouts(d).items()
                if name != "p"
            },
            "buffers": self.smem_buffers(limits),
            "async_copy": limits.has_async_copy,
            "register_stage": self.stages == 2 and not limits.has_async_copy,
            "key_step": KEY_STEP,
        }

    # -- limits: what cannot run -----------------------------------------------------------------------

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

    @rule("divisibility", after="bc")
    def _keys_split_over_lanes(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.bc % self.lanes:
            return f"bc={self.bc} keys do not split over {self.lanes} lanes"
        return None

    @rule("registers", after="bc")
    def _scores_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _overflow("S", self.tm, self.tn)

    @rule("divisibility", after="vec")
    def _vector_divides_head_dim(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if problem.head_dim % self.vec:
            return f"vec={self.vec} does not divide head dim {problem.head_dim}"
        return None

    @rule("registers", after="q_in_registers")
    def _q_fits_in_registers(self, problem: Problem, limits: DeviceLimits) -> str | None:
        held = self.tm * problem.head_dim
        if self.q_in_registers and held > MAX_MICRO_TILE:
            return f"{self.tm} rows of Q take {held} registers per thread, {MAX_MICRO_TILE} at most"
        return None

    @rule("layout", after="q_layout")
    def _q_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("q", self.q_layout, problem.head_dim, self.vec)

    @rule("layout", after="k_layout")
    def _k_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("k", self.k_layout, problem.head_dim, self.vec)

    @rule("layout", after="v_layout")
    def _v_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        d = problem.head_dim
        return _unswizzlable("v", self.v_layout, self.padded_dim(d), self.vec)

    @rule("registers", after="v_layout")
    def _output_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _overflow("O", self.tm, self.td(problem.head_dim))

    @rule("layout", after="p_layout")
    def _p_swizzles(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _unswizzlable("p", self.p_layout, self.bc, KEY_STEP)

    @rule("divisibility", after="p_passes")
    def _passes_split_the_keys(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.tn % (self.p_passes * self.col_group) or self.bc % (self.p_passes * KEY_STEP):
            return f"{self.tn} keys per lane by {self.col_group} do not split over {self.p_passes} passes"
        return None

    @rule("shared memory", after="stages")
    def _shared_memory_fits(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed = self.smem_bytes(problem, limits)
        if needed > limits.smem_per_block:
            return f"needs {needed} bytes, {limits.sm} allows {limits.smem_per_block}"
        return None

    @rule("registers", after="min_blocks")
    def _registers_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        needed, allowed = self.registers(problem, limits), self._registers_allowed(self.min_blocks, limits)
        if needed > allowed:
            return (
                f"about {needed} per thread, {allowed} allowed with "
                f"{self.min_blocks} blocks of {self.threads_per_block} threads per SM"
            )
        return None

    @rule("occupancy", after="min_blocks")
    def _promised_blocks_fit(self, problem: Problem, limits: DeviceLimits) -> str | None:
        smem = self.smem_bytes(problem, limits)
        room = limits.blocks_per_sm(self.threads_per_block, 0, smem)
        if self.min_blocks > room:
            return f"min_blocks={self.min_blocks}, but {smem} bytes of shared memory leave room for {room}"
        return None

    # -- advice: what runs, but never best ----------------------------------------------------------

    @rule("short sequence", after="lanes", advisory=True)
    def _rows_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return wasted("br", self.br, problem.seqlen_q)

    @rule("short sequence", after="bc", advisory=True)
    def _keys_are_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        longest = 8 * self.bc
        if self.bc % 16 and self.bc > 8 and problem.seqlen_k > longest:
            return f"bc={self.bc} fits odd lengths up to {longest}, this one is {problem.seqlen_k}"
        return wasted("bc", self.bc, problem.seqlen_k)

    @rule("micro-tile", after="bc", advisory=True)
    def _scores_feed_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _starved("S", self.tm, self.tn, _wanted_intensity(problem, limits))

    @rule("vector width", after="vec", advisory=True)
    def _vector_is_widest(self, problem: Problem, limits: DeviceLimits) -> str | None:
        widest = vector_group(problem.head_dim)
        if self.vec < widest:
            return f"vec={self.vec}, but {widest} divides head dim {problem.head_dim} too"
        return None

    @rule("layout", after="q_layout", advisory=True)
    def _q_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.q_in_registers and self.q_layout != TRANSPOSED:
            return f"q_layout={self.q_layout} of a Q that is held in registers"
        return _outdone("q", self.q_layout, self.tm)

    @rule("layout", after="v_layout", advisory=True)
    def _v_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.v_layout in (PADDED, SWIZZLED):
            return f"v_layout={self.v_layout}: V is read along its rows, free of conflicts as it is"
        if self.v_layout == TRANSPOSED:
            by_rows = replace(self, v_layout=ROW).padded_dim(problem.head_dim)
            if by_rows == problem.head_dim:
                return f"v_layout=transposed: the lanes divide head dim {by_rows} without it"
        return None

    @rule("micro-tile", after="v_layout", advisory=True)
    def _output_feeds_enough(self, problem: Problem, limits: DeviceLimits) -> str | None:
        # Short head dims give a lane few columns.
        d = problem.head_dim
        return _starved("O", self.tm, self.td(d), min(_wanted_intensity(problem, limits), d / 16))

    @rule("layout", after="p_layout", advisory=True)
    def _p_layout_is_best(self, problem: Problem, limits: DeviceLimits) -> str | None:
        return _outdone("p", self.p_layout, self.tm)

    @rule("bank conflicts", after="p_layout", advisory=True)
    def _reads_are_conflict_free(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for name, ways in self.read_conflicts(problem.head_dim).items():
            if ways > 1:
                return f"each read of {name.upper()} takes {ways:.0f} times its least wavefronts"
        return None

    @rule("layout", after="p_layout", advisory=True)
    def _padding_and_swizzle_serve(self, problem: Problem, limits: DeviceLimits) -> str | None:
        for name in ("k", "q", "p"):
            kind = getattr(self, f"{name}_layout")
            if kind in (PADDED, SWIZZLED) and not (name == "q" and self.q_in_registers):
                for simpler in (ROW, PADDED)[: 1 if kind == PADDED else 2]:
                    other = replace(self, **{f"{name}_layout": simpler})
                    if other.read_conflicts(problem.head_dim)[name] == 1:
                        return f"{name}_layout={kind}, but {simpler} is free of conflicts too"
        return None

    @rule("stages", after="stages", advisory=True)
    def _second_stage_is_used(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.stages == 2 and problem.seqlen_k <= self.bc:
            return f"{problem.seqlen_k} keys fill one tile of {self.bc}, a second stage would stay empty"
        return None

    @rule("shared memory", after="stages", advisory=True)
    def _second_pass_makes_room(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.p_passes == 1:
            return None
        whole = replace(self, p_passes=1).smem_bytes(problem, limits)
        halved = self.smem_bytes(problem, limits)
        room = [limits.blocks_per_sm(self.threads_per_block, 0, smem) for smem in (whole, halved)]
        if whole <= limits.smem_per_block and room[0] == room[1]:
            return f"p_passes=2 saves {whole - halved} bytes, but {room[1]} blocks fit either way"
        return None

    @rule("occupancy", after="min_blocks", advisory=True)
    def _blocks_hide_latency(self, problem: Problem, limits: DeviceLimits) -> str | None:
        room = limits.blocks_per_sm(self.threads_per_block, 0, self.smem_bytes(problem, limits))
        needed = self.registers(problem, limits)
        more = [
            blocks
            for blocks in self._choices("min_blocks")
            if self.min_blocks < blocks <= room and needed <= self._registers_allowed(blocks, limits)
        ]
        if more:
            return f"min_blocks={self.min_blocks}, but {max(more)} blocks fit"
        # Two warps per scheduler: one issues while the other waits. Small shared memories hold fewer.
        warps, wanted = self.min_blocks * self.warps, 8 if limits.smem_per_sm >= 128 * KIB else 4
        if warps < wanted:
            return f"{warps} warps per SM promised, {wanted} wanted to hide latencies"
        return None

    @rule("block order", after="block_order", advisory=True)
    def _blocks_differ(self, problem: Problem, limits: DeviceLimits) -> str | None:
        if self.block_order == "heaviest_first" and not problem.causal:
            return "block_order=heaviest_first: without a causal mask all blocks are equally long"
        return None

    def _registers_allowed(self, blocks: int, limits: DeviceLimits) -> int:
        """Registers per thread when so many blocks are resident: warps live in one of four partitions, which
        own a quarter of the registers each."""
        warps_per_partition = -(-blocks * self.warps // 4)
        share = limits.registers_per_sm // 4 // (warps_per_partition * WARP) // 8 * 8
        return min(limits.max_registers_per_thread, share)

    def read_conflicts(self, head_dim: int) -> dict[str, float]:
        """Returns the wavefronts of each operand's fragment read over the least possible, by operand."""
        tiles = self.layouts(head_dim)
        row_group, col_group = self.row_group, self.col_group
        keys, rows = lane_corners(self.lanes, col_group, row_group)

        def ways(name: str, at: tuple[int, ...], width: int, group: int) -> float:
            return read_conflict(tiles[name], at, group if tiles[name].transposed else width)

        conflicts = {"k": ways("k", keys, self.vec, col_group), "p": ways("p", rows, KEY_STEP, row_group)}
        if "q" in tiles:
            conflicts["q"] = ways("q", rows, self.vec, row_group)
        return conflicts


def _overflow(name: str, rows: int, columns: int) -> str | None:
    """Why a micro-tile cannot stay in registers."""
    held = rows * columns
    if held > MAX_MICRO_TILE:
        return f"{rows}x{columns} of {name} per thread take {held} registers, {MAX_MICRO_TILE} at most"
    return None


def _starved(name: str, rows: int, columns: int, least: float) -> str | None:
    """Why a micro-tile starves the FFMA pipe: a step reads rows + columns floats for rows · columns FFMAs."""
    fed = rows * columns / (rows + columns)
    if fed < least:
        return f"a {rows}x{columns} tile of {name} feeds {fed:.2f} FFMAs per shared float, {least:.2f} wanted"
    return None


def _wanted_intensity(problem: Problem, limits: DeviceLimits) -> float:
    """FFMAs per shared float worth asking for: two, but long rows leave a small memory with small tiles."""
    return min(2.0, limits.smem_per_block / (512 * problem.head_dim))


def _unswizzlable(name: str, kind: str, columns: int, width: int) -> str | None:
    chunks = columns // width
    if kind == SWIZZLED and chunks % 2:
        return f"{name}_layout=swizzled: the {chunks} chunks of a row have no power of two to XOR"
    return None


def _outdone(name: str, kind: str, tm: int) -> str | None:
    """Why another layout of Q or P is at least as good: whole vectors of rows need few fragment registers."""
    if kind != TRANSPOSED and tm % 4 == 0:
        return f"{name}_layout={kind}, but {tm} rows per lane are whole vectors of a transposed tile"
    return None
