"""What a `Simt` kernel makes a card do, counted along ``templates/families/simt/main.cu.jinja``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from ...handover.reach import reaches_of_heads, work_in_front
from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...scored_tiles.change import scaled_change
from ...scored_tiles.seen import partial_share
from ...shared_memory.banks import wavefronts
from ...shared_memory.tiles import KEY_STEP, TRANSPOSED, Copy, TileLayout, lane_spot, plan_copy
from ...work import BlockWork, Counts, Walk, count_work, heads_alike, shared_walks, walk_tiles
from ..scoring_work import mask_counts, pair_counts
from .family import Simt

#: Integer instructions around one step of a product: addresses, loop.
ALU_PER_STEP = 2.0
#: Issue slots around one copied chunk: addresses and bounds, which no FFMA of the warp's own accompanies.
#: Fitted to times of an H200; the other cards' are assumed to be like it.
ALU_PER_COPY = 11.0


@dataclass(frozen=True)
class _Access:
    """A warp's accesses to shared memory: how many, the wavefronts and the words per lane of each."""

    instructions: float
    wavefronts_each: int
    width: int

    @property
    def wavefronts(self) -> float:
        return self.instructions * self.wavefronts_each

    @property
    def words(self) -> float:
        return self.instructions * self.width


@count_work.register
def simt_work(variant: Simt, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    d, dv, bc = problem.head_dim, problem.head_dim_v, variant.bc
    tm, tn, td = variant.tm, variant.tn, variant.td(dv)
    steps_s, steps_o = d / variant.vec, bc / KEY_STEP
    fragments = _fragments(variant, problem)
    shuffles = tm * log2(variant.lanes)
    accesses = fragments.values()
    # Neighbouring rows that one vector brings, by product.
    rows_s = variant.row_group if variant.q_layout == TRANSPOSED and not variant.q_in_registers else 1
    rows_o = variant.row_group if variant.p_layout == TRANSPOSED else 1
    compute = Counts(
        ffma=tm * tn * d + tm * td * bc,
        scattered=tm * tn * d / rows_s + tm * td * bc / rows_o,
        # Zeroed scores, maximum, subtraction of it, sum; the maximum over lanes; the rescaled output.
        alu=4 * tm * tn + shuffles + 6 * tm + tm * td + ALU_PER_STEP * (steps_s + steps_o) / variant.unroll,
        exp=tm * (tn + 1),
        shuffles=shuffles,
        accesses=sum(a.instructions for a in accesses),
        wavefronts=sum(a.wavefronts for a in accesses) + shuffles,
        delivered=sum(a.words for name, a in fragments.items() if name != "p_store") + shuffles,
        # Within an unrolled body the compiler reads ahead; each body starts with a wait.
        shared_waits=(steps_s + steps_o) / variant.unroll + 2 * log2(variant.lanes) + 3 * variant.p_passes,
    )
    reaches = reaches_of_heads(problem) if variant.leaves_far_keys_out else ()
    walks = walk_tiles(problem, variant.br, bc, variant.warps, skips=True, reaches=reaches)
    if (splits := variant.workspace_splits) > 1:
        wanted = variant.wanted_blocks(limits) // heads_alike(problem) if problem.layout.is_packed else None
        walks = shared_walks(walks, splits, wanted=wanted)
    compute += _scoring(variant, problem, walks)
    tiles = variant.layouts(problem)
    copies = [_copy(variant, tiles[name], bc, width, limits) for name, width in (("k", d), ("v", dv))]
    barriers, waits = _pipeline(variant, problem, limits)
    # The two products stand there as often as they are unrolled; P's in parts, each of them.
    unrolled_s = steps_s if variant.q_in_registers else min(variant.unroll, steps_s)
    unrolled_o = min(variant.unroll * variant.p_passes, steps_o)
    products = tm * tn * variant.vec * unrolled_s + tm * td * KEY_STEP * unrolled_o
    moves = 4 * (copies[0].accesses + copies[1].accesses) / variant.warps
    per_tile = copies[0] + copies[1] + Counts(barriers=barriers, global_waits=waits)
    return BlockWork(
        once=_once(variant, problem, limits),
        per_tile=per_tile,
        per_warp_tile=compute,
        walks=walks,
        heads=heads_alike(problem),
        warps=variant.warps,
        heads_interleaved=variant.block_order == "heaviest_first",
        left_bytes=variant.left_bytes(problem),
        shares=variant.workspace_splits,
        loop_instructions=products + compute.alu + compute.exp + compute.shuffles + moves,
        **(work_in_front(problem) if reaches else {}),
    )


def _scoring(variant: Simt, problem: Problem, walks: tuple[Walk, ...]) -> Counts:
    """What one warp does for one tile that masks and changes of scores ask for."""
    blocks = sum(walk.blocks for walk in walks)
    tiles = sum(walk.blocks * walk.warp_tiles for walk in walks) / (blocks * variant.warps)
    tm, tn, bc = variant.tm, variant.tn, variant.bc
    partial = partial_share(problem, variant.br, bc)
    change = scaled_change(problem.scores.change) if problem.scores.change else None
    changed = pair_counts(
        problem,
        tm,
        tn,
        warp_rows=variant.lane_rows,
        partial=partial,
        change=change and change.in_names_of_pairs,
    )
    changed += Counts(ffma=tm * tn * (change is not None))  # into units of log2, by the factor
    return changed + mask_counts(problem, tm, tn, warp_rows=variant.rows_per_warp, bc=bc, tiles=tiles)


def _pipeline(variant: Simt, problem: Problem, limits: DeviceLimits) -> tuple[float, float]:
    """Block barriers per tile, and waits for global memory that no computation covers."""
    if variant.copies_by_themselves(problem, limits):
        return (1.0, 0.0) if variant.stages == 2 else (2.0, 0.5)
    return (2.0, 0.2) if variant.stages == 2 else (2.0, 2.0)


def _once(variant: Simt, problem: Problem, limits: DeviceLimits) -> Counts:
    """The Q tile, and the output with its division."""
    d, tm = problem.head_dim, variant.tm
    td = variant.td(problem.head_dim_v)
    q_bytes, o_bytes = (variant.br * x * ITEM_BYTES[problem.dtype] for x in (d, problem.head_dim_v))
    tiles = variant.layouts(problem)
    if "q" in tiles:
        load = _copy(variant, tiles["q"], variant.br, d, limits)
    else:
        accesses = tm * d / variant.vec
        load = Counts(
            accesses=accesses, wavefronts=accesses * variant.vec, l2_bytes=q_bytes, alu=tm * d
        ).of_warps(variant.warps)
    o_vec = variant.o_vec(problem.head_dim_v)
    stores = tm * td / o_vec
    shuffles = tm * log2(variant.lanes)
    write = Counts(
        alu=tm * td + shuffles + 20 + 4 * stores,
        exp=tm,
        shuffles=shuffles,
        accesses=stores,
        wavefronts=stores * o_vec + shuffles,
        shared_waits=log2(variant.lanes) + 1,
    ).of_warps(variant.warps)
    return load + write + Counts(l2_bytes=o_bytes, global_waits=2, barriers=1)


def _copy(variant: Simt, tile: TileLayout, rows: int, d: int, limits: DeviceLimits) -> Counts:
    """One tile from global to shared memory."""
    plan = plan_copy(tile, rows, d, variant.vec, variant.threads_per_block)
    instructions = variant.warps * plan.row_passes * plan.x_passes
    conflicts = _copy_wavefronts(tile, plan, variant.vec)
    # Whole lines of global memory where the rows are; a copy of four columns takes half sectors.
    lines = max(1.0, plan.unit * 4 * WARP / 128)
    return Counts(
        alu=ALU_PER_COPY * instructions,
        accesses=instructions * (1 if limits.has_async_copy else 2),
        wavefronts=instructions * (conflicts + lines),
        l2_bytes=rows * d * 4 * (2 if plan.wide == 4 else 1),
    )


@lru_cache(maxsize=65536)
def _copy_wavefronts(tile: TileLayout, plan: Copy, vec: int) -> int:
    """Wavefronts of one warp's store into the tile."""
    lanes = range(WARP)
    if plan.wide:
        return wavefronts([tile.offset(lane // plan.wide, lane % plan.wide) for lane in lanes], 1)
    spots = [(lane // plan.across, lane % plan.across * vec) for lane in lanes]
    return wavefronts([tile.offset(row, x) for row, x in spots], vec)


def _fragments(variant: Simt, problem: Problem) -> dict[str, _Access]:
    """One warp's accesses to shared memory for one K/V tile, by operand."""
    tiles, d = variant.layouts(problem), problem.head_dim
    lanes, bc = variant.lanes, variant.bc
    rows, keys = (variant.row_group, 1), (variant.col_group, 0)
    fragments = {
        "k": _fragment(tiles["k"], variant.tn, d, variant.vec, variant.col_group, lanes, keys),
        "p": _fragment(tiles["p"], variant.tm, bc, KEY_STEP, variant.row_group, lanes, rows),
        "v": _v_fragment(tiles["v"], variant, problem.head_dim_v),
        "p_store": _p_store(tiles["p"], variant),
    }
    if "q" in tiles:
        fragments["q"] = _fragment(tiles["q"], variant.tm, d, variant.vec, variant.row_group, lanes, rows)
    return fragments


def _fragment(
    tile: TileLayout, count: int, depth: int, width: int, group: int, lanes: int, along: tuple[int, int]
) -> _Access:
    """Reads of ``count`` rows of the tile per lane over all ``depth`` columns. Lanes are ``along[0]`` rows
    apart, counted down the warp's lanes (``along[1]`` = 1) or across them (0)."""
    width = group if tile.transposed else width
    instructions = depth * count / group if tile.transposed else count * depth / width
    return _Access(instructions, _row_wavefronts(tile, lanes, along, width), width)


@lru_cache(maxsize=65536)
def _row_wavefronts(tile: TileLayout, lanes: int, along: tuple[int, int], width: int) -> int:
    spacing, axis = along
    rows = [lane_spot(lane, lanes)[axis] * spacing for lane in range(WARP)]
    return wavefronts([tile.offset(row, 0) for row in rows], width)


def _v_fragment(tile: TileLayout, variant: Simt, dv: int) -> _Access:
    td, width = variant.td(dv), variant.o_vec(dv)
    if tile.transposed:
        instructions = td * variant.bc / KEY_STEP
        return _Access(instructions, _column_wavefronts(tile, variant.lanes, 1, KEY_STEP), KEY_STEP)
    instructions = variant.bc * td / width
    return _Access(instructions, _column_wavefronts(tile, variant.lanes, width, width), width)


@lru_cache(maxsize=65536)
def _column_wavefronts(tile: TileLayout, lanes: int, spacing: int, width: int) -> int:
    columns = [lane_spot(lane, lanes)[0] * spacing for lane in range(WARP)]
    return wavefronts([tile.offset(0, column) for column in columns], width)


def _p_store(tile: TileLayout, variant: Simt) -> _Access:
    rows, keys = variant.row_group, variant.col_group
    width = rows if tile.transposed else keys
    instructions = variant.tm * variant.tn / width
    return _Access(instructions, _p_wavefronts(tile, variant.lanes, rows, keys, width), width)


@lru_cache(maxsize=65536)
def _p_wavefronts(tile: TileLayout, lanes: int, row_group: int, col_group: int, width: int) -> int:
    spots = [lane_spot(lane, lanes) for lane in range(WARP)]
    return wavefronts([tile.offset(y * row_group, x * col_group) for x, y in spots], width)
