"""Tensors of PyTorch: run where they lie, and as operators that its graphs hold."""

import functools
import importlib
import math
from typing import Any, Protocol

from .arrays import _check_kinds, _check_output, _describe, _stepped
from .driver import _DEFAULT_STREAMS, _LOCK, _stream_handle
from .facts import _OUTPUT_DTYPES
from .plans import _NOTHING_BESIDE, _Beside, _launch, _make_plan, _Plan
from .table import _TORCH_DEVICES, _Table, _type_name

# Whoever passes tensors has imported torch: it is found among the loaded modules, and imported only to
# register operators.


class _Derivative(Protocol):
    """What takes gradients by kernels."""

    def computes(self, torch: Any, q: Any, v: Any) -> bool:
        """Tells whether there are kernels for gradients of such tensors."""
        ...

    def register(self, torch: Any) -> None:
        """Makes the operator of the kernels."""
        ...

    def attend(
        self, torch: Any, tensors: "_Tensors", q: Any, k: Any, v: Any, settings: tuple[Any, ...]
    ) -> Any:
        """Computes what the operator with a log-sum-exp does, told those settings, at once where that may be;
        else returns None."""
        ...

    def keep(self, ctx: Any, operator: str, inputs: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        """Keeps what `differentiate` takes of a call of the operator of that name."""
        ...

    def differentiate(
        self, torch: Any, ctx: Any, grad: Any, grad_lse: Any, at_once: bool = False
    ) -> tuple[Any, ...]:
        """Returns the gradients of an operator's inputs; `at_once`, where PyTorch need not see how."""
        ...


class _Tensors:
    """A table's kernels for tensors, with the plans of those seen before."""

    reads_more = False
    """Whether kernels read arrays beside q, k and v: then the operators neither have gradients nor cast."""
    copies = True
    """Whether what no kernel can step by is copied where it may be."""
    gradients: _Derivative | None = None
    """The kernels that take gradients; None: PyTorch's attention does, where it is asked to."""

    def __init__(self, table: _Table, operator: str, default_mask: bool) -> None:
        self.table = table
        self.operator = operator
        """The name of the first of its operators in torch.ops.flashgen."""
        self.default_mask = default_mask
        self.plan = functools.lru_cache(maxsize=1024)(functools.partial(_make_plan, table))
        """Returns the plan for what `_make_plan` takes behind the table, kept between calls."""
        self.plan_sdpa = functools.lru_cache(maxsize=1024)(self.make_plan_sdpa)
        _REGISTERED[operator] = self

    def forget(self) -> None:
        """Lets kernels be chosen anew."""
        self.plan.cache_clear()
        self.plan_sdpa.cache_clear()

    @property
    def arrays(self) -> str:
        """What the operators take first, as PyTorch writes it: of caches that they write to, that they do."""
        return "Tensor q, Tensor k, Tensor v"

    @property
    def settings(self) -> str:
        """What the operators take beside tensors, as PyTorch writes it."""
        of_values = ", float value_scale=1.0" if self.table.has_scales else ""
        return f'bool? causal=None, float? scale=None, str layout="bhsd"{of_values}'

    def is_masked(self, causal: bool | None) -> bool:
        return self.default_mask if causal is None else bool(causal)

    def attend(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None,
        scale: float | None,
        out: Any,
        stream: Any,
        return_lse: bool,
        layout: str,
        recompute: bool,
        beside: _Beside,
    ) -> Any:
        """Computes `attention` of tensors: launches a kernel at once, or calls the operator where PyTorch
        must see one."""
        kind = type(q)
        if type(k) is not kind or type(v) is not kind or (out is not None and type(out) is not kind):
            _check_kinds(q, (("k", k), ("v", v), ("out", out)))
        derived = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (beside is not _NOTHING_BESIDE and beside.requires_grad)
        )
        by_kernels = derived and self.takes_gradients(torch, q, v)
        if derived and not (recompute or by_kernels):
            tensors = {"q": q, "k": k, "v": v}
            name = next((name for name, x in tensors.items() if x.requires_grad), "an array beside them")
            raise RuntimeError(
                f"{name} requires a gradient, but this kernel is forward only: call it under "
                f"torch.no_grad(), pass {name}.detach(), or recompute=True for a backward pass by PyTorch's "
                "attention"
            )
        if out is not None and torch.is_grad_enabled() and (derived or out.requires_grad):
            raise RuntimeError(
                "no gradient is taken through out: leave it out, or call under torch.no_grad()"
            )
        if torch.is_autocast_enabled() and not (self.table.has_scales or self.table.has_key_scales):
            q, k, v = (self.autocast(torch, x) for x in (q, k, v))
        if derived or torch.compiler.is_compiling() or kind is not torch.Tensor:
            plan = None
        else:
            plan = self.plan(
                torch,
                self.default_mask if causal is None else bool(causal),
                layout,
                # To ask for strides takes longer than to ask whether there is anything to tell of them.
                None
                if out is None
                else (out.dtype, out.shape, None if out.is_contiguous() else out.stride(), out.device),
                q.dtype,
                q.shape,
                None if q.is_contiguous() else q.stride(),
                q.device,
                k.dtype,
                k.shape,
                None if k.is_contiguous() else k.stride(),
                k.device,
                v.dtype,
                v.shape,
                None if v.is_contiguous() else v.stride(),
                v.device,
            )
        if plan is None or plan.meta:
            if stream is not None:
                raise ValueError("leave stream out where gradients are needed, and under torch.compile")
            settings = causal, scale, out, return_lse, layout, beside, by_kernels
            return self.attend_in_graph(torch, q, k, v, *settings)
        at_q, at_k, at_v = addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & plan.misfit_bits and self.copies and out is None and stream is None:
            # The operator copies.
            return self.attend_in_graph(torch, q, k, v, causal, scale, out, return_lse, layout, beside)
        # A call is as long as the functions it enters: of nothing there is nothing to ask.
        if beside is _NOTHING_BESIDE:
            return _run(torch, plan, q, addresses, scale, (), out, stream, return_lse)
        numbers = beside.numbers(plan, q, stream is None)
        made = _run(torch, plan, q, addresses, scale, numbers, out, stream, return_lse)
        beside.launched()
        return made

    def takes_gradients(self, torch: Any, q: Any, v: Any) -> bool:
        """Tells whether kernels take the gradients of such tensors."""
        return self.gradients is not None and self.gradients.computes(
            torch, *((self.autocast(torch, x) for x in (q, v)) if torch.is_autocast_enabled() else (q, v))
        )

    def autocast(self, torch: Any, x: Any) -> Any:
        """Returns a tensor as torch.autocast casts it, in its type where there are kernels of it; kernels of
        one type alone have it cast to theirs."""
        dtypes = self.table.dtypes
        wanted = getattr(torch, dtypes[0]) if len(dtypes) == 1 else torch.get_autocast_dtype("cuda")
        casts = x.is_floating_point() and x.dtype is not torch.float64
        return x.to(wanted) if casts and _type_name(torch, wanted, dtypes) in dtypes else x

    # ---- as torch's scaled_dot_product_attention

    def serve(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        beside: _Beside = _NOTHING_BESIDE,
    ) -> Any:
        """Computes `sdpa` by a kernel; returns None where PyTorch must."""
        derived = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (beside is not _NOTHING_BESIDE and beside.requires_grad)
        )
        if derived and not self.takes_gradients(torch, q, v):
            return None
        if torch.is_autocast_enabled():
            dtypes = self.table.dtypes
            if _type_name(torch, torch.get_autocast_dtype("cuda"), dtypes) not in dtypes:
                return None
            q, k, v = (self.autocast(torch, x) for x in (q, k, v))
        if derived or torch.compiler.is_compiling():
            if not self.serves(torch, _describe(q), _describe(k), _describe(v), is_causal, enable_gqa):
                return None
            if is_causal and q.shape[2] < k.shape[2]:
                k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            settings = is_causal, scale, None, False, "bhsd", beside, derived
            return self.attend_in_graph(torch, q, k, v, *settings)
        if type(q) not in (torch.Tensor, torch.nn.Parameter):
            return None
        plan = self.plan_sdpa(
            torch,
            is_causal,
            enable_gqa,
            q.dtype,
            q.shape,
            q.stride(),
            q.device,
            k.dtype,
            k.shape,
            k.stride(),
            k.device,
            v.dtype,
            v.shape,
            v.stride(),
            v.device,
        )
        at_q, at_k, at_v = addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if plan is None or (at_q | at_k | at_v) & plan.misfit_bits:
            return None
        if beside is _NOTHING_BESIDE:
            return _run(torch, plan, q, addresses, scale, (), None, None, False)
        numbers = beside.numbers(plan, q, True)
        o = _run(torch, plan, q, addresses, scale, numbers, None, None, False)
        beside.launched()
        return o

    def make_plan_sdpa(self, torch: Any, is_causal: bool, enable_gqa: bool, *arrays: Any) -> _Plan | None:
        query, key, value = arrays[:4], arrays[4:8], arrays[8:]
        if query[3].type == "meta" or not self.serves(torch, query, key, value, is_causal, enable_gqa):
            return None
        if is_causal:  # later keys are seen by no row
            key, value = (
                (dtype, (*shape[:2], query[1][2], shape[3]), strides, device)
                for dtype, shape, strides, device in (key, value)
            )
        return self.plan(torch, is_causal, "bhsd", None, *query, *key, *value)

    def serves(
        self,
        torch: Any,
        query: tuple[Any, ...],
        key: tuple[Any, ...],
        value: tuple[Any, ...],
        is_causal: bool,
        enable_gqa: bool,
    ) -> bool:
        """Tells whether a kernel computes what `sdpa` would of tensors of these types, shapes, strides and
        devices."""
        if self.table.has_scales or self.table.has_key_scales:  # of which `sdpa` knows nothing
            return False
        for dtype, shape, strides, device in (query, key, value):
            if dtype is not query[0] or device != query[3] or device.type not in _TORCH_DEVICES:
                return False
            if len(shape) != 4 or shape[0] == 0 or shape[1] == 0 or shape[2] == 0 or strides[3] != 1:
                return False
        batch, heads, rows, head_dim = query[1]
        _, kv_heads, keys, _ = key[1]
        columns = value[1][3]
        if key[1] != (batch, kv_heads, keys, head_dim) or value[1] != (batch, kv_heads, keys, columns):
            return False
        if is_causal and rows > keys:  # rows beyond the keys would see all of them
            return False
        steps = [step for _, n, strides, _ in (query, key, value) for step in _stepped(n[:3], strides[:3])]
        dtype_name = _type_name(torch, query[0], self.table.dtypes)
        if not any(tuned.can_step(steps) for tuned in self.table.computing(dtype_name, head_dim, columns)):
            return False
        return bool(heads == kv_heads or (enable_gqa and heads % kv_heads == 0))

    # ---- in graphs

    def attend_in_graph(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None,
        scale: float | None,
        out: Any,
        return_lse: bool,
        layout: str,
        beside: _Beside,
        derived: bool = False,
    ) -> Any:
        """Computes `attention` by the operators, which are registered as needed. What is `derived` by kernels
        takes the log-sum-exp."""
        causal = None if causal is None else bool(causal)
        scale = None if scale is None else float(scale)
        settings = (causal, scale, self.layout_in_graph(layout), *self.in_graph(beside))
        if derived and self.gradients is not None and not torch.compiler.is_compiling():
            made = self.gradients.attend(torch, self, q, k, v, settings)
            if made is not None:
                return made if return_lse else made[0]
        name, operators = _register(self.operator), torch.ops.flashgen
        if out is not None and not return_lse:
            getattr(operators, name + "_out")(q, k, v, out, *settings)
            return out
        if not (return_lse or derived):
            return getattr(operators, name)(q, k, v, *settings)
        o, lse = getattr(operators, name + "_lse")(q, k, v, *settings)
        if out is not None:
            o = out.copy_(o)
        return (o, lse) if return_lse else o

    def is_seen_by_autograd_alone(self, torch: Any, *arrays: Any) -> bool:
        """Tells whether nothing of PyTorch but autograd must see an operator: neither a compiler nor a mode
        nor a transformation, and tensors are of no other kind."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return False
        for x in arrays:
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
                return False
        return torch._C._functorch.peek_interpreter_stack() is None

    def layout_in_graph(self, layout: Any) -> Any:
        """Returns what the operators take of a layout."""
        return layout

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        """Returns the layout of which `layout_in_graph` made that, and what an operator took behind it."""
        return layout

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        """Returns what the operators take of what a kernel reads beside."""
        return beside.told

    def beside_in(self, layout: Any, taken: tuple[Any, ...]) -> _Beside:
        """Returns what a kernel reads beside, of what `layout_in_graph` and `in_graph` made of it."""
        return _Beside(1.0) if self.table.has_scales and not taken else _Beside(*taken)

    def run(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None = None,
        scale: float | None = None,
        layout: str = "bhsd",
        *taken: Any,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Computes what an operator returns, on a GPU. Copies what the kernel cannot step by, unless `out` is
        given."""
        settings = (torch, self.is_masked(causal), self.layout_in(layout, taken))
        output = None if out is None else _describe(out)
        plan = self.plan(*settings, output, *_describe(q), *_describe(k), *_describe(v))
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if self.copies and out is None and not _suits(plan, addresses):
            out = q.new_empty_strided(plan.out_shape, plan.out_strides, dtype=plan.out_dtype)
            q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            plan = self.plan(*settings, _describe(out), *_describe(q), *_describe(k), *_describe(v))
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        beside = self.beside_in(layout, taken)  # which holds copies until the launch has been made
        numbers = beside.numbers(plan, q, True)
        return _run(torch, plan, q, addresses, scale, numbers, out, None, return_lse)

    def fake(self, torch: Any, q: Any, k: Any, v: Any, *settings: Any) -> Any:
        """Returns an output without data, of tensors whose extents may be symbols."""
        shape, strides, dtype = self.inspect(torch, q, k, v, None, self.layout_of(settings))
        return q.new_empty_strided(shape, strides, dtype=getattr(torch, dtype))

    def layout_of(self, settings: tuple[Any, ...]) -> Any:
        """Returns the layout that an operator was told."""
        return self.layout_in(settings[2], settings[3:]) if len(settings) > 2 else "bhsd"

    def rows_of(self, o: Any, layout: Any) -> tuple[int, ...]:
        """Returns the shape of the log-sum-exp of such outputs."""
        batch, heads, rows = (o.shape[0], o.shape[2], o.shape[1]) if layout == "bshd" else o.shape[:3]
        return batch, heads, rows

    def inspect(
        self, torch: Any, q: Any, k: Any, v: Any, out: Any, layout: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Returns shape, strides and type of what the kernels make of tensors; raises as `_make_plan`."""
        table = self.table
        query = table.inspect("q", _describe(q), layout, torch)
        value = table.inspect("v", _describe(v), layout, torch)
        table.check_shapes(query, table.inspect("k", _describe(k), layout, torch), value)
        dtype = _OUTPUT_DTYPES.get(query.dtype, query.dtype)
        if out is not None:
            _check_output(table.inspect("out", _describe(out), layout, torch), query, dtype)
        made = table.output_like(query, value.head_dim, layout)
        return made.shape, made.strides, dtype

    def differentiate(
        self,
        torch: Any,
        tensors: tuple[Any, Any, Any],
        settings: tuple[bool | None, float | None, str],
        grad: Any,
        grad_lse: Any,
    ) -> tuple[Any, ...]:
        """Returns the gradients of q, k and v, given those of o and of the log-sum-exp, either of which may
        be None."""
        causal, scale, layout = settings
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            query, key, value = (x.transpose(1, 2) for x in leaves) if layout == "bshd" else leaves
            if grad is not None and layout == "bshd":
                grad = grad.transpose(1, 2)
            masked = self.is_masked(causal)
            rows, keys = query.shape[2], key.shape[2]
            if masked and rows > keys:  # the first rows see no key
                query, rows = query[:, :, rows - keys :], keys
                grad, grad_lse = (None if x is None else x[:, :, -keys:] for x in (grad, grad_lse))
            visible = None
            if masked and (rows < keys or grad_lse is not None):
                visible = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
            groups = query.shape[1] // max(key.shape[1], 1)
            if groups > 1:
                key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
            outputs = []
            if grad is not None:
                square = masked and rows == keys
                outputs.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        query, key, value, None if square else visible, is_causal=square, scale=scale
                    )
                )
            if grad_lse is not None:
                scores = query.float() @ key.float().transpose(2, 3)
                scores = scores * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
                scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
                outputs.append(scores.logsumexp(3))
            given = [x for x in (grad, grad_lse) if x is not None]
            grads: tuple[Any, ...] = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
            return grads


#: What serves tensors in each module, by the name of its operators.
_REGISTERED: dict[str, _Tensors] = {}


def _register(operator: str) -> str:
    """Makes the operators of that name in torch.ops.flashgen, once; returns the name."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"register_torch() makes operators for PyTorch, 2.7 or newer: `pip install torch` ({error})"
        ) from error
    library, tensors = torch.library, _REGISTERED[operator]
    with _LOCK:
        if hasattr(torch.ops.flashgen, f"{operator}_out"):
            return operator

        def run(*arguments: Any) -> Any:
            return tensors.run(torch, *arguments)

        def run_lse(*arguments: Any) -> Any:
            return tensors.run(torch, *arguments, return_lse=True)

        def run_out(q: Any, k: Any, v: Any, out: Any, *settings: Any) -> None:
            tensors.run(torch, q, k, v, *settings, out=out)

        def fake(*arguments: Any) -> Any:
            return tensors.fake(torch, *arguments)

        def fake_lse(*arguments: Any) -> Any:
            o = tensors.fake(torch, *arguments)
            rows = tensors.rows_of(o, tensors.layout_of(arguments[3:]))
            return o, arguments[0].new_empty(rows, dtype=torch.float32)

        def fake_out(q: Any, k: Any, v: Any, out: Any, *settings: Any) -> None:
            tensors.inspect(torch, q, k, v, out, tensors.layout_of(settings))

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            ctx.by_kernels = tensors.takes_gradients(torch, inputs[0], inputs[2])
            if tensors.gradients is not None and ctx.by_kernels:
                made = output if isinstance(output, tuple) else (output,)
                tensors.gradients.keep(ctx, operator, inputs, made)
                return
            ctx.save_for_backward(*inputs[:3])
            ctx.settings = inputs[3:]

        def differentiate(ctx: Any, grad: Any, grad_lse: Any = None) -> tuple[Any, ...]:
            if tensors.gradients is not None and ctx.by_kernels:
                return tensors.gradients.differentiate(torch, ctx, grad, grad_lse)
            grads = tensors.differentiate(torch, ctx.saved_tensors, ctx.settings, grad, grad_lse)
            return (*grads, None, None, None)

        # Strides decide how the kernel reads and what it returns: Inductor must not change them.
        exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
        has_scales, dtypes = tensors.table.has_scales, tensors.table.dtypes
        settings = tensors.settings
        for suffix, out, result, function, fake_function in (
            ("", "", "Tensor", run, fake),
            ("_lse", "", "(Tensor, Tensor)", run_lse, fake_lse),
            ("_out", "Tensor(o!) out, ", "()", run_out, fake_out),
        ):
            name = f"flashgen::{operator}{suffix}"
            schema = f"({tensors.arrays}, {out}{settings}) -> {result}"
            library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, exact))
            library.impl(name, "default", function)
            library.register_fake(name, fake_function)
            if has_scales:
                continue
            if not out and (tensors.gradients is not None or not tensors.reads_more):
                library.register_autograd(name, differentiate, setup_context=keep)
            if tensors.reads_more:
                continue
            if len(dtypes) == 1:  # of several, `attention` casts itself
                library.register_autocast(name, "cuda", getattr(torch, dtypes[0]))
        if tensors.gradients is not None:
            tensors.gradients.register(torch)
        return operator


