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
    row are adjacent. ``sizes`` are the lengths that a kernel is told, by the names of a problem's. Where
    sequences have lengths of their own, ``lengths`` are the arrays of 32-bit integers that tell them on the
    card, by name and meaning, and all rows of all of them stand in one batch, as many as ``totals`` say by
    the name of what one sequence has.
    """

    name: str
    stride_axes: tuple[str, ...]
    sizes: tuple[str, ...]
    lengths: tuple[tuple[str, str], ...] = ()
    totals: tuple[tuple[str, str], ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether sequences stand one behind the other, each of its own length."""
        return bool(self.lengths)

    def axes(self, heads: str, rows: str) -> tuple[str | int, str, str]:
        """Returns what says how long the axes of an array are beside its columns: a batch, heads and rows."""
        return (1 if self.is_packed else "batch", heads, dict(self.totals).get(rows, rows))

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the usual strides of an array of that shape, (batch, heads, rows, columns), in elements:
        without gaps, rows of one position side by side where sequences are packed."""
        batch_stride = shape[1] * shape[2] * shape[3]
        if self.is_packed:
            return (batch_stride, shape[3], shape[1] * shape[3], 1)
        return (batch_stride, shape[2] * shape[3], shape[3], 1)


#: Arrays (batch, heads, seqlen, head_dim) by strides: every sequence of a batch is as long as the others.
DENSE = Layout(
    "dense",
    stride_axes=("batch", "head", "row"),
    sizes=("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k"),
)
#: Arrays (total, heads, head_dim) by strides: ``batch`` sequences one behind the other.
PACKED = Layout(
    "packed",
    stride_axes=("head", "row"),
    sizes=("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "total_q", "total_k"),
    lengths=(
        ("cu_seqlens_q", "where each sequence's queries begin, and where the last one's end: batch + 1"),
        ("cu_seqlens_k", "the same of its keys"),
        ("seqused_q", "how many of a sequence's queries count, the first of them; null: all"),
        ("seqused_k", "the same of its keys"),
    ),
    totals=(("seqlen_q", "total_q"), ("seqlen_k", "total_k")),
)
