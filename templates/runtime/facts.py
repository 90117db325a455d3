"""What a module says of its kernels: what each was tuned for, how it is launched, and what it needs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
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
    """Bytes within which rows are swizzled in shared memory; 16 are none."""
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
    """Threads per block."""
    smem_bytes: int
    """Bytes of dynamic shared memory per block."""
    arguments: tuple[tuple[str, str], ...]
    """The fields of the function's first parameter, a struct: names, and formats as Python's struct has
    them."""
    count: Callable[..., int]
    """Blocks of the grid before `max_blocks` limits them, of what `Tuned.counted` names, none of which is
    zero."""
    rows_per_block: int | None = None
    """Query rows that one block covers; None: all of a head's."""
    heads_per_block: int = 1
    """Query heads, counted through all batches, that one block serves."""
    pack_heads: bool = False
    """Whether a tile's rows are those of all query heads that share keys."""
    splits: int = 1
    """Blocks of a cluster that share the keys of a tile of rows."""
    cluster: int = 1
    """Neighbouring blocks that make a cluster and share what they copy."""
    heads_per_cluster: int = 1
    """Query heads that share keys, each of which has a block of a cluster."""
    heads_together: int = 1
    """Neighbouring heads, each of which has a block of a cluster."""
    max_blocks: int | None = None
    """The most blocks launched, as many as the card it was tuned on runs at once, where each takes several
    tiles of rows; None: no limit."""
    workspace_splits: int = 1
    """Blocks of no cluster that share the keys of a tile of rows, and meet in the workspace."""
    wanted_blocks: int = 0
    """Blocks that fill the card, over which keys of packed sequences are split; 0: they are not."""
    shares_turn: bool = False
    """Whether blocks share the keys of the tiles of rows that are left for a last turn, and hand on in the
    workspace what these make of the rows."""
    alike_batches: bool = False
    """Whether what it makes for one batch serves all."""
    alike_heads: bool = False
    """Whether what it makes for one head serves all."""
    dependent: bool = False
    """Whether it may begin before the launch in front of it ends, for which it waits itself."""
    plans: bool = False
    """Whether it plans which block takes what of packed sequences, which may be kept from call to call."""
    makes: str = ""
    """The gradient of what scores read without which nobody needs it."""
    lists: int = 0
    """Keys of a tile where it lists the tiles that rows see, which may be kept from call to call; else 0."""
    list_words: int = 0
    """The 32-bit words that there are for each tile beside: what rows see of its single keys."""
    list_batch_strides: tuple[str, ...] = ()
    """The strides of zero by which all batches see the same, so that there are lists for one alone; empty
    where nothing tells."""
    list_head_strides: tuple[str, ...] = ()
    """The same of heads."""
    maps: tuple[TensorMap, ...] = ()
    """The maps of which the function's second parameter is made; empty where it has none."""

    @property
    def is_main(self) -> bool:
        """Whether it makes the products."""
        return self.symbol.endswith("_kernel")

    @property
    def reads_queries(self) -> bool:
        """Whether it reads queries as they are multiplied: rotated where the kernel rotates them."""
        return self.is_main or self.symbol.endswith("_combine")

    @property
    def blocks_per_cluster(self) -> int:
        return self.cluster * self.heads_per_cluster * self.heads_together * self.splits

    def tiles(self, batch: int, heads: int, kv_heads: int, seqlen_q: int, *keys: int) -> int:
        """Counts the shares of the work, of which a block takes one, or several where there are more than
        `max_blocks`."""
        if not (batch and heads and seqlen_q):
            return 0
        return self.count(batch, heads, kv_heads, seqlen_q, *keys)

    def list_ints(
        self, keys: int, alike: tuple[bool, bool], batch: int, heads: int, kv_heads: int, *others: int
    ) -> int:
        """Returns how many 32-bit integers the lists take that it makes of so many keys, where batches, and
        heads, are `alike` or not."""
        batches_alike, heads_alike = alike
        if batches_alike:
            batch = 1
        if heads_alike:
            heads, kv_heads = heads // kv_heads if self.pack_heads else 1, 1
        lists = self.tiles(batch, heads, kv_heads, *others) // self.splits
        return lists * (1 + -(-keys // self.lists) * (1 + self.list_words))

    def lists_alike(self, values: Mapping[str, Any]) -> tuple[bool, bool]:
        """Tells whether batches, and heads, see alike by the strides among a kernel's arguments."""
        batch, head = (
            bool(strides) and not any(map(values.get, strides))
            for strides in (self.list_batch_strides, self.list_head_strides)
        )
        return batch, head

    def blocks(self, tiles: int) -> int:
        """Returns the number of blocks in the grid for so many tiles; 0 where there are no rows."""
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
    """Elements that one memory access moves: pointers and strides must be multiples of it."""
    key_vector: int = 0
    """The same of k and v where they are of a type of their own; else 0."""
    launches: tuple[Launch, ...]
    """The launches that one call makes, one after the other."""
    tolerance: float
    """The largest norm(o - reference) / norm(reference) that a head of a right result has against float64."""
    oldest_arch: int | None = None
    """Compute capability, times ten, of the first cards with the instructions the kernel uses; None: all have
    them."""
    only_arch: int | None = None
    """Compute capability, times ten, of the only cards with the instructions the kernel uses; None: later
    ones have them, too."""
    arch_suffix: str = ""
    """What compilers add to an architecture's name for instructions that it alone has, as in sm_90a."""
    workspace: tuple[Callable[..., int], ...] = ()
    """The 32-bit words of each part of the memory that its launches leave each other things in, of what
    `counted` names; each begins at a multiple of 256 bytes."""
    plan_ints: Callable[..., int] | None = None
    """The 32-bit integers of the plan of packed sequences, of what blocks are counted by."""
    counts_keys: bool = False
    """Whether blocks or workspace are counted by keys, too, of a kernel that makes no gradients."""
    deterministic: bool = True
    """Whether it makes the same bits every time."""
    source: str = dataclasses.field(repr=False)
    cubins: dict[bool, str] = dataclasses.field(repr=False, default_factory=dict)
    """What was compiled for the card the kernel was tuned on, packed as text, by whether it has the causal
    mask."""

    @functools.cached_property
    def dtype(self) -> str:
        """The type of q, as array libraries call it."""
        return _DTYPE_NAMES[self.problem["dtype"]]

    @functools.cached_property
    def key_dtype(self) -> str:
        """The type of k and v, which is that of q but where heads of theirs come with scales."""
        return _DTYPE_NAMES[self.problem.get("kv_dtype") or self.problem["dtype"]]

    @property
    def input_dtypes(self) -> tuple[str, str, str]:
        """The types of q, k and v."""
        return (self.dtype, self.key_dtype, self.key_dtype)

    @property
    def output_dtype(self) -> str:
        return _OUTPUT_DTYPES.get(self.dtype, self.dtype)

    @property
    def head_dim(self) -> int:
        """The head dim of q and k."""
        return int(self.problem["head_dim"])

    @property
    def head_dim_v(self) -> int:
        """The head dim of v and o."""
        return int(self.problem["head_dim_v"])

    @functools.cached_property
    def default_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @functools.cached_property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @functools.cached_property
    def access_bytes(self) -> int:
        return max(self.item_bytes * self.vector, _ITEM_BYTES[self.key_dtype] * self.key_vector)

    @property
    def step(self) -> int:
        """What strides must be multiples of, in elements."""
        return max(self.vector, self.key_vector)

    @functools.cached_property
    def has_maps(self) -> bool:
        return any(launch.maps for launch in self.launches)

    @functools.cached_property
    def main(self) -> Launch:
        """The launch that makes the products."""
        return next(launch for launch in self.launches if launch.is_main)

    @property
    def smem_bytes(self) -> int:
        """The most dynamic shared memory, in bytes, that a block of any launch needs."""
        return max(launch.smem_bytes for launch in self.launches)

    @property
    def told(self) -> str:
        """Its name, family, speed and card in words."""
        speed = f", {self.measurement['tflops']:.1f} TFLOP/s" if "tflops" in self.measurement else ""
        kind = "predicted for" if self.measurement.get("predicted") else "on"
        return f"{self.name} ({self.variant['family']}{speed} {kind} {self.device['name']})"

    @property
    def command(self) -> str:
        """The command line that tunes such kernels, but for the card."""
        dtype, precision, apart = (
            self.problem["dtype"],
            self.problem["precision"],
            self.head_dim_v != self.head_dim,
        )
        precise = "" if precision == "auto" else f" --precision {precision}"
        dims = f"--d {self.head_dim} --dv {self.head_dim_v}" if apart else f"--d {self.head_dim}"
        keys = f" --kv-dtype {self.problem['kv_dtype']}" if self.problem.get("kv_dtype") else ""
        backward = " --backward" if self.problem.get("backward") else ""
        return f"flashgen tune{backward} --dtype {dtype}{keys}{precise} {dims}"

    @functools.cached_property
    def met_arrays(self) -> Mapping[str, Any]:
        """The arrays beside q, k, v and o that launches may have maps of, as they are described."""
        return {}

    @functools.cached_property
    def counted(self) -> tuple[str, ...]:
        """The sizes of arrays by which blocks are counted: of gradients the keys, too."""
        keys = ("seqlen_k",) if self.counts_keys or self.problem.get("backward") else ()
        totals = ("total_q", "total_k") if keys and self.problem.get("varlen") else ()
        return ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", *keys, *totals)

    def tiles(self, *counted: int) -> int:
        """Returns the shares of the work in the launch that has most."""
        return max(launch.tiles(*counted) for launch in self.launches)

    def can_step(self, strides: Iterable[int]) -> bool:
        """Tells whether the kernel's accesses suit such strides, in elements."""
        if self.has_maps:  # the copy engine takes no step back
            end = _STRIDE_END_BYTES // self.item_bytes
            return all(0 <= stride < end and stride % self.step == 0 for stride in strides)
        return all(stride % self.step == 0 for stride in strides)

    def lacking(self, arch: int) -> str:
        """Returns what cards of that compute capability, times ten, lack that the kernel needs; empty: they
        run it."""
        if self.only_arch not in (None, arch):
            return f"instructions of sm_{self.only_arch} alone"
        if arch < (self.oldest_arch or 0):
            units = "tensor cores"
            if any(launch.splits > 1 for launch in self.launches):
                units = "clusters"
            elif any(launch.dependent for launch in self.launches):
                units = "dependent launches"
            return f"the {units} of sm_{self.oldest_arch}"
        return ""
