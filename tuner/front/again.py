"""Calls of tensors like one before, of which addresses alone are new.

What the first call of its kind found out, its kernel, shapes and arguments packed, is kept by all that it
follows from. To the next are left: to write addresses, to make what is returned, and to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ...templates.runtime.gradient_tensors import _Seen, _with_tensors, _without_tensors
from ...templates.runtime.plans import (
    _LISTS_MADE,
    _MOST_STREAMS,
    _TILE_LISTS,
    _WORKSPACE,
    _encode_maps,
    _functions_in_primary,
    _Plan,
    _Ready,
    _Step,
    _tell_of_launch,
)
from ...templates.runtime.scored_values import _LISTS, Scored, _Asked, _is_captured
from ...templates.runtime.tensors import _Tensors
from .attend import Call, call_of, served_by
from .bound import Bound
from .known import Again, Known, KnownCalls
from .whole_columns import filled_up

#: What has calls be found out about anew where it is another.
_USUAL = {"wait": True, "fallback": None, "device": None, "stream": None}
#: What kernels know an array by that a call may be told by another name.
_KEYWORDS = {"attn_mask": "bias"}
_WORD_BYTES = 8
#: CUDA_ERROR_INVALID_CONTEXT and _HANDLE: what the driver says, and launches nothing, where no context is
#: current, or another than the one which a function and a stream are of.
_OTHER_CONTEXT = (201, 400)


def go_the_usual_way(q: Any, k: Any, v: Any, out: Any, arrays: tuple[Any, ...]) -> None:
    """Stands for calls of a kind that nothing can be kept of."""


def keep(
    bound: Bound,
    known: KnownCalls,
    key: Any,
    torch: Any,
    arrays: tuple[Any, ...],
    told: Mapping[str, Any],
    *,
    derived: bool,
) -> None:
    """Keeps a call that was computed among the ``known``, which were the bound's as it began, under that key:
    all its ``arrays``, q, k and v first, and what it was ``told`` beside those, the other arrays in their
    order among it; ``derived``: gradients are taken of it."""
    if not bound.most_again or any(told.get(name, usual) is not usual for name, usual in _USUAL.items()):
        return
    call = call_of(*arrays[:3], **{name: value for name, value in told.items() if name not in _USUAL})
    beside = {_KEYWORDS.get(name, name): value for name, value in told.items() if _is_array(value)}
    read = {**call.named, **call.buffers, "out": call.out}
    if any(read.get(name) is not value for name, value in beside.items()):
        return  # a number was read of an array, which may have another next time
    if len(known) >= bound.most_again:
        known.clear()
    again = _made(bound, torch, call, ("q", "k", "v", *beside), derived)
    known[key] = Known(again or go_the_usual_way)


def _made(bound: Bound, torch: Any, call: Call, names: Sequence[str], derived: bool) -> Again | None:
    """What computes such calls again, of whose arrays those are the names; None where each is found out about
    anew."""
    q, k, v, out = call.q, call.k, call.v, call.out
    if filled_up(torch, call) is not None:
        return None
    attention, scale, beside = served_by(bound, call)
    tensors = attention._tensors
    # As `_Tensors.attend` asks.
    described = [(x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.device) for x in (q, k, v)]
    output = None
    if out is not None:
        output = out.dtype, out.shape, None if out.is_contiguous() else out.stride(), out.device
    masked = tensors.is_masked(call.causal)
    plan = tensors.plan(torch, masked, call.layout, output, *(each for one in described for each in one))
    suits = plan.blocks and plan.has_keys and plan.misfit_bits != -1
    if plan.meta or not plan.in_primary or not suits:
        return None
    if any(launch.plans for launch in plan.tuned.launches):
        return None  # which are made as they are needed
    read = _Read.of(call, beside, plan, names)
    if read is None:
        return None
    listed = None
    if any(launch.lists for launch in plan.tuned.launches):
        listed = _common_lists(beside, plan, read)
        if listed is None:
            return None
    run = _running(torch, q, plan, scale, read, listed, return_lse=call.return_lse or derived)
    return _differentiated(torch, tensors, run, call, scale, beside, read) if derived else run


def _common_lists(beside: Any, plan: _Plan, read: _Read) -> tuple[Any, ...] | None:
    """What is remembered of lists of tiles which such calls have in common, but for the stream; None where
    each makes its own, or the call before has left none."""
    tuned = plan.tuned
    if not (isinstance(tuned, Scored) and isinstance(beside, _Asked) and tuned.lists_stand):
        return None
    are_made = read.numbers[beside.tuned.reads.index(_LISTS_MADE)]
    return beside.key_of_lists(tuned, plan) if are_made else None


class _Read(NamedTuple):
    """What a kernel reads beside q, k and v, the addresses of arrays apart."""

    numbers: tuple[float, ...]
    """All of it, as the first call of its kind read it."""
    names: tuple[str, ...]
    """The arrays, as the kernel calls them, in its order."""
    order: tuple[int, ...]
    """Which of the arrays that calls pass each of them is."""
    places: tuple[int, ...]
    """Where the address of each is among the numbers."""

    @classmethod
    def of(cls, call: Call, beside: Any, plan: _Plan, passed: Sequence[str]) -> _Read | None:
        """Returns what is read of a call that is passed arrays of those names; None where arrays are copied,
        or made of others."""
        if not isinstance(beside, _Asked):
            return cls((), (), (), ())
        numbers, names = beside.numbers(plan, call.q, True), tuple(beside.tuned.buffers)
        keywords = {parts: keyword for keyword, parts in beside.tuned.keywords.items()}
        if any((name,) not in keywords for name in names) or beside.kept.keys() - {_TILE_LISTS} != set(names):
            return None
        asked = [beside.arrays[keywords[(name,)]] for name in names]
        if any(beside.kept[name] is not each for name, each in zip(names, asked, strict=True)):
            return None
        order = tuple(passed.index(keywords[(name,)]) for name in names)
        return cls(numbers, names, order, tuple(map(beside.tuned.reads.index, names)))


def _is_array(value: Any) -> bool:
    return hasattr(value, "data_ptr")


class _Launches(NamedTuple):
    """What launches a call on a stream, but for addresses. No two calls have it at once."""

    at_arrays: tuple[tuple[Any, int, int], ...]
    """Words of eight bytes that are addresses of arrays: among which, the place there, and which array it is
    of those that calls pass."""
    at_workspace: tuple[tuple[Any, int], ...]
    """Those that are the address of the workspace."""
    at_lists: tuple[tuple[Any, int], ...]
    """And of lists of tiles."""
    steps: tuple[tuple[Callable[..., None], Callable[[], int], Any, _Step], ...]
    """For each launch what writes the addresses of q, k, v, o and the log-sum-exp, what makes it, and the
    maps made before, by addresses; None where there are none."""


def _launches(
    plan: _Plan, functions: tuple[int, ...], handle: int, scale: float | None, read: _Read
) -> tuple[Any, ...]:
    """What launches a call by those functions on the stream of that handle, as `_Launches` says; parts of a
    mere tuple are had sooner."""
    ready = _Ready(plan, handle, functions)
    ready.write_numbers(scale, read.numbers)
    at_arrays: list[tuple[Any, int, int]] = []
    at_workspace: list[tuple[Any, int]] = []
    at_lists: list[tuple[Any, int]] = []
    for step in ready.steps:
        arguments = step.arguments
        words = memoryview(arguments.buffer).cast("B").cast("Q")
        places = {name: arguments.offset_of(i) // _WORD_BYTES for i, (name, _) in enumerate(arguments.fields)}
        for name, index in zip(read.names, read.order, strict=True):
            at_arrays.append((words, places[name], index))
        if plan.workspace_words and _WORKSPACE in places:
            at_workspace.append((words, places[_WORKSPACE]))
        if _TILE_LISTS in places:
            at_lists.append((words, places[_TILE_LISTS]))
    steps = ready.steps_for(read.numbers)
    return tuple(_Launches(tuple(at_arrays), tuple(at_workspace), tuple(at_lists), steps))


def _running(
    torch: Any,
    like: Any,
    plan: _Plan,
    scale: float | None,
    read: _Read,
    listed: tuple[Any, ...] | None,
    *,
    return_lse: bool,
) -> Again:
    """Runs a plan on tensors ``like`` that one: what `tensors._run` and `plans._launch` do where all but
    addresses is known. A call is as long as what it looks up and enters. ``listed``: by what lists of tiles
    are found on each stream, where the plan has some."""
    idle: dict[int, list[Any]] = {}
    misfit_bits, device, like_q, words = plan.misfit_bits, plan.device, plan.like_q, plan.workspace_words
    shape, strides, dtype = plan.out_shape, plan.out_strides, plan.out_dtype
    rows_shape, rows_strides, float32 = plan.rows_shape, plan.rows_strides, torch.float32
    current_stream, empty_like = _current_stream(torch), torch.empty_like
    empty: Any = _empty(torch, like)
    has_empty = empty is not None
    current_device = torch._C._cuda_getDevice if _has_several(torch) else None
    # Found now: the next call may be the first that a graph captures.
    functions = _functions_in_primary(plan)

    def again(q: Any, k: Any, v: Any, out: Any, arrays: tuple[Any, ...]) -> Any:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & misfit_bits:
            return None
        handle, address_of_lists = current_stream(device), 0
        if listed is not None:
            lists = None if _is_captured(handle) else _LISTS.find((*listed, handle))
            if lists is None:
                return None  # whoever makes them remembers them
            address_of_lists = lists.address
        try:
            waiting = idle[handle]
            ready = waiting.pop()
        except (KeyError, IndexError):
            if len(idle) > _MOST_STREAMS:
                idle.clear()
            waiting = idle.setdefault(handle, [])
            ready = _launches(plan, functions, handle, scale, read)
        at_arrays, at_workspace, at_lists, steps = ready
        at_once = has_empty and (current_device is None or current_device() == device)
        at_lse, lse = 0, None
        if out is not None:
            at_o = out.data_ptr()
            if at_o & misfit_bits or at_o in (at_q, at_k, at_v):
                waiting.append(ready)
                return None
        elif at_once:
            out = empty(shape, strides, dtype)
            at_o = out.data_ptr()
        else:
            out = empty_like(q) if like_q else q.new_empty_strided(shape, strides, dtype=dtype)
            at_o = out.data_ptr()
        if return_lse:
            if at_once:
                lse = empty(rows_shape, rows_strides, float32)
            else:
                lse = q.new_empty_strided(rows_shape, rows_strides, dtype=float32)
            at_lse = lse.data_ptr()
        if words:
            workspace = q.new_empty((words,), dtype=float32)
            address = workspace.data_ptr()
            for memory, word in at_workspace:
                memory[word] = address
        for memory, word in at_lists:
            memory[word] = address_of_lists
        for memory, word, index in at_arrays:
            memory[word] = arrays[index].data_ptr()
        for write, start, kept, step in steps:
            write(at_q, at_k, at_v, at_o, at_lse)
            if kept is not None:
                pointers = (at_q, at_k, at_v, at_o)
                if step.met_at:
                    pointers += _met(step, read, arrays)
                maps = kept.get(pointers) or _encode_maps(plan, step, kept, pointers)
                step.parameters[1] = maps.address
            status = start()
            if status:
                if status in _OTHER_CONTEXT:
                    waiting.append(ready)
                    return None
                _tell_of_launch(status, handle, device)
        waiting.append(ready)
        return (out, lse) if return_lse else out

    return again


def _current_stream(torch: Any) -> Callable[[int], int]:
    """What returns the handle of the stream in use on a device, as `tensors._current_handle` does."""
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def _has_several(torch: Any) -> bool:
    return bool(hasattr(torch._C, "_cuda_getDevice") and torch.cuda.device_count() > 1)


def _empty(torch: Any, like: Any) -> Any:
    """What makes tensors of a shape, strides and type on the device in use, as that of a tensor ``like`` that
    one is, and as code of torch.compile makes them: in half the time that it takes to find out which library
    makes them. None where this PyTorch has no such function."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    empty = getattr(guards, f"_empty_strided_{like.device.type}", None)
    if empty is None:
        return None
    try:
        made = empty((2, 3), (3, 1), like.dtype)
    except (RuntimeError, TypeError):
        return None
    told = (made.dtype, made.device.type, tuple(made.shape), made.stride())
    return empty if told == (like.dtype, like.device.type, (2, 3), (3, 1)) else None


