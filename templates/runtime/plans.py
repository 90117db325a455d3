"""What is made once for arrays of the same shapes, and how a kernel is launched on them."""

import collections
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .arrays import _check_output
from .build import _load
from .driver import _asking, _check, _driver, _pop_context, _push_context, _retain_primary_context
from .facts import _ITEM_BYTES, Launch, Tuned
from .table import _SIZES, _Table
from .tensor_maps import _clipped, _encode, _encode_map, _KeptMaps, _Maps

_INT_MAX = 2**31 - 1
_MOST_STREAMS = 64  # for which a plan keeps launches
_POINTERS = ("q", "k", "v", "o", "lse")  # neighbours in the arguments of every kernel, where it has them
_OUTER_AXES = ("batch", "head", "row")
_STRIDES = tuple(f"{array}_stride_{dim}" for array in "qkvo" for dim in _OUTER_AXES)
#: What kernels of the backward pass have in place of those, and the arrays of it that have strides.
_GRADIENT_POINTERS = ("q", "k", "v", "o", "dout", "lse", "dlse", "dq", "dk", "dv")
_GRADIENT_ARRAYS = tuple(name for name in _GRADIENT_POINTERS if name not in ("lse", "dlse"))
_GRADIENT_STRIDES = tuple(f"{array}_stride_{dim}" for array in _GRADIENT_ARRAYS for dim in _OUTER_AXES)
_TILE_LISTS, _LISTS_MADE = "tile_lists", "tile_lists_made"
_TOTALS = ("total_q", "total_k")
#: The strides that caches have in place of those of batches, and their sizes.
_PAGE_STRIDES = {f"{array}_stride_page": f"{array}_stride_batch" for array in "kv"}
_PAGE_SIZES = ("num_pages", "page_size", "max_pages")
_PLAN, _PLAN_MADE = "plan", "plan_made"
#: Where launches leave things for others of the same call; parts of it take multiples of so many 32-bit
#: words.
_WORKSPACE, _WORKSPACE_WORDS = "workspace", 64
#: Where launches behind one that rotates queries read them.
_ROTATED = "rotated_q"


class _Beside:
    """What a kernel reads beside q, k, v and the scale: numbers, in the order of its arguments. Of plain
    attention there are none, of tensors with scales that of v."""

    streams: frozenset[int | None] = frozenset()
    """The streams on which arrays among it are ready."""

    def __init__(self, *numbers: float) -> None:
        self.told = numbers

    @property
    def requires_grad(self) -> bool:
        """Whether PyTorch wants the gradient of some array among it."""
        return False

    def numbers(self, plan: "_Plan", q: Any, may_make: bool) -> tuple[float, ...]:
        """Returns the numbers for a plan's arrays, of which q is one. What must be copied or made for it, is
        where it may be."""
        return self.told

    def launched(self) -> None:
        """Hears that the launches have been made for which `numbers` was asked."""

    def on_device(self, put: Callable[[Any], Any]) -> "_Beside":
        """Returns the same with numpy's arrays where `put` puts them, on the GPU."""
        return self

    def through(self, read: Callable[[Any], Any]) -> "_Beside":
        """Returns the same with its arrays as another library reads them."""
        return self


_NOTHING_BESIDE = _Beside()


