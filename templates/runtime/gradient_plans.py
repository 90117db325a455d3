"""What is made once for gradients of arrays of the same shapes, and how their kernels are launched."""

import collections
import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import _View
from .build import _load
from .driver import _asking, _check, _driver, _pop_context, _push_context, _retain_primary_context
from .facts import Launch, Tuned
from .plans import (
    _GRADIENT_ARRAYS,
    _GRADIENT_POINTERS,
    _GRADIENT_STRIDES,
    _INT_MAX,
    _MOST_STREAMS,
    _TOTALS,
    _Arguments,
    _Beside,
    _starts,
    _tell_of_launch,
    _workspace_words,
)
from .table import _TORCH_DEVICES, _ordinal, _Output, _Table
from .tensor_maps import _clipped, _encode_map, _KeptMaps, _Maps

#: What is given of each row, and not by strides.
_ROWS = ("lse", "dlse")
#: What of the arrays by strides is read, and whose gradients the others are.
_GIVEN = _GRADIENT_ARRAYS[:5]
#: By which size of a call the rows and the heads of arrays of keys are counted; those of others by another.
_OF_KEYS = ("k", "v", "dk", "dv")


class _ReadByGradients(_Beside):
    """What kernels of the backward pass read beside their arrays, and the gradients of it that a call wants:
    of plain attention there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, Any] = {}
        """The gradients that are wanted, by what kernels call the arrays that they are of, once `make` has
        made room for them."""

    @property
    def in_no_order(self) -> tuple[str, ...]:
        """Those that are wanted whose last bits vary."""
        return ()

    @property
    def zeroed(self) -> tuple[tuple[int, int], ...]:
        """Where memory begins that must be zero first, and the bytes of it."""
        return ()

    @property
    def leaves_rows(self) -> bool:
        """Whether there may be rows of which kernels make no gradients: those are zero."""
        return False

    def make(self, plan: "_GradientPlan", allocate: Callable[[tuple[int, ...]], Any]) -> None:
        """Makes room for the gradients that are wanted."""

    def skips(self, launch: Launch) -> bool:
        """Tells whether a call can do without a launch."""
        return False

    def found(self, may_sum: bool) -> tuple[Any, ...]:
        """Returns the gradients that are wanted, in their order, of the shapes of what they are of: what that
        repeats is summed where it may be."""
        return self.as_passed(self.made, may_sum)

    def as_passed(self, made: dict[str, Any], may_sum: bool = True) -> tuple[Any, ...]:
        """Returns such gradients likewise."""
        return ()

    def on_device(self, put: Callable[[Any], Any]) -> "_ReadByGradients":
        return self

    def through(self, read: Callable[[Any], Any]) -> "_ReadByGradients":
        return self


_NOTHING_READ = _ReadByGradients()


class _GradientPlan(NamedTuple):
    """What follows from all about the arrays but their addresses: made once for arrays of the same shapes."""

    tuned: Tuned
    """The kernel that serves."""
    masked: bool
    blocks: tuple[int, ...]
    """The blocks of each of the kernel's launches; those of none are left out."""
    steps: tuple[tuple[int, int, int], ...]
    """The strides of arrays by batch, head and row, in elements and 0 along dimensions of one entry."""
    sizes: dict[str, int]
    grid: tuple[int, ...]
    """The sizes by which blocks are counted."""
    workspace_words: int
    """32-bit words of what the launches leave each other things in."""
    misfit_bits: int
    """The bits that no address may have: those below the size of an access; all where strides do not suit
    it."""
    device: int
    """The device's ordinal."""
    in_primary: bool
    """Whether the context to be in is the device's primary, as torch's is; else that of the arrays."""
    meta: bool
    """Whether the arrays are tensors without data."""
    made: tuple[_Output, _Output, _Output]
    """The gradients."""
    made_bytes: tuple[int, ...]
    """The bytes of each of them."""
    dtype: Any
    """Their type, torch's own for tensors."""
    idle: "dict[int, list[_ReadyGradients]]"
    """Launches that no call has now, by stream."""
    maps: tuple[_KeptMaps, ...]
    """The maps made for each launch, by the addresses of arrays."""
    read: dict[Any, dict[str, float]]
    """What calls were told of all that is read beside, by what that follows from but for addresses."""


