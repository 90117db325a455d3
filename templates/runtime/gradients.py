"""What a module offers of the backward pass: gradients of q, k and v, by the kernels of its table."""

import contextlib
import ctypes
import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrays import (
    Array,
    _address,
    _Buffer,
    _can_allocate,
    _check_kinds,
    _describe,
    _empty,
    _kind,
    _read,
)
from .attention import Attention, _check_call, _default_mask, _explained, _reader_of
from .build import _compile, _pack
from .driver import _LOCK, _driver, _pop_context, _push_context, _stream_handle, _wait_for_producers
from .facts import Tuned
from .gradient_plans import _GIVEN, _GradientPlan, _launch_gradients, _make_gradient_plan
from .plans import _NOTHING_BESIDE, _Beside
from .table import Choice, _Table, _type_name
from .tensors import _allocating_for, _current_handle

_G = TypeVar("_G", bound=Array)
#: What operators take for the causal mask, the scale and the layout where these are left out.
_USUAL: tuple[Any, ...] = (None, None, "bhsd")


class _Settings(NamedTuple):
    """What a call is told beside arrays."""

    causal: bool | None
    scale: float | None
    stream: Any
    layout: str
    deterministic: bool | None
    beside: _Beside


class _GradientTensors:
    """A table's kernels of the backward pass for tensors, with the plans of those seen before."""

    settings = 'bool? causal=None, float? scale=None, str layout="bhsd", bool deterministic=False'
    """What the operator takes beside tensors, as PyTorch writes it."""

    def __init__(self, kernels: tuple[Tuned, ...], operator: str, default_mask: bool) -> None:
        self.operator, self.default_mask = operator, default_mask
        self.table = _Table(kernels)
        """All kernels."""
        repeating = tuple(each for each in kernels if each.deterministic)
        self.repeating = self.table if repeating == kernels else _Table(repeating)
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

    def numbers(self, beside: _Beside, plan: _GradientPlan, q: Any, may_make: bool) -> tuple[float, ...]:
        """Returns what a kernel reads beside its arrays, in the order of its arguments."""
        of: Any = plan
        return beside.numbers(of, q, may_make)

    # ---- in PyTorch

    def computes(self, torch: Any, q: Any, v: Any) -> bool:
        """Tells whether there are kernels for gradients of such tensors."""
        dtype = _type_name(torch, q.dtype, self.table.dtypes)
        return len(q.shape) == len(v.shape) == 4 and bool(self.table.computing(dtype, q.shape[3], v.shape[3]))

    def keep(self, ctx: Any, operator: str, inputs: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Keeps what `differentiate` takes of a call of the operator of that name."""
        ctx.operator, (q, k, v, *settings) = operator, inputs
        ctx.settings, beside = self.kept(settings)
        ctx.num_beside = len(beside)
        ctx.save_for_backward(q, k, v, *beside, *made)

    def kept(self, settings: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns what an operator was told beside q, k and v without tensors, and these."""
        return tuple(settings), ()

    def told(self, settings: tuple[Any, ...], beside: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns what `kept` made that of, for an operator."""
        return settings

    def differentiate(self, torch: Any, ctx: Any, grad: Any, grad_lse: Any) -> tuple[Any, ...]:
        """Returns the gradients of an operator's inputs."""
        q, k, v, *rest = ctx.saved_tensors
        beside, made = tuple(rest[: ctx.num_beside]), rest[ctx.num_beside :]
        settings = self.told(ctx.settings, beside)
        if len(made) == 2:
            o, lse = made
        else:
            with torch.no_grad():
                o, lse = getattr(torch.ops.flashgen, f"{ctx.operator}_lse")(q, k, v, *settings)
        grad = torch.zeros_like(o) if grad is None else grad
        if grad.stride(3) != 1 and grad.shape[3] > 1:
            grad = grad.contiguous()
        # Which may end anywhere, as an operator's arguments do.
        causal, scale, layout = (*settings, *_USUAL[len(settings) :])[:3]
        told = causal, scale, layout, bool(torch.are_deterministic_algorithms_enabled()), *settings[3:]
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        operator: Any = getattr(torch.ops.flashgen, self.operator)
        grads = operator(q, k, v, o, lse, grad, grad_lse, *told)
        return (*grads, *self.none_of(settings))

    def none_of(self, settings: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the gradients of what an operator was told beside q, k and v: none."""
        return (None,) * len(settings)

    def beside_in(self, taken: tuple[Any, ...]) -> _Beside:
        """Returns what kernels read beside, of what the operator took."""
        return _NOTHING_BESIDE

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        """Returns what the operator takes of what kernels read beside."""
        return ()

    def register(self, torch: Any) -> None:
        """Makes the operator of the kernels in torch.ops.flashgen, once."""
        with _LOCK:
            if hasattr(torch.ops.flashgen, self.operator):
                return
            name, library = f"flashgen::{self.operator}", torch.library
            arrays = "Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dout, Tensor? dlse=None"
            exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
            schema = f"({arrays}, {self.settings}) -> (Tensor, Tensor, Tensor)"
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
        layout: str = "bhsd",
        deterministic: bool = False,
        *taken: Any,
    ) -> tuple[Any, ...]:
        """Computes what the operator returns, on a GPU."""
        settings = _Settings(causal, scale, None, layout, deterministic, self.beside_in(taken))
        return self.launch(torch, (q, k, v, o, dout), lse, dlse, settings)

    def launch(
        self,
        torch: Any,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[Any, ...]:
        """Computes the gradients of q, k and v, where arrays are those, o and dout. Copies what the kernel
        cannot step by, but beside `stream`."""
        q, _, v, *_ = arrays
        stream, layout = settings.stream, settings.layout
        dtype = _type_name(torch, q.dtype, self.table.dtypes)
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        repeats = self.repeats(bool(settings.deterministic), dtype, q.shape, v.shape, warn_only)
        rows = [*_describe(lse), *((None,) * 4 if dlse is None else _describe(dlse))]

        def planned() -> tuple[_GradientPlan, list[int]]:
            described = [each for x in arrays for each in _describe(x)]
            plan = self.plan(repeats, torch, self.is_masked(settings.causal), layout, *described, *rows)
            return plan, [x.data_ptr() for x in arrays]

        plan, addresses = planned()
        if stream is None and functools.reduce(int.__or__, addresses) & plan.misfit_bits:
            named = zip(_GIVEN, arrays, strict=True)
            arrays = tuple(self.laid_out(torch, name, x, layout) for name, x in named)
            plan, addresses = planned()
        current = _current_handle(torch, plan.device)
        handle = current if stream is None else _stream_handle(stream)
        with contextlib.nullcontext() if handle == current else _allocating_for(torch, q, handle):
            grads = tuple(
                q.new_empty_strided(each.shape, each.strides, dtype=plan.dtype) for each in plan.made
            )
            workspace = q.new_empty((plan.workspace_words,), dtype=torch.float32)
        addresses += [lse.data_ptr(), 0 if dlse is None else dlse.data_ptr()]
        addresses += [x.data_ptr() for x in grads]
        numbers = self.numbers(settings.beside, plan, q, stream is None)
        _launch_gradients(plan, tuple(addresses), workspace.data_ptr(), settings.scale, numbers, handle)
        return grads

    def laid_out(self, torch: Any, name: str, x: Any, layout: str) -> Any:
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
        layout: str = "bhsd",
        *others: Any,
    ) -> tuple[Any, ...]:
        """Returns gradients without data, of tensors whose extents may be symbols."""
        grads = []
        for name, x in zip("qkv", (q, k, v), strict=True):
            view = self.table.inspect(name, _describe(x), layout, torch)
            made = self.table.output_like(view, view.head_dim, layout)
            grads.append(x.new_empty_strided(made.shape, made.strides))
        return tuple(grads)

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
        derived = torch.is_grad_enabled() and any(x.requires_grad for x in arrays)
        plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in arrays)
        if plain and not derived and not torch.compiler.is_compiling() and not arrays[0].is_meta:
            settings = settings._replace(deterministic=deterministic)
            return self.launch(torch, arrays, lse, dlse, settings)
        if settings.stream is not None:
            raise ValueError("leave stream out where gradients are needed, and under torch.compile")
        _register_gradients(self)
        q, k, v, o, dout = arrays
        causal = None if settings.causal is None else bool(settings.causal)
        scale = None if settings.scale is None else float(settings.scale)
        told = causal, scale, settings.layout, deterministic, *self.in_graph(settings.beside)
        operator: Any = getattr(torch.ops.flashgen, self.operator)
        grads: tuple[Any, ...] = operator(q, k, v, o, lse, dout, dlse, *told)
        return grads


def _refuse(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("gradients of gradients are not taken: leave create_graph=True out")


def _register_gradients(tensors: _GradientTensors) -> None:
    tensors.register(importlib.import_module("torch"))


# As torch.compiler.assume_constant_result would mark it: torch.compile calls it as it traces, and moves on.
_register_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Gradients:
    """The gradients of attention by the kernels of a table, of which the nearest to the arrays serves.
    Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernels among torch's operators."""
        self.kernels = tuple(kernels)
        self._tensors = _GradientTensors(self.kernels, f"{operator}_gradients", _default_mask(self.kernels))

    def gradients(
        self,
        q: _G,
        k: _G,
        v: _G,
        o: _G,
        lse: _G,
        dout: _G,
        causal: bool | None = None,
        scale: float | None = None,
        stream: Any = None,
        *,
        dlse: _G | None = None,
        layout: str = "bhsd",
        deterministic: bool | None = None,
    ) -> tuple[_G, _G, _G]:
        """Computes the gradients dq, dk and dv of attention, given that of its output.

        q, k and v are as `attention` takes them: (batch, heads, seqlen_q, head_dim), (batch, kv_heads,
        seqlen_k, head_dim) and (batch, kv_heads, seqlen_k, head_dim_v); o and lse are what it made of them
        with return_lse=True, dout, of o's shape and type, is the gradient of o, and dlse, float32 of lse's
        shape, that of lse; None: nothing depends on lse. With layout="bshd", heads and seqlen are swapped in
        all but lse and dlse, which are contiguous (batch, heads, seqlen_q). Gradients are laid out as what
        they are of, in its type; those of keys and values are sums over the query heads that share them.

        Takes arrays of every library that `attention` takes, numpy's with a copy to the GPU and back. What
        the kernel's launches leave each other in is taken from the allocator of q's library, torch's caching
        one among them, and given back by the end of the call.

        causal, scale, stream: as of the call of `attention`.
        deterministic: True for kernels alone that make the same bits every time. None: as
            torch.use_deterministic_algorithms says where arrays are tensors, else False.

        Under torch.compile it is an operator, without a graph break. Gradients of gradients are not taken.

        Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or the compiler
        fails, or where no kernel is deterministic as asked, ImportError without PyCUDA.
        """
        settings = _Settings(causal, scale, stream, layout, deterministic, _NOTHING_BESIDE)
        found: tuple[_G, _G, _G] = self._gradients((q, k, v, o, dout), lse, dlse, settings)
        return found

    def _gradients(
        self,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> Any:
        _check_call(settings.layout, settings.scale)
        q = arrays[0]
        named = (*zip(_GIVEN[1:], arrays[1:], strict=True), ("lse", lse), ("dlse", dlse))
        _check_kinds(q, named)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(q, torch.Tensor):
            return self._tensors.take(torch, arrays, lse, dlse, settings)
        if isinstance(q, np.ndarray):
            return self._of_numpy(arrays, lse, dlse, settings)
        if not _can_allocate(q) and hasattr(q, "__dlpack__"):
            if settings.stream is not None:
                raise ValueError(
                    f"stream is taken with torch, CuPy, PyCUDA and numpy arrays only, and q is a {_kind(q)}"
                )
            read = _reader_of(q, self._tensors.table).from_dlpack
            views = tuple(map(read, arrays))
            settings = settings._replace(beside=settings.beside.through(read))
            found = self._gradients(views, read(lse), None if dlse is None else read(dlse), settings)
            give_back = q.__array_namespace__().from_dlpack
            return tuple(map(give_back, found))
        if not _can_allocate(q):
            raise TypeError(
                f"q is a {_kind(q)}, of which this module cannot make gradients: pass torch, CuPy, PyCUDA or "
                "numpy arrays"
            )
        return self._of_others(arrays, lse, dlse, settings)[0]

    def _of_others(
        self,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[tuple[Any, ...], Any]:
        """Computes `gradients` of arrays that are no tensors, on the GPU; returns them and the workspace."""
        q = arrays[0]
        read = [_read(name, x) for name, x in zip(_GIVEN, arrays, strict=True)]
        rows = [(0, (None,) * 4, None) if x is None else _read("lse", x) for x in (lse, dlse)]
        described = [each for _, one, _ in (*read, *rows) for each in one]
        tensors = self._tensors
        (dtype, shape, *_), (_, shape_v, *_) = read[0][1], read[2][1]
        repeats = tensors.repeats(bool(settings.deterministic), dtype, shape, shape_v, False)
        masked, stream = tensors.is_masked(settings.causal), settings.stream
        plan = tensors.plan(repeats, None, masked, settings.layout, *described)
        current, beside = read[0][2] or 0, settings.beside
        handle = current if stream is None else _stream_handle(stream)
        side_stream = None if handle == current else handle
        made = tuple(_empty(q, plan.dtype, each.shape, each.strides, side_stream) for each in plan.made)
        workspace = _empty(q, "float32", (max(1, plan.workspace_words),), (1,), side_stream)
        numbers = tensors.numbers(beside, plan, q, stream is None or isinstance(q, _Buffer))
        if stream is None:
            _wait_for_producers({*(each[2] for each in (*read, *rows)), *beside.streams}, handle)
        addresses = [each[0] for each in (*read, *rows)] + [_address(x) for x in made]
        _launch_gradients(plan, tuple(addresses), _address(workspace), settings.scale, numbers, handle)
        return made, workspace

    def _of_numpy(
        self,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[NDArray[Any], ...]:
        """Computes `gradients` of numpy arrays through device memory, on the current context's device,
        failing that on device 0."""
        for name, x in zip(_GIVEN, arrays, strict=True):
            self._tensors.table.check_type(name, x.dtype.name, False)
        for name, x in (("lse", lse), ("dlse", dlse)):
            if x is not None and x.dtype != np.float32:
                raise TypeError(f"{name} is {x.dtype}, not float32, as the log-sum-exp of attention is")
        found = self._through_buffers(arrays, lse, dlse, settings, arrays[0].dtype.name)
        grads = []
        for x, grad in zip(arrays[:3], found, strict=True):
            laid_out: NDArray[Any] = np.empty_like(x, subok=False)
            laid_out[...] = grad.view(x.dtype)
            grads.append(laid_out)
        return tuple(grads)

    def _through_buffers(
        self,
        arrays: Sequence[NDArray[Any]],
        lse: NDArray[Any],
        dlse: NDArray[Any] | None,
        settings: _Settings,
        dtype: str,
    ) -> list[NDArray[Any]]:
        """Returns the gradients. Arrays hold that type, or the bits of it as integers."""
        driver, current = _driver(), ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(current))
        pushed = current.value is None and _push_context(driver, 0, 0)
        handle = 0 if settings.stream is None else _stream_handle(settings.stream)
        buffers: list[_Buffer] = []

        def put(host: NDArray[Any], dtype: str | None = None) -> _Buffer:
            host = np.ascontiguousarray(host)
            hosts.append(host)
            buffers.append(_Buffer(host.shape, host.dtype, dtype or host.dtype.name))
            buffers[-1].write(host, handle)
            return buffers[-1]

        hosts: list[NDArray[Any]] = []  # which live until the stream has got there
        try:
            given = tuple(put(x, dtype) for x in arrays)
            settings = settings._replace(stream=handle, beside=settings.beside.on_device(put))
            of_rows = put(lse), None if dlse is None else put(dlse)
            made, workspace = self._of_others(given, *of_rows, settings)
            buffers += [*made, workspace]
            return [x.read(handle) for x in made]
        finally:
            for buffer in buffers:
                buffer.free()
            if pushed:
                _pop_context()

    def explain(
        self, q: Array, k: Array, v: Array, causal: bool | None = None, *, layout: str = "bhsd"
    ) -> Choice:
        """Says which kernel `gradients` would run on these arrays, and why. Nothing is compiled or launched.

        Raises TypeError and ValueError as `gradients` does where none serves.
        """
        _check_call(layout)
        return _explained(self._tensors.table, self._tensors.is_masked(causal), q, k, v, layout)

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve whatever it can compute from now on, however far its shapes:
        for measuring and checking. None lets the nearest serve again. Raises ValueError for an unknown
        name."""
        only = None if name is None else self._named(name)
        self._tensors.table.only = only
        if only is None or only.deterministic:
            self._tensors.repeating.only = only
        self._tensors.forget()

    def register_torch(self) -> str:
        """Makes an operator of the kernels in torch.ops.flashgen, for graphs to hold, once. Returns its name:

            NAME(q, k, v, o, lse, dout, dlse=None, causal=None, scale=None, layout="bhsd",
                deterministic=False) -> (dq, dk, dv)

        It takes what `gradients` takes, and copies what no kernel can step by. `gradients` registers it as
        needed. Needs PyTorch 2.7 or newer."""
        _register_gradients(self._tensors)
        return self._tensors.operator

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        return _compile(self._named(name), arch, causal, True)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        self._named(name).cubins[causal] = _pack(cubin)

    def _named(self, name: str) -> Tuned:
        named = {tuned.name: tuned for tuned in self.kernels}
        if name not in named:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(named)}")
        return named[name]


class DifferentiableAttention(Attention):
    """Attention whose gradients kernels take, too. Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, gradients: Sequence[Tuned]) -> None:
        """`operator` names the kernels among torch's operators, `gradients` are those of the backward
        pass."""
        super().__init__(kernels, operator)
        self._gradients = Gradients(gradients, operator)
        # What says nothing of the mask means the same forwards and backwards.
        self._gradients._tensors.default_mask = self._tensors.default_mask
        self._tensors.gradients = self._gradients._tensors
        self.gradients = self._gradients.gradients

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve whatever it can compute from now on, however far its shapes:
        for measuring and checking. None lets the nearest serve again. Raises ValueError for an unknown
        name."""
        of_gradients = any(name == tuned.name for tuned in self._gradients.kernels)
        self._gradients.use(name if of_gradients else None)
        super().use(None if of_gradients else name)

    def _named(self, name: str) -> Tuned:
        named = {tuned.name: tuned for tuned in (*self._table.kernels, *self._gradients.kernels)}
        if name not in named:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(named)}")
        return named[name]
