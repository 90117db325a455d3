"""Kernels of the backward pass for tensors of PyTorch: run where they lie, and as operators of its graphs."""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arrays import _describe
from .driver import _LOCK, _stream_handle
from .facts import Tuned
from .gradient_plans import (
    _GIVEN,
    _NOTHING_READ,
    _GradientPlan,
    _launch_gradients,
    _make_gradient_plan,
    _ReadByGradients,
)
from .table import _Table, _type_name
from .tensors import _allocating_for, _current_handle, _Tensors

#: What operators take for the causal mask, the scale and the layout where these are left out.
_USUAL: tuple[Any, ...] = (None, None, "bhsd")


class _Settings(NamedTuple):
    """What a call is told beside arrays."""

    causal: bool | None
    scale: float | None
    stream: Any
    layout: Any
    deterministic: bool | None
    read: _ReadByGradients


class _GradientTensors:
    """A table's kernels of the backward pass for tensors, with the plans of those seen before."""

    settings = (
        'Tensor? dlse=None, bool? causal=None, float? scale=None, str layout="bhsd", bool deterministic=False'
    )
    """What the operator takes behind the arrays that are always there, as PyTorch writes it."""
    results = "(Tensor, Tensor, Tensor)"
    """What it returns."""

    def __init__(
        self,
        kernels: tuple[Tuned, ...],
        operator: str,
        default_mask: bool,
        make_table: Callable[[Any], _Table] = _Table,
    ) -> None:
        self.operator, self.default_mask = operator, default_mask
        self.table = make_table(kernels)
        """All kernels."""
        repeating = tuple(each for each in kernels if each.deterministic)
        self.repeating = self.table if repeating == kernels else make_table(repeating)
        """Those that make the same bits every time."""
        self.plan = functools.lru_cache(maxsize=1024)(self.make_plan)

    def forget(self) -> None:
        """Lets kernels be chosen anew."""
        self.plan.cache_clear()

    def make_plan(self, deterministic: bool, *settings: Any) -> _GradientPlan:
        return _make_gradient_plan(self.repeating if deterministic else self.table, *settings)

    def is_masked(self, causal: bool | None) -> bool:
        return self.default_mask if causal is None else bool(causal)

    def repeats(
        self, deterministic: bool, dtype: str, query: tuple[int, ...], value: tuple[int, ...], warn_only: bool
    ) -> bool:
        """Tells whether only kernels may serve that make the same bits every time, which was asked for if
        `deterministic`, of q and v of those shapes; raises RuntimeError, or warns, where there are none."""
        if not deterministic or self.repeating.computing(dtype, int(query[-1]), int(value[-1])):
            return deterministic
        told = (
            f"none of the kernels for gradients of {dtype}, head dim {query[-1]}, makes the same bits every "
            "time, which was asked for: make one with --set dq_path=launch beside it, or in its place"
        )
        if not warn_only:
            raise RuntimeError(told)
        warnings.warn(told, stacklevel=3)
        return False

    def numbers(
        self, read: _ReadByGradients, plan: _GradientPlan, q: Any, may_make: bool
    ) -> tuple[float, ...]:
        """Returns what a kernel reads beside its arrays, in the order of its arguments."""
        of: Any = plan
        return read.numbers(of, q, may_make)

    # ---- in PyTorch

    def computes(self, torch: Any, q: Any, v: Any) -> bool:
        """Tells whether there are kernels for gradients of such tensors."""
        dtype = _type_name(torch, q.dtype, self.table.dtypes)
        return len(q.shape) == len(v.shape) and bool(self.table.computing(dtype, q.shape[-1], v.shape[-1]))

    def attend(self, torch: Any, tensors: _Tensors, q: Any, k: Any, v: Any, settings: tuple[Any, ...]) -> Any:
        """Computes what the operator with a log-sum-exp does of `tensors`, told those settings, where nothing
        of PyTorch but autograd must see it: as a function of autograd, which PyTorch enters sooner than an
        operator that is written in Python. Else returns None."""
        told, read = _without_tensors(settings)
        if not tensors.is_seen_by_autograd_alone(torch, q, k, v, *read):
            return None
        return _function(torch).apply(tensors, told, q, k, v, *read)

    def keep(self, ctx: Any, operator: str, inputs: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Keeps what `differentiate` takes of a call of the operator of that name."""
        ctx.operator, (q, k, v, *settings) = operator, inputs
        ctx.settings, read = _without_tensors(settings)
        ctx.num_read = len(read)
        ctx.save_for_backward(q, k, v, *read, *made)

    def differentiate(
        self, torch: Any, ctx: Any, grad: Any, grad_lse: Any, at_once: bool = False
    ) -> tuple[Any, ...]:
        """Returns the gradients of an operator's inputs; `at_once`, where PyTorch need not see how."""
        q, k, v, *rest = ctx.saved_tensors
        made, settings = rest[ctx.num_read :], ctx.settings
        if ctx.num_read:
            settings = _with_tensors(settings, rest[: ctx.num_read])
        if len(made) == 2:
            o, lse = made
        else:
            with torch.no_grad():
                o, lse = getattr(torch.ops.flashgen, f"{ctx.operator}_lse")(q, k, v, *settings)
        grad = torch.zeros_like(o) if grad is None else grad
        if grad.stride(-1) != 1 and grad.shape[-1] > 1:
            grad = grad.contiguous()
        # Which may end anywhere, as an operator's arguments do.
        causal, scale, layout = (*settings, *_USUAL[len(settings) :])[:3]
        deterministic = bool(torch.are_deterministic_algorithms_enabled())
        told = causal, scale, layout, deterministic, *settings[3:], *self.wanted_of(ctx)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        if at_once:
            grads = self.in_order(self.run(torch, q, k, v, o, lse, grad, grad_lse, *told))
        else:
            grads = self.in_order(self.of_graphs(torch)(q, k, v, o, lse, grad, grad_lse, *told))
        return (*grads[:3], *self.of_settings(ctx, settings, grads[3:]))

    def of_graphs(self, torch: Any) -> Any:
        """Returns the operator, which is registered as needed."""
        _register_gradients(self)
        return getattr(torch.ops.flashgen, self.operator)

    def wanted_of(self, ctx: Any) -> tuple[Any, ...]:
        """Returns what the operator takes of which more gradients are wanted."""
        return ()

    def of_settings(self, ctx: Any, settings: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the gradients of what an operator was told beside q, k and v, of those that were made."""
        return (None,) * len(settings)

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        """Returns the layout of which `layout_in_graph` made that, and what the operator took behind it."""
        return layout

    def layout_in_graph(self, layout: Any) -> Any:
        """Returns what the operator takes of a layout."""
        return layout

    def read_in(self, layout: Any, taken: tuple[Any, ...]) -> _ReadByGradients:
        """Returns what kernels read beside, of what the operator took."""
        return _NOTHING_READ

    def in_graph(self, read: _ReadByGradients) -> tuple[Any, ...]:
        """Returns what the operator takes of what kernels read beside."""
        return ()

    def returned(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns gradients as the operator does."""
        return grads

    def in_order(self, returned: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the gradients of which `returned` made that."""
        return returned

    def more_like(self, taken: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns gradients without data of what kernels read beside, of what the operator took."""
        return ()

    def register(self, torch: Any) -> None:
        """Makes the operator of the kernels in torch.ops.flashgen, once."""
        with _LOCK:
            if hasattr(torch.ops.flashgen, self.operator):
                return
            name, library = f"flashgen::{self.operator}", torch.library
            arrays = "Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout"
            exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
            schema = f"({arrays}, {self.settings}) -> {self.results}"
            library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, exact))
            library.impl(name, "default", functools.partial(self.run, torch))
            library.register_fake(name, functools.partial(self.fake, torch))
            library.register_autograd(name, _refuse)

    def run(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        dlse: Any = None,
        causal: bool | None = None,
        scale: float | None = None,
        layout: Any = "bhsd",
        deterministic: bool = False,
        *taken: Any,
    ) -> tuple[Any, ...]:
        """Computes what the operator returns, on a GPU."""
        read, layout = self.read_in(layout, taken), self.layout_in(layout, taken)
        settings = _Settings(causal, scale, None, layout, deterministic, read)
        return self.returned(self.launch(torch, (q, k, v, o, dout), lse, dlse, settings))

    def launch(
        self,
        torch: Any,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[Any, ...]:
        """Computes the gradients of q, k and v, where arrays are those, o and dout, and those wanted of what
        is read beside. Copies what the kernel cannot step by, but beside `stream`."""
        q, _, v, *_ = arrays
        stream, layout, read = settings.stream, settings.layout, settings.read
        repeats = bool(settings.deterministic)
        if repeats:
            dtype = _type_name(torch, q.dtype, self.table.dtypes)
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            repeats = self.repeats(repeats, dtype, q.shape, v.shape, warn_only)
            _check_order(read, warn_only)
        plan = self.planned(torch, repeats, settings, arrays, lse, dlse)
        addresses = [x.data_ptr() for x in arrays]
        if stream is None and functools.reduce(int.__or__, addresses) & plan.misfit_bits:
            named = zip(_GIVEN, arrays, strict=True)
            arrays = tuple(self.laid_out(torch, name, x, layout) for name, x in named)
            plan = self.planned(torch, repeats, settings, arrays, lse, dlse)
            addresses = [x.data_ptr() for x in arrays]
        current = _current_handle(torch, plan.device)
        handle = current if stream is None else _stream_handle(stream)
        with contextlib.nullcontext() if handle == current else _allocating_for(torch, q, handle):
            grads = [q.new_empty_strided(each.shape, each.strides, dtype=plan.dtype) for each in plan.made]
            workspace = q.new_empty_strided((plan.workspace_words,), (1,), dtype=torch.float32)
            addresses += lse.data_ptr(), 0 if dlse is None else dlse.data_ptr()
            addresses += [x.data_ptr() for x in grads]
            at, scale = workspace.data_ptr(), settings.scale
            if read is _NOTHING_READ:  # of nothing there is nothing to ask
                _launch_gradients(plan, tuple(addresses), at, scale, read, (), handle)
                return tuple(grads)
            read.make(plan, functools.partial(q.new_empty, dtype=torch.float32))
            numbers = self.numbers(read, plan, q, stream is None)
            _launch_gradients(plan, tuple(addresses), at, scale, read, numbers, handle)
            return (*grads, *read.found(True))

    def planned(
        self,
        torch: Any,
        repeats: bool,
        settings: _Settings,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
    ) -> _GradientPlan:
        """Returns the plan for such tensors, `repeats` if it must be of a kernel that makes the same bits
        every time."""
        described: list[Any] = []
        for x in (*arrays, lse):
            # To ask for strides takes longer than to ask whether there is anything to tell of them.
            described += x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.device
        described += (None,) * 4 if dlse is None else _describe(dlse)
        return self.plan(repeats, torch, self.is_masked(settings.causal), settings.layout, *described)

    def laid_out(self, torch: Any, name: str, x: Any, layout: Any) -> Any:
        """Returns a dense copy of a tensor, its dimensions in the same order."""
        view = self.table.inspect(name, _describe(x), layout, torch)
        made = self.table.output_like(view, view.head_dim, layout)
        return x.new_empty_strided(made.shape, made.strides).copy_(x)

    def fake(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        dlse: Any = None,
        causal: bool | None = None,
        scale: float | None = None,
        layout: Any = "bhsd",
        deterministic: bool = False,
        *taken: Any,
    ) -> tuple[Any, ...]:
        """Returns gradients without data, of tensors whose extents may be symbols."""
        grads, layout = [], self.layout_in(layout, taken)
        for name, x in zip("qkv", (q, k, v), strict=True):
            view = self.table.inspect(name, _describe(x), layout, torch)
            made = self.table.output_like(view, view.head_dim, layout)
            grads.append(x.new_empty_strided(made.shape, made.strides))
        return self.returned((*grads, *self.more_like(taken)))

    def take(
        self,
        torch: Any,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[Any, ...]:
        """Computes `gradients` of tensors: launches a kernel at once, or calls the operator where PyTorch
        must see one."""
        deterministic = settings.deterministic
        if deterministic is None:
            deterministic = bool(torch.are_deterministic_algorithms_enabled())
        derived = torch.is_grad_enabled() and (
            any(x.requires_grad for x in arrays) or settings.read.requires_grad
        )
        plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in arrays)
        if plain and not derived and not torch.compiler.is_compiling() and not arrays[0].is_meta:
            settings = settings._replace(deterministic=deterministic)
            return self.launch(torch, arrays, lse, dlse, settings)
        if settings.stream is not None:
            raise ValueError("leave stream out where gradients are needed, and under torch.compile")
        q, k, v, o, dout = arrays
        causal = None if settings.causal is None else bool(settings.causal)
        scale = None if settings.scale is None else float(settings.scale)
        layout = self.layout_in_graph(settings.layout)
        told = causal, scale, layout, deterministic, *self.in_graph(settings.read)
        return self.in_order(self.of_graphs(torch)(q, k, v, o, lse, dout, dlse, *told))


class _Saved(NamedTuple):
    """In place of tensors that are saved apart: which is the first of them, and how many a list had; None: it
    was one by itself."""

    first: int
    number: int | None


def _without_tensors(settings: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What an operator was told beside q, k and v without tensors, and these."""
    told: list[Any] = []
    tensors: list[Any] = []
    for each in settings:
        if hasattr(each, "data_ptr"):
            told.append(_Saved(len(tensors), None))
            tensors.append(each)
        elif isinstance(each, list) and each and hasattr(each[0], "data_ptr"):
            told.append(_Saved(len(tensors), len(each)))
            tensors += each
        else:
            told.append(each)
    return tuple(told), tuple(tensors)


def _with_tensors(settings: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """What `_without_tensors` made that of."""
    told: list[Any] = []
    for each in settings:
        if not isinstance(each, _Saved):
            told.append(each)
        else:
            found = tensors[each.first : each.first + (1 if each.number is None else each.number)]
            told.append(found[0] if each.number is None else list(found))
    return tuple(told)


class _Seen(NamedTuple):
    """A call of an operator as gradients see it, of what a function of autograd kept in its place."""

    saved_tensors: tuple[Any, ...]
    settings: tuple[Any, ...]
    num_read: int
    operator: str
    needs_input_grad: tuple[Any, ...]
    """Which gradients are wanted of what the operator was told behind v, or the end of that."""


@functools.cache
def _function(torch: Any) -> Any:
    """The function of autograd of all operators with a log-sum-exp whose gradients kernels take."""

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, of: _Tensors, settings: tuple[Any, ...], q: Any, k: Any, v: Any, *read: Any
        ) -> tuple[Any, Any]:
            ctx.set_materialize_grads(False)
            told = _with_tensors(settings, read) if read else settings
            made: tuple[Any, Any] = of.run(torch, q, k, v, *told, return_lse=True)
            ctx.of, ctx.settings = of, settings
            ctx.save_for_backward(q, k, v, *read, *made)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Any, grad_lse: Any) -> tuple[Any, ...]:
            of, settings, wanted = ctx.of, ctx.settings, ctx.needs_input_grad[5:]
            at_once = not torch.is_grad_enabled() and of.is_seen_by_autograd_alone(torch)
            needed = _with_tensors(settings, wanted) if wanted else settings
            seen = _Seen(ctx.saved_tensors, settings, len(wanted), of.operator, needed)
            dq, dk, dv, *others = of.gradients.differentiate(torch, seen, grad, grad_lse, at_once)
            return None, None, dq, dk, dv, *(_of_tensors(settings, others) if wanted else ())

    return Attention


def _of_tensors(settings: tuple[Any, ...], grads: Sequence[Any]) -> list[Any]:
    """The gradients of what `_without_tensors` saved apart, of those of all that an operator was told."""
    found: list[Any] = []
    for each, grad in zip(settings, grads, strict=True):
        if isinstance(each, _Saved):
            found += [grad] if each.number is None else grad
    return found


def _check_order(read: _ReadByGradients, warn_only: bool) -> None:
    """Raises RuntimeError, or warns, where gradients are wanted that are added up in no order, although those
    were asked for that have the same bits every time."""
    if not read.in_no_order:
        return
    told = (
        f"elements of {', '.join(read.in_no_order)} are read at computed places, and their gradients added "
        "up as pairs come, but the same bits every time were asked for: leave these gradients out"
    )
    if not warn_only:
        raise RuntimeError(told)
    warnings.warn(told, stacklevel=3)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("gradients of gradients are not taken: leave create_graph=True out")


def _register_gradients(tensors: _GradientTensors) -> None:
    tensors.register(importlib.import_module("torch"))


# As torch.compiler.assume_constant_result would mark it: torch.compile calls it as it traces, and moves on.
_register_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]
