"""Sequences one behind the other: where each begins, and the plan of which block takes what of them."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .arrays import _check_kinds, _kind, _read, _torch_of, _View
from .facts import _ITEM_BYTES, Tuned
from .plans import _PLAN, _PLAN_MADE, _ROTATED, _TOTALS, _Beside, _beside, _Plan
from .scored_values import _BUFFER_TYPESTRS, _allocator, _Asked, _CardMemory, _laid_out, _Placed
from .table import _TORCH_DEVICES, Choice, _ordinal, _Output, _Table

#: The arrays that tell where sequences are, those that must be there first.
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class _Packed(NamedTuple):
    """The layout of packed sequences: how many there are, and how long the longest may be."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int


class _PackedTable(_Table):
    """A kernel of packed sequences, whose arrays are (total, heads, head_dim)."""

    def inspect(self, name: str, described: tuple[Any, ...], layout: Any, torch: Any) -> _View:
        dtype, shape, strides, device = described
        if len(shape) != 3:
            raise ValueError(
                f"{name} has {len(shape)} dimensions, {tuple(shape)}; 3 are needed, (total, heads, head_dim) "
                "of sequences one behind the other"
            )
        strides = None if strides is None else (0, *strides)
        return super().inspect(name, (dtype, (1, *shape), strides, device), "bshd", torch)

    def output_like(self, query: _View, head_dim: int, layout: Any) -> _Output:
        made = super().output_like(query, head_dim, "bshd")
        return made._replace(
            shape=made.shape[1:],
            strides=made.strides[1:],
            rows_shape=made.rows_shape[1:],
            rows_strides=made.rows_strides[1:],
        )

    def sizes(self, query: _View, key: _View, layout: Any) -> dict[str, int]:
        assert isinstance(layout, _Packed)
        found = super().sizes(query, key, layout)
        found |= dict(zip(_TOTALS, (found["seqlen_q"], found["seqlen_k"]), strict=True))
        return found | {
            "batch": layout.batch,
            "seqlen_q": layout.max_seqlen_q,
            "seqlen_k": layout.max_seqlen_k,
        }

    def sizes_of_grid(self, sizes: dict[str, int]) -> tuple[int, int, int, int]:
        return sizes["batch"], sizes["num_q_heads"], sizes["num_kv_heads"], sizes["total_q"]

    def choose(
        self, query: _View, key: _View, value: _View, strides: tuple[int, ...], causal: bool
    ) -> Choice:
        _, running = self.running(query, value)
        return Choice(running[0], False, f"{running[0].told}: the only kernel here")