class _Plan(NamedTuple):
    """What follows from all about the arrays but their addresses: made once for arrays of the same shapes."""

    tuned: Tuned
    """The kernel that serves."""
    masked: bool
    blocks: tuple[int, ...]
    """The blocks of each of the kernel's launches, of which those of none are left out; empty where there is
    nothing to compute."""
    strides: tuple[int, ...]
    """The strides of q, k, v and o by batch, head and row, in elements and 0 along dimensions of one
    entry."""
    workspace_words: int
    """The 32-bit words that a call needs for what its launches leave each other."""
    sizes: dict[str, int]
    grid: tuple[int, ...]
    """The sizes by which blocks are counted."""
    misfit_bits: int
    """The bits that no address may have: those below the size of an access; all where strides do not suit
    it."""
    has_keys: bool
    device: int
    """The device's ordinal."""
    in_primary: bool
    """Whether the context to be in is the device's primary, as torch's is; else that of the arrays."""
    meta: bool
    """Whether the arrays are tensors without data."""
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    """The strides, in elements, of the output made where none is passed."""
    rows_shape: tuple[int, ...]
    rows_strides: tuple[int, ...]
    """The strides, in elements, of the log-sum-exp."""
    out_dtype: Any
    """The type of the output made where none is passed, torch's own for tensors."""
    like_q: bool
    """Whether the output made where none is passed is laid out as q is: then torch makes one faster."""
    idle: "dict[int, list[_Ready]]"
    """Launches that no call has now, by stream."""
    maps: "tuple[_KeptMaps, ...]"
    """The maps made for each launch, by the addresses of q, k, v and o, and of what scores meet by addresses
    and strides."""
    read: dict[Any, dict[str, float]]
    """What calls were told of all that is read beside, by what that follows from but for addresses."""


