"""What kernels read for masks and changes of scores: numbers, and arrays as they lie."""

import ctypes
import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .arrays import _address, _can_allocate, _empty, _kind, _library, _read, _torch_of
from .driver import _DEFAULT_STREAMS, _LOCK, _driver
from .facts import Launch, Tuned
from .plans import _LISTS_MADE, _TILE_LISTS, _Beside, _beside, _Plan
from .table import _TORCH_DEVICES, _ordinal
from .tensors import _current_handle

#: What is asked for by name: the keyword, and the numbers or arrays that kernels read of it.
_FEATURES = {
    "window": ("window", ("window_left", "window_right")),
    "always": ("always", ("always_keys",)),
    "chunk": ("chunk", ("chunk",)),
    "prefix": ("prefix", ("prefix",)),
    "lengths": ("lengths", ("lengths",)),
    "documents": ("documents", ("document_begin", "document_end")),
    "dilation": ("dilation", ("dilation",)),
    "tree": ("tree", ("tree",)),
    "softcap": ("softcap", ("softcap",)),
    "alibi": ("alibi_slopes", ("slopes",)),
    "bias": ("bias", ("bias",)),
    "sinks": ("sinks", ("sinks",)),
}
#: The arrays that masks of those names read.
_OF_MASKS = ("prefix", "lengths", "document_begin", "document_end", "tree")
#: What array libraries call the types of buffers.
_BUFFER_DTYPES = {
    "f32": ("float32",),
    "f16": ("float16",),
    "bf16": ("bfloat16",),
    "i16": ("int16",),
    "i32": ("int32",),
    "i64": ("int64",),
    "u8": ("bool", "uint8"),
}
#: How the CUDA array interface calls them.
_BUFFER_TYPESTRS = {"<i2": "int16", "<i4": "int32", "<i8": "int64", "|u1": "uint8", "|b1": "bool"}
_BUFFER_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i16": 2, "i32": 4, "i64": 8, "u8": 1}
#: CUtensorMapDataType of those that the copy engine brings, and the sizes of such an array, the innermost
#: axis first.
_MAP_TYPES_OF_BUFFERS = {"u8": 0, "f16": 6, "f32": 7, "bf16": 9}
_MAP_SIZES = ("seqlen_k", "seqlen_q", "num_q_heads", "batch")
_INT_END = 2**31
#: The greatest window, chunk or dilation.
_MAX_REACH = 2**30
#: The rows that a tree may have: the bits of a word.
_TREE_ROWS = 64
#: The most lists of tiles that are remembered, and the integers of all of them.
_MOST_LISTS = 16
_MOST_LIST_INTS = 2**25
#: Of how many calls with the same plan it is remembered what they were told beside.
_MOST_READ = 64
#: CUDA's handle of the default stream that each thread has of its own.
_STREAM_OF_THREAD = 2


class Buffer(NamedTuple):
    """An array that a kernel reads: its type, and for each axis which sizes index it, none where an index is
    computed."""

    dtype: str
    axes: tuple[tuple[str, ...], ...]
    any_step: bool = False
    """Whether the last axis, too, may be repeated or have gaps, and must be as long as q and k say."""


