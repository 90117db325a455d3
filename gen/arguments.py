"""The arguments of a kernel: one list of typed fields, from which all declarations and packings are made.

``AttentionArgs`` is a kernel's first argument, or its only one. Its fields are listed here once, by the
arrays of the operation; the C struct of the kernel, that of the library's header, the bytes that are packed
for a launch and what an emitted module knows of them follow from the list. Strides are in elements.

The second argument, where a launch has tensor maps, is a struct of as many ``CUtensorMap``: opaque, and made
by the driver from what `describe_maps` says. By what they are aligned within a kernel's parameters differs
from one toolkit to the next: such kernels are launched with an array of pointers to the arguments, which the
driver puts where they belong.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from .append import NEW_ROWS, NEW_STARTS, ROTATED, TABLE_ROWS, TOTAL_NEW, Append, rotated_strides
from .expression import Kind
from .handover.workspace import WORKSPACE
from .launch import Launch, TensorMap
from .layout import DENSE, Layout
from .operation import BACKWARD, FLOAT, FORWARD, INPUT, ITEM_BYTES, KEYS, OUTPUT, Array, Operation
from .problem import Problem
from .scoring.asked import BUFFER_BYTES
from .scoring.buffer_gradients import BufferGradient, buffer_gradients
from .scoring.scores import Buffer, Scores, scores_of

#: A CUtensorMap, and what the driver wants its address to be a multiple of.
MAP_BYTES, MAP_ALIGNMENT = 128, 64
#: Where the rows of a map end of which a sequence has fewer, which is told for each box: beyond any sequence.
#: As many steps of so many bytes come round to the same address, of 64 bits.
MAP_ROWS_END, MAP_ROUND_BYTES = 2**30, 2**34
#: Byte strides that a map can hold are multiples of the one and below the other.
MAP_STRIDE_UNIT, MAP_STRIDE_END = 16, 2**40
#: What kernels whose rows see what a predicate says are told of their lists of tiles.
TILE_LISTS, LISTS_MADE = "tile_lists", "tile_lists_made"
#: What kernels of packed sequences are told of their plan.
PLAN, PLAN_MADE = "plan", "plan_made"
#: What kernels are told whose keys and values are of another type than the queries: by what each head of
#: keys, or of values, is multiplied, and the axes over which that has strides.
KEY_SCALES = {"k_scale": "keys", "v_scale": "values"}
KEY_SCALE_AXES = ("batch", "num_kv_heads")
#: What the numbers of masks and changes by name are.
_NUMBERS = {
    "window_left": "keys before a row's place that it sees; negative: all",
    "window_right": "keys after it that it sees; negative: all",
    "always_keys": "first keys that all rows see",
    "chunk": "places of a chunk, of which rows see their own",
    "dilation": "rows see keys at distances that are multiples of this",
    "softcap": "a scaled score s becomes softcap * tanh(s / softcap)",
}
#: The codes by which `struct` packs them.
ADDRESS, LONG, INT, SINGLE = "Q", "q", "i", "f"
#: Those of plain attention, which read nothing but q, k and v.
PLAIN_SCORES = scores_of(causal=False)
_C_TYPES = {LONG: "long long", INT: "int", SINGLE: "float"}


#: What elements of buffers are called in C; those of 16 bits are known by their bits there.
BUFFER_ELEMENTS = {
    "f32": "float",
    "f16": "unsigned short",
    "bf16": "unsigned short",
    "i16": "short",
    "i32": "int",
    "i64": "long long",
    "u8": "unsigned char",
}


@dataclass(frozen=True)
class Field:
    """One member of a kernel's arguments: its name and the code by which `struct` packs it.

    ``array`` is the array that an address is of, or ``buffer`` the buffer, or ``pointee`` the C type there.
    """

    name: str
    code: str
    array: Array | None = None
    comment: str = ""
    buffer: Buffer | None = None
    pointee: str = ""

    def c_type(self, elements: Mapping[str, str]) -> str:
        """Returns the member's type in C, ``elements`` being what arrays' elements are called there."""
        if self.pointee:
            return f"{self.pointee}* "
        if self.buffer is not None:
            return f"const {BUFFER_ELEMENTS[self.buffer.dtype]}* "
        if self.array is None:
            return f"{_C_TYPES[self.code]} "
        const = "" if self.array.is_output else "const "
        return f"{const}{elements[self.array.element]}* "


@dataclass(frozen=True)
class ArgumentStruct:
    """A struct of arguments, as lines of fields that are declared together."""

    name: str
    lines: tuple[tuple[Field, ...], ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields in the order in which they lie in memory."""
        return tuple(field for line in self.lines for field in line)

    @cached_property
    def format(self) -> str:
        """All fields for `struct`, filled up to a multiple of the widest's alignment, as C does."""
        fields = "<" + "".join(field.code for field in self.fields)
        alignment = max(struct.calcsize(field.code) for field in self.fields)
        padding = -struct.calcsize(fields) % alignment
        return fields + (f"{padding}x" if padding else "")

    @property
    def num_bytes(self) -> int:
        """The struct's size in C."""
        return struct.calcsize(self.format)

    def declared(self, elements: Mapping[str, str], comment: str = "// %s") -> list[str]:
        """Returns the struct's members as lines of C, ``elements`` being what arrays' elements are called
        there."""
        return [
            f"{line[0].c_type(elements)}{', '.join(field.name for field in line)};"
            + (f"  {comment % line[0].comment}" if line[0].comment else "")
            for line in self.lines
        ]

    def pack(self, values: Mapping[str, float]) -> bytes:
        """Returns the struct's bytes, each field of its name's value; raises KeyError for one without."""
        return struct.pack(self.format, *(values[field.name] for field in self.fields))

    def unpack(self, packed: bytes) -> dict[str, float]:
        """Returns the values of all fields, by name."""
        return dict(zip((f.name for f in self.fields), struct.unpack(self.format, packed), strict=True))