def _make_plan(
    table: _Table, torch: Any, masked: bool, layout: Any, out: tuple[Any, ...] | None, *arrays: Any
) -> _Plan:
    """Checks type, shape, strides and device of q, k and v, `arrays` one after the other, and of `out`, and
    draws from them all that they decide. `torch` is the module where they are tensors, else None. Strides are
    None where arrays are contiguous, as in the CUDA array interface, or as they are. `layout` is as the table
    has it."""
    q, k, v = arrays[:4], arrays[4:8], arrays[8:]
    query = table.inspect("q", q, layout, torch)
    key = table.inspect("k", k, layout, torch)
    value = table.inspect("v", v, layout, torch)
    kv_heads, num_keys = table.check_shapes(query, key, value)
    made = table.output_like(query, value.head_dim, layout)
    output = None if out is None else table.inspect("out", out, layout, torch)
    for name, array in (("k", key), ("v", value), ("out", output)):
        if array is not None and None not in (array.device, query.device) and array.device != query.device:
            raise ValueError(
                f"q is on device {query.device}, {name} on device {array.device}; move them to one"
            )
    choosing = (*query.strides, *key.strides, *value.strides)
    if output is None:
        o_strides = made.steps
        tuned = table.choose(query, key, value, (*choosing, *o_strides), masked).tuned
    else:
        tuned = table.choose(query, key, value, (*choosing, *output.strides), masked).tuned
        _check_output(output, query, tuned.output_dtype)
        if value.head_dim != output.head_dim:
            raise ValueError(
                f"v has the head dim {value.head_dim}, out {output.head_dim}; they must be equal"
            )
        o_strides = output.strides
    strides = (*choosing, *o_strides)
    sizes = table.sizes(query, key, layout)
    grid: tuple[int, ...] = table.sizes_of_grid(sizes)
    if tuned.counts_keys:
        grid = (*grid, num_keys)
    tiles = [launch.tiles(*grid) for launch in tuned.launches]
    _, heads, num_rows = query.shape
    rows = num_rows * (heads // max(kv_heads, 1)) if tuned.main.pack_heads else num_rows
    if max(*tiles, rows, num_keys) > _INT_MAX:
        raise ValueError(f"{max(tiles)} blocks exceed what a CUDA grid holds, {_INT_MAX}: split the batch")
    computes = tuned.main.tiles(*grid) > 0
    return _Plan(
        tuned=tuned,
        masked=masked,
        blocks=tuple(launch.blocks(n) for launch, n in zip(tuned.launches, tiles, strict=True))
        if computes
        else (),
        strides=strides,
        workspace_words=_workspace_words(tuned, grid) if computes else 0,
        sizes=sizes,
        grid=grid,
        misfit_bits=tuned.access_bytes - 1 if tuned.can_step(strides) else -1,
        has_keys=num_keys > 0,
        device=query.device or 0,
        in_primary=torch is not None,
        meta=torch is not None and q[3].type == "meta",
        out_shape=made.shape,
        out_strides=made.strides,
        rows_shape=made.rows_shape,
        rows_strides=made.rows_strides,
        out_dtype=tuned.output_dtype if torch is None else getattr(torch, tuned.output_dtype),
        like_q=not table.has_scales and made.shape == q[1] and q[2] in (None, made.strides),
        idle=collections.defaultdict(list),
        maps=tuple(_KeptMaps() for _ in tuned.launches),
        read={},
    )


def _workspace_words(tuned: Tuned, counted: Sequence[int]) -> int:
    """The 32-bit words that a call of such sizes needs for what its launches leave each other."""
    parts = (words(*counted) for words in tuned.workspace)
    return sum(-(-words // _WORKSPACE_WORDS) * _WORKSPACE_WORDS for words in parts)


def _launch(
    plan: _Plan,
    q: int,
    k: int,
    v: int,
    o: int,
    lse: int,
    scale: float | None,
    beside: tuple[float, ...],
    handle: int,
    given: bool,
    workspace: int = 0,
) -> None:
    """Launches a plan's kernel on arrays at these addresses, with what it reads `beside` them, on the stream
    of that handle. `o` was `given` or made for the call; `lse`, the log-sum-exp, is 0 where it is not
    wanted. `workspace` is the address of the plan's `workspace_words`."""
    if not plan.has_keys:
        k = v = 0
    if given and o in (q, k, v):
        raise ValueError("out is the memory of q, k or v, which the kernel still reads; pass another array")
    if (q | k | v | o) & plan.misfit_bits:
        _check_alignment(plan, (q, k, v, o))
    idle = plan.idle[handle]
    try:
        ready = idle.pop()
    except IndexError:
        if len(plan.idle) > _MOST_STREAMS:
            plan.idle.clear()
        ready = _Ready(plan, handle)
    if scale != ready.scale or beside != ready.beside:
        ready.write_numbers(scale, beside)
    if workspace:
        ready.write_workspace(workspace)
    pushed = False
    ready.ask_context()
    if ready.context.value != ready.primary:
        pushed = _push_context(_driver(), q, plan.device)
    status = 0
    try:
        for write, start, kept, step in ready.steps_for(beside) if ready.made_at else ready.in_order:
            queries = q if step.rotated_at is None else int(beside[step.rotated_at])
            write(queries, k, v, o, lse)
            if kept is not None:
                pointers: tuple[int, ...] = (queries, k, v, o)
                if step.met_at:
                    pointers += tuple(int(beside[place]) for place in step.met_at)
                maps = kept.get(pointers) or _encode_maps(plan, step, kept, pointers)
                step.parameters[1] = maps.address
            status = start()
            if status:
                break
    finally:
        if pushed:
            _pop_context()
    if status:
        _tell_of_launch(status, handle, plan.device)
    idle.append(ready)


def _tell_of_launch(status: int, handle: int, device: int) -> None:
    """Raises what a launch on the stream of that handle failed of."""
    _check(status, f"launching on stream {handle:#x} (is it one of device {device} and its context?)")


def _check_alignment(plan: _Plan, addresses: tuple[int, ...]) -> None:
    """Each access moves `vector` elements and must start at a multiple of them; the copy engine takes no step
    back."""
    tuned = plan.tuned
    moves, positive = ("copies", "positive ") if tuned.has_maps else ("reads", "")
    for i, (name, address) in enumerate(zip(("q", "k", "v", "out"), addresses, strict=True)):
        strides = plan.strides[3 * i : 3 * i + 3]
        if address % tuned.access_bytes == 0 and tuned.can_step(strides):
            continue
        raise ValueError(
            f"{name} starts at address {address:#x} with strides {strides} (batch, head, row) in elements; "
            f"kernel {tuned.name} {moves} {tuned.step} elements at once and needs an address that is a "
            f"multiple of {tuned.access_bytes} and {positive}strides that are multiples of {tuned.step}: "
            f"pass {name}.contiguous() (torch) or a copy"
        )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a number for a value."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: it may begin before the launch in front of it ends.
_DEPENDENT = _Attribute(6, 0, (1,))


def _configuration(launch: Launch, blocks: int, handle: int, follows: bool) -> _Config:
    """What the driver is told of a launch on the stream of that handle. One that `follows` another of its
    call may overlap that, if it is `dependent`; the first waits for whatever others have launched."""
    attributes = (ctypes.addressof(_DEPENDENT), 1) if launch.dependent and follows else (None, 0)
    return _Config((blocks, 1, 1), (launch.threads, 1, 1), launch.smem_bytes, handle, *attributes)


def _starts(launch: Launch, blocks: int, handle: int, function: int, parameters: Any) -> tuple[Any, Any]:
    """What makes a launch as the first of a call, and behind another; each returns what the driver does."""
    first, behind = (
        functools.partial(
            _driver()["cuLaunchKernelEx"],
            ctypes.byref(_configuration(launch, blocks, handle, follows)),
            ctypes.c_void_p.from_param(function),
            ctypes.byref(parameters),
            None,
        )
        for follows in (False, True)
    )
    return first, behind


class _Ready:
    """The launches of a call but for addresses: what the driver is passed, kept with its plan, as making it
    takes longer than the launch itself. The driver copies the arguments, so that the next call may write its
    own; no two calls have it at once."""

    def __init__(self, plan: _Plan, handle: int, functions: tuple[int, ...] | None = None) -> None:
        """`functions`: those to launch, where they are of one context (`_functions_in_primary`); else any
        context may launch them."""
        functions = functions or _load(plan.tuned, plan.device, plan.masked)
        self.scale: float | None = None
        self.beside: tuple[float, ...] | None = None
        """What the last call wrote beside the scale; None before the first."""
        self.default_scale = plan.tuned.default_scale
        self.primary = _retain_primary_context(plan.device) if plan.in_primary else 0
        """The context to be in, where it is known."""
        self.context = ctypes.c_void_p()
        """The current one, once `ask_context` was called."""
        # Functions found by index have no argument types, and take ctypes' own objects as they are: in half
        # the time.
        self.ask_context = functools.partial(_asking("cuCtxGetCurrent"), ctypes.byref(self.context))
        self.steps = tuple(
            _Step(plan, index, function, handle)
            for index, function in enumerate(functions)
            if plan.blocks[index]
        )
        self.in_order = _looked_up(self.steps)
        """What each call asks of the steps, looked up before."""
        names = _beside(plan.tuned.launches[0].arguments)
        self.made_at = tuple(names.index(name) for name in (_PLAN_MADE, _LISTS_MADE) if name in names)
        """Where `beside` says of what may be kept that it is there."""
        self.in_order_again = {
            made: _looked_up(
                tuple(each for each in self.steps if not _is_made(each.launch, names, self.made_at, made))
            )
            for made in itertools.product((False, True), repeat=len(self.made_at))
        }
        """The same without those that make what is there, by what is."""

    def steps_for(self, beside: tuple[float, ...]) -> "tuple[tuple[Any, Any, Any, _Step], ...]":
        """Returns what is to be launched: plans and lists of tiles but where they are there."""
        if not self.made_at:
            return self.in_order
        return self.in_order_again[tuple(bool(beside[place]) for place in self.made_at)]

    def write_workspace(self, address: int) -> None:
        for step in self.steps:
            step.arguments.write_workspace(address)

    def write_numbers(self, scale: float | None, beside: tuple[float, ...]) -> None:
        for step in self.steps:
            step.write_numbers(self.default_scale if scale is None else scale, beside)
        self.scale, self.beside = scale, beside


def _functions_in_primary(plan: _Plan) -> tuple[int, ...]:
    """The functions of a plan's launches in its device's primary context: the driver refuses to launch them
    in another, and need not be asked before which is current."""
    kernels, device = _load(plan.tuned, plan.device, plan.masked), plan.device
    driver, functions = _driver(), []
    _check(driver.cuCtxPushCurrent_v2(_retain_primary_context(device)), f"entering device {device}")
    try:
        for kernel in kernels:
            function = ctypes.c_void_p()
            _check(driver.cuKernelGetFunction(ctypes.byref(function), kernel), "finding a kernel's function")
            assert function.value is not None
            functions.append(function.value)
    finally:
        _pop_context()
    return tuple(functions)


def _looked_up(steps: "tuple[_Step, ...]") -> "tuple[tuple[Any, Any, Any, _Step], ...]":
    """What a call of those steps asks of each."""
    return tuple(
        (step.write, step.start if i == 0 else step.follow, step.maps, step) for i, step in enumerate(steps)
    )


def _is_made(launch: Launch, names: tuple[str, ...], places: tuple[int, ...], made: tuple[bool, ...]) -> bool:
    """Whether what a launch makes is there, as the flags of those names say."""
    flag = _PLAN_MADE if launch.plans else _LISTS_MADE if launch.lists else None
    return any(there and names[place] == flag for place, there in zip(places, made, strict=True))


class _Step:
    """One launch of a kernel that is ready, with the arguments of its own."""

    def __init__(self, plan: _Plan, index: int, function: int, handle: int) -> None:
        self.launch = plan.tuned.launches[index]
        self.maps = plan.maps[index] if self.launch.maps else None
        self.arguments = _Arguments(self.launch.arguments)
        self.write, self.write_numbers = self.arguments.write_addresses, self.arguments.write_numbers
        names = _beside(self.launch.arguments)
        rotates = _ROTATED in names and self.launch.reads_queries
        self.rotated_at = names.index(_ROTATED) if rotates else None
        """Where `beside` says of rotated queries that it is to take those; None where it takes q."""
        met = plan.tuned.met_arrays
        self.met_at = tuple(
            names.index(name)
            for each in self.launch.maps
            if each.array in met
            for name in met[each.array].told
        )
        """Where `beside` says of addresses and strides of what scores meet that has maps."""
        self.strides = plan.strides
        if rotates:
            head, row = plan.tuned.head_dim, plan.tuned.head_dim * plan.sizes["num_q_heads"]
            self.strides = (plan.sizes["seqlen_q"] * row, head, row, *plan.strides[3:])
        steps = dict(zip(_STRIDES, self.strides, strict=True))
        steps |= {name: steps[batches] for name, batches in _PAGE_STRIDES.items()}
        self.arguments.write(steps | plan.sizes)
        addresses = [ctypes.addressof(self.arguments.buffer)] + [0] * bool(self.launch.maps)
        self.parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        """The addresses of the kernel's parameters: the arguments, then the maps where there are any."""
        self.start, self.follow = _starts(self.launch, plan.blocks[index], handle, function, self.parameters)
        """What makes the launch as the first of a call, and behind another."""


class _Arguments:
    """A struct as C lays it out, by the names and formats of its fields."""

    def __init__(self, fields: tuple[tuple[str, str], ...], arrays: tuple[str, ...] = _POINTERS) -> None:
        """`arrays` are those whose addresses each call writes."""
        self.fields = fields
        self.buffer = ctypes.create_string_buffer(self.size_of(len(fields)))
        names = [name for name, _ in fields]
        first = names.index(arrays[0])
        # Of latent attention keys are values, too.
        kept = tuple(name for name in arrays if name in names)
        assert tuple(names[first : first + len(kept)]) == kept
        pointers = struct.Struct("".join(format for name, format in fields if name in kept))
        write = functools.partial(pointers.pack_into, self.buffer, self.offset_of(first))
        self.write_addresses: Callable[..., None] = (
            write if kept == arrays else lambda q, k, v, o, lse: write(q, k, o, lse)
        )
        told = [names.index("scale"), *map(names.index, _beside(fields))]
        self.numbers = [struct.Struct(fields[i][1]).pack_into for i in told]
        self.places = [self.offset_of(i) for i in told]
        self.workspace_at = self.offset_of(names.index(_WORKSPACE)) if _WORKSPACE in names else None

    def size_of(self, count: int) -> int:
        """Returns the bytes that the first `count` fields take, filled up as in an array of such structs."""
        return struct.calcsize("".join(format for _, format in self.fields[:count]) + "0Q")

    def offset_of(self, index: int) -> int:
        format = self.fields[index][1]
        before = "".join(each for _, each in self.fields[:index])
        return struct.calcsize(before + format) - struct.calcsize(format)

    def write(self, values: Mapping[str, float]) -> None:
        """Writes those of the values that the struct has fields for."""
        for index, (name, format) in enumerate(self.fields):
            if name in values:
                struct.pack_into(format, self.buffer, self.offset_of(index), values[name])

    def write_workspace(self, address: int) -> None:
        """Writes where the workspace is, of a kernel that has one."""
        if self.workspace_at is not None:
            struct.pack_into("Q", self.buffer, self.workspace_at, address)

    def write_numbers(self, scale: float, beside: tuple[float, ...]) -> None:
        """Writes the scale, and what the kernel reads beside it in order."""
        for write, place, number in zip(self.numbers, self.places, (scale, *beside), strict=True):
            write(self.buffer, place, number)


def _beside(fields: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The names of what a kernel reads beside q, k, v, its outputs and the scale, in order."""
    usual = {*_POINTERS, *_STRIDES, *_PAGE_STRIDES, *_SIZES, *_TOTALS, *_PAGE_SIZES, "scale"}
    usual |= {*_GRADIENT_POINTERS, *_GRADIENT_STRIDES, _WORKSPACE}
    return tuple(name for name, _ in fields if name not in usual)


def _described(
    plan: _Plan,
    name: str,
    addresses: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where a map of an array begins, how long the dimensions beside its columns are, the innermost first,
    and how far apart in elements, the outermost first."""
    sizes, i, of_keys = plan.sizes, "qkvo".index(name), name in "kv"
    address, strides = addresses[i], strides[3 * i : 3 * i + 3]
    rows, heads = (
        sizes["seqlen_k" if of_keys else "seqlen_q"],
        sizes["num_kv_heads" if of_keys else "num_q_heads"],
    )
    lengths: tuple[int, ...] = (rows, heads, sizes["batch"])
    in_pages = of_keys and "page_size" in sizes
    if in_pages:
        lengths = (sizes["page_size"], heads, sizes["num_pages"])
    elif _TOTALS[0] in sizes:
        lengths, strides = (sizes[_TOTALS[of_keys]], heads), strides[1:]
    if in_pages or _TOTALS[0] in sizes:
        heads_apart, row = strides[-2:]
        if in_pages:  # heads of a page follow on those of the last
            page, pages = strides[0], sizes["num_pages"]
            heads_apart = heads_apart if heads > 1 else page
            if pages > 1 and (heads_apart == 0 or page % heads_apart):
                raise ValueError(
                    f"{name}'s pages are {page} elements apart, its heads {heads_apart}: the copy engine "
                    "takes caches whose pages are a whole number of heads apart; pass "
                    f"{name}.contiguous() (torch) or a copy"
                )
            heads += (pages - 1) * (page // heads_apart) if pages > 1 else 0
        lengths, strides = _clipped(lengths[0], heads, heads_apart, row, item_bytes)
    if of_keys and not plan.has_keys:  # nothing is read of it, but a map must be of something
        address, lengths = addresses[0], (1,) * len(lengths)
    return address, lengths, strides


def _encode_maps(
    plan: _Plan,
    of: _Step,
    kept: _KeptMaps,
    addresses: tuple[int, ...],
) -> _Maps:
    """The maps of a step for arrays at these addresses, kept with their plan; behind those of q, k, v and o
    addresses and strides of arrays that scores meet."""
    tuned, launch = plan.tuned, of.launch
    met, end = tuned.met_arrays, 4
    made = kept.make(addresses, len(launch.maps))
    for place, each in enumerate(launch.maps):
        if each.array in met:
            begin, end = end, end + len(met[each.array].told)
            told = addresses[begin:end]
            described = met[each.array].described(told, plan.sizes, addresses[0])
            made.put(place, (addresses[0], *told), _encode, each, *described)
            continue
        dtype = tuned.output_dtype if each.array == "o" else tuned.dtype
        address, lengths, strides = _described(plan, each.array, addresses, of.strides, _ITEM_BYTES[dtype])
        sizes = (tuned.head_dim if each.array in "qk" else tuned.head_dim_v, *lengths)
        made.put(place, (address,), _encode_map, each, dtype, address, sizes, strides)
    return made.keep()
