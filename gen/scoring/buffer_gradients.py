"""The gradients of the arrays of floats that changes of scores read: which there are, and how each is summed.

An element's gradient is a sum over the pairs of a row and a key whose score the element is in. Where a pair's
batch, head, row and key are the element's place, each as an index of its own, a block of a launch of its own
makes a tile of the gradient and adds up, one after the other, what the array is repeated along or has no axis
of: every run has the same bits. Elements at places that are computed, such as ``table[h, q - k]``, are added
to as their pairs come, in whatever order that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..expression import Expression, Load
from ..formula.derivative import gradients
from ..launch import BUFFER_ROLE, Launch
from ..operation import gradient_name
from .scores import BATCH, HEAD, KEY, QUERY, Buffer, Scores

#: Threads of a block that makes a tile of gradients of elements, and the rows and keys of its pairs.
PAIR_THREADS, PAIR_ROWS, PAIR_KEYS = 256, 64, 64
#: Columns of queries and keys that it multiplies at a time.
PAIR_COLUMNS = 16
#: Threads of a block that makes the gradient of a head's sink.
SINK_THREADS = 256
#: What says that an array is of sinks.
SINKS = "sinks"
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class BufferGradient:
    """The gradient of one buffer: ``rates``, by how much a score rises with each element that it reads; none
    of a sink, which is in no score."""

    buffer: Buffer
    rates: tuple[tuple[Load, Expression], ...]

    @property
    def name(self) -> str:
        """What the array is called among a kernel's arguments."""
        return gradient_name(self.buffer.name)

    @property
    def strides(self) -> tuple[str, ...]:
        """The names of its strides there, of all axes but the last; 0 where a sum is over the axis."""
        return tuple(f"{self.name}_stride_{axis}" for axis in range(len(self.buffer.axes) - 1))

    @property
    def is_of_sinks(self) -> bool:
        return not self.rates

    @property
    def axes(self) -> dict[str, int]:
        """Which of the buffer's axes a pair's batch, head, row and key each are the index of, by name; none
        where some index is another, or where elements are read at several places."""
        if len(self.rates) != 1:
            return {}
        indices, places = self.rates[0][0].indices, (BATCH, HEAD, QUERY, KEY)
        if not all(each in places for each in indices) or len(set(indices)) < len(indices):
            return {}
        return {each.name: axis for axis, index in enumerate(indices) for each in places if each == index}

    @property
    def is_scattered(self) -> bool:
        """Whether elements are added to in no order."""
        return not self.axes and not self.is_of_sinks

    @property
    def role(self) -> str:
        """The role of the launch that makes it."""
        return BUFFER_ROLE + self.buffer.name

    @property
    def lengths(self) -> tuple[str, ...]:
        """The lengths of the array's axes in C++, as far as elements are read."""
        told = dict(self.buffer.sizes)
        return tuple(
            f"args.{told[axis]}" if axis in told else _greatest([f"args.{each}" for each in sorted(names)])
            for axis, names in enumerate(self.buffer.axes)
        )

    @property
    def launch(self) -> Launch:
        """The launch that makes it."""
        if self.is_of_sinks:
            smem_bytes = _FLOAT_BYTES * SINK_THREADS
            return Launch(SINK_THREADS, smem_bytes, None, role=self.role, alike_batches=True, makes=self.name)
        tiles = PAIR_COLUMNS * (PAIR_ROWS + PAIR_KEYS + 2 * 4)
        sums = PAIR_ROWS * (PAIR_KEYS + 1)
        smem_bytes = _FLOAT_BYTES * max(tiles, sums)
        return Launch(
            PAIR_THREADS,
            smem_bytes,
            PAIR_ROWS,
            role=self.role,
            keys_per_block=PAIR_KEYS,
            makes=self.name,
        )


def buffer_gradients(scores: Scores) -> tuple[BufferGradient, ...]:
    """Returns those of all buffers of floats that scores depend on, in their order. Raises ValueError where
    another buffer is called what a gradient is."""
    return tuple(_gradients(scores))


def scattered_arrays(scores: Scores) -> tuple[str, ...]:
    """Returns the names of the arrays whose gradients are added up in no order."""
    return tuple(each.buffer.name for each in buffer_gradients(scores) if each.is_scattered)


def _greatest(lengths: list[str]) -> str:
    first, *others = lengths
    return f"max({first}, {_greatest(others)})" if others else first


def _gradients(scores: Scores) -> Iterator[BufferGradient]:
    found = gradients(scores.change) if scores.change is not None else {}
    names = {each.name for each in (*scores.buffers, *scores.scalars)}
    for buffer in scores.buffers:
        rates = tuple((load, rate) for load, rate in found.items() if load.buffer == buffer.name)
        if not rates and not (scores.sinks and buffer.name == SINKS):
            continue
        if gradient_name(buffer.name) in names:
            raise ValueError(
                f"{gradient_name(buffer.name)} is the gradient of {buffer.name}; call the other array or "
                "number of that name something else"
            )
        yield BufferGradient(buffer, rates)
