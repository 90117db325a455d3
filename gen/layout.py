"""How the rows of arrays lie in memory: which arguments tell it, and so how a tile's rows become addresses.

A family turns rows into addresses in one place of its templates, ``addresses.cu.jinja`` or, where all of it
is a head's pointers and a row's stride, ``common/memory.cu.jinja``; that is where another layout goes in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the rows of an operation's arrays are found.

    ``stride_axes`` are the axes over which an array has a stride each, the outermost first; the columns of a
    row are adjacent. ``sizes`` are the lengths that a kernel is told, by the names of a problem's.
    """

    name: str
    stride_axes: tuple[str, ...]
    sizes: tuple[str, ...]


#: Arrays (batch, heads, seqlen, head_dim) by strides: every sequence of a batch is as long as the others.
DENSE = Layout(
    "dense",
    stride_axes=("batch", "head", "row"),
    sizes=("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k"),
)
