"""What a module offers: attention and what is around it, by the kernels of its table."""

import ctypes
import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

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
    _torch_of,
)
from .build import _built, _compile, _pack
from .driver import _arch_of, _driver, _pop_context, _push_context, _stream_handle, _wait_for_producers
from .facts import _OUTPUT_DTYPES, Tuned
from .huggingface import _attend, _make_mask, _register_transformers
from .plans import _NOTHING_BESIDE, _Beside, _launch
from .table import Choice, _Table
from .tensors import _register, _Tensors

_A = TypeVar("_A", bound=Array)


class Attention:
    """Attention by the kernels of a table, of which the nearest to the arrays serves. Modules offer its
    methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernels among torch's operators."""
        self._serve_by(_Tensors(_Table(tuple(kernels)), operator, _default_mask(kernels)))

    def _serve_by(self, tensors: _Tensors) -> None:
        self._tensors, self._table = tensors, tensors.table
        self._attend_tensors = self._tensors.attend  # whoever calls with tensors waits for this look-up
        self._usual_beside = _Beside(1.0) if self._table.has_scales else _NOTHING_BESIDE

    @overload
    def attention(
        self,
        q: _A,
        k: _A,
        v: _A,
        causal: bool | None = ...,
        scale: float | None = ...,
        out: _A | None = ...,
        stream: Any = ...,
        return_lse: Literal[False] = ...,
        *,
        layout: Literal["bhsd", "bshd"] = ...,
        recompute: bool = ...,
        strict: bool = ...,
        scales: tuple[float, float, float] | None = ...,
    ) -> _A: ...

    @overload
    def attention(
        self,
        q: _A,
        k: _A,
        v: _A,
        causal: bool | None = ...,
        scale: float | None = ...,
        out: _A | None = ...,
        stream: Any = ...,
        *,
        return_lse: Literal[True],
        layout: Literal["bhsd", "bshd"] = ...,
        recompute: bool = ...,
        strict: bool = ...,
        scales: tuple[float, float, float] | None = ...,
    ) -> tuple[_A, _A]: ...

    @overload
    def attention(
        self,
        q: _A,
        k: _A,
        v: _A,
        causal: bool | None = ...,
        scale: float | None = ...,
        out: _A | None = ...,
        stream: Any = ...,
        return_lse: bool = ...,
        *,
        layout: Literal["bhsd", "bshd"] = ...,
        recompute: bool = ...,
        strict: bool = ...,
        scales: tuple[float, float, float] | None = ...,
    ) -> _A | tuple[_A, _A]: ...

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None = None,
        scale: float | None = None,
        out: Any = None,
        stream: Any = None,
        return_lse: bool = False,
        *,
        layout: str = "bhsd",
        recompute: bool = False,
        strict: bool = False,
        scales: tuple[float, float, float] | None = None,
    ) -> Any:
        """Computes softmax(scale * q k^T) v in the arrays' type, summed in float32; of float8_e4m3fn in
        bfloat16.

        q is (batch, heads, seqlen_q, head_dim), k is (batch, kv_heads, seqlen_k, head_dim) and v (batch,
        kv_heads, seqlen_k, head_dim_v), where kv_heads divides heads; the result is (batch, heads, seqlen_q,
        head_dim_v). With layout="bshd", heads and seqlen are swapped in all of them. Any strides will do as
        long as the last dimension is contiguous: transposed views and slices of a packed array run without a
        copy. Torch tensors with strides or an address that no kernel's accesses suit are copied, unless `out`
        or `stream` is given.

        Takes torch tensors, CuPy arrays, PyCUDA GPUArrays and whatever else has __cuda_array_interface__
        where they lie (of bfloat16 and float8_e4m3fn those whose dtype is ml_dtypes'), others that have
        __dlpack__ (JAX's) where they lie too, by way of torch or CuPy, and numpy arrays with a copy to the
        GPU and back. Returns an array of q's kind and memory layout, or `out`, which may have strides of its
        own but not the memory of q, k or v.

        Of `KERNELS` that one runs which was tuned for just this; failing that the nearest of the same type
        and head dim: one that can step by the arrays' strides before others, one for few query rows (16 at
        most) before others where there are few, else one for many, one of the same mask before the other (a
        single row sees all keys anyhow), then the nearest in lengths and in the number of tiles. `explain`
        says which, and all of them are correct for any lengths.

        causal: True masks bottom-right: query row i sees keys 0 .. i + seqlen_k - seqlen_q. A row that sees
            no key is zero, its log-sum-exp -inf. None for the mask that a module's only kernel was tuned
            with; of several, False.
        scale: None for 1 / sqrt(head_dim).
        stream: None for the stream the arrays are used on (torch's and CuPy's current one, else the default
            stream); otherwise an integer handle or a torch, CuPy or PyCUDA stream, whose order with other
            streams is the caller's.
        return_lse: also return the natural log-sum-exp, a contiguous float32 (batch, heads, seqlen_q) array
            of q's kind.
        recompute: True lets gradients of torch tensors be taken, by PyTorch's attention, which the backward
            pass runs anew. Otherwise tensors that need one are refused.
        strict: True raises LookupError unless a kernel was tuned for just these shapes and this mask.
        scales: of float8_e4m3fn alone, what q, k and v must be multiplied by to be what was meant, a number
            each. Scores are of eight bits, with sums of fourteen; weights and v are multiplied as float16,
            which holds v exactly.

        Under torch.compile and torch.export it is the operator of `register_torch`, without a graph break. In
        torch.autocast, tensors are cast to its type, where kernels have it; to the only one that kernels
        have.

        Runs in the arrays' CUDA context, from any thread. Raises TypeError and ValueError for arrays it
        cannot serve, RuntimeError when the GPU or the compiler fails.
        """
        if scale is not None or layout != "bhsd":
            _check_call(layout, scale)
        beside = self._usual_beside
        if scales is not None:
            scale, value_scale = self._fold(q, scale, scales)
            beside = _Beside(value_scale)
        if strict:
            _check_exact(self.explain(q, k, v, causal, layout=layout))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(q, torch.Tensor):
            return self._attend_tensors(
                torch, q, k, v, causal, scale, out, stream, return_lse, layout, recompute, beside
            )
        return self._attend_others(q, k, v, causal, scale, out, stream, return_lse, layout, beside)

    def _attend_others(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None,
        scale: float | None,
        out: Any,
        stream: Any,
        return_lse: bool,
        layout: str,
        beside: _Beside,
    ) -> Any:
        """Computes `attention` of arrays that are no tensors."""
        if isinstance(q, np.ndarray):
            return self._attend_numpy(q, k, v, causal, scale, out, stream, return_lse, layout, beside)
        if out is None and not _can_allocate(q) and hasattr(q, "__dlpack__") and not self._table.has_scales:
            return self._attend_dlpack(q, k, v, causal, scale, stream, return_lse, layout, beside)
        _check_kinds(q, (("k", k), ("v", v), ("out", out)))
        q_address, query, q_stream = _read("q", q)
        k_address, key, k_stream = _read("k", k)
        v_address, value, v_stream = _read("v", v)
        o_address, output, o_stream = (0, None, None) if out is None else _read("out", out)
        masked = self._tensors.is_masked(causal)
        plan = self._tensors.plan(None, masked, layout, output, *query, *key, *value)
        # The stream on which q's library works now.
        current = q_stream or 0
        handle = current if stream is None else _stream_handle(stream)
        side_stream = None if handle == current else handle
        if out is None:
            out = _empty(q, plan.out_dtype, plan.out_shape, plan.out_strides, side_stream)
            o_address = _address(out)
        lse = _empty(q, "float32", plan.rows_shape, plan.rows_strides, side_stream) if return_lse else None
        if plan.blocks:
            numbers = beside.numbers(plan, q, stream is None or isinstance(q, _Buffer))
            if stream is None:
                _wait_for_producers({q_stream, k_stream, v_stream, o_stream, *beside.streams}, handle)
            lse_address = 0 if lse is None else _address(lse)
            addresses = (q_address, k_address, v_address, o_address, lse_address)
            workspace, words = None, plan.workspace_words
            if words:
                workspace = _empty(q, "float32", (words,), (1,), side_stream)
            at = 0 if workspace is None else _address(workspace)
            _launch(plan, *addresses, scale, numbers, handle, output is not None, at)
            beside.launched()
            if isinstance(workspace, _Buffer):
                workspace.free()  # once the launches have run
        return (out, lse) if return_lse else out

    def _fold(self, q: Any, scale: float | None, scales: tuple[float, float, float]) -> tuple[float, float]:
        """Returns what scores and what outputs are multiplied by. Raises TypeError and ValueError."""
        if not self._table.has_scales:
            raise TypeError(f"scales are taken with float8_e4m3fn alone, not with {self._table.classes()}")
        of_q, of_k, of_v = map(float, scales)
        folded = (1 / math.sqrt(int(q.shape[-1])) if scale is None else scale) * of_q * of_k
        if not max(abs(folded), abs(of_v)) < 3.4e38:
            raise ValueError(f"scales are {scales}, those of scores {folded}: they must be finite float32")
        return folded, of_v

    def _attend_dlpack(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None,
        scale: float | None,
        stream: Any,
        return_lse: bool,
        layout: str,
        beside: _Beside,
    ) -> Any:
        """Computes `attention` on views of the arrays, which torch or CuPy make; the results go back to q's
        library the same way.

        DLPack orders the memory's producers and consumers, on the streams that either library uses.
        """
        if stream is not None:
            raise ValueError(
                f"stream is taken with torch, CuPy, PyCUDA and numpy arrays only, and q is a {_kind(q)}"
            )
        library = _reader_of(q, self._table)
        read = library.from_dlpack
        views, beside = [read(array) for array in (q, k, v)], beside.through(read)
        query, key, value = views
        if library.__name__ == "torch":
            results = self._attend_tensors(
                library, query, key, value, causal, scale, None, None, return_lse, layout, False, beside
            )
        else:
            results = self._attend_others(
                query, key, value, causal, scale, None, None, return_lse, layout, beside
            )
        give_back = q.__array_namespace__().from_dlpack
        return tuple(map(give_back, results)) if return_lse else give_back(results)

    def _attend_numpy(
        self,
        q: NDArray[Any],
        k: Any,
        v: Any,
        causal: bool | None,
        scale: float | None,
        out: Any,
        stream: Any,
        return_lse: bool,
        layout: str,
        beside: _Beside,
    ) -> Any:
        """Computes `attention` of numpy arrays through device memory, on the current context's device,
        failing that on device 0."""
        dtype = q.dtype.name
        views = []
        for name, array in {"q": q, "k": k, "v": v, "out": out}.items():
            if name == "out" and array is None:
                continue
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"q is a numpy array, but {name} a {_kind(array)}; pass arrays of one library"
                )
            self._table.check_type(name, array.dtype.name, False)
            wanted = {"out": _OUTPUT_DTYPES.get(dtype, dtype)}.get(name, dtype)
            if name in ("k", "v") and self._table.has_key_scales:
                wanted = self._table.key_dtypes[0]
            if array.dtype.name != wanted:
                raise TypeError(f"q is {q.dtype}, {name} {array.dtype}; they must be of one type")
            if name != "out":
                # As it will lie on the GPU, which is asked for once there is nothing wrong with the arrays.
                described = (array.dtype.name, array.shape, None, None)
                views.append(self._table.inspect(name, described, layout, None))
        query, key, value = views
        self._table.check_shapes(query, key, value)
        shape = (*q.shape[:-1], *v.shape[-1:])
        if out is None:
            # Types that numpy has no name for are ml_dtypes', which made q.
            output_type = (
                getattr(importlib.import_module("ml_dtypes"), _OUTPUT_DTYPES[dtype])
                if dtype in _OUTPUT_DTYPES
                else q.dtype
            )
            out = np.empty_like(q, output_type, shape=shape, subok=False)
        if out.shape != shape:
            raise ValueError(f"out has the shape {out.shape}; with that q and v it must be {shape}")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        handle = 0 if stream is None else _stream_handle(stream)
        return self._through_buffers(q, k, v, causal, scale, out, handle, return_lse, layout, dtype, beside)

    def _through_buffers(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        causal: bool | None,
        scale: float | None,
        out: NDArray[Any],
        handle: int,
        return_lse: bool,
        layout: str,
        dtype: str,
        beside: _Beside,
    ) -> Any:
        """Fills `out`. q holds that type, k and v it or their own, and `out` what is made of it, or the bits
        of these as integers."""
        hosts = [np.ascontiguousarray(array) for array in (q, k, v)]
        driver = _driver()
        current = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(current))
        pushed = current.value is None and _push_context(driver, 0, 0)
        buffers: list[_Buffer] = []

        def put(host: NDArray[Any], dtype: str | None = None) -> _Buffer:
            buffers.append(_Buffer(host.shape, host.dtype, dtype or host.dtype.name))
            buffers[-1].write(host, handle)
            return buffers[-1]

        try:
            of_keys = self._table.key_dtypes[0] if self._table.has_key_scales else dtype
            query, key, value = map(put, hosts, (dtype, of_keys, of_keys))
            beside = beside.on_device(put)
            output = _Buffer(out.shape, out.dtype, _OUTPUT_DTYPES.get(dtype, dtype))
            buffers.append(output)
            result = self._attend_others(
                query, key, value, causal, scale, output, handle, return_lse, layout, beside
            )
            if return_lse:
                buffers.append(result[1])
            out[...] = output.read(handle)
            return (out, result[1].read(handle)) if return_lse else out
        finally:
            for buffer in buffers:
                buffer.free()
            if pushed:
                _pop_context()

    def explain(
        self, q: Array, k: Array, v: Array, causal: bool | None = None, *, layout: str = "bhsd"
    ) -> Choice:
        """Says which kernel `attention` would run on these arrays, and why. Nothing is compiled or launched.

        Raises TypeError and ValueError as `attention` does where none serves.
        """
        _check_call(layout)
        return self._explain(q, k, v, causal, layout)

    def _explain(self, q: Any, k: Any, v: Any, causal: bool | None, layout: Any) -> Choice:
        return _explained(self._table, self._tensors.is_masked(causal), q, k, v, layout)

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve whatever it can compute from now on, however far its shapes:
        for measuring and checking. None lets the nearest serve again. Raises ValueError for an unknown
        name."""
        self._table.only = None if name is None else self._named(name)
        self._tensors.forget()

    def sdpa(
        self,
        query: _A,
        key: _A,
        value: _A,
        attn_mask: _A | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _A:
        """Computes what torch.nn.functional.scaled_dot_product_attention does, by a kernel where one serves
        and by PyTorch elsewhere.

        PyTorch computes what has a mask, dropout, a type, head dim, device or number of dimensions that no
        kernel is for, strides that none can step by, no rows or keys, and what a gradient must be taken of.
        `is_causal` is torch's, aligned top-left: query row i sees keys 0 .. i, however many there are. In
        torch.autocast, a kernel serves where it has the type that PyTorch would cast to."""
        torch = _torch_of(query)
        if torch is None:
            raise TypeError(f"query is a {_kind(query)}; pass torch tensors, or other arrays to attention")
        o: Any = None
        if attn_mask is None and dropout_p == 0:
            o = self._tensors.serve(torch, query, key, value, is_causal, scale, enable_gqa)
        if o is None:
            o = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        result: _A = o
        return result

    def register_torch(self) -> str:
        """Makes operators of the kernels in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first:

            NAME(q, k, v, causal=None, scale=None, layout="bhsd") -> o
            NAME_lse(q, k, v, causal=None, scale=None, layout="bhsd") -> (o, lse)
            NAME_out(q, k, v, out, causal=None, scale=None, layout="bhsd")

        They take what `attention` takes; the first two copy what no kernel can step by. Those have gradients,
        too, by PyTorch's attention, which the backward pass runs anew. Of float8_e4m3fn they have none;
        `scale` has the scales of q and k in it, and a last argument, value_scale, is v's. `attention` and
        `sdpa` register them as needed. Needs PyTorch 2.7 or newer."""
        return _register(self._tensors.operator)

    def register_transformers(self, name: str = "tuned") -> None:
        """Registers the kernels with Hugging Face's transformers: attn_implementation=name then has models
        call `sdpa`.

        Masks are made as for "sdpa", which also computes what no kernel serves; of compiled models, whatever
        has an attention_mask, as no graph can tell whether it hides anything. The name "sdpa" itself gives
        all models the kernels that do not ask for another attention. Raises ValueError for a name with
        "flash" in it, which transformers takes for one of FlashAttention's, ImportError without transformers
        or with one before 4.53."""
        _register_transformers(functools.partial(_attend, self._tensors), _make_mask, name)

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        return _compile(self._named(name), arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        self._named(name).cubins[causal] = _pack(cubin)

    def _named(self, name: str) -> Tuned:
        named = {tuned.name: tuned for tuned in self._table.kernels}
        if name not in named:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(named)}")
        return named[name]


def _default_mask(kernels: Sequence[Tuned]) -> bool:
    """Whether the causal mask holds where a call does not say."""
    return len(kernels) == 1 and bool(kernels[0].problem["causal"])


def _check_call(layout: str, scale: float | None = None) -> None:
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; choose 'bhsd' or 'bshd'")
    if scale is not None and not abs(scale) < 3.4e38:
        raise ValueError(f"scale is {scale}; it must be a finite float32")


def _check_exact(choice: Choice) -> None:
    if not choice.exact:
        raise LookupError(f"nothing was tuned for just this, and strict=True: {choice.how}")


def _reader_of(q: Any, table: _Table) -> Any:
    """The library that reads arrays of q's library through DLPack, one that is loaded before others. Raises
    TypeError where q's library takes no results back, or nothing is installed that reads its arrays."""
    if not hasattr(q, "__array_namespace__"):
        raise TypeError(
            f"q is a {_kind(q)}, whose library takes no results back: pass torch tensors or CuPy arrays"
        )
    # CuPy has no bfloat16.
    readers = {"torch": "torch", "cupy": "CuPy"} if table.dtypes != ("bfloat16",) else {"torch": "torch"}
    for name in sorted(readers, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TypeError(f"q is a {_kind(q)}, which is read through {' or '.join(readers.values())}: install it")


def _explained(table: _Table, masked: bool, q: Any, k: Any, v: Any, layout: Any) -> Choice:
    """Which of a table's kernels would run on arrays, and why."""
    torch = _torch_of(q)
    views = []
    for name, array in (("q", q), ("k", k), ("v", v)):
        if torch is not None:
            described = _describe(array)
        elif hasattr(array, "__cuda_array_interface__"):
            described = _read(name, array)[1]
        elif hasattr(array, "dtype") and hasattr(array, "shape"):
            # As it will lie on the GPU: numpy's are copied there, densely; of others it is not known.
            described = (np.dtype(array.dtype).name, tuple(array.shape), None, None)
        else:
            raise TypeError(f"{name} is a {_kind(array)}, not an array")
        views.append(table.inspect(name, described, layout, torch))
    query, key, value = views
    table.check_shapes(query, key, value)
    strides = (*query.strides, *key.strides, *value.strides)
    choice = table.choose(query, key, value, strides, masked)
    arch = None if query.device is None else _arch_of(query.device)
    if choice.tuned.cubins and arch is not None and _built(choice.tuned, arch, masked) is None:
        made = f"what the module carries is not for this mask on sm_{arch}"
        return choice._replace(how=f"{choice.how}; compiled from its source by the first call, as {made}")
    return choice
