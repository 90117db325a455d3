"""The terminal as everything of flashgen's prints to it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..printable import printable


class SafeConsole(Console):
    """Rich's console, in which text cannot command the terminal: what files, studies, folders' names and
    compilers say may hold escape sequences. Colours and cursors are Rich's own alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Returns the segments of a renderable, with control characters in their text escaped."""
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