class _MetArray(NamedTuple):
    """An array that scores meet at their own row and key, as the copy engine brings it."""

    name: str
    buffer: Buffer

    @property
    def told(self) -> tuple[str, ...]:
        """What the kernel's arguments call its address and strides."""
        return (self.name, *(f"{self.name}_stride_{axis}" for axis in range(len(self.buffer.axes) - 1)))

    def described(
        self, told: tuple[int, ...], sizes: Mapping[str, int], anything: int
    ) -> tuple[int, int, tuple[int, ...], list[int]]:
        """Returns the type of the array's map, where it begins, how long its dimensions are, the innermost
        first, of one entry where they repeat it, and how far apart in bytes. Of one that the copy engine does
        not take, or without entries, nothing is read by its map, which is of `anything`."""
        item_bytes, (address, *steps) = _BUFFER_BYTES[self.buffer.dtype], told
        lengths = {name: sizes[name] for name in _MAP_SIZES}
        step_bytes = [item_bytes * step for step in steps]
        suits = min(steps) >= 0 and not any(number % 16 for number in (address, *step_bytes))
        if not suits or not all(lengths.values()):
            address, lengths = anything, dict.fromkeys(lengths, 1)
        step_of = {
            size: step for axis, step in zip(self.buffer.axes, step_bytes, strict=False) for size in axis
        }
        columns, *outer = lengths
        repeated = [lengths[name] if step_of.get(name) else 1 for name in outer]
        apart = [step_of[name] if length > 1 else 16 for name, length in zip(outer, repeated, strict=True)]
        return _MAP_TYPES_OF_BUFFERS[self.buffer.dtype], address, (lengths[columns], *repeated), apart


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scored(Tuned):
    """A kernel with masks or changes of scores beside the causal mask."""

    asked: str
    """The options of the command line that ask for them."""
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    """The numbers that it reads, as it was tuned for them."""
    buffers: dict[str, Buffer] = dataclasses.field(default_factory=dict)
    """The arrays that it reads."""
    sees: Callable[..., Any]
    """Which pairs of a row and a key there are, of numpy's arrays; ``at`` has the numbers and arrays."""
    change: Callable[..., Any]
    """What becomes of scores, likewise."""
    scattered: tuple[str, ...] = ()
    """The arrays whose gradients are added up in no order."""

    @functools.cached_property
    def met_arrays(self) -> Mapping[str, Any]:
        """Those of its arrays that launches have maps of, as they are described."""
        mapped = {each.array for launch in self.launches for each in launch.maps}
        return {name: _MetArray(name, buffer) for name, buffer in self.buffers.items() if name in mapped}

    @property
    def command(self) -> str:
        """The command line that tunes such kernels, but for the card."""
        return super().command.replace(" --d ", f" {self.asked} --d ", 1)

    @functools.cached_property
    def named(self) -> dict[str, tuple[str, ...]]:
        """The keywords of what is asked for by name, and the numbers or arrays that are read of each."""
        return dict(_FEATURES[each] for each in self.problem.get("scoring", ()) if each in _FEATURES)

    @functools.cached_property
    def keywords(self) -> dict[str, tuple[str, ...]]:
        """All that `attention` is told by keyword, and the numbers or arrays that are read of each."""
        known = {part for parts in self.named.values() for part in parts}
        own = [each for each in (*self.buffers, *self.scalars) if each not in known]
        return self.named | {each: (each,) for each in own}

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """What callers call arrays whose keyword is another than their own name."""
        alone = {each: parts[0] for each, parts in self.keywords.items() if len(parts) == 1}
        return {name: each for each, name in alone.items() if name != each}

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The keywords of arrays, which have no defaults."""
        return tuple(each for each, parts in self.keywords.items() if parts[0] in self.buffers)

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of what it reads beside q, k, v, its outputs and the scale, in order."""
        return _beside(self.launches[0].arguments)

    @functools.cached_property
    def listing(self) -> tuple[Launch, ...]:
        """Those of its launches that list tiles."""
        return tuple(launch for launch in self.launches if launch.lists)

    @functools.cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that it reads, in order."""
        return tuple(each for each in self.reads if each in self.scalars or each == "value_scale")

    @functools.cached_property
    def kind(self) -> tuple[object, ...]:
        """What kernels have in common that read and compute the same, whatever the numbers."""
        told = self.problem.get("scoring", {})
        texts = tuple((each, told.get(each)) for each in ("bias", "mask", "score"))
        return (frozenset(told), texts, tuple(self.buffers.items()), tuple(self.scalars))

    @functools.cached_property
    def exact(self) -> frozenset[str]:
        """The arrays that must be as long as q and k say; those of expressions may be longer."""
        by_head = (name for name, buffer in self.buffers.items() if buffer.any_step)
        return frozenset((*by_head, *(part for parts in self.named.values() for part in parts)))

    @functools.cached_property
    def integers(self) -> frozenset[str]:
        """The names of the numbers that are integers."""
        return frozenset(
            name for name, format in self.launches[0].arguments if format == "i" and name in self.scalars
        )

    @functools.cached_property
    def lists_stand(self) -> bool:
        """Whether the tiles that rows see follow from sizes and numbers alone: no array tells, which may
        change in its place."""
        told = self.problem.get("scoring", {})
        telling = {*_OF_MASKS, *re.findall(r"\w+", told.get("mask", ""))}
        telling |= {"bias"} if told.get("bias") == "u8" else set()
        of_changes = rf"({'|'.join(self.buffers)})(_(stride|size)_\d+)?"
        numbers = {*self.scalars, "value_scale", _TILE_LISTS, _LISTS_MADE}
        # Of sequences and pages it reads more.
        return telling.isdisjoint(self.buffers) and all(
            name in numbers or re.fullmatch(of_changes, name) for name in self.reads
        )

    def numbers_of(self, keyword: str, value: Any) -> dict[str, float]:
        """Returns the numbers that a keyword's value stands for. Raises TypeError and ValueError."""
        values = [value]
        if keyword == "window" and keyword in self.named:
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise TypeError(f"window is {value!r}; pass (left, right), -1 or None for all keys on a side")
            values = [-1 if each is None else each for each in value]
        return {
            name: _number(keyword, name if keyword in self.named else "", each, name in self.integers)
            for name, each in zip(self.keywords[keyword], values, strict=True)
        }