def _make_gradient_plan(
    table: _Table, torch: Any, masked: bool, layout: Any, *described: Any
) -> _GradientPlan:
    """Checks type, shape, strides and device of q, k, v, o, dout and of lse and dlse, one after the other,
    and draws from them all that they decide. `torch` is the module where they are tensors, else None. Strides
    are None where arrays are contiguous; what is said of dlse is None where there is none."""
    arrays = [described[4 * i : 4 * i + 4] for i in range(len(_GIVEN))]
    views = {
        name: table.inspect(name, each, layout, torch) for name, each in zip(_GIVEN, arrays, strict=True)
    }
    query, key, value = (views[name] for name in "qkv")
    table.check_shapes(query, key, value)
    of_rows = table.output_like(query, value.head_dim, layout).rows_shape
    for name in ("o", "dout"):
        _check_like_output(name, views[name], query, value)
    devices = {name: view.device for name, view in views.items()}
    rows = described[4 * len(_GIVEN) :]
    for name, each in zip(_ROWS, (rows[:4], rows[4:]), strict=True):
        if each[0] is not None:
            devices[name] = _check_rows(name, each, of_rows, torch)
    for name, device in devices.items():
        if None not in (device, query.device) and device != query.device:
            raise ValueError(f"q is on device {query.device}, {name} on device {device}; move them to one")
    made = tuple(table.output_like(view, view.head_dim, layout) for view in (query, key, value))
    steps = (*(view.strides for view in views.values()), *(each.steps for each in made))
    strides = tuple(step for each in steps for step in each)
    tuned = table.choose(query, key, value, strides, masked).tuned
    sizes = table.sizes(query, key, layout)
    counted = tuple(sizes[name] for name in tuned.counted)
    blocks = tuple(launch.count(*counted) for launch in tuned.launches)
    if max(*blocks, query.shape[2], key.shape[2]) > _INT_MAX:
        raise ValueError(f"{max(blocks)} blocks exceed what a CUDA grid holds, {_INT_MAX}: split the batch")
    return _GradientPlan(
        tuned=tuned,
        masked=masked,
        blocks=tuple(launch.blocks(n) for launch, n in zip(tuned.launches, blocks, strict=True)),
        steps=steps,
        sizes=sizes,
        grid=counted,
        workspace_words=_workspace_words(tuned, counted),
        misfit_bits=tuned.access_bytes - 1 if tuned.can_step(strides) else -1,
        device=query.device or 0,
        in_primary=torch is not None,
        meta=torch is not None and arrays[0][3].type == "meta",
        made=(made[0], made[1], made[2]),
        made_bytes=tuple(tuned.item_bytes * math.prod(each.shape) for each in made),
        dtype=tuned.dtype if torch is None else getattr(torch, tuned.dtype),
        idle=collections.defaultdict(list),
        maps=tuple(_KeptMaps() for _ in tuned.launches),
        read={},
    )


def _check_like_output(name: str, given: _View, query: _View, value: _View) -> None:
    """Raises TypeError and ValueError unless an array is as the output of `attention` is."""
    if given.dtype != query.dtype:
        raise TypeError(f"q is {query.dtype}, {name} {given.dtype}; they must be of one type")
    if given.shape != query.shape:
        raise ValueError(
            f"{name} has (batch, heads, seqlen) {given.shape}, q has {query.shape}; they must be equal"
        )
    if given.head_dim != value.head_dim:
        raise ValueError(f"v has the head dim {value.head_dim}, {name} {given.head_dim}; they must be equal")


