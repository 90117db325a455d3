"""The arguments every kernel takes, as C declares them and as Python packs them.

``AttentionArgs`` is the first, or the only one; the C declaration stands in ``templates/_kernel.cu.jinja``.
Strides are in elements; the head dim is contiguous. ``lse`` may be null; else it is contiguous
``(batch, num_q_heads, seqlen_q)`` and receives the natural logarithm of each row's softmax denominator.
Kernels of tensors with scales take that of the values last; those of q and k are in ``scale``.

The second, where a launch has tensor maps, is a struct of as many ``CUtensorMap``: opaque, and made by the
driver from what `describe_maps` says. By what they are aligned within a kernel's parameters differs from one
toolkit to the next: such kernels are launched with an array of pointers to the arguments, which the driver
puts where they belong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .problem import ITEM_BYTES, Problem
from .variant import Launch

#: q, k, v, o, lse; (batch, head, row) strides of q, k, v, o; batch, num_q_heads, num_kv_heads, seqlen_q,
#: seqlen_k; scale. Pointers first, so that no padding arises.
ARGS_FORMATS = ("5Q", "12q5i", "f")
ARGS_FORMAT = "<" + "".join(ARGS_FORMATS)
#: With the values' scale behind, and what fills the struct up to a multiple of its alignment.
SCALED_FORMAT = ARGS_FORMATS[2] + "f4x"
#: A CUtensorMap, and what the driver wants its address to be a multiple of.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
#: Byte strides that a map can hold are multiples of the one and below the other.
MAP_STRIDE_UNIT, MAP_STRIDE_END = 16, 2**40


def args_formats(problem: Problem) -> tuple[str, str, str]:
    """``AttentionArgs`` of the problem's kernels, for `struct`: pointers, extents, scales."""
    return (*ARGS_FORMATS[:2], SCALED_FORMAT) if problem.has_scales else ARGS_FORMATS


def args_bytes(problem: Problem) -> int:
    """How large it is in C."""
    return struct.calcsize("<" + "".join(args_formats(problem)))


def pack_args(
    pointers: Sequence[int],
    strides: Sequence[int],
    sizes: Sequence[int],
    scale: float,
    value_scale: float | None = None,
) -> bytes:
    """``AttentionArgs`` as bytes: five addresses, twelve strides, five sizes, the softmax scale and, for
    kernels of tensors with scales, that of the values."""
    if value_scale is None:
        return struct.pack(ARGS_FORMAT, *pointers, *strides, *sizes, scale)
    return struct.pack(
        f"<{''.join(ARGS_FORMATS[:2])}{SCALED_FORMAT}", *pointers, *strides, *sizes, scale, value_scale
    )


@dataclass(frozen=True)
class Arguments:
    """What `pack_args` packs."""

    pointers: tuple[int, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    scale: float
    value_scale: float | None = None

    def pack(self) -> bytes:
        return pack_args(self.pointers, self.strides, self.sizes, self.scale, self.value_scale)


@dataclass(frozen=True)
class MapDescription:
    """What ``cuTensorMapEncodeTiled`` is told of an array of rank 4, the innermost dimension first: columns,
    rows, heads, batch. ``sizes`` are in elements, ``strides`` of the three outer dimensions in bytes; a box
    is ``columns`` by ``rows`` of one head; ``swizzle`` and ``l2_promotion`` are in bytes, and a swizzle of 16
    is none."""

    array: str
    dtype: str
    address: int
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    columns: int
    rows: int
    swizzle: int
    l2_promotion: int

    def __str__(self) -> str:
        return (
            f"{self.array} at {self.address:#x}, {self.sizes[::-1]} (batch, heads, rows, columns) by "
            f"{self.strides[::-1]} bytes, in boxes of {self.rows} rows and {self.columns} columns"
        )


def describe_maps(launch: Launch, problem: Problem, arguments: Arguments) -> tuple[MapDescription, ...]:
    """The launch's maps, in order, of the arrays that ``arguments`` names; of ``problem`` only the type and
    the head dims count. Nothing is checked: the driver refuses what it cannot take."""
    batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k = arguments.sizes
    described = []
    for each in launch.tensor_maps:
        index = "qkvo".index(each.array)
        dtype = problem.output_dtype if each.array == "o" else problem.dtype
        size = ITEM_BYTES[dtype]
        heads, rows = (num_kv_heads, seqlen_k) if each.array in "kv" else (num_q_heads, seqlen_q)
        lengths, address = (rows, heads, batch), arguments.pointers[index]
        if rows == 0:
            # Nothing is read of an array without rows, but a map must be of something.
            lengths, address = (1, 1, 1), arguments.pointers[0]
        columns = problem.head_dim if each.array in "qk" else problem.head_dim_v
        of_batch, of_head, of_row = arguments.strides[3 * index : 3 * index + 3]
        # The stride of a dimension of one is never used, but must be one that can be held.
        of_row, of_head, of_batch = (
            size * stride if length > 1 else MAP_STRIDE_UNIT
            for length, stride in zip(lengths, (of_row, of_head, of_batch), strict=True)
        )
        described.append(
            MapDescription(
                each.array,
                dtype,
                address,
                (columns, *lengths),
                (of_row, of_head, of_batch),
                each.columns,
                each.rows,
                each.swizzle,
                each.l2_promotion,
            )
        )
    return tuple(described)
