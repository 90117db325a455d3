"""What a `Ladder` kernel makes a card do, counted along ``templates/families/ladder/main.cu.jinja``."""

from __future__ import annotations

from functools import lru_cache

from ...limits import WARP, DeviceLimits
from ...problem import ITEM_BYTES, Problem
from ...shared_memory.banks import wavefronts
from ...work import BlockWork, Counts, Walk, count_work, walk_tiles
from .family import Ladder

#: A division: its reciprocal and the instructions that make it exact.
ALU_PER_DIVISION = 8.0
ALU_PER_COPY = 6.0


@count_work.register
def ladder_work(variant: Ladder, problem: Problem, limits: DeviceLimits) -> BlockWork:
    """Returns the work of a kernel of this family on a problem and a card."""
    d, warps = problem.head_dim, variant.br // WARP
    q_tile = _copy(variant, variant.br, d, transposed=variant.transposed and not variant.q_in_registers)
    once = _output(variant, d).of_warps(warps) + Counts(global_waits=2)
    per_tile = _copy(variant, variant.bc, d, transposed=False) * 2 + Counts(barriers=4, global_waits=2)
    if variant.hoisted:
        once += q_tile
    else:
        per_tile += q_tile
    walks = walk_tiles(problem, variant.br, variant.bc, warps, skips=False)
    if not variant.split_queries:
        # One block does the work of all query tiles of its head.
        q_tiles = sum(walk.blocks for walk in walks)
        once = once * q_tiles
        tiles = sum(walk.blocks * walk.tiles for walk in walks)
        walks = (Walk(1, tiles, tiles * warps, tiles * warps),)
    return BlockWork(
        once=once,
        per_tile=per_tile,
        per_warp_tile=_tile(variant, d),
        walks=walks,
        heads=problem.batch * problem.num_q_heads,
        warps=warps,
    )


def _tile(variant: Ladder, d: int) -> Counts:
    """One warp's 32 rows against one tile of keys."""
    bc, vec = variant.bc, variant.vec
    chunks = d / vec
    # Reads of K and of V are broadcasts: a wavefront each.
    counts = Counts(
        ffma=2 * bc * d,
        scattered=2 * bc * d,
        alu=bc * (vec + 4) + 2 * bc,
        accesses=2 * bc * chunks,
        wavefronts=2 * bc * chunks,
        delivered=2 * bc * d,
        exp=bc + 1,
        shared_waits=bc * (1 + chunks / 4) + bc / 4 + chunks,
    )
    # Scores: stored once per key, read once for the exponential.
    per_score = _strided_wavefronts(1 if variant.transposed else bc, 1)
    counts += Counts(accesses=2 * bc, wavefronts=2 * bc * per_score, delivered=bc)
    if not variant.q_in_registers:
        if variant.transposed:
            counts += Counts(accesses=bc * d, wavefronts=bc * d, delivered=bc * d)
        else:
            conflicted = bc * chunks * _strided_wavefronts(d, vec)
            counts += Counts(accesses=bc * chunks, wavefronts=conflicted, delivered=bc * d)
        # The weights go back to shared memory and are read for every chunk of the output.
        reads = bc * (1 + chunks)
        counts += Counts(accesses=reads, wavefronts=reads * per_score, delivered=reads)
    if not variant.stats_in_registers:
        counts += Counts(accesses=4 * bc, wavefronts=4 * bc, delivered=2 * bc, shared_waits=bc)
    if not variant.hoisted:
        counts += Counts(exp=2 * d, alu=d * (ALU_PER_DIVISION + 3))
    return counts + _output_pass(variant, d)


def _output_pass(variant: Ladder, d: int) -> Counts:
    """A read and a write of the warp's output rows in global memory, a row per lane: a line each."""
    accesses = 2 * d / variant.vec
    return Counts(
        accesses=accesses, wavefronts=accesses * WARP, l2_bytes=2 * WARP * d * 4, alu=d, global_waits=1
    )


def _output(variant: Ladder, d: int) -> Counts:
    zeroed = Counts(accesses=d / variant.vec, wavefronts=WARP * d / variant.vec, l2_bytes=WARP * d * 4)
    return zeroed + _output_pass(variant, d) if variant.hoisted else zeroed


def _copy(variant: Ladder, rows: int, d: int, *, transposed: bool) -> Counts:
    """A tile of rows, from global to shared memory."""
    bytes_moved = rows * d * ITEM_BYTES["f32"]
    instructions = rows * d / variant.vec / WARP
    if variant.coalesced:
        lines = max(1.0, variant.vec * 4 * WARP / 128)
        stores = lines
        traffic = 1.0
    else:
        # Neighbouring threads read a run of chunks each: a line per lane, kept by L1 only in part.
        lines = float(WARP)
        stores = float(_strided_wavefronts(max(1, rows * d // variant.br), variant.vec))
        traffic = 2.0
    if transposed and variant.coalesced:
        stores = variant.vec * _strided_wavefronts(variant.br * variant.vec, 1)
    return Counts(
        alu=ALU_PER_COPY * instructions,
        accesses=2 * instructions,
        wavefronts=instructions * (lines + stores),
        l2_bytes=traffic * bytes_moved,
    )


@lru_cache(maxsize=4096)
def _strided_wavefronts(stride: int, width: int) -> int:
    """A warp's access of ``width`` floats, neighbours ``stride`` floats apart."""
    return wavefronts([lane * stride for lane in range(WARP)], width)
