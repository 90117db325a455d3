"""What a kernel computes: its arrays, and the arithmetic and bytes that it cannot do without.

Everything that handles a kernel's arrays (arguments, tensor maps, devices, references) asks the operation for
them, so that one with other arrays, such as the backward pass, is another value here and no special case
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from .layout import Layout


class Sizes(Protocol):
    """The lengths and types of one problem, as `flashgen.gen.problem.Problem` has them."""

    @property
    def dtype(self) -> str: ...
    @property
    def key_dtype(self) -> str: ...
    @property
    def output_dtype(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def seqlen_q(self) -> int: ...
    @property
    def seqlen_k(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def layout(self) -> Layout: ...


#: Bytes of an element, by dtype.
ITEM_BYTES: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1}
#: What the elements of an array are: the type of the problem's queries, of its keys and values, or of its
#: outputs, or float32 whatever these are.
INPUT, KEYS, OUTPUT, FLOAT = "input", "keys", "output", "float"


@dataclass(frozen=True)
class Array:
    """One array of an operation, shaped ``(batch, heads, rows, columns)``.

    ``heads``, ``rows`` and ``columns`` name the sizes of a problem; without columns it has a number for each
    row and is contiguous, else it is reached by strides with contiguous columns. ``element`` is `INPUT`,
    `KEYS`, `OUTPUT` or `FLOAT`. An optional array may be absent.
    """

    name: str
    heads: str
    rows: str
    columns: str
    element: str
    is_output: bool = False
    is_optional: bool = False

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the lengths of the array's axes."""
        return self._lengths(sizes.layout.axes(self.heads, self.rows), sizes)

    def stored_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the lengths of the array's axes as it lies in memory: ``shape`` but where it has pages,
        which stand in the place of batches."""
        return self._lengths(sizes.layout.stored_axes(self.heads, self.rows), sizes)

    def _lengths(self, axes: tuple[str | int, ...], sizes: Sizes) -> tuple[int, ...]:
        named = (*axes, *([self.columns] if self.columns else []))
        return tuple(axis if isinstance(axis, int) else getattr(sizes, axis) for axis in named)

    def dtype(self, sizes: Sizes) -> str:
        """Returns the type of the array's elements: ``bf16``."""
        types = {INPUT: sizes.dtype, KEYS: sizes.key_dtype, OUTPUT: sizes.output_dtype, FLOAT: "f32"}
        return types[self.element]

    def num_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes that the array's elements take."""
        return prod(self.shape(sizes)) * ITEM_BYTES[self.dtype(sizes)]

    def stored_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes that it takes in memory, pages as a whole."""
        return prod(self.stored_shape(sizes)) * ITEM_BYTES[self.dtype(sizes)]


@dataclass(frozen=True)
class Operation:
    """A computation on arrays, such as the forward pass of attention.

    ``products`` are the columns over which each visible pair of a query row and a key is multiplied and
    summed, by the name of a size.
    """

    name: str
    arrays: tuple[Array, ...]
    products: tuple[str, ...]

    @property
    def strided(self) -> tuple[Array, ...]:
        """The arrays that are reached by strides."""
        return tuple(each for each in self.arrays if each.columns)

    @property
    def outputs(self) -> tuple[Array, ...]:
        """The arrays that are written."""
        return tuple(each for each in self.arrays if each.is_output)

    def array(self, name: str) -> Array:
        """Returns the array called ``name``; raises KeyError."""
        return {each.name: each for each in self.arrays}[name]

    def flops(self, sizes: Sizes, pairs: int) -> int:
        """Returns the floating-point operations over so many pairs of a query row and a key: two for each
        multiply-add."""
        return 2 * pairs * sum(getattr(sizes, columns) for columns in self.products)

    def min_bytes(self, sizes: Sizes) -> int:
        """Returns the fewest bytes through device memory: each array that is always there, read or written
        once."""
        return sum(each.num_bytes(sizes) for each in self.arrays if not each.is_optional)


#: softmax(scale · q kᵀ) v, and the log-sum-exp of each row's scores where it is wanted.
FORWARD = Operation(
    "forward",
    (
        Array("q", "num_q_heads", "seqlen_q", "head_dim", INPUT),
        Array("k", "num_kv_heads", "seqlen_k", "head_dim", KEYS),
        Array("v", "num_kv_heads", "seqlen_k", "head_dim_v", KEYS),
        Array("o", "num_q_heads", "seqlen_q", "head_dim_v", OUTPUT, is_output=True),
        Array("lse", "num_q_heads", "seqlen_q", "", FLOAT, is_output=True, is_optional=True),
    ),
    products=("head_dim", "head_dim_v"),
)
#: The same of latent attention, whose values are the first columns of the keys: one array has both.
LATENT = replace(
    FORWARD, name="latent attention", arrays=tuple(each for each in FORWARD.arrays if each.name != "v")
)


def gradient_name(name: str) -> str:
    """Returns what the gradient of an array is called that masks or changes of scores read."""
    return f"d{name}"


#: The gradients of `FORWARD`'s inputs, from its inputs and outputs and the gradients of these.
BACKWARD = Operation(
    "backward",
    (
        Array("q", "num_q_heads", "seqlen_q", "head_dim", INPUT),
        Array("k", "num_kv_heads", "seqlen_k", "head_dim", INPUT),
        Array("v", "num_kv_heads", "seqlen_k", "head_dim_v", INPUT),
        Array("o", "num_q_heads", "seqlen_q", "head_dim_v", OUTPUT),
        Array("dout", "num_q_heads", "seqlen_q", "head_dim_v", OUTPUT),
        Array("lse", "num_q_heads", "seqlen_q", "", FLOAT),
        Array("dlse", "num_q_heads", "seqlen_q", "", FLOAT, is_optional=True),
        Array("dq", "num_q_heads", "seqlen_q", "head_dim", INPUT, is_output=True),
        Array("dk", "num_kv_heads", "seqlen_k", "head_dim", INPUT, is_output=True),
        Array("dv", "num_kv_heads", "seqlen_k", "head_dim_v", INPUT, is_output=True),
    ),
    # Scores again and q's and k's gradients; weights' and v's.
    products=("head_dim", "head_dim", "head_dim", "head_dim_v", "head_dim_v"),
)