#: The least that numbers of named masks and changes may be.
_LEAST = {"window_left": -1, "window_right": -1, "always_keys": 0, "chunk": 1, "dilation": 1}


def _number(keyword: str, name: str, value: Any, integer: bool) -> float:
    try:
        number = value.__index__() if integer else float(value)
    except (AttributeError, TypeError, ValueError):
        kind = "an integer" if integer else "a number"
        raise TypeError(f"{keyword} is {value!r}; it must be {kind}") from None
    if name in _LEAST:
        if not _LEAST[name] <= number <= _MAX_REACH:
            raise ValueError(f"{keyword} is {value}; it must lie in {_LEAST[name]}..{_MAX_REACH}")
    elif integer and not -_INT_END <= number < _INT_END:
        raise ValueError(f"{keyword} is {value}; the kernel takes 32 bits, {-_INT_END}..{_INT_END - 1}")
    elif not integer and not abs(number) < 3.4e38:
        raise ValueError(f"{keyword} is {value}; it must be a finite float32")
    elif name == "softcap" and not number > 0:
        raise ValueError(f"softcap is {value}; it must be positive")
    return number


def _check_asked(tuned: Scored, asked: Mapping[str, Any]) -> None:
    """Raises TypeError unless these are keywords of what a kernel reads, and all arrays among them."""
    unknown = [each for each in asked if each not in tuned.keywords]
    if unknown:
        raise TypeError(
            f"{unknown[0]}= is nothing that the kernels here read; they take {_keywords_of(tuned)}. "
            f"Kernels are made by {tuned.command} with options for what is wanted"
        )
    missing = [each for each in tuned.required if each not in asked]
    if missing:
        raise TypeError(f"{missing[0]}= is missing: the kernels here read {_keywords_of(tuned)}")


def _keywords_of(tuned: Scored) -> str:
    """What a call may name of what a kernel reads."""
    return ", ".join(f"{each}=" for each in tuned.keywords)