@cache
def argument_struct(
    operation: Operation = FORWARD,
    layout: Layout = DENSE,
    *,
    has_scales: bool = False,
    has_key_scales: bool = False,
    scores: Scores = PLAIN_SCORES,
    append: Append | None = None,
    has_workspace: bool = False,
) -> ArgumentStruct:
    """Returns ``AttentionArgs`` of an operation on arrays of a layout.

    Pointers come first, so that no padding arises between its fields.

    With ``has_scales`` arrays come with a scale each: that of the values is an argument of its own, those of
    q and k are in ``scale``. With ``has_key_scales`` heads of keys and of values have one each, in arrays by
    strides. What masks and changes of ``scores`` read stands behind the arrays' own. With ``append`` there
    are new rows for the caches. With ``has_workspace`` launches leave things for each other in memory of the
    caller's, as those of the backward pass always do.
    """
    cache = ("seqlen_k",) if append is not None else ()  # which is written
    arrays = (replace(each, is_output=True) if each.rows in cache else each for each in operation.arrays)
    addresses = [(Field(each.name, ADDRESS, each),) for each in arrays]
    addresses += [(Field(each.name, ADDRESS, buffer=each, comment=_shape(each)),) for each in scores.buffers]
    if has_key_scales:
        addresses += [
            (Field(name, ADDRESS, pointee="const float", comment=f"(batch, num_kv_heads): of {of}; null: 1"),)
            for name, of in KEY_SCALES.items()
        ]
    made = []
    if append is not None:
        addresses += _append_addresses(append, layout)
    for name, comment in layout.index_arrays:
        if append is not None and name == "seqused_k":
            comment = "keys of each sequence before the new ones; null: seqlen_k with them"
        addresses.append((Field(name, ADDRESS, pointee="const int", comment=comment),))
    if layout.is_packed:
        addresses.append((Field(PLAN, ADDRESS, pointee="int", comment="memory for which block takes what"),))
        made.append((Field(PLAN_MADE, INT, comment="whether it is there from a call before"),))
    if operation is BACKWARD or has_workspace:
        comment = "for what launches leave each other"
        addresses.append((Field(WORKSPACE, ADDRESS, pointee="float", comment=comment),))
    if operation is BACKWARD:
        addresses += [(_gradient_field(each),) for each in buffer_gradients(scores)]
    if scores.needs_lists:
        addresses.append((Field(TILE_LISTS, ADDRESS, pointee="int", comment="memory for lists of tiles"),))
        made.append((Field(LISTS_MADE, INT, comment="whether they are there from a call before"),))
    strides = [
        tuple(Field(f"{each.name}_stride_{axis}", LONG) for axis in layout.axes_of(each.rows))
        for each in operation.strided
    ]
    strides += [
        (Field(f"{name}_stride", LONG, comment="from one row to the next"),) for name, _ in layout.table
    ]
    if append is not None:
        strides += _append_strides(append, layout)
    if has_key_scales:
        strides += [tuple(Field(name, LONG) for name in key_scale_strides(each)) for each in KEY_SCALES]
    strides += [tuple(Field(name, LONG) for name in each.strides) for each in scores.buffers if each.strides]
    if operation is BACKWARD:
        of_buffers = (each.strides for each in buffer_gradients(scores))
        strides += [tuple(Field(name, LONG) for name in names) for names in of_buffers if names]
    sizes = tuple(Field(name, INT) for name in layout.sizes)
    more_sizes = [(Field(name, INT),) for each in scores.buffers for _, name in each.sizes]
    if append is not None:
        more_sizes = [*_append_sizes(append, layout), *more_sizes]
    numbers = [
        (Field(each.name, INT, comment=_NUMBERS.get(each.name, "")), each.kind) for each in scores.scalars
    ]
    more_sizes += [(field,) for field, kind in numbers if kind is not Kind.FLOAT]
    usual = "multiplies q k^T{} 1 / sqrt(head_dim)"
    if has_scales:
        scale = Field("scale", SINGLE, comment=usual.format(": usually") + ", times the scales of q and k")
        scalars = [(scale,), (Field("value_scale", SINGLE, comment="multiplies o: the scale of v"),)]
    else:
        scalars = [(Field("scale", SINGLE, comment=usual.format(", usually")),)]
    scalars += [(replace(field, code=SINGLE),) for field, kind in numbers if kind is Kind.FLOAT]
    return ArgumentStruct("AttentionArgs", (*addresses, *strides, sizes, *made, *more_sizes, *scalars))


