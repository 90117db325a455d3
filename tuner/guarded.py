"""Memory in which every stray write shows: tensors apart, poison around them and under the outputs."""

from __future__ import annotations

import numpy as np

from .device import CorruptedMemory

#: The bits of unwritten memory: a signalling NaN, which no arithmetic yields.
POISON = 0x7FA0DEAD
#: Floats of poison before and after each tensor.
GUARD_FLOATS = 4096
#: Alignment of every tensor, in floats: what cudaMalloc gives.
ALIGN_FLOATS = 64


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """In elements; that of an axis of length 1 counts for nothing and is set to what divides every vector."""
    return tuple(
        0 if n == 1 else stride // array.itemsize
        for n, stride in zip(array.shape, array.strides, strict=True)
    )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


class GuardedImage:
    """A host image of the device memory one launch may touch: tensors apart by poison, at fixed offsets.

    Outputs, and the gaps that strides leave, are poison too. Compared after the launch, it shows every write
    outside the outputs and every output element that was not written.
    """

    def __init__(self) -> None:
        self.floats = GUARD_FLOATS
        self._inputs: list[tuple[int, np.ndarray]] = []
        self._outputs: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []

    def add_input(self, array: np.ndarray) -> tuple[int, tuple[int, ...]]:
        """Its offset and strides, in floats. What lies in the strides' gaps comes along."""
        strides = _strides(array)
        span = np.lib.stride_tricks.as_strided(
            array, (_extent(array.shape, strides),), (array.itemsize,), writeable=False
        )
        offset = self._reserve(len(span))
        self._inputs.append((offset, span))
        return offset, strides

    def add_output(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        """Its offset and strides, in floats. ``name`` is what messages call it."""
        offset = self._reserve(_extent(shape, strides))
        self._outputs.append((name, offset, shape, strides))
        return offset, strides

    def _reserve(self, floats: int) -> int:
        offset = self.floats
        end = offset + floats
        self.floats = -(-end // ALIGN_FLOATS) * ALIGN_FLOATS + GUARD_FLOATS
        return offset

    def before(self) -> np.ndarray:
        """The image to upload, as 32-bit words."""
        image = np.full(self.floats, POISON, np.uint32)
        for offset, span in self._inputs:
            image[offset : offset + len(span)] = span.view(np.uint32)
        return image

    def outputs(self, before: np.ndarray, after: np.ndarray) -> list[np.ndarray]:
        """The outputs that the launch left in ``after``. Raises `CorruptedMemory`."""
        touchable = np.zeros(self.floats, bool)
        found = []
        for name, offset, shape, strides in self._outputs:
            words = _view(after, offset, shape, strides)
            unwritten = words == POISON
            if unwritten.any():
                first = tuple(int(i) for i in np.unravel_index(int(unwritten.argmax()), shape))
                raise CorruptedMemory(
                    f"{np.count_nonzero(unwritten)} of {unwritten.size} elements of {name} were not written, "
                    f"the first at {first}"
                )
            _view(touchable, offset, shape, strides)[...] = True
            found.append(words.view(np.float32))
        strayed = (before != after) & ~touchable
        if strayed.any():
            raise CorruptedMemory(
                f"{np.count_nonzero(strayed)} elements outside the outputs were written, "
                f"{self._place(int(strayed.argmax()))}"
            )
        return found

    def _place(self, position: int) -> str:
        """Where a word lies, relative to the nearest output."""
        name, offset, shape, strides = min(
            self._outputs, key=lambda o: abs(position - o[1] - _extent(o[2], o[3]) / 2)
        )
        end = offset + _extent(shape, strides)
        if position < offset:
            return f"the first {offset - position} elements before {name}"
        if position >= end:
            return f"the first {position - end + 1} elements past the end of {name}"
        return f"the first in a gap that the strides of {name} leave"


def _view(words: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    bytes_apart = tuple(s * words.itemsize for s in strides)
    return np.lib.stride_tricks.as_strided(words[offset:], shape, bytes_apart)


def output_strides(q: np.ndarray) -> tuple[int, ...]:
    """Strides of an o with q's layout, in elements; contiguous where q's elements share memory."""
    strides = _strides(q)
    apart = all(s > 0 for n, s in zip(q.shape, strides, strict=True) if n > 1)
    return strides if apart else contiguous_strides(q.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)
