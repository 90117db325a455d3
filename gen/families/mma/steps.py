"""How products are cut into steps, by which instructions, and what matrix loads bring for them."""

from __future__ import annotations

from dataclasses import dataclass

from ...limits import DeviceLimits
from ...problem import Problem
from .layouts import TILE_COLUMNS, widest
from .parameters import E4M3_STEP, EIGHT_BITS, F16, TF32, WIDENED_KEYS, Parameters


@dataclass(frozen=True)
class Steps:
    """Steps of q k^T along the head dim, of ``wide`` columns and then of eight, and those of p v along the
    keys of a tile, of sixteen and then of eight.

    ``half_step`` elements behind a wide step's first is its second half, ``q_fragments`` registers have a row
    tile of Q. Of weights ``operand_keys`` make an operand, and ``weighed_ahead`` of these come before the
    products. ``number`` is what q k^T multiplies, ``instructions`` are depths and types, ``plain`` and
    ``trans`` the matrices that loads bring at once, as they lie or transposed.
    """

    wide: int
    half_step: int
    wide_steps: int
    narrow_steps: int
    wide_keys: int
    narrow_keys: int
    q_fragments: int
    operand_keys: int
    weighed_ahead: int
    number: str
    instructions: tuple[tuple[int, str], ...]
    plain: frozenset[int]
    trans: frozenset[int]


def steps_of(p: Parameters, problem: Problem, limits: DeviceLimits) -> Steps:
    """Returns the steps of a kernel's products."""
    arithmetic = p.arithmetic(problem)
    if arithmetic == EIGHT_BITS:
        return _of_eight_bits(p, problem)
    if arithmetic == WIDENED_KEYS:
        return _of_widened_keys(p, problem, limits)
    return _of_one_type(p, problem, limits)


def _of_one_type(p: Parameters, problem: Problem, limits: DeviceLimits) -> Steps:
    """Of q, k and v of one type, 16 bits or float32."""
    half, in_pairs = problem.dtype != "f32", p.in_pairs(problem)
    d, value_tiles = p.d_columns(problem), p.value_columns(problem) // TILE_COLUMNS
    number = problem.dtype if half else F16 if p.arithmetic(problem) == "3xf16" else TF32
    wide_steps, narrow_steps = divmod(d, 16) if in_pairs else (d // 8, 0)
    wide_keys, narrow_keys = divmod(p.key_tiles, 2) if in_pairs else (0, 0)
    narrow_steps //= 8
    if in_pairs and not limits.has_async_copy:  # sm_75 multiplies eight deep
        wide_steps, narrow_steps = 0, d // 8
        wide_keys, narrow_keys = 0, p.key_tiles
    operand_keys = 16 if half and wide_keys else 8
    plain = {widest(p.key_tiles)} if narrow_steps else set()
    trans = {widest(value_tiles)} if narrow_keys and half else set()
    if wide_steps:
        plain |= {4 if p.key_tiles % 2 == 0 else 2}
    if not p.q_in_registers:
        plain |= {4} if wide_steps else set()
        plain |= {2} if narrow_steps else set()
    if wide_keys:
        trans |= {4} if value_tiles > 1 else set()
        trans |= {2} if value_tiles % 2 else set()
    if narrow_keys and not half:
        trans |= {2} if value_tiles > 1 else set()
        trans |= {1} if value_tiles % 2 else set()
    depths = [16] if in_pairs and (wide_steps or wide_keys) else []
    depths += [8] if not in_pairs or narrow_steps or narrow_keys else []
    return Steps(
        wide=16 if in_pairs else 8,
        half_step=8 if in_pairs else 4,
        wide_steps=wide_steps,
        narrow_steps=narrow_steps,
        wide_keys=wide_keys,
        narrow_keys=narrow_keys,
        q_fragments=d // 4 if in_pairs else d // 2,
        operand_keys=operand_keys,
        # float32 splits all weights before its products with V; 16-bit weights are made beside them.
        weighed_ahead=1 if half else -(-p.bc // operand_keys),
        number=number,
        instructions=tuple((depth, number) for depth in depths),
        plain=frozenset(plain),
        trans=frozenset(trans),
    )


def _of_widened_keys(p: Parameters, problem: Problem, limits: DeviceLimits) -> Steps:
    """Of 16-bit queries with keys and values of e4m3. A matrix load brings what makes a whole step, which
    sm_75 multiplies in two."""
    d, deep = p.d_columns(problem), limits.has_async_copy
    wide_keys, narrow_keys = divmod(p.key_tiles, 2)
    return Steps(
        wide=16,
        half_step=8,
        wide_steps=d // 16,
        narrow_steps=0,
        wide_keys=wide_keys,
        narrow_keys=narrow_keys,
        q_fragments=d // 4,
        operand_keys=16 if wide_keys else 8,
        weighed_ahead=1,
        number=F16,
        instructions=(((16, F16),) * deep + ((8, F16),) * (not deep or narrow_keys > 0)),
        plain=frozenset({widest(p.key_tiles)}),
        trans=_loads_of_values(p, problem),
    )


def _of_eight_bits(p: Parameters, problem: Problem) -> Steps:
    """Of q, k and v of e4m3: to q k^T four neighbours are what two of 16 bits are, and p v is that of widened
    values."""
    steps = p.d_columns(problem) // E4M3_STEP
    wide_keys, narrow_keys = divmod(p.key_tiles, 2)
    of_keys = {4 if p.key_tiles % 2 == 0 else 2}
    return Steps(
        wide=E4M3_STEP,
        half_step=E4M3_STEP // 2,
        wide_steps=steps,
        narrow_steps=0,
        wide_keys=wide_keys,
        narrow_keys=narrow_keys,
        q_fragments=4 * steps,
        operand_keys=16,
        weighed_ahead=1,
        number="e4m3",
        instructions=((E4M3_STEP, "e4m3"), (16, F16)) + ((8, F16),) * (narrow_keys > 0),
        plain=frozenset(of_keys if p.q_in_registers else of_keys | {4}),
        trans=_loads_of_values(p, problem),
    )


def _loads_of_values(p: Parameters, problem: Problem) -> frozenset[int]:
    """Matrices of pairs of columns, sixteen keys by thirty-two columns at once."""
    value_tiles = p.value_columns(problem) // TILE_COLUMNS
    wide_keys, narrow_keys = divmod(p.key_tiles, 2)
    loads: set[int] = set()
    for columns, keys in ((4, wide_keys), (2, narrow_keys)):
        loads |= {columns} if keys and value_tiles >= 4 else set()
        loads |= {columns // 2} if keys and value_tiles % 4 else set()
    return frozenset(loads)