# As torch.compiler.assume_constant_result would mark it: torch.compile calls it as it traces, and moves on.
_register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _suits(plan: _Plan, addresses: tuple[int, int, int]) -> bool:
    """Whether the kernel can step by the strides of q, k and v, and start where they do."""
    q, k, v = addresses
    return not (q | k | v) & plan.misfit_bits


def _current_handle(torch: Any, device: int) -> int:
    """The handle of the stream in use on a device."""
    try:  # as Triton does, without making an object of the stream
        handle: int = torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:
        handle = torch.cuda.current_stream(device).cuda_stream
    return handle


def _allocating_for(torch: Any, q: Any, handle: int) -> Any:
    """A context in which memory is handed out in the order of another stream than the current one."""
    if handle in _DEFAULT_STREAMS:
        return torch.cuda.stream(torch.cuda.default_stream(q.device))
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, q.device))


def _run(
    torch: Any,
    plan: _Plan,
    q: Any,
    addresses: tuple[int, int, int],
    scale: float | None,
    beside: tuple[float, ...],
    out: Any,
    stream: Any,
    return_lse: bool,
) -> Any:
    """Runs a plan on tensors on a GPU, whatever PyTorch would have done with them."""
    current = _current_handle(torch, plan.device)
    handle = current if stream is None else _stream_handle(stream)
    given, lse, workspace = out is not None, None, None
    if handle == current:
        if plan.like_q and not given:
            out = torch.empty_like(q)
        elif not given:
            out = q.new_empty_strided(plan.out_shape, plan.out_strides, dtype=plan.out_dtype)
        if return_lse:
            lse = q.new_empty_strided(plan.rows_shape, plan.rows_strides, dtype=torch.float32)
        if plan.workspace_words:
            workspace = q.new_empty((plan.workspace_words,), dtype=torch.float32)
    else:
        with _allocating_for(torch, q, handle):
            if not given:
                out = q.new_empty_strided(plan.out_shape, plan.out_strides, dtype=plan.out_dtype)
            if return_lse:
                lse = q.new_empty_strided(plan.rows_shape, plan.rows_strides, dtype=torch.float32)
            if plan.workspace_words:
                workspace = q.new_empty((plan.workspace_words,), dtype=torch.float32)
    if plan.blocks:
        _launch(
            plan,
            *addresses,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            scale,
            beside,
            handle,
            given,
            0 if workspace is None else workspace.data_ptr(),
        )
    return (out, lse) if return_lse else out