class _Asked(_Beside):
    """What a call says of masks and changes of scores."""

    def __init__(
        self,
        tuned: Scored,
        scalars: Mapping[str, float],
        arrays: Mapping[str, Any],
        sizes: Mapping[str, int],
        lists: "TileLists | None" = None,
        put: Callable[[Any], Any] | None = None,
    ) -> None:
        """`arrays` are as they were passed, by their keywords; `sizes` those of q and k. `lists` are the
        caller's, `put` puts numpy's arrays on the GPU."""
        super().__init__()
        self.lists, self.put = lists, put
        self._remembering: tuple[tuple[Any, ...], TileLists] | None = None
        """Lists that this call makes for others, and what these have in common with it."""
        self.kept: dict[str, Any] = {}
        """What must stay until the launches have been made."""
        self.whole: tuple[str, ...] = ()
        """The arrays that go to the GPU with all that they repeat."""
        self.tuned, self.scalars, self.arrays, self.sizes = tuned, scalars, arrays, sizes
        self.called = tuned.called

    def numbers(self, plan: _Plan, q: Any, may_make: bool) -> tuple[float, ...]:
        """Returns addresses, strides, sizes and numbers in the order of the kernel's arguments."""
        values = self.values(plan, q, may_make)
        return tuple(map(values.__getitem__, self.tuned.reads))

    def values(self, plan: _Plan, q: Any, may_make: bool) -> dict[str, float]:
        """Returns the same by name."""
        self.sizes = plan.sizes
        rows = self.sizes["seqlen_q"]
        if "tree" in self.tuned.named and rows > _TREE_ROWS:
            raise ValueError(
                f"tree= tells of {_TREE_ROWS} rows by a bit each, but q has {rows}: pass at most "
                f'{_TREE_ROWS}, or take a kernel with a mask of bias="u8" for more'
            )
        arrays = self.buffers(may_make)
        key = self._key_of_values(arrays)
        known = None if key is None else plan.read.get(key)
        if known is not None:
            values = {**known, **{name: array.data_ptr() for name, array in arrays.items()}}
            self.kept = arrays
        else:
            values = self._placed(plan, arrays, may_make)
            if key is not None and all(self.kept[name] is array for name, array in arrays.items()):
                if len(plan.read) >= _MOST_READ:
                    plan.read.clear()
                plan.read[key] = values.copy()
        assert isinstance(plan.tuned, Scored)
        if plan.tuned.listing:
            lists, made = self._lists_of(plan.tuned, plan, q, may_make, values)
            values |= {_LISTS_MADE: made, _TILE_LISTS: lists.address}
            self.kept[_TILE_LISTS] = lists.memory
        return values

    def _key_of_values(self, arrays: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What calls with the same plan have in common that are told the same but for addresses; None for
        other arrays than tensors."""
        parts: list[Any] = [*self.scalars.items()]
        for name, array in arrays.items():
            if _torch_of(array) is None:
                return None
            parts += name, array.dtype, array.shape, array.stride(), array.device
        return tuple(parts)

    def _placed(self, plan: _Plan, arrays: Mapping[str, Any], may_make: bool) -> dict[str, float]:
        """The numbers, and of arrays where and how they lie, by name; copies them where they must lie in
        another way."""
        values, streams = dict(self.scalars), set()
        # What was copied must stay until the launch has been made: memory is handed out in its order.
        self.kept = dict(arrays)
        for name, buffer in self.tuned.buffers.items():
            called = self.called.get(name, name)
            placed = _place(called, arrays[name], buffer, name in self.tuned.exact, plan, may_make)
            values[name] = placed.address
            values |= {f"{name}_stride_{axis}": step for axis, step in enumerate(placed.strides)}
            values |= {f"{name}_size_{axis}": length for axis, length in enumerate(placed.shape)}
            streams.add(placed.stream)
            self.kept[name] = placed.array
        if _TILE_LISTS in self.tuned.reads:
            values |= {_TILE_LISTS: 0, _LISTS_MADE: 0}
        self.streams = frozenset(streams)
        return values

    def _lists_of(
        self, tuned: Scored, plan: _Plan, q: Any, may_make: bool, values: Mapping[str, float]
    ) -> tuple["TileLists", bool]:
        """Returns the lists of tiles for a call, and whether they are made."""
        key = None if self.lists is not None else self._key_of_lists(tuned, plan, q, may_make)
        found = None if key is None else _LISTS.find(key)
        if found is not None:
            return found, True
        lists = self.lists or TileLists()
        made = lists.fill(plan, self.put or _allocator(q), may_make, values)
        self._remembering = None if key is None else (key, lists)
        return lists, made

    def _key_of_lists(self, tuned: Scored, plan: _Plan, q: Any, may_make: bool) -> tuple[Any, ...] | None:
        """What calls have in common that lists of tiles serve alike; None where each makes its own.

        The stream is part of it: there lists are ready for whoever comes later, and their memory goes to no
        one else before. Graphs make theirs each time: they outlive what is remembered, and of what they
        capture nothing is computed yet."""
        torch = _torch_of(q)
        if not (may_make and tuned.lists_stand and (torch is not None or _library(q) == "cupy")):
            return None
        handle = _current_handle(torch, plan.device) if torch is not None else _read("q", q)[2] or 0
        if handle == _STREAM_OF_THREAD or _is_captured(handle):
            return None
        return (*self.key_of_lists(tuned, plan), handle)

    def key_of_lists(self, tuned: Scored, plan: _Plan) -> tuple[Any, ...]:
        """The same but for the stream, of lists that numbers alone tell."""
        numbers = [self.scalars[name] for name in tuned.scalars]
        return (tuned, plan.masked, plan.device, *plan.sizes.values(), *numbers)

    def launched(self) -> None:
        if self._remembering is not None:
            _LISTS.keep(*self._remembering)

    @property
    def requires_grad(self) -> bool:
        """Whether PyTorch wants the gradient of some array."""
        return any(getattr(array, "requires_grad", False) for array in self.arrays.values())

    def array(self, name: str) -> Any:
        """Returns the array that the kernel calls so, as it was passed."""
        return next(self.arrays[each] for each, parts in self.tuned.keywords.items() if parts == (name,))

    def in_graph(self, names: tuple[str, ...]) -> tuple[list[Any], list[float]]:
        """Returns the arrays in the kernel's order and the numbers of those names: what operators take."""
        arrays = self.buffers()
        return [arrays[name] for name in self.tuned.buffers], [float(self.scalars[name]) for name in names]

    def buffers(self, may_make: bool = True) -> dict[str, Any]:
        """Returns the arrays by the kernel's own names for them."""
        arrays: dict[str, Any] = {}
        for keyword, array in self.arrays.items():
            parts = self.tuned.keywords[keyword]
            if len(parts) == 1:
                arrays[parts[0]] = array
                continue
            bounds = _bounds_of(array, self.sizes["seqlen_q"], self.sizes["seqlen_k"], may_make=may_make)
            arrays |= dict(zip(parts, bounds, strict=True))
        return arrays

    def on_device(self, put: Callable[[Any], Any]) -> "_Asked":
        """Returns the same with numpy's arrays where `put` puts them; what is repeated goes there once."""
        placed = {}
        for name, array in self.buffers().items():
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"q is a numpy array, but {self.called.get(name, name)} a {_kind(array)}; pass arrays of "
                    "one library"
                )
            once = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides[:-1])
            short = array[once] if array.size and name not in self.whole else array
            buffer = self.tuned.buffers[name]
            last = 1 if buffer.any_step else _needed(buffer, self.sizes)[-1]
            if short.shape[-1:] == (1,) and last > 1:
                short = np.broadcast_to(short, (*short.shape[:-1], last))
            placed[name] = put(np.ascontiguousarray(short))
        made = {
            keyword: placed[parts[0]] if len(parts) == 1 else tuple(placed[each] for each in parts)
            for keyword, parts in self.tuned.keywords.items()
            if keyword in self.arrays
        }
        return _Asked(self.tuned, self.scalars, made, self.sizes, put=put)

    def through(self, read: Callable[[Any], Any]) -> "_Asked":
        """Returns the same with its arrays as another library reads them."""
        made = {
            keyword: tuple(map(read, array)) if _is_pair(array) else read(array)
            for keyword, array in self.arrays.items()
        }
        return _Asked(self.tuned, self.scalars, made, self.sizes, self.lists)


