"""What a Hopper kernel keeps in shared memory: tiles in swizzled chunks, and barriers."""

from __future__ import annotations

from math import gcd

from ...launch import TensorMap
from ...limits import DeviceLimits
from ...problem import ITEM_BYTES, Problem
from .parameters import GROUP_ROWS, Parameters, is_split
from .ramps import ramp_columns

#: Bytes of a row of a chunk of shared memory, swizzled whole, and its columns of 16 bits.
CHUNK_BYTES, CHUNK = 128, 64
#: Where chunks must start, and so what shared memory is measured in.
ALIGNMENT = 1024
BARRIER_BYTES = 8
#: Rows of shared memory within which swizzles are alike: shares of a tile are of whole ones.
SWIZZLED_ROWS = 8
#: Rows of float32 that share a unit: as many as are swizzled alike.
UNIT_ROWS = SWIZZLED_ROWS
#: Bytes that come with a tile which is split already: its unit, and what fills up the least that is copied.
UNIT_BYTES = 16
#: Tiles of values of eight bits that wait to be turned into f16, or transposed.
RAW_STAGES = 2
#: What the four lanes of a row read at once of float32.
PAIRS_BYTES = 32
#: The most tiles of arrays that come ahead of the scores that meet them: two hide how long memory takes.
MOST_AHEAD = 2


