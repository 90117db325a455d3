"""What a module offers of the backward pass: gradients of q, k and v, by the kernels of its table."""

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, _address, _Buffer, _can_allocate, _check_kinds, _empty, _kind, _read
from .attention import Attention, _check_call, _default_mask, _explained, _reader_of
from .build import _compile, _pack
from .driver import _driver, _pop_context, _push_context, _stream_handle, _wait_for_producers
from .facts import Tuned
from .gradient_plans import _GIVEN, _NOTHING_READ, _launch_gradients
from .gradient_tensors import _check_order, _GradientTensors, _register_gradients, _Settings
from .table import Choice

_G = TypeVar("_G", bound=Array)


class Gradients:
    """The gradients of attention by the kernels of a table, of which the nearest to the arrays serves.
    Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernels among torch's operators."""
        table = tuple(kernels)
        self._serve_by(_GradientTensors(table, f"{operator}_gradients", _default_mask(table)))

    def _serve_by(self, tensors: _GradientTensors) -> None:
        self._tensors, self.kernels = tensors, tensors.table.kernels

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
        fails, or where no kernel is deterministic as asked.
        """
        _check_call(layout, scale)
        settings = _Settings(causal, scale, stream, layout, deterministic, _NOTHING_READ)
        found: tuple[_G, _G, _G] = self._gradients((q, k, v, o, dout), lse, dlse, settings)
        return found

    def _gradients(
        self,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> Any:
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
            settings = settings._replace(read=settings.read.through(read))
            found = self._gradients(views, read(lse), None if dlse is None else read(dlse), settings)
            give_back = q.__array_namespace__().from_dlpack
            return tuple(map(give_back, found))
        if not _can_allocate(q):
            raise TypeError(
                f"q is a {_kind(q)}, of which this module cannot make gradients: pass torch, CuPy, PyCUDA or "
                "numpy arrays"
            )
        made, _ = self._of_others(arrays, lse, dlse, settings)
        return *made, *settings.read.found(settings.stream is None)

    def _of_others(
        self,
        arrays: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        settings: _Settings,
    ) -> tuple[tuple[Any, ...], Any]:
        """Computes `gradients` of arrays that are no tensors, on the GPU; returns those of q, k and v, and
        the workspace."""
        q = arrays[0]
        read = [_read(name, x) for name, x in zip(_GIVEN, arrays, strict=True)]
        rows = [(0, (None,) * 4, None) if x is None else _read("lse", x) for x in (lse, dlse)]
        described = [each for _, one, _ in (*read, *rows) for each in one]
        tensors = self._tensors
        (dtype, shape, *_), (_, shape_v, *_) = read[0][1], read[2][1]
        repeats = tensors.repeats(bool(settings.deterministic), dtype, shape, shape_v, False)
        if settings.deterministic:
            _check_order(settings.read, False)
        masked, stream = tensors.is_masked(settings.causal), settings.stream
        plan = tensors.plan(repeats, None, masked, settings.layout, *described)
        current, beside = read[0][2] or 0, settings.read
        handle = current if stream is None else _stream_handle(stream)
        side_stream = None if handle == current else handle

        def allocate(shape: tuple[int, ...]) -> Any:
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            return _empty(q, "float32", shape, strides, side_stream)

        beside.make(plan, allocate)
        numbers = tensors.numbers(beside, plan, q, stream is None or isinstance(q, _Buffer))
        made = tuple(_empty(q, plan.dtype, each.shape, each.strides, side_stream) for each in plan.made)
        workspace = _empty(q, "float32", (max(1, plan.workspace_words),), (1,), side_stream)
        if stream is None:
            _wait_for_producers({*(each[2] for each in (*read, *rows)), *beside.streams}, handle)
        addresses = [each[0] for each in (*read, *rows)] + [_address(x) for x in made]
        at, scale = _address(workspace), settings.scale
        _launch_gradients(plan, tuple(addresses), at, scale, beside, numbers, handle)
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
        for x, grad in zip(arrays[:3], found[:3], strict=True):
            laid_out: NDArray[Any] = np.empty_like(x, subok=False)
            laid_out[...] = grad.view(x.dtype)
            grads.append(laid_out)
        return *grads, *found[3:]

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
        read = settings.read
        try:
            given = tuple(put(x, dtype) for x in arrays)
            read = read.on_device(put)
            of_rows = put(lse), None if dlse is None else put(dlse)
            placed = settings._replace(stream=handle, read=read)
            made, workspace = self._of_others(given, *of_rows, placed)
            buffers += [*made, workspace]
            grads = {name: x.read(handle) for name, x in read.made.items()}
            return [*(x.read(handle) for x in made), *settings.read.as_passed(grads)]
        finally:
            for buffer in (*buffers, *read.made.values()):
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
        return _compile(self._named(name), arch, causal)

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
