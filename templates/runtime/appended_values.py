"""New keys and values that a kernel writes into its caches, and what rotates them and queries."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import _check_kinds, _read, _torch_of
from .facts import _ITEM_BYTES, Tuned
from .plans import _ROTATED, _Plan
from .scored_values import _Placed
from .table import _TORCH_DEVICES, _ordinal

#: The new rows, the tables that rotate, and where the new rows of packed sequences begin.
_NEW_ROWS, _TABLES, _NEW_STARTS = ("k_new", "v_new"), ("rotary_cos", "rotary_sin"), "cu_seqlens_new"
#: All that kernels are told of them: what is not given is nothing, or none.
_NEW_FIELDS = (
    *(*_NEW_ROWS, *_TABLES, _ROTATED, _NEW_STARTS),
    *(f"{name}_stride_{axis}" for name in _NEW_ROWS for axis in ("batch", "head", "row")),
    *(f"{name}_stride" for name in _TABLES),
    *("seqlen_new", "total_new", "rotary_rows"),
)
#: What of these operators of PyTorch take, and the caches that they write to, as it writes them.
_NEW_IN_GRAPH = (*_NEW_ROWS, *_TABLES, _NEW_STARTS)
_NEW_SETTINGS = "".join(f", Tensor? {name}" for name in _NEW_IN_GRAPH)
_WRITTEN_CACHES = "Tensor q, Tensor(k!) k, Tensor(v!) v"
#: How bfloat16 is called by who has no name for it.
_BITS = {"<u2": "bfloat16", "uint16": "bfloat16"}
#: The axes of new rows, of queries by heads or by rows and of packed ones.
_AXES = {"bhsd": ("batch", "head", "row"), "bshd": ("batch", "row", "head"), "thd": ("row", "head")}


def _appends(tuned: Tuned) -> bool:
    return "append" in tuned.problem


def _rotary_of(tuned: Tuned) -> tuple[str, int]:
    """How a kernel pairs the columns that it rotates, and how many these are; none where it rotates none."""
    told = tuned.problem.get("append", {})
    return told.get("rotary", ""), told.get("rotary_dim", 0)


def _check_new(tuned: Tuned, given: Mapping[str, Any]) -> None:
    """Raises TypeError and ValueError unless a kernel appends what is given, and all of it is there."""
    told = [name for name, array in given.items() if array is not None]
    pairs, columns = _rotary_of(tuned)
    if told and not _appends(tuned):
        raise ValueError(
            f"{told[0]}= asks for new keys to be written to the cache, or turned, which this kernel does not "
            f"do: make another with {tuned.command} --append, or write them into their pages first, with "
            f"lengths that count them, and leave {', '.join(f'{name}=' for name in told)} out"
        )
    if ("k" in told) != ("v" in told):
        raise TypeError("k= and v= are appended together: pass both, or neither")
    turned = [name for name in told if name in (*_TABLES, "rotated")]
    if turned and not pairs:
        raise ValueError(
            f"{turned[0]}= rotates, and {tuned.name} appends what is rotated already: make another with "
            f"{tuned.command} --append --rotary halves:COLUMNS, or leave it out"
        )
    missing = [name for name in _TABLES if pairs and name not in told]
    if missing:
        raise TypeError(
            f"{missing[0]}= is missing: {tuned.name} rotates {columns} columns ({pairs}) by its tables, "
            f"(positions, {columns // 2})"
        )


def _check_appending(tuned: Tuned, q: Any, given: Mapping[str, Any]) -> None:
    """Raises TypeError and RuntimeError for arrays beside q that no kernel can append."""
    if isinstance(q, np.ndarray):
        raise TypeError(
            f"{tuned.name} writes into its caches, and those of numpy are copied to the card: pass torch "
            "tensors or CuPy arrays"
        )
    _check_kinds(q, tuple(given.items()))
    torch = _torch_of(q)
    for name, array in given.items():
        if torch is not None and array is not None and torch.is_grad_enabled() and array.requires_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but this kernel is forward only: call it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )


def _check_pairs(tuned: Tuned, rotary_cos: Any, interleaved: bool) -> None:
    """Raises ValueError for columns that are to be paired in another way than the kernel does."""
    pairs, columns = _rotary_of(tuned)
    if rotary_cos is not None and pairs and (pairs == "interleaved") != bool(interleaved):
        wanted = "interleaved" if interleaved else "halves"
        raise ValueError(
            f"rotary_interleaved is {interleaved}, and {tuned.name} pairs columns by {pairs}: pass "
            f"{not interleaved}, or make another with {tuned.command} --append --rotary {wanted}:{columns}"
        )


def _check_flash_call(cache_leftpad: Any, num_splits: int) -> None:
    """Raises ValueError for what flash-attn's function beside caches takes, and no kernel here."""
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad= is nothing that kernels here read: begin sequences at key 0")
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}; it must be 0 or more")