class _AskedNumbers(_Asked):
    """What a call says of masks and changes of scores that read numbers alone: all calls may share it."""

    def __init__(self, tuned: Scored, scalars: Mapping[str, float]) -> None:
        super().__init__(tuned, scalars, {}, {})
        self.told = tuple(scalars[name] for name in tuned.reads)

    def numbers(self, plan: _Plan, q: Any, may_make: bool) -> tuple[float, ...]:
        return self.told


class _CardMemory:
    """Memory that a call has filled on the card, for the calls that take what is there."""

    def __init__(self) -> None:
        self.memory: Any = None
        self._made_for: tuple[Any, ...] | None = None

    @property
    def address(self) -> int:
        if _torch_of(self.memory) is not None:
            return int(self.memory.data_ptr())
        return _address(self.memory)


class TileLists(_CardMemory):
    """Memory for lists of the tiles of keys that rows see, where a mask is no interval, for who calls
    `attention` again while what masks read stands: the first call has a kernel make the lists, others of the
    same sizes use them. To be filled before a CUDA graph is captured."""

    ints = 0
    """The integers that there is room for."""

    def fill(
        self, plan: _Plan, allocate: Callable[[Any], Any], may_make: bool, values: Mapping[str, float]
    ) -> bool:
        """Makes room for a plan's lists; whether they are there from a call before. `values` are the
        kernel's arguments, of which strides tell whether batches, or heads, are alike."""
        launches = plan.tuned.listing if isinstance(plan.tuned, Scored) else ()
        alike = [each.lists_alike(values) for each in launches]
        key = (plan.tuned, plan.masked, plan.device, *plan.sizes.values(), *alike)
        if key == self._made_for:
            return True
        if not may_make:
            raise ValueError(
                "beside stream= no memory is made for lists of tiles: pass lists=, a TileLists() that a call "
                "without stream= has filled"
            )
        ints = sum(
            each.list_ints(plan.sizes["seqlen_k"], are, *plan.grid)
            for each, are in zip(launches, alike, strict=True)
        )
        self.memory = allocate(np.empty(max(1, ints), np.int32))
        self._made_for, self.ints = key, ints
        return False

    def forget(self) -> None:
        """Has the next call make the lists anew: for when what masks read has changed."""
        self._made_for = None