class SequencePlan(_CardMemory):
    """Which block takes what of packed sequences, for who calls `attention_varlen` again on sequences of the
    same lengths, as all layers of a model do: the first call has the card make it, others take it.

    To be filled by a call before a CUDA graph is captured. A graph in which a call stands behind `forget`
    makes the plan anew each time it is replayed, of the lengths that there are then."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[int, int] | None = None

    def fill(self, plan: _Plan, allocate: Callable[[Any], Any], may_make: bool) -> bool:
        """Makes room for the plan of such arrays; whether it is there from a call before."""
        key = (plan.tuned, plan.device, *plan.sizes.values())
        if key == self._made_for:
            return True
        assert plan.tuned.plan_ints is not None
        batch, ints = plan.sizes["batch"], plan.tuned.plan_ints(*plan.grid)
        if self._room is None or self._room[0] != plan.device or self._room[1] < ints:
            if not may_make:
                raise ValueError(
                    f"beside stream= no memory is made for the plan of {batch} sequences, {ints} integers: "
                    "pass plan=, a SequencePlan() that a call without stream= has filled for as many"
                )
            self.memory = allocate(np.empty(ints, np.int32))
            self._room = (plan.device, ints)
        self._made_for = key
        return False

    def forget(self) -> None:
        """Has the next call make the plan anew, in the same memory: for when lengths have changed."""
        self._made_for = None


class _Sequences(_Beside):
    """What a call says of packed sequences, and of masks and changes of scores."""

    names: tuple[str, ...] = _LENGTHS
    """The arrays that tell where sequences are."""

    def __init__(
        self,
        tuned: Tuned,
        arrays: Mapping[str, Any],
        layout: Any,
        plan: SequencePlan | None = None,
        scoring: _Asked | None = None,
        value_scale: float = 1.0,
        put: Callable[[Any], Any] | None = None,
    ) -> None:
        """`arrays` are those of `names` that there are; `put` puts numpy's arrays on the GPU."""
        super().__init__()
        self.tuned, self.arrays, self.layout, self.plan, self.scoring = tuned, arrays, layout, plan, scoring
        self.value_scale, self.put = value_scale, put

    @property
    def requires_grad(self) -> bool:
        return self.scoring is not None and self.scoring.requires_grad

    def numbers(self, plan: _Plan, q: Any, may_make: bool) -> tuple[float, ...]:
        """Returns addresses, strides, sizes and numbers in the order of the kernel's arguments."""
        values = self.values(plan, q, may_make)
        return tuple(values[name] for name in _beside(self.tuned.launches[0].arguments))

    def values(self, plan: _Plan, q: Any, may_make: bool) -> dict[str, float]:
        """Returns the same by name."""
        values: dict[str, float] = {"value_scale": self.value_scale, **dict.fromkeys(self.names, 0)}
        streams: set[int | None] = set()
        if self.scoring is not None:
            values |= self.scoring.values(plan, q, may_make)
            streams |= self.scoring.streams
        kept = []
        for name, array in self.arrays.items():
            placed, told = self.place(name, array, plan, may_make)
            values |= told
            kept.append(placed.array)
            streams.add(placed.stream)
        names = _beside(self.tuned.launches[0].arguments)
        if _ROTATED in names and _ROTATED not in self.arrays:
            memory = self._rotated(plan, q, may_make)
            values[_ROTATED] = memory.address
            kept.append(memory)
        if _PLAN in names:
            made = self.plan or SequencePlan()
            values[_PLAN_MADE] = made.fill(plan, self.put or _allocator(q, "plans"), may_make)
            values[_PLAN] = made.address
            kept.append(made.memory)
        # What was made for this call must stay until the launch has been made.
        self.streams, self.kept = frozenset(streams), kept
        return values

    def _rotated(self, plan: _Plan, q: Any, may_make: bool) -> _CardMemory:
        """Memory for rotated queries, as many elements as q has."""
        if not may_make:
            raise ValueError(
                "beside stream= no memory is made for rotated queries: pass rotated=, contiguous and like q"
            )
        count = math.prod(plan.out_shape[:-1]) * plan.tuned.head_dim
        made = _CardMemory()
        allocate = self.put or _allocator(q, "rotated queries")
        made.memory = allocate(np.empty(-(-count * _ITEM_BYTES[plan.tuned.dtype] // 4), np.int32))
        return made

    def place(self, name: str, array: Any, plan: _Plan, may_copy: bool) -> tuple[_Placed, dict[str, float]]:
        """Returns an array as a kernel reads it, and what the kernel is told of it, by name."""
        placed = _placed_ints(name, array, (self.layout.batch + name.startswith("cu_"),), plan, may_copy)
        return placed, {name: placed.address}

    def forget(self) -> None:
        """Has the next call make anew what this one may have left half made."""
        lists = None if self.scoring is None else self.scoring.lists
        for kept in (self.plan, lists):
            if kept is not None:
                kept.forget()

    def on_device(self, put: Callable[[Any], Any]) -> "_Sequences":
        """Returns the same with numpy's arrays where `put` puts them, once their lengths are looked at."""
        placed = {name: put(np.ascontiguousarray(array)) for name, array in self.arrays.items()}
        scoring = None if self.scoring is None else self.scoring.on_device(put)
        return type(self)(self.tuned, placed, self.layout, None, scoring, self.value_scale, put)

    def through(self, read: Callable[[Any], Any]) -> "_Sequences":
        """Returns the same with its arrays as another library reads them."""
        arrays = {name: read(array) for name, array in self.arrays.items()}
        scoring = None if self.scoring is None else self.scoring.through(read)
        return type(self)(self.tuned, arrays, self.layout, self.plan, scoring, self.value_scale)


def _layout_of(q: Any, arrays: Mapping[str, Any], max_seqlen_q: int, max_seqlen_k: int) -> _Packed:
    """The layout of a call; raises TypeError and ValueError for arrays that tell no sequences."""
    counts = _counts_of(q, arrays)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_longest(name, longest)
    return _Packed(counts["cu_seqlens_q"], max_seqlen_q, max_seqlen_k)


def _counts_of(q: Any, arrays: Mapping[str, Any]) -> dict[str, int]:
    """How many sequences the arrays tell of, which is the same of all; raises TypeError and ValueError."""
    counts = {}
    for name, array in arrays.items():
        _check_kinds(q, ((name, array),))
        if isinstance(q, np.ndarray) and not isinstance(array, np.ndarray):
            raise TypeError(f"q is a numpy array, but {name} a {_kind(array)}; pass arrays of one library")
        shape = _shape(array)
        offsets = name.startswith("cu_")
        if len(shape) != 1 + (name == "page_table") or shape[0] < offsets:
            told = "batch, max_pages" if name == "page_table" else "batch + 1" if offsets else "batch"
            raise ValueError(f"{name} has the shape {shape}, but must be ({told})")
        counts[name] = shape[0] - offsets
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise ValueError(
            f"these are of different numbers of sequences: {told}; cu_seqlens have one entry more than there "
            "are, others as many"
        )
    return counts


def _check_longest(name: str, longest: Any) -> None:
    """Raises TypeError and ValueError unless it is a length, or a symbol for one."""
    if not isinstance(longest, int | np.integer) and not _is_symbol(longest):
        raise TypeError(
            f"{name} is a {_kind(longest)}; pass an int, for which nothing is read back from the card"
        )
    if not _is_symbol(longest) and not 0 <= longest < 2**31:
        raise ValueError(f"{name} is {longest}; it must lie in 0..{2**31 - 1}")


def _shape(array: Any) -> tuple[int, ...]:
    if hasattr(array, "shape"):
        return tuple(array.shape)
    return tuple(getattr(array, "__cuda_array_interface__", {"shape": ()})["shape"])


def _is_symbol(number: Any) -> bool:
    """Whether it is an extent that torch.compile does not know."""
    return type(number).__name__ == "SymInt"


def _check_lengths(arrays: Mapping[str, Any], totals: tuple[int, int], layout: _Packed) -> None:
    """Raises TypeError and ValueError for lengths on the host that no arrays of so many rows have."""
    _check_integers(arrays)
    for x, total, longest in zip("qk", totals, layout[1:], strict=True):
        _check_slots(x, arrays, total, longest)


def _check_integers(arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise TypeError(f"{name} is {array.dtype}, and kernels read int32: pass {name}.astype('int32')")


def _check_slots(x: str, arrays: Mapping[str, Any], total: int, longest: int) -> None:
    """Raises ValueError unless sequences are parts of so many rows of that array, and no longer than told."""
    name, used = f"cu_seqlens_{x}", arrays.get(f"seqused_{x}")
    starts = arrays[name].astype(np.int64)
    slots = np.diff(starts)
    if (slots < 0).any():
        at = int(np.argmax(slots < 0))
        raise ValueError(
            f"{name} falls from {starts[at]} to {starts[at + 1]} at sequence {at}; it must never fall"
        )
    if starts[0] < 0 or starts[-1] > total:
        raise ValueError(
            f"{name} reaches from {starts[0]} to {starts[-1]}, and there are {total} rows: it must lie "
            f"in 0..{total}"
        )
    if used is not None and ((used < 0) | (used > slots)).any():
        at = int(np.argmax((used < 0) | (used > slots)))
        raise ValueError(
            f"seqused_{x} is {used[at]} at sequence {at}, which has {slots[at]} rows: it must lie in "
            f"0..{slots[at]}"
        )
    lengths = slots if used is None else used
    if lengths.size and lengths.max() > longest:
        raise ValueError(
            f"max_seqlen_{x} is {longest}, but the longest sequence has {lengths.max()} rows: pass that"
        )


def _placed_ints(name: str, array: Any, wanted: tuple[int, ...], plan: _Plan, may_copy: bool) -> _Placed:
    """An array of 32-bit integers of that shape, the last axis of which is contiguous. Raises TypeError and
    ValueError for another."""
    torch, stream = _torch_of(array), None
    steps: tuple[int, ...]
    if torch is not None:
        if array.device.type not in _TORCH_DEVICES:
            raise ValueError(f"{name} is on the device {str(array.device)!r}; move it with {name}.cuda()")
        dtype, address = str(array.dtype).removeprefix("torch."), array.data_ptr()
        shape, steps, device = tuple(array.shape), tuple(array.stride()), _ordinal(array.device)
    else:
        address, (typestr, shape, strides, device), stream = _read(name, array)
        dtype = _BUFFER_TYPESTRS.get(typestr, typestr)
        if strides is None:
            steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        else:
            steps = tuple(stride // 4 for stride in strides)
    if dtype != "int32":
        way_out = f"{name}.to(torch.int32)" if torch is not None else f"{name}.astype('int32')"
        raise TypeError(f"{name} is {dtype}, and {plan.tuned.name} reads int32: pass {way_out}")
    if shape != wanted:
        raise ValueError(f"{name} has the shape {shape}, but must be {wanted}")
    if device not in (None, plan.device):
        raise ValueError(f"q is on device {plan.device}, {name} on device {device}; move them to one")
    if steps[-1] == 1 or shape[-1] <= 1 or 0 in shape:
        return _Placed(array, address, shape, steps, stream)
    if not may_copy:
        raise ValueError(
            f"the last axis of {name} has the stride {steps[-1]}, but must be contiguous, and beside stream= "
            "nothing is copied: pass a contiguous array"
        )
    return _placed_ints(name, _laid_out(name, array, wanted[-1], torch), wanted, plan, False)