def chunks(columns: int) -> int:
    """Returns how many chunks hold rows of so many columns of 16 bits."""
    return -(-columns // CHUNK)


def qk_chunks(problem: Problem) -> int:
    """Returns how many chunks hold the rows of Q and of K as products read them."""
    if is_split(problem):
        return chunks(problem.head_dim)
    return -(-problem.head_dim * ITEM_BYTES[problem.dtype] // CHUNK_BYTES)


def raw_chunks(variant: Parameters, problem: Problem) -> tuple[int, int]:
    """Returns the chunks in which values of eight bits come, and the columns of each: whole ones, swizzled,
    where they are to be transposed; else as many as there are, not swizzled."""
    columns = CHUNK_BYTES if variant.has_small_weights() else min(problem.head_dim_v, CHUNK_BYTES)
    return -(-problem.head_dim_v // columns), columns


def value_bytes(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of a tile of values as products read it: of each key rows of 16 bits, or of each
    column its keys of eight."""
    if variant.has_small_weights():
        keys = variant.bc if variant.turns_values_in_front else CHUNK_BYTES * -(-variant.bc // CHUNK_BYTES)
        return keys * variant.value_columns(problem)
    return CHUNK_BYTES * variant.bc * chunks(problem.head_dim_v)


def bytes_of_storage(variant: Parameters, problem: Problem, ahead: int = 0) -> int:
    """Returns the bytes of a block's ``SharedStorage``: tiles of all stages, units, a ramp's columns and
    barriers, and so many tiles ``ahead`` of each array that scores meet."""
    # Of packed rows the consumers bring Q themselves.
    barriers = 0 if variant.pack_heads else variant.q_stages * (variant.consumers + 1)
    barriers += 2 * (variant.k_stages + variant.v_stages)
    if is_split(problem):
        d, dv = qk_chunks(problem), chunks(problem.head_dim_v)
        kv_chunks = variant.k_stages * d + variant.v_stages * dv
        units = ITEM_BYTES["f32"] * variant.bc // UNIT_ROWS
        tiles = 2 * CHUNK_BYTES * (variant.br * variant.q_stages * d + variant.bc * kv_chunks)
        if variant.splits_in_front:
            tiles += UNIT_BYTES * (variant.q_stages * variant.consumers + variant.k_stages + variant.v_stages)
        else:
            tiles += units * (variant.k_stages + variant.v_stages)
            barriers += variant.k_stages + variant.v_stages
    else:
        tiles = bytes_of_tiles(variant, problem)
    if problem.has_scales and not variant.turns_values_in_front:
        count, columns = raw_chunks(variant, problem)
        tiles += RAW_STAGES * count * columns * variant.bc
        barriers += 2 * RAW_STAGES
    tiles += 2 * variant.bc * ramp_columns(problem)
    if variant.bias_stages:
        row_bytes = variant.bc * sum(each.item_bytes for each in variant.met_arrays(problem))
        tiles += variant.bias_stages * variant.br * row_bytes
        barriers += 2 * variant.bias_stages
    tiles += ahead * variant.br * sum(pitch(variant, each.item_bytes) for each in variant.met_arrays(problem))
    return -(-(tiles + BARRIER_BYTES * barriers) // ALIGNMENT) * ALIGNMENT


def bytes_of_tiles(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of the tiles of all stages where types are not split: of Q, with outputs in its place
    unless they are apart or put together from parts; of weights that pass by there; of K and V."""
    d, dv = qk_chunks(problem), chunks(problem.head_dim_v)
    outputs = dv if variant.writes_rows(problem) else 0
    row_chunks = variant.q_stages * d + dv if variant.o_apart else variant.q_stages * max(d, outputs)
    row_chunks += chunks(variant.bc) if variant.p_in_shared else 0
    rows = CHUNK_BYTES * (variant.br * row_chunks + variant.bc * variant.k_stages * d)
    return rows + variant.v_stages * value_bytes(variant, problem)


def pitch(variant: Parameters, item_bytes: int) -> int:
    """Returns the bytes from row to row of a tile of such an array: rows of whole chunks are swizzled, others
    so far apart that what is read at once is in different banks."""
    row = variant.bc * item_bytes
    if row % CHUNK_BYTES == 0:
        return row
    return row + (32 if item_bytes == 4 else 16 if row % 32 == 0 else 0)


def tiles_ahead(variant: Parameters, problem: Problem, limits: DeviceLimits) -> int:
    """Returns how many tiles of such arrays come ahead, as far as there is room that nothing else needs."""
    if variant.bias_stages or not variant.met_arrays(problem):
        return 0
    room = limits.smem_per_sm // variant.min_blocks - limits.smem_reserved_per_block
    room = min(room, limits.smem_per_block)
    fitting = (n for n in range(MOST_AHEAD, 0, -1) if bytes_of_storage(variant, problem, n) <= room)
    return next(fitting, 0)


def piece(variant: Parameters, problem: Problem) -> int:
    """Returns how many keys are copied together: a block's share of a tile, or what of it is of one page."""
    return gcd(variant.bc // variant.cluster, problem.page_size)


def pieces(variant: Parameters, problem: Problem) -> int:
    """Returns in how many pieces a block's share of a tile is copied: several where it may be of several
    pages."""
    return variant.bc // variant.cluster // piece(variant, problem)


def tensor_maps(variant: Parameters, problem: Problem) -> tuple[TensorMap, ...]:
    """Returns the arrays as the copy engine moves them, a box of a tile at a time; none where tiles lie in
    memory as products read them."""
    if variant.splits_in_front:
        return ()
    columns = CHUNK_BYTES // ITEM_BYTES[problem.dtype]
    share = piece(variant, problem)
    values = TensorMap("v", share, columns if is_split(problem) else CHUNK)
    if problem.has_scales:
        swizzle = CHUNK_BYTES if variant.has_small_weights() else 16
        values = TensorMap("v", share, raw_chunks(variant, problem)[1], swizzle=swizzle)
    keys = TensorMap("k", share, columns)
    factors = (keys,) if variant.turns_values_in_front else (keys, values)
    if not variant.pack_heads:  # whose rows lie apart
        factors = (TensorMap("q", GROUP_ROWS, columns), *factors)
    # Of float32, packed heads and split keys each thread writes what it has.
    by_threads = is_split(problem) or variant.pack_heads or not variant.writes_rows(problem)
    outputs = () if by_threads else (TensorMap("o", GROUP_ROWS),)
    return (*factors, *outputs, *maps_of_arrays(variant, problem))


def maps_of_arrays(variant: Parameters, problem: Problem) -> tuple[TensorMap, ...]:
    """Returns the arrays that scores meet as the copy engine brings them to stages: chunks of a tile."""
    if not variant.bias_stages:
        return ()
    arrays = ((each, staged_chunk(variant, each.item_bytes)) for each in variant.met_arrays(problem))
    rows = variant.br // variant.bias_heads
    return tuple(TensorMap(each.name, rows, chunk // each.item_bytes, chunk) for each, chunk in arrays)


def staged_chunk(variant: Parameters, item_bytes: int) -> int:
    """Returns the bytes of a row of a chunk of such an array: the widest power of two that its tiles are
    whole multiples of; of float32 as many as four lanes read at once."""
    row = variant.bc * item_bytes
    return min(row & -row, PAIRS_BYTES if item_bytes == 4 else CHUNK_BYTES)


def partial_bytes(variant: Parameters, problem: Problem) -> int:
    """Returns the bytes of what a block's keys make of its rows: of each outputs, a sum by four lanes, a
    maximum."""
    return 4 * variant.partial_floats(problem)