class _RememberedLists:
    """Lists of tiles that calls have made which pass none, where they follow from sizes and numbers alone."""

    def __init__(self) -> None:
        self._lists: dict[tuple[Any, ...], TileLists] = {}
        """Those read last stand last."""

    def find(self, key: tuple[Any, ...]) -> TileLists | None:
        """Returns the lists that serve such calls, if there are some."""
        with _LOCK:
            found = self._lists.pop(key, None)
            if found is not None:
                self._lists[key] = found
            return found

    def keep(self, key: tuple[Any, ...], lists: TileLists) -> None:
        """Keeps lists whose launch has been made: whoever finds them launches behind it. Those that nobody
        has read for longest make room."""
        with _LOCK:
            self._lists[key] = lists
            while (
                len(self._lists) > _MOST_LISTS
                or sum(each.ints for each in self._lists.values()) > _MOST_LIST_INTS
            ):
                del self._lists[next(iter(self._lists))]


_LISTS = _RememberedLists()


def _is_captured(handle: int) -> bool:
    """Whether what is launched on a stream goes to a graph, which the default stream never does."""
    state = ctypes.c_int()
    return handle not in _DEFAULT_STREAMS and bool(
        _driver().cuStreamIsCapturing(ctypes.c_void_p(handle), ctypes.byref(state)) or state.value
    )


