"""The console on which commands print."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class WordConsole(Console):
    """A console that breaks long lines between words on a terminal, and nowhere in a file or a pipe.

    A terminal left to itself would break them in the middle of words, wherever it ends.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **how)