def _gradient_field(gradient: BufferGradient) -> Field:
    array = Array(gradient.name, "", "", "", FLOAT, is_output=True, is_optional=True)
    return Field(gradient.name, ADDRESS, array, f"the gradient of {gradient.buffer.name}; null: not wanted")


def _append_addresses(append: Append, layout: Layout) -> list[tuple[Field, ...]]:
    fields = [Field(each.name, ADDRESS, each) for each in append.inputs]
    if append.rotary:
        q = FORWARD.array("q")
        fields += [Field(name, ADDRESS, replace(q, name=name)) for name in append.tables]
        comment = "memory for rotated queries, as many elements as q has"
        fields.append(Field(ROTATED, ADDRESS, replace(q, name=ROTATED, is_output=True), comment))
    if layout.is_packed:
        comment = "where each sequence's new rows begin, and where the last one's end; null: a row a query"
        fields.append(Field(NEW_STARTS, ADDRESS, pointee="const int", comment=comment))
    return [(each,) for each in fields]


def _append_strides(append: Append, layout: Layout) -> list[tuple[Field, ...]]:
    strides = [
        tuple(Field(f"{each.name}_stride_{axis}", LONG) for axis in layout.stride_axes)
        for each in append.inputs
    ]
    return strides + [(Field(f"{name}_stride", LONG, comment="of rows"),) for name in append.tables]


def _append_sizes(append: Append, layout: Layout) -> list[tuple[Field, ...]]:
    rows = TOTAL_NEW if layout.is_packed else NEW_ROWS
    of = "of all sequences" if layout.is_packed else "of each sequence"
    sizes = [Field(rows, INT, comment=f"new rows {of}, which come behind the keys that are there")]
    if append.rotary:
        sizes.append(Field(TABLE_ROWS, INT, comment="positions that rotary_cos and rotary_sin have"))
    return [(each,) for each in sizes]


def key_scale_strides(name: str) -> tuple[str, ...]:
    """Returns what the strides of an array of `KEY_SCALES` are called."""
    return tuple(f"{name}_stride_{axis}" for axis, _ in enumerate(KEY_SCALE_AXES))


def _shape(buffer: Buffer) -> str:
    """What a buffer's axes are, the last of which is contiguous, and its type."""
    axes = [" or ".join(sorted(names)) if names else "any" for names in buffer.axes]
    return f"({', '.join(axes)}) of {buffer.dtype}"


def struct_of(problem: Problem, *, has_workspace: bool = False) -> ArgumentStruct:
    """Returns ``AttentionArgs`` as the problem's kernels take it: with a workspace or without one."""
    return argument_struct(
        problem.operation,
        problem.layout,
        has_scales=problem.has_scales,
        has_key_scales=problem.has_key_scales,
        scores=problem.scores,
        append=problem.append,
        has_workspace=has_workspace,
    )


