"""A table that is printed or written as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A title over cells of text.

    ``left`` is how many columns hold words and stand left-aligned; ``notes`` stand below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: int = 0

    def markdown(self) -> str:
        """Returns the table as Markdown, without its title."""
        lines = [self.columns, ["--:" if i >= self.left else ":--" for i in range(len(self.columns))]]
        text = ["| " + " | ".join(line) + " |" for line in (*lines, *self.rows)]
        return "\n".join([*text, *(f"\n{note}" for note in self.notes)])

    def rich(self) -> RichTable:
        """Returns the table as Rich prints it."""
        table = RichTable(title=escape(self.title), caption=escape("\n".join(self.notes)) or None)
        for i, name in enumerate(self.columns):
            # Numbers are never cut; names may be folded on a narrow terminal.
            table.add_column(escape(name), justify="left" if i < self.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table
