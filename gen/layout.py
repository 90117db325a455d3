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
    card, by name and meaning. Where they are packed all rows of all of them stand in one batch, as many as
    ``totals`` say by the name of what one sequence has.

    Where keys and values lie in pages, which sequences may share, ``cache_axes`` are the axes over which
    these arrays have strides, and ``table`` is the array that lists the pages of each sequence.
    """

    name: str
    stride_axes: tuple[str, ...]
    sizes: tuple[str, ...]
    lengths: tuple[tuple[str, str], ...] = ()
    totals: tuple[tuple[str, str], ...] = ()
    cache_axes: tuple[str, ...] = ()
    table: tuple[tuple[str, str], ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether sequences stand one behind the other, each of its own length."""
        return bool(self.totals)

    @property
    def is_paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return bool(self.cache_axes)

    @property
    def index_arrays(self) -> tuple[tuple[str, str], ...]:
        """The arrays of 32-bit integers that say which rows are whose, by name and meaning."""
        return (*self.table, *self.lengths)

    def in_pages(self, rows: str) -> bool:
        """Returns whether an array with such rows, by the name of their number, lies in pages."""
        return self.is_paged and rows == "seqlen_k"

    def axes_of(self, rows: str) -> tuple[str, ...]:
        """Returns the axes over which an array with such rows has strides, the outermost first."""
        return self.cache_axes if self.in_pages(rows) else self.stride_axes

    def axes(self, heads: str, rows: str) -> tuple[str | int, str, str]:
        """Returns what says how long the axes of an array are beside its columns: a batch, heads and rows."""
        return (1 if self.is_packed else "batch", heads, dict(self.totals).get(rows, rows))

    def stored_axes(self, heads: str, rows: str) -> tuple[str | int, str, str]:
        """Returns the same of an array as it lies in memory: of pages where it has some."""
        return ("num_pages", heads, "page_size") if self.in_pages(rows) else self.axes(heads, rows)

    def strides(self, shape: tuple[int, ...], rows: str = "") -> tuple[int, ...]:
        """Returns the usual strides of an array of that shape, (batch, heads, rows, columns), in elements:
        without gaps, rows of one position side by side where sequences are packed, and in pages."""
        batch_stride = shape[1] * shape[2] * shape[3]
        if self.is_packed or self.in_pages(rows):
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
_TABLE = (("page_table", "(batch, max_pages): the pages of each sequence's keys, in their order"),)
_CACHE_SIZES = ("num_pages", "page_size", "max_pages")
_USED_KEYS = ("seqused_k", "keys of each sequence; null: all have seqlen_k")
#: Queries as in dense arrays, keys and values in caches (pages, heads, page_size, head_dim) by strides.
PAGED = Layout(
    "paged",
    stride_axes=DENSE.stride_axes,
    sizes=(*DENSE.sizes, *_CACHE_SIZES),
    lengths=(_USED_KEYS,),
    cache_axes=("page", "head", "row"),
    table=_TABLE,
)
#: Queries as in packed sequences, keys and values in such caches.
PACKED_PAGED = Layout(
    "packed_paged",
    stride_axes=PACKED.stride_axes,
    sizes=(*DENSE.sizes, "total_q", *_CACHE_SIZES),
    lengths=(*(each for each in PACKED.lengths if each[0].endswith("_q")), _USED_KEYS),
    totals=PACKED.totals,
    cache_axes=PAGED.cache_axes,
    table=_TABLE,
)


def knows_page_size(page_size: int, bc: int) -> bool:
    """Returns whether a kernel of tiles of ``bc`` keys is made for pages of that size alone: tiles of whole
    pages, and pages of whole tiles, are found without dividing. Others take pages of any size."""
    return page_size > 0 and bc > 0 and (page_size % bc == 0 or bc % page_size == 0)
