"""Memory in which every stray write shows: tensors apart, poison around them and under the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import CorruptedMemory
from .dtypes import bits_dtype, unwritten_bits

FLOAT32 = np.dtype(np.float32)
#: Poison before and after each tensor.
GUARD_BYTES = 16384
#: Alignment of every tensor: what cudaMalloc gives.
ALIGN_BYTES = 256
#: All rows of an output.
ALL = slice(None)


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Returns an array's strides in elements; that of an axis of length 1 counts for nothing and is set to
    what divides every vector."""
    return tuple(
        0 if n == 1 else stride // array.itemsize
        for n, stride in zip(array.shape, array.strides, strict=True)
    )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def span_of(array: np.ndarray) -> np.ndarray:
    """Returns the memory from an array's first element to its last, what lies between them included; strides
    must not be negative."""
    extent = _extent(array.shape, _strides(array))
    return np.lib.stride_tricks.as_strided(array, (extent,), (array.itemsize,), writeable=False)


@dataclass(frozen=True)
class _Output:
    """Where an output lies; offset and extent in elements of the image, the strides in its own."""

    name: str
    offset: int
    extent: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    rows: np.ndarray | slice

    def view(self, image: np.ndarray) -> np.ndarray:
        """Returns the bits of this output in an image, with the output's shape and strides."""
        own = image[self.offset : self.offset + self.extent].view(bits_dtype(self.dtype))
        return np.lib.stride_tricks.as_strided(own, self.shape, tuple(s * own.itemsize for s in self.strides))


class GuardedImage:
    """A host image of the device memory one launch may touch: tensors apart by poison, at fixed offsets.

    Outputs, and the gaps that strides leave, are poison too. Compared after the launch, it shows every write
    outside the outputs and every output element that was not written. Offsets are in elements of ``dtype``,
    that of the tensors; an output may be of a wider type.
    """

    def __init__(self, dtype: np.dtype = FLOAT32) -> None:
        self.dtype = dtype
        self.items = GUARD_BYTES // dtype.itemsize
        self._inputs: list[tuple[int, np.ndarray]] = []
        self._outputs: list[_Output] = []
        self._caches: list[_Output] = []

    @property
    def floats(self) -> int:
        """32-bit words of device memory that the image takes."""
        return self.items * self.dtype.itemsize // 4

    def add_input(self, array: np.ndarray, dtype: np.dtype | None = None) -> tuple[int, tuple[int, ...]]:
        """Adds an input to the image and returns its offset, in elements of the image, and its strides, in
        its own. What lies in the strides' gaps comes along. ``dtype`` is its type where that is not the
        image's. Raises ValueError for an array of another one."""
        if array.dtype != (dtype or self.dtype):
            raise ValueError(f"an image of {dtype or self.dtype} takes no input of {array.dtype}")
        return self.add_buffer(array), _strides(array)

    def add_cache(self, name: str, array: np.ndarray) -> tuple[int, tuple[int, ...]]:
        """Adds an input of which the launch may write elements; returns its offset and its strides, in
        elements."""
        offset, strides = self.add_input(array)
        extent = _extent(array.shape, strides)
        self._caches.append(_Output(name, offset, extent, array.shape, strides, self.dtype, ALL))
        return offset, strides

    def add_buffer(self, array: np.ndarray) -> int:
        """Adds an input of any type to the image and returns its offset, in elements of the image."""
        span = span_of(array)
        offset = self._reserve(-(-span.nbytes // self.dtype.itemsize))
        self._inputs.append((offset, span))
        return offset

    def add_output(
        self,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype | None = None,
        rows: np.ndarray | None = None,
    ) -> tuple[int, tuple[int, ...]]:
        """Adds an output to the image and returns its offset, in elements of the image, and its strides.
        ``name`` is what messages call it, ``dtype`` its type where that is not the image's; ``rows`` are
        those of its third axis that are to be written, by default all."""
        dtype = dtype or self.dtype
        extent = _extent(shape, strides) * dtype.itemsize // self.dtype.itemsize
        offset = self._reserve(extent)
        self._outputs.append(
            _Output(name, offset, extent, shape, strides, dtype, ALL if rows is None else rows)
        )
        return offset, strides

    def _reserve(self, items: int) -> int:
        offset = self.items
        end = offset + items
        align = ALIGN_BYTES // self.dtype.itemsize
        self.items = -(-end // align) * align + GUARD_BYTES // self.dtype.itemsize
        return offset

    def before(self) -> np.ndarray:
        """Returns the image to upload, as the bits of its elements."""
        image = np.full(self.items, unwritten_bits(self.dtype), bits_dtype(self.dtype))
        for offset, span in self._inputs:
            first = offset * image.itemsize
            image.view(np.uint8)[first : first + span.nbytes] = span.view(np.uint8)
        for output in self._outputs:
            output.view(image)[...] = unwritten_bits(output.dtype)
        return image

    def outputs(self, before: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        """Returns the outputs that the launch left in ``after``. Raises `CorruptedMemory`."""
        touchable = np.zeros_like(before)
        found = []
        for output in self._outputs:
            bits = output.view(after)
            unwritten = bits[:, :, output.rows] == unwritten_bits(output.dtype)
            if unwritten.any():
                first = tuple(int(i) for i in np.unravel_index(int(unwritten.argmax()), unwritten.shape))
                raise CorruptedMemory(
                    f"{np.count_nonzero(unwritten)} of {unwritten.size} elements of {output.name} were not "
                    f"written, the first at {first}"
                )
            output.view(touchable)[:, :, output.rows] = np.iinfo(bits.dtype).max
            found.append(bits.view(output.dtype))
        for cache in self._caches:
            cache.view(touchable)[...] = np.iinfo(before.dtype).max
        strayed = (before != after) & (touchable == 0)
        if strayed.any():
            raise CorruptedMemory(
                f"{np.count_nonzero(strayed)} elements outside the outputs were written, "
                f"{self._place(int(strayed.argmax()))}"
            )
        return found

    def caches(self, after: np.ndarray) -> list[np.ndarray]:
        """Returns what the launch made of the caches."""
        return [each.view(after).view(each.dtype) for each in self._caches]

    def _place(self, position: int) -> str:
        """Where an element lies, relative to the nearest output."""
        output = min(self._outputs, key=lambda o: abs(position - o.offset - o.extent / 2))
        end = output.offset + output.extent
        if position < output.offset:
            return f"the first {output.offset - position} elements before {output.name}"
        if position >= end:
            return f"the first {position - end + 1} elements past the end of {output.name}"
        return f"the first in a gap that the strides of {output.name} leave"


def output_strides(q: np.ndarray, head_dim_v: int | None = None) -> tuple[int, ...]:
    """Returns the strides of an o with q's layout, in elements; contiguous where q's elements share memory.

    An o of other columns than q has its axes in q's order, and a gap after each row where q has one.
    """
    strides = _strides(q)
    shape = (*q.shape[:3], head_dim_v or q.shape[3])
    walked = [axis for axis in range(3) if shape[axis] > 1]
    if any(strides[axis] <= 0 for axis in walked):
        return contiguous_strides(shape)
    if shape == q.shape:
        return strides
    step = shape[3] + min((strides[axis] for axis in walked), default=q.shape[3]) - q.shape[3]
    found = [0, 0, 0, 1]
    for axis in sorted(walked, key=lambda axis: strides[axis]):
        found[axis] = step
        step *= shape[axis]
    return tuple(found)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of an array without gaps."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)