def _check_rows(name: str, described: tuple[Any, ...], wanted: tuple[int, ...], torch: Any) -> int | None:
    """The device of an array with a number for each row, of that shape. Raises TypeError and ValueError."""
    dtype, shape, strides, device = described
    if dtype not in ("float32", "<f4") if torch is None else dtype is not torch.float32:
        raise TypeError(f"{name} is {dtype}, not float32, as the log-sum-exp of attention is")
    if tuple(shape) != wanted:
        told = "(batch, heads, seqlen_q)" if len(wanted) == 3 else "(heads, total_q)"
        raise ValueError(f"{name} has the shape {tuple(shape)}, but must be {told}, {wanted}")
    item_bytes = 4 if torch is None else 1
    dense = [math.prod(wanted[axis + 1 :]) for axis in range(len(wanted))]
    if strides is not None and any(
        n > 1 and stride != item_bytes * step
        for n, stride, step in zip(shape, strides, dense, strict=True)
        if 0 not in wanted
    ):
        raise ValueError(f"{name} has the strides {tuple(strides)}, but must be contiguous")
    if torch is None:
        on: int | None = device
        return on
    if device.type not in _TORCH_DEVICES:
        raise ValueError(f"{name} is on the device {str(device)!r}; move it with {name}.cuda()")
    return _ordinal(device)


def _launch_gradients(
    plan: _GradientPlan,
    addresses: tuple[int, ...],
    workspace: int,
    scale: float | None,
    read: _ReadByGradients,
    numbers: tuple[float, ...],
    handle: int,
) -> None:
    """Launches a plan's kernel on arrays at these addresses, in the order of its arguments and 0 where they
    are absent, with the `numbers` of what it reads beside them, on the stream of that handle."""
    _check_gradient_alignment(plan, addresses)
    idle = plan.idle[handle]
    try:
        ready = idle.pop()
    except IndexError:
        if len(plan.idle) > _MOST_STREAMS:
            plan.idle.clear()
        ready = _ReadyGradients(plan, handle)
    ready.write(addresses, workspace, plan.tuned.default_scale if scale is None else scale, numbers)
    pushed, status = False, 0
    ready.ask_context()
    if ready.context.value != ready.primary:
        in_use = next(filter(None, (workspace, *addresses)), 0)
        pushed = _push_context(_driver(), in_use, plan.device)
    try:
        unwritten = zip(addresses[-3:], plan.made_bytes, strict=True) if read.leaves_rows else ()
        for address, count in (*unwritten, *read.zeroed):
            _check(_driver().cuMemsetD8Async(address, 0, count, handle), "filling memory with zeros")
        follows = False
        for index in ready.launched:
            if not read.skips(plan.tuned.launches[index]):
                status, follows = ready.start(plan, index, addresses, follows), True
            if status:
                break
    finally:
        if pushed:
            _pop_context()
    if status:
        _tell_of_launch(status, handle, plan.device)
    idle.append(ready)


def _check_gradient_alignment(plan: _GradientPlan, addresses: tuple[int, ...]) -> None:
    """Each access moves `vector` elements and must start at a multiple of them."""
    if not functools.reduce(int.__or__, addresses) & plan.misfit_bits:
        return
    tuned = plan.tuned
    at: dict[str, int] = dict(zip(_GRADIENT_POINTERS, addresses, strict=True))
    for name, strides in zip(_GRADIENT_ARRAYS, plan.steps, strict=True):
        if at[name] % tuned.access_bytes or not tuned.can_step(strides):
            raise ValueError(
                f"{name} starts at address {at[name]:#x} with strides {strides} (batch, head, row) in "
                f"elements; kernel {tuned.name} moves {tuned.step} elements at once and needs an address "
                f"that is a multiple of {tuned.access_bytes} and strides that are multiples of {tuned.step}: "
                f"pass {name}.contiguous() (torch) or a copy"
            )