@dataclass(frozen=True)
class Arguments:
    """The values of one launch's arguments, by the names of their fields."""

    struct: ArgumentStruct
    values: Mapping[str, float]
    layout: Layout = DENSE

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths that a kernel is told, by name."""
        new = (name for name in (NEW_ROWS, TOTAL_NEW) if name in self.values)
        return {name: int(self.values[name]) for name in (*self.layout.sizes, *new)}

    def with_rotated_queries(self, head_dim: int) -> Arguments:
        """Returns them as launches behind one that rotates queries take them: q where that has put them."""
        sizes = self.sizes
        strides = rotated_strides(self.layout, sizes["num_q_heads"], sizes["seqlen_q"], head_dim)
        return replace(self, values={**self.values, "q": self.values[ROTATED], **strides})

    def pack(self) -> bytes:
        """Returns the bytes that a kernel takes."""
        return self.struct.pack(self.values)

    def address(self, array: str) -> int:
        """Returns the address at which an array begins; 0 for one that is absent."""
        return int(self.values[array])

    def strides(self, array: str) -> tuple[int, ...]:
        """Returns the strides of an array's outer axes in elements, the outermost first."""
        prefix = f"{array}_stride_"
        return tuple(
            int(self.values[each.name]) for each in self.struct.fields if each.name.startswith(prefix)
        )


def make_arguments(
    problem: Problem,
    addresses: Mapping[str, int],
    strides: Mapping[str, Sequence[int]],
    *,
    scale: float,
    sizes: Mapping[str, int] | None = None,
    value_scale: float | None = None,
    scoring: Mapping[str, float] | None = None,
    sequences: Mapping[str, float] | None = None,
    append: Mapping[str, float] | None = None,
    key_scales: Mapping[str, float] | None = None,
    workspace: int | None = None,
) -> Arguments:
    """Returns a kernel's arguments from its arrays' addresses and strides by name.

    ``strides`` are of batches or pages, heads and rows in elements; arrays left out of ``addresses`` are
    absent. ``sizes`` are the problem's unless they are given. ``value_scale`` is for kernels of arrays with
    scales, 1 by default. ``scoring`` has what masks and changes of scores read, by the names of the fields:
    addresses, strides and sizes of buffers, and scalars; lists of tiles are absent unless they are among it.
    ``sequences`` has the addresses of what says which rows are whose, and the table of pages' stride; and
    that of packed sequences' plan. ``append`` has what tells of new rows, by the names of the fields, and
    ``key_scales`` the addresses and strides of scales of keys and values; 1 unless they are given.
    ``workspace`` is the address of the kernel's workspace, of one that has some.
    """
    operation, layout = problem.operation, problem.layout
    values: dict[str, float] = {each.name: addresses.get(each.name, 0) for each in operation.arrays}
    for each in operation.strided:
        axes = layout.axes_of(each.rows)
        for axis, stride in zip(axes, strides[each.name][3 - len(axes) : 3], strict=True):
            values[f"{each.name}_stride_{axis}"] = stride
    values |= {name: getattr(problem, name) for name in layout.sizes} if sizes is None else dict(sizes)
    values["scale"] = scale
    values["value_scale"] = 1.0 if value_scale is None else value_scale
    values |= {TILE_LISTS: 0, LISTS_MADE: 0, PLAN: 0, PLAN_MADE: 0, WORKSPACE: workspace or 0}
    if operation is BACKWARD:
        for each in buffer_gradients(problem.scores):
            values |= dict.fromkeys((each.name, *each.strides), 0)
    values |= {name: 0 for name, _ in layout.index_arrays}
    values |= {f"{name}_stride": 0 for name, _ in layout.table}
    for name in KEY_SCALES:
        values |= dict.fromkeys((name, *key_scale_strides(name)), 0)
    told = {**(scoring or {}), **(sequences or {}), **(append or {}), **(key_scales or {})}
    struct = struct_of(problem, has_workspace=workspace is not None)
    return Arguments(struct, {**values, **told}, layout)


@dataclass(frozen=True)
class MapDescription:
    """What ``cuTensorMapEncodeTiled`` is told of an array, the innermost dimension first: columns, rows,
    heads, batch; of packed sequences and of pages columns, rows, heads (of all pages), rows again, and the
    way round. ``sizes`` are in elements, ``strides`` of all but columns in bytes; a box is ``columns`` by
    ``rows`` of one head; ``swizzle`` and ``l2_promotion`` are in bytes, and a swizzle of 16 is none."""

    array: str
    dtype: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    columns: int
    rows: int
    swizzle: int
    l2_promotion: int

    def __str__(self) -> str:
        outer = "batch" if len(self.sizes) == 4 else "way round, rows"
        return (
            f"{self.array} at {self.address:#x}, {self.sizes[::-1]} ({outer}, heads, rows, columns) by "
            f"{self.strides[::-1]} bytes, in boxes of {self.rows} rows and {self.columns} columns"
        )


