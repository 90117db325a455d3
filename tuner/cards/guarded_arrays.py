"""Copies of arrays for an emulated card: guards around each, and what was written told from what was not."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...gen.kernel import Kernel
from ..errors import CorruptedMemory
from .dtypes import bits_dtype, unwritten_bits

#: Bytes watched on either side of each array; CUDA aligns allocations to 256 bytes.
GUARD_BYTES = 4096
ALIGNMENT = 256
#: The axes of an array as ``runner.cpp`` knows it.
MAX_AXES = 4
#: An array that is not there, as `GuardedArray.serialized` would write it.
ABSENT = bytes(8 * 10)


@dataclass(frozen=True)
class GuardedArray:
    """A copy of an array with its strides: unwritten memory between its rows, and guards around it."""

    memory: np.ndarray
    """The memory of the copy, guard, extent and guard, as the bits of elements."""
    extent: slice
    view: np.ndarray
    """The array itself, in the extent."""
    pristine: np.ndarray = field(repr=False)
    """The memory before the launch."""
    is_output: bool = False
    grows: bool = False
    """Whether it is a cache, of which rows are written."""

    @classmethod
    def like(cls, array: np.ndarray, *, copy: bool = True, grows: bool = False) -> GuardedArray:
        unwritten, size = unwritten_bits(array.dtype), array.itemsize
        if array.strides[-1] != size and array.shape[-1] != 1:
            raise ValueError(f"rows of contiguous {array.dtype} are needed, not by {array.strides} bytes")
        spans = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
        below, above = -sum(min(s, 0) for s in spans), sum(max(s, 0) for s in spans)
        items, guard, slack = (below + above) // size + 1, GUARD_BYTES // size, ALIGNMENT // size
        memory = np.full(guard + slack + items + guard, unwritten, bits_dtype(array.dtype))
        first = guard + -(memory.ctypes.data // size + guard) % slack
        view = np.ndarray(
            array.shape, array.dtype, memory.data, offset=size * first + below, strides=array.strides
        )
        if copy:
            view[...] = array
        return cls(memory, slice(first, first + items), view, memory.copy(), is_output=not copy, grows=grows)

    def check(self, name: str, kernel: Kernel) -> None:
        """Raises CorruptedMemory when the guards, or an input, are not as they were; of a cache, what is
        between its rows."""
        memory = self.memory
        if self.grows:
            memory = memory.copy()
            rows = np.ndarray(
                self.view.shape,
                self.view.dtype,
                memory.data,
                offset=self.view.ctypes.data - self.memory.ctypes.data,
                strides=self.view.strides,
            )
            rows.view(memory.dtype)[...] = self.before().view(memory.dtype)
        for place, part in (
            ("before", slice(0, self.extent.start)),
            ("in" if not self.is_output else "", self.extent),
            ("past", slice(self.extent.stop, None)),
        ):
            if not place:
                continue
            changed = np.flatnonzero(memory[part] != self.pristine[part])
            if changed.size:
                size = self.view.itemsize
                raise CorruptedMemory(
                    f"{kernel.symbol} overwrote {size * changed.size} bytes {place} {name}, "
                    f"the first of them byte {size * int(changed[0])} there"
                )

    def before(self) -> np.ndarray:
        """Returns the array as it was before the launch."""
        offset = self.view.ctypes.data - self.memory.ctypes.data
        data = self.pristine.data
        return np.ndarray(self.view.shape, self.view.dtype, data, offset=offset, strides=self.view.strides)

    def check_written(self, name: str, kernel: Kernel, rows: np.ndarray) -> None:
        """Raises CorruptedMemory when elements of ``rows``, a truth for each, still hold what they were
        poisoned with, or others no longer do."""
        bits = self.view.view(self.memory.dtype)
        untouched = bits == unwritten_bits(self.view.dtype)
        strayed = np.argwhere(~untouched[:, :, ~rows])
        if len(strayed):
            raise CorruptedMemory(
                f"{kernel.symbol} wrote {len(strayed)} elements of {name} that are of no sequence"
            )
        unwritten = np.argwhere(untouched[:, :, rows])
        if len(unwritten):
            raise CorruptedMemory(
                f"{kernel.symbol} left {len(unwritten)} of {self.view.size} elements of {name} unwritten, "
                f"the first at {tuple(int(i) for i in unwritten[0])}"
            )

    def serialized(self) -> bytes:
        """Returns the bytes from which ``runner.cpp`` makes the array: count, offset of the first element,
        shape and strides as 64-bit numbers, all in 32-bit words, then the data."""
        words = self.memory[self._whole_words()].view(np.uint32)
        offset_bytes = self.view.ctypes.data - words.ctypes.data
        missing = MAX_AXES - self.view.ndim
        *rows, columns = (1,) * missing + self.view.shape
        *strides, _ = (0,) * missing + self.view.strides
        # An axis of length 1 is not walked.
        strides = [0 if length == 1 else stride for length, stride in zip(rows, strides, strict=True)]
        row_words = -(-columns * self.view.itemsize // 4)
        if any(x % 4 for x in (offset_bytes, *strides)) or missing < 0:
            # Rows that begin in the middle of a word, or of more axes: the gaps between them go unwatched.
            offset_bytes, rows, strides, row_words = 0, [1, 1, 1], [0, 0, 0], len(words)
        header = [len(words), offset_bytes // 4, *rows, row_words, *(stride // 4 for stride in strides), 1]
        return np.array(header, np.int64).tobytes() + words.tobytes()

    def receive(self, words: np.ndarray, first: int) -> int:
        """Takes this array's extent out of the runner's reply; returns where the next one starts."""
        target = self.memory[self._whole_words()].view(np.uint32)
        target[...] = words[first : first + len(target)]
        return first + len(target)

    def _whole_words(self) -> slice:
        """The extent, to the end of its last 32-bit word."""
        size = self.view.itemsize
        num_bytes = -(-(self.extent.stop - self.extent.start) * size // 4) * 4
        return slice(self.extent.start, self.extent.start + num_bytes // size)
