"""The console on which commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..printable import printable


class SafeConsole(Console):
    """A console that breaks long lines between words on a terminal, and nowhere in a file or a pipe, and in
    which text cannot command the terminal.

    A terminal left to itself would break lines in the middle of words, wherever it ends. What files, studies,
    folders' names and compilers say may hold escape sequences; colours and cursors are Rich's own alone.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Returns the segments of a renderable, with control characters in their text escaped."""
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
