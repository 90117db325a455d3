"""Maps of arrays for the copy engine, as the driver writes them, and those that are kept."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from .driver import _check, _driver
from .facts import _ITEM_BYTES, TensorMap

_MOST_MAPS = 1024  # that a launch keeps
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
#: Where the rows of a map end of which a sequence has fewer, which is told for each box: beyond any sequence.
#: As many steps of so many bytes come round to the same address, of 64 bits.
_MAP_ROWS_END, _MAP_ROUND_BYTES = 2**30, 2**34
#: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion, the latter two by bytes.
_MAP_TYPES = {"float8_e4m3fn": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_INVALID_VALUE = 1  # CUresult


class _Maps(NamedTuple):
    """The kernel's second argument: maps of the arrays, one after the other, in host memory."""

    memory: "ctypes.Array[ctypes.c_char]"
    address: int


class _KeptMaps(dict[tuple[int, ...], _Maps]):
    """The maps of a launch by the addresses of all arrays of a call, and each map by that of its own array:
    calls put arrays together anew more often than memory is handed out that was never seen."""

    def __init__(self) -> None:
        super().__init__()
        self.single: dict[tuple[int, ...], bytes] = {}

    def make(self, addresses: tuple[int, ...], number: int) -> "_NewMaps":
        """Returns maps of so many arrays that are yet to be put in, kept for calls of these addresses."""
        if len(self) >= _MOST_MAPS:
            self.clear()
        if len(self.single) >= _MOST_MAPS:
            self.single.clear()
        memory = ctypes.create_string_buffer(_MAP_BYTES * number + _MAP_ALIGNMENT)
        first = ctypes.addressof(memory) + -ctypes.addressof(memory) % _MAP_ALIGNMENT
        return _NewMaps(self, addresses, _Maps(memory, first))


class _NewMaps(NamedTuple):
    """Maps of a call's arrays, into which one is put after the other."""

    kept: _KeptMaps
    addresses: tuple[int, ...]
    maps: _Maps

    def put(self, place: int, told: tuple[int, ...], encode: "Callable[..., None]", *described: Any) -> None:
        """Puts the map of an array there of which calls tell that, mostly its address alone; `encode` writes
        it of what describes it, if it was never written."""
        at, known = self.maps.address + _MAP_BYTES * place, self.kept.single.get((place, *told))
        if known is not None:
            ctypes.memmove(at, known, _MAP_BYTES)
            return
        encode(at, *described)
        self.kept.single[place, *told] = ctypes.string_at(at, _MAP_BYTES)

    def keep(self) -> _Maps:
        """Returns the maps, once all are there; the next call of these addresses finds them."""
        self.kept[self.addresses] = self.maps
        return self.maps


def _clipped(
    rows: int, heads: int, heads_apart: int, row: int, item_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same lengths and strides of arrays whose rows end where each box says."""
    # Rows twice, named by the sum of both: the first of both is chosen to end where a sequence does, so that
    # boxes are clipped there. The sum is too large by the rows of the whole map, and the last dimension goes
    # back by those, all the way round: what a map begins with must be memory.
    lengths = (_MAP_ROWS_END, heads, rows + 1, _MAP_ROWS_END + 1)
    return lengths, (_MAP_ROUND_BYTES // item_bytes - row, row, heads_apart, row)


def _encode_map(
    at: int, of: TensorMap, dtype: str, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Writes a map of an array of such an address there. `sizes` begin with its columns, `strides` are those
    of the other dimensions in elements, the outermost first."""
    # Of a length of 1 the stride is never used, but must be a possible one.
    steps = zip(sizes[1:], reversed(strides), strict=True)
    stride_bytes = [_ITEM_BYTES[dtype] * step if length > 1 else 16 for length, step in steps]
    _encode(at, of, _MAP_TYPES[dtype], address, sizes, stride_bytes)


def _encode(
    at: int, of: TensorMap, code: int, address: int, sizes: tuple[int, ...], stride_bytes: list[int]
) -> None:
    """Has the driver write a map of elements of that type there."""
    rank = len(sizes)
    status = _driver().cuTensorMapEncodeTiled(
        at,
        code,
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*stride_bytes),
        (ctypes.c_uint32 * rank)(of.columns, of.rows, *[1] * (rank - 2)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _SWIZZLES[of.swizzle],
        _PROMOTIONS[of.l2_promotion],
        0,  # zeros outside of the array
    )
    if status == _INVALID_VALUE:
        array = "out" if of.array == "o" else of.array
        raise ValueError(
            f"{array} has (batch, heads, seqlen) {sizes[:0:-1]} by {stride_bytes[::-1]} bytes, of which "
            f"the driver makes no map for the copy engine: pass {array}.contiguous() (torch) or a copy"
        )
    _check(status, "making a map for the copy engine")