class _ReadyGradients:
    """The launches of a call but for addresses, kept with their plan; no two calls have them at once."""

    def __init__(self, plan: _GradientPlan, handle: int) -> None:
        functions = _load(plan.tuned, plan.device, plan.masked)
        self.primary = _retain_primary_context(plan.device) if plan.in_primary else 0
        """The context to be in, where it is known."""
        self.context = ctypes.c_void_p()
        """The current one, once `ask_context` was called."""
        self.ask_context = functools.partial(_asking("cuCtxGetCurrent"), ctypes.byref(self.context))
        launches = plan.tuned.launches
        # All launches are told the same.
        self.arguments = _Arguments(launches[0].arguments, _GRADIENT_POINTERS)
        strides = (step for each in plan.steps for step in each)
        self.arguments.write(dict(zip(_GRADIENT_STRIDES, strides, strict=True)) | plan.sizes)
        self.launched = tuple(index for index, blocks in enumerate(plan.blocks) if blocks)
        self.parameters = tuple(
            (ctypes.c_void_p * 2)(ctypes.addressof(self.arguments.buffer), 0) for _ in launches
        )
        """The addresses of each function's parameters: the arguments, then the maps where there are any."""
        self.starts = tuple(
            _starts(launch, blocks or 1, handle, function, parameters)
            for blocks, launch, function, parameters in zip(
                plan.blocks, launches, functions, self.parameters, strict=True
            )
        )
        """What makes each as the first of a call, and behind another."""

    def write(
        self, addresses: tuple[int, ...], workspace: int, scale: float, beside: tuple[float, ...]
    ) -> None:
        self.arguments.write_addresses(*addresses)
        self.arguments.write_workspace(workspace)
        self.arguments.write_numbers(scale, beside)

    def start(self, plan: _GradientPlan, index: int, addresses: tuple[int, ...], follows: bool) -> int:
        """Makes one launch, which `follows` another of the same call or is its first; returns what the driver
        does."""
        if plan.tuned.launches[index].maps:
            kept = plan.maps[index]
            maps = kept.get(addresses) or _encode_gradient_maps(plan, index, kept, addresses)
            self.parameters[index][1] = maps.address
        status: int = self.starts[index][follows]()
        return status


def _encode_gradient_maps(
    plan: _GradientPlan, index: int, kept: _KeptMaps, addresses: tuple[int, ...]
) -> _Maps:
    """The maps of a launch for arrays at these addresses, kept with their plan."""
    tuned, sizes, wanted = plan.tuned, plan.sizes, plan.tuned.launches[index].maps
    made = kept.make(addresses, len(wanted))
    at: dict[str, int] = dict(zip(_GRADIENT_POINTERS, addresses, strict=True))
    for place, each in enumerate(wanted):
        of_keys, of_queries_dim = each.array in _OF_KEYS, each.array in ("q", "k", "dq", "dk")
        rows, heads = ("seqlen_k", "num_kv_heads") if of_keys else ("seqlen_q", "num_q_heads")
        strides: tuple[int, ...] = plan.steps[_GRADIENT_ARRAYS.index(each.array)]
        lengths: tuple[int, ...] = (sizes[rows], sizes[heads], sizes["batch"])
        address = at[each.array]
        if _TOTALS[0] in sizes:
            rows = _TOTALS[of_keys]
            _, heads_apart, row = strides
            lengths, strides = _clipped(sizes[rows], sizes[heads], heads_apart, row, tuned.item_bytes)
        if not sizes[rows]:  # nothing is read of it, but a map must be of something
            lengths, address = (1,) * len(lengths), next(filter(None, addresses))
        columns = tuned.head_dim if of_queries_dim else tuned.head_dim_v
        sizes_of = (columns, *lengths)
        made.put(place, (address,), _encode_map, each, tuned.dtype, address, sizes_of, strides)
    return made.keep()
