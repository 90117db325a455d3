"""What a module says of its kernels: what each was tuned for, how it is launched, and what it needs."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

#: What array libraries call a problem's type, and what an element of it takes. Outputs of eight bits are
#: wider.
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_OUTPUT_DTYPES = {"float8_e4m3fn": "bfloat16"}
#: The end of what the copy engine can step by, in bytes.
_STRIDE_END_BYTES = 2**40


class TensorMap(NamedTuple):
    """An array as the copy engine moves it, a box of rows and columns at a time."""

    array: str
    rows: int
    columns: int
    swizzle: int
    """Bytes; 16 are none."""
    l2_promotion: int
    """Bytes that a miss brings to L2."""


# Annotations here are no strings: dataclasses would look those up in a module that may not be among the
# loaded ones.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel: a function of its source, what it is given, and how many blocks there are."""

    symbol: str
    """The function's name in the source."""
    threads: int
    """Per block."""
    smem_bytes: int
    """Dynamic shared memory per block."""
    arguments: tuple[tuple[str, str], ...]
    """The fields of its first parameter, a struct: names, and formats as Python's struct has them."""
    rows_per_block: int | None = None
    """Query rows; None: all of a head's."""
    heads_per_block: int = 1
    """Query heads, counted through all batches."""
    pack_heads: bool = False
    """Whether rows are those of all query heads that share keys."""
    splits: int = 1
    """Blocks of a cluster that share the keys of a tile of rows."""
    cluster: int = 1
    """Neighbouring blocks that share what they copy."""
    heads_per_cluster: int = 1
    """Query heads that share keys, each with a block of a cluster."""
    max_blocks: int | None = None
    """What the card it was tuned on runs at once, where each block takes several tiles of rows."""
    maps: tuple[TensorMap, ...] = ()
    """Its second parameter, where it has one."""

    @property
    def blocks_per_cluster(self) -> int:
        return self.cluster * self.heads_per_cluster * self.splits

    def tiles(self, batch: int, heads: int, kv_heads: int, seqlen_q: int) -> int:
        """Shares of the work, of which a block takes one, or several where there are more than
        `max_blocks`."""
        if self.pack_heads and heads:
            heads, seqlen_q = kv_heads, seqlen_q * (heads // kv_heads)
        if self.heads_per_cluster > 1 and heads:  # the last of a head of keys may have blocks without rows
            clusters = -(-(heads // kv_heads) // self.heads_per_cluster)
            heads = clusters * self.heads_per_cluster * kv_heads
        groups = -(-heads * batch // self.heads_per_block) * self.splits
        if self.rows_per_block is None:
            return groups if seqlen_q else 0
        # Clusters are whole: the last may have blocks without rows.
        return -(-seqlen_q // (self.rows_per_block * self.cluster)) * self.cluster * groups

    def blocks(self, tiles: int) -> int:
        """Of the grid; none where there are no rows."""
        return tiles if self.max_blocks is None else min(tiles, self.max_blocks)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tuned:
    """A kernel of `KERNELS`: what it was tuned for, on which card, how fast it was there, how it is
    launched."""

    name: str
    problem: dict[str, Any]
    variant: dict[str, Any]
    device: dict[str, Any]
    measurement: dict[str, Any]
    vector: int
    """Elements per memory access: what pointers and strides must be multiples of."""
    launches: tuple[Launch, ...]
    """One after the other."""
    tolerance: float
    """Per head, of norm(o - reference) / norm(reference) against float64."""
    oldest_arch: int | None = None
    """Compute capability, times ten, of the first cards with the instructions it uses."""
    only_arch: int | None = None
    """The same of the only ones."""
    arch_suffix: str = ""
    """What compilers add to the name of such an architecture."""
    source: str = dataclasses.field(repr=False)
    cubins: dict[bool, str] = dataclasses.field(repr=False, default_factory=dict)
    """Without and with the causal mask, what was compiled for the card it was tuned on, packed as text."""

    @functools.cached_property
    def dtype(self) -> str:
        """Of q, k and v."""
        return _DTYPE_NAMES[self.problem["dtype"]]

    @property
    def output_dtype(self) -> str:
        return _OUTPUT_DTYPES.get(self.dtype, self.dtype)

    @property
    def head_dim(self) -> int:
        """Of q and k."""
        return int(self.problem["head_dim"])

    @property
    def head_dim_v(self) -> int:
        """Of v and o."""
        return int(self.problem["head_dim_v"])

    @functools.cached_property
    def default_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @functools.cached_property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @functools.cached_property
    def access_bytes(self) -> int:
        return self.item_bytes * self.vector

    @functools.cached_property
    def has_maps(self) -> bool:
        return any(launch.maps for launch in self.launches)

    @property
    def smem_bytes(self) -> int:
        """The most that a block of any launch needs."""
        return max(launch.smem_bytes for launch in self.launches)

    @property
    def command(self) -> str:
        """What tunes such kernels, but for the card."""
        dtype, precision, apart = (
            self.problem["dtype"],
            self.problem["precision"],
            self.head_dim_v != self.head_dim,
        )
        precise = "" if precision == "auto" else f" --precision {precision}"
        dims = f"--d {self.head_dim} --dv {self.head_dim_v}" if apart else f"--d {self.head_dim}"
        return f"flashgen tune --dtype {dtype}{precise} {dims}"

    def tiles(self, batch: int, heads: int, kv_heads: int, seqlen_q: int) -> int:
        """Of the launch that has most."""
        return max(launch.tiles(batch, heads, kv_heads, seqlen_q) for launch in self.launches)

    def can_step(self, strides: Iterable[int]) -> bool:
        """Whether its accesses suit such strides, in elements."""
        if self.has_maps:  # the copy engine takes no step back
            end = _STRIDE_END_BYTES // self.item_bytes
            return all(0 <= stride < end and stride % self.vector == 0 for stride in strides)
        return all(stride % self.vector == 0 for stride in strides)

    def lacking(self, arch: int) -> str:
        """What cards of that compute capability, times ten, do not have of what it needs; empty: they run
        it."""
        if self.only_arch not in (None, arch):
            return f"instructions of sm_{self.only_arch} alone"
        if arch < (self.oldest_arch or 0):
            units = "clusters" if any(launch.splits > 1 for launch in self.launches) else "tensor cores"
            return f"the {units} of sm_{self.oldest_arch}"
        return ""