def _met(step: _Step, read: _Read, arrays: Sequence[Any]) -> tuple[int, ...]:
    """The addresses and strides of arrays that scores meet by maps."""
    numbers = list(read.numbers)
    for place, index in zip(read.places, read.order, strict=True):
        numbers[place] = arrays[index].data_ptr()
    return tuple(int(numbers[place]) for place in step.met_at)


# ---- gradients


class _Derived(NamedTuple):
    """Calls of a kind that gradients are taken of, by kernels."""

    tensors: _Tensors
    run: Again
    """Makes o and the log-sum-exp."""
    settings: tuple[Any, ...]
    """What the operator is told beside q, k and v, as gradients keep it: without the arrays."""


def _differentiated(
    torch: Any, tensors: _Tensors, run: Again, call: Call, scale: float | None, beside: Any, read: _Read
) -> Again | None:
    """Runs such calls where autograd takes their gradients by kernels, through a function of autograd, which
    PyTorch enters sooner than an operator that is written in Python. None where gradients are not taken
    so."""
    if call.out is not None or not tensors.takes_gradients(torch, call.q, call.v):
        return None
    told = (bool(call.causal), None if scale is None else float(scale), tensors.layout_in_graph(call.layout))
    settings, arrays = _without_tensors([*told, *tensors.in_graph(beside)])
    if len(arrays) != len(read.order):
        return None
    derived, order, return_lse = _Derived(tensors, run, settings), read.order, call.return_lse
    apply, modes = _function(torch).apply, torch._C._len_torch_dispatch_stack
    transformation = torch._C._functorch.peek_interpreter_stack

    def again(q: Any, k: Any, v: Any, out: Any, arrays: tuple[Any, ...]) -> Any:
        if modes() or transformation() is not None:
            return None  # which must see an operator
        read = [arrays[index] for index in order] if order else ()
        made = apply(derived, arrays, q, k, v, *read)
        return made if return_lse else made[0]

    return again


@cache
def _function(torch: Any) -> Any:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, derived: _Derived, arrays: tuple[Any, ...], *tensors: Any) -> Any:
            q, k, v, *read = tensors
            ctx.set_materialize_grads(False)
            made = derived.run(q, k, v, None, arrays)
            if made is None:
                told = _with_tensors(derived.settings, read)
                made = derived.tensors.run(torch, q, k, v, *told, return_lse=True)
            ctx.derived = derived
            ctx.save_for_backward(*tensors, *made)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Any, grad_lse: Any) -> Any:
            of, saved, wanted = ctx.derived, ctx.saved_tensors, list(ctx.needs_input_grad[5:])
            seen = _Seen(saved, of.settings, len(wanted), of.tensors.operator, (wanted, False))
            at_once = not torch.is_grad_enabled() and of.tensors.is_seen_by_autograd_alone(torch)
            found = of.tensors.gradients.differentiate(torch, seen, grad, grad_lse, at_once)
            # Of the arrays they are where the operator takes these, behind what is told of any call.
            return None, None, *found[:3], *(found[6] if wanted else ())

    return Attention