def _placed_new(name: str, array: Any, queries: str, plan: _Plan) -> tuple[_Placed, dict[str, float]]:
    """New rows, or a table that rotates, as a kernel steps through it, and what it is told of it. Raises
    TypeError and ValueError for arrays that it cannot."""
    placed = _placed_of_type(name, array, plan)
    shape, steps, sizes, tuned = placed.shape, placed.strides, plan.sizes, plan.tuned
    if name == _ROTATED:
        count = math.prod(sizes.get(each, 1) for each in ("num_q_heads",)) * tuned.head_dim
        count *= sizes["total_q"] if "total_q" in sizes else sizes["batch"] * sizes["seqlen_q"]
        whole = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if math.prod(shape) < count or steps != whole:
            raise ValueError(f"rotated has the shape {shape}; pass contiguous memory for {count} elements")
        return placed, {name: placed.address}
    columns = tuned.head_dim_v if name == "v_new" else tuned.head_dim
    axes = _AXES[queries]
    if name in _TABLES:
        columns, axes = _rotary_of(tuned)[1] // 2, ("row",)
    lengths = dict(zip(axes, shape, strict=False))
    wanted = {"batch": sizes["batch"], "head": sizes["num_kv_heads"]}
    if len(shape) != len(axes) + 1 or any(lengths[each] != wanted.get(each, lengths[each]) for each in axes):
        words = ", ".join("rows" if axis == "row" else str(wanted[axis]) for axis in axes)
        raise ValueError(f"{name} has the shape {shape}, but must be ({words}, {columns})")
    if shape[-1] != columns or (steps[-1] != 1 and columns > 1):
        raise ValueError(
            f"{name} has {shape[-1]} columns by {steps[-1]}; {columns} contiguous ones are needed: pass "
            f"{name}.contiguous()"
        )
    if name in _TABLES:
        return placed, {name: placed.address, f"{name}_stride": steps[0], "rotary_rows": shape[0]}
    step_of = {axis: step if lengths[axis] > 1 else 0 for axis, step in zip(axes, steps, strict=False)}
    if placed.address % tuned.access_bytes or any(step % tuned.vector for step in step_of.values()):
        raise ValueError(
            f"{name} starts at address {placed.address:#x} with strides {steps}; {tuned.name} reads "
            f"{tuned.vector} elements at once: pass {name}.contiguous()"
        )
    told: dict[str, float] = {f"{name}_stride_{axis}": step for axis, step in step_of.items()}
    told["total_new" if queries == "thd" else "seqlen_new"] = lengths["row"]
    return placed, {name: placed.address if lengths["row"] else 0, **told}


def _placed_of_type(name: str, array: Any, plan: _Plan) -> _Placed:
    """An array of the kernel's type on its device, as it lies."""
    torch, stream = _torch_of(array), None
    if torch is not None:
        if array.device.type not in _TORCH_DEVICES:
            raise ValueError(f"{name} is on the device {str(array.device)!r}; move it with {name}.cuda()")
        dtype, address = str(array.dtype).removeprefix("torch."), array.data_ptr()
        shape, steps, device = tuple(array.shape), tuple(array.stride()), _ordinal(array.device)
    else:
        address, (dtype, shape, strides, device), stream = _read(name, array)
        dtype, size = _BITS.get(dtype, dtype), _ITEM_BYTES[plan.tuned.dtype]
        steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if strides is not None:
            steps = tuple(stride // size for stride in strides)
    if dtype != plan.tuned.dtype:
        raise TypeError(f"{name} is {dtype}, and {plan.tuned.name} takes {plan.tuned.dtype}: convert it")
    if device not in (None, plan.device):
        raise ValueError(f"q is on device {plan.device}, {name} on device {device}; move them to one")
    return _Placed(array, address, shape, steps, stream)