def describe_maps(launch: Launch, problem: Problem, arguments: Arguments) -> tuple[MapDescription, ...]:
    """Returns the maps of one launch, in order, of the arrays that ``arguments`` names.

    Of ``problem`` only the types and the head dims count. Nothing is checked: the driver refuses what it
    cannot take. Raises ValueError for pages that are not a whole number of heads apart.
    """
    described, layout = [], arguments.layout
    buffers = {each.name: each for each in problem.scores.buffers}
    for each in launch.tensor_maps:
        if each.array in buffers:
            described.append(_map_of_buffer(each, buffers[each.array], problem, arguments))
            continue
        array = problem.operation.array(each.array)
        item_bytes = ITEM_BYTES[array.dtype(problem)]
        address, strides = arguments.address(array.name), arguments.strides(array.name)
        in_pages = layout.in_pages(array.rows)
        outer, heads, rows = (
            int(arguments.values.get(str(axis), 1)) for axis in layout.stored_axes(array.heads, array.rows)
        )
        lengths = (rows, heads, outer)
        if layout.is_packed or in_pages:
            heads_apart, row = strides[-2:]
            if in_pages:
                heads_apart = heads_apart if heads > 1 else strides[0]
                heads = _heads_of_pages(each.array, heads, outer, strides[0], heads_apart)
            # Rows twice, named by the sum of both: the first of both is chosen to end where a sequence does,
            # so that boxes are clipped there. The sum is too large by the rows of the whole map, and the last
            # dimension goes back by those, all the way round: what a map begins with must be memory.
            lengths = (MAP_ROWS_END, heads, rows + 1, MAP_ROWS_END + 1)
            strides = (MAP_ROUND_BYTES // item_bytes - row, row, heads_apart, row)
        if rows == 0 or (in_pages and arguments.values[array.rows] == 0):
            # Nothing is read of an array without rows, but a map must be of something.
            lengths, address = (1,) * len(lengths), arguments.address(problem.operation.arrays[0].name)
        # The stride of a dimension of one is never used, but must be one that can be held.
        stride_bytes = tuple(
            item_bytes * stride if length > 1 else MAP_STRIDE_UNIT
            for length, stride in zip(lengths, reversed(strides), strict=True)
        )
        described.append(
            MapDescription(
                each.array,
                array.dtype(problem),
                address,
                (getattr(problem, array.columns), *lengths),
                stride_bytes,
                each.columns,
                each.rows,
                each.swizzle,
                each.l2_promotion,
            )
        )
    return tuple(described)


def _map_of_buffer(each: TensorMap, buffer: Buffer, problem: Problem, arguments: Arguments) -> MapDescription:
    """Returns the map of an array that scores meet, whose axes are those of sizes: of one entry along those
    that it repeats itself along. Of one that the copy engine does not take nothing is read by its map."""
    item_bytes, values = BUFFER_BYTES[buffer.dtype], arguments.values
    address, strides = int(values[buffer.name]), [int(values[name]) for name in buffer.strides]
    sizes = {name: int(values[name]) for name in ("seqlen_k", "seqlen_q", "num_q_heads", "batch")}
    suits = min(strides) >= 0 and all(item_bytes * step % MAP_STRIDE_UNIT == 0 for step in strides)
    if not suits or address % MAP_STRIDE_UNIT or not all(sizes.values()):
        address, sizes = arguments.address(problem.operation.arrays[0].name), dict.fromkeys(sizes, 1)
    step_of = {size: step for axis, step in zip(buffer.axes, strides, strict=False) for size in axis}
    columns, *outer = sizes
    lengths = tuple(sizes[name] if step_of.get(name) else 1 for name in outer)
    stride_bytes = tuple(
        item_bytes * step_of[name] if length > 1 else MAP_STRIDE_UNIT
        for name, length in zip(outer, lengths, strict=True)
    )
    return MapDescription(
        each.array,
        buffer.dtype,
        address,
        (sizes[columns], *lengths),
        stride_bytes,
        each.columns,
        each.rows,
        each.swizzle,
        each.l2_promotion,
    )


def _heads_of_pages(array: str, heads: int, pages: int, page_stride: int, heads_apart: int) -> int:
    """Returns the end of what heads of pages are numbered by: those of a page follow on those of the last."""
    if pages > 1 and (heads_apart == 0 or page_stride % heads_apart != 0):
        raise ValueError(
            f"{array}: pages are {page_stride} elements apart, heads {heads_apart}; the copy engine takes "
            "caches whose pages are a whole number of heads apart"
        )
    return max(pages - 1, 0) * (page_stride // heads_apart if pages > 1 else 1) + heads


#: What elements of arrays are called where the type does not matter: in a C header.
VOID_ELEMENTS = {INPUT: "void", KEYS: "void", OUTPUT: "void", FLOAT: "float"}