def _allocator(q: Any, what: str = "lists of tiles") -> Callable[[Any], Any]:
    """What makes room for an array, and for what, on q's device by q's library."""

    def allocate(host: Any) -> Any:
        if _torch_of(q) is not None:
            return q.new_empty(host.shape, dtype=_torch_of(q).int32)
        if not _can_allocate(q):
            raise TypeError(
                f"q is a {_kind(q)}, of which this module cannot make room for {what}: pass torch, CuPy, "
                "PyCUDA or numpy arrays"
            )
        return _empty(q, "int32", host.shape, (1,), None)

    return allocate


class _Placed(NamedTuple):
    """An array as a kernel steps through it."""

    array: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, 0 along axes that are repeated."""
    stream: int | None


def _place(name: str, array: Any, buffer: Buffer, exact: bool, plan: _Plan, may_copy: bool) -> _Placed:
    """Finds out how a kernel steps through an array. Raises what tells the caller how to mend it."""
    torch, stream = _torch_of(array), None
    strides: tuple[int, ...] | None
    if torch is not None:
        dtype, address = str(array.dtype).removeprefix("torch."), array.data_ptr()
        if array.device.type not in _TORCH_DEVICES:
            raise ValueError(f"{name} is on the device {str(array.device)!r}; move it with {name}.cuda()")
        shape, strides, device = tuple(array.shape), tuple(array.stride()), _ordinal(array.device)
    else:
        address, (dtype, shape, strides, device), stream = _read(name, array)
        dtype = _BUFFER_TYPESTRS.get(dtype, dtype)
        strides = None if strides is None else tuple(step // _BUFFER_BYTES[buffer.dtype] for step in strides)
    wanted = _BUFFER_DTYPES[buffer.dtype]
    if dtype not in wanted:
        way_out = f"{name}.to(torch.{wanted[0]})" if torch is not None else f"{name}.astype({wanted[0]!r})"
        raise TypeError(f"{name} is {dtype}, and {plan.tuned.name} reads {wanted[0]}: pass {way_out}")
    if device not in (None, plan.device):
        raise ValueError(f"q is on device {plan.device}, {name} on device {device}; move them to one")
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    whole, steps = _broadcast(name, shape, strides, buffer, exact, plan.sizes)
    last = _needed(buffer, plan.sizes)[-1]
    if buffer.any_step or whole[-1] <= 1 >= last or (whole[-1] > 1 and steps[-1] == 1):
        return _Placed(array, address, whole, steps, stream)
    if not may_copy:
        raise ValueError(
            f"the last axis of {name} has the stride {steps[-1]}, but must be contiguous, and beside stream= "
            "nothing is copied: pass a contiguous array"
        )
    laid_out = _laid_out(name, array, whole[-1] if whole[-1] > 1 else last, torch)
    return _place(name, laid_out, buffer, exact, plan, False)


def _serves_dtype(buffer: Buffer, array: Any) -> bool:
    """Tells whether an array is of a buffer's type, as far as it says; what says nothing may be."""
    name = str(getattr(array, "dtype", "")).removeprefix("torch.")
    return not name or name in _BUFFER_DTYPES[buffer.dtype]


