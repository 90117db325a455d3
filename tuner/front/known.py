"""Calls that are kept, to be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Computes such a call of q, k, v, out, and of all tensors that it was told, q, k and v first; None: it goes
#: the way of the first, which tells what is the matter, or mends it.
Again = Callable[[Any, Any, Any, Any, tuple[Any, ...]], Any]


def like_nothing(*arrays: Any) -> bool:
    """Stands for a test of tensors that is yet to be made."""
    return False


class Known:
    """A call that is kept."""

    __slots__ = ("again", "is_like")

    def __init__(self, again: Again) -> None:
        self.again = again
        self.is_like: Callable[..., bool] = like_nothing
        """Tells whether tensors are as those of some call like it were. Others may belong to such a call,
        too."""


class KnownCalls(dict[Any, Known]):
    """Calls that are kept, by all that what is kept of them follows from."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: dict[Any, tuple[Known, ...]] = {}
        """The newest of those that were told the same, tensors apart, by that."""

    def clear(self) -> None:
        super().clear()
        self.newest.clear()