def _broadcast(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    buffer: Buffer,
    exact: bool,
    sizes: Mapping[str, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and strides of an array with all of a buffer's axes."""
    needed = _needed(buffer, sizes)
    missing = len(needed) - len(shape)
    whole, steps = (1,) * missing + shape, (0,) * missing + strides
    # Which entry is read along an axis without sizes, the kernel finds out: there must be one.
    if missing < 0 or not all(
        (length in (1, least) or (length > least and not exact)) if names else length > 0 and axis >= missing
        for axis, (length, least, names) in enumerate(zip(whole, needed, buffer.axes, strict=True))
    ):
        told = ", ".join(
            str(least) if names else "any" for least, names in zip(needed, buffer.axes, strict=True)
        )
        of = ", ".join(f"{each} {sizes[each]}" for each in dict.fromkeys(sum(buffer.axes, ())))
        raise ValueError(
            f"{name} has the shape {shape}, but must be ({told}){f' with {of}' if of else ''}, or broadcast "
            "to that"
        )
    return whole, tuple(0 if length == 1 else step for length, step in zip(whole, steps, strict=True))


def _needed(buffer: Buffer, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The least lengths of a buffer's axes, 0 where an index is computed."""
    return tuple(max((sizes[each] for each in names), default=0) for names in buffer.axes)


def _laid_out(name: str, array: Any, last: int, torch: Any) -> Any:
    """A copy whose last axis is contiguous, repeated where there is one entry of it."""
    if torch is not None:
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.stride()[:-1])
        array = array[once] if once else array
        return array.expand(*array.shape[:-1], last).contiguous()
    if _library(array) == "cupy":
        cupy = importlib.import_module("cupy")
        return cupy.ascontiguousarray(cupy.broadcast_to(array, (*array.shape[:-1], last)))
    raise ValueError(
        f"the last axis of {name} must be contiguous and have {last} entries, which this module lays out of "
        f"torch, CuPy and numpy arrays alone, not of a {_kind(array)}"
    )


# ---- documents


def _is_pair(value: Any) -> bool:
    """Whether documents are told by where they begin and end for each row."""
    return isinstance(value, tuple | list) and len(value) == 2


def _bounds_of(documents: Any, rows: int, keys: int, *, may_make: bool) -> tuple[Any, Any]:
    """Where each row's document begins and ends: as it was passed, or made of segment ids on their device."""
    if _is_pair(documents):
        begins, ends = documents
        return begins, ends
    if not may_make:
        raise ValueError("beside stream= nothing is made of documents: pass what document_bounds returns")
    return _document_bounds(documents, rows, keys)


def _document_bounds(ids: Any, rows: int, keys: int) -> tuple[Any, Any]:
    shape = tuple(ids.shape)
    if len(shape) not in (1, 2) or shape[-1] != keys:
        raise ValueError(f"documents have the shape {shape}, but must be (batch, {keys}), an id for each key")
    torch = _torch_of(ids)
    if torch is not None:
        # The last row is that of the last key.
        places = torch.arange(keys - rows, keys, device=ids.device).clamp_(min=0)
        ids = ids.contiguous()
        of_rows = ids.index_select(-1, places) if keys else ids.new_zeros((*shape[:-1], rows))
        begins = torch.searchsorted(ids, of_rows, out_int32=True)
        return begins, torch.searchsorted(ids, of_rows, right=True, out_int32=True)
    if _library(ids) not in ("numpy", "cupy"):
        raise TypeError(
            f"documents are a {_kind(ids)}, which this module cannot search: pass int32 arrays of where each "
            "row's document begins and ends, (batch, seqlen_q), as a pair"
        )
    library: Any = importlib.import_module(_library(ids))
    if library is np and bool((ids[..., 1:] < ids[..., :-1]).any()):
        raise ValueError(
            "documents are not sorted; ids in any order are what the mask 'doc[b, q] == doc[b, k]' reads"
        )
    places = library.clip(library.arange(keys - rows, keys), 0, None)
    bounds = []
    batch = math.prod(shape[:-1])
    for side in ("left", "right"):
        found = library.zeros((batch, rows), library.int32)
        for at, row in enumerate(ids.reshape(batch, keys) if keys else ()):
            found[at] = library.searchsorted(row, row[places], side)
        bounds.append(found)
    return bounds[0], bounds[1]
