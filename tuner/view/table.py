"""A table that is printed, in parts where it is wider than the terminal, or written as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

#: What a cell begins with that tells of a ratio: flashgen is faster, or slower; and how each is coloured.
FASTER, SLOWER = "\u25b2", "\u25bc"
COLOURS = {FASTER: "green", SLOWER: "bold red"}
#: What Rich puts around a cell, and around a row.
AROUND_CELL, AROUND_ROW = 3, 1


@dataclass(frozen=True)
class Table:
    """A title over cells of text.

    ``left`` is how many columns hold words and stand left-aligned; the first ``repeated`` say what a row is
    of, and stand in each part. ``notes`` stand below. Lines of a cell stand below each other in a terminal,
    in Markdown behind each other.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: int = 0
    repeated: int = 1

    def markdown(self) -> str:
        """Returns the table as Markdown, without its title; what tells that flashgen is slower stands out."""
        lines = [self.columns, ["--:" if i >= self.left else ":--" for i in range(len(self.columns))]]
        rows = [[", ".join(map(_bold_if_slower, cell.split("\n"))) for cell in row] for row in self.rows]
        text = ["| " + " | ".join(line) + " |" for line in (*lines, *rows)]
        notes = [f"**{note}**" if note.startswith(SLOWER) else note for note in self.notes]
        return "\n".join([*text, *(f"\n{note}" for note in notes)])

    def print(self, console: Console) -> None:
        """Prints the table, in as many parts as the terminal's width asks for, and its notes."""
        whole = [self._width(i, [name]) for i, name in enumerate(self.columns)]
        fits = AROUND_ROW + sum(whole) <= console.width
        widths = whole if fits else [self._width(i, name.split()) for i, name in enumerate(self.columns)]
        title = self.title
        for part in self.parts(widths, console.width):
            console.print(self._rich(title, part, widths))
            title = f"{self.title} (continued)"
        for note in self.notes:
            style = COLOURS[SLOWER] if note.startswith(SLOWER) else None
            console.print(note, style=style, markup=False, highlight=False)

    def parts(self, widths: Sequence[int], room: int) -> Iterator[list[int]]:
        """Yields the columns of each part: as many of those ``widths`` as there is room for, one at least."""
        lead = list(range(min(self.repeated, len(widths))))
        part = list(lead)
        for i in range(len(lead), len(widths)):
            if len(part) > len(lead) and AROUND_ROW + sum(widths[j] for j in (*part, i)) > room:
                yield part
                part = list(lead)
            part.append(i)
        yield part

    def _width(self, column: int, heading: Sequence[str]) -> int:
        """What a column needs for its cells and for a heading in those lines."""
        cells = [*heading, *(line for row in self.rows for line in row[column].split("\n"))]
        return AROUND_CELL + max(map(cell_len, cells), default=0)

    def _rich(self, title: str, part: Sequence[int], widths: Sequence[int]) -> RichTable:
        table = RichTable(title=escape(title))
        for i in part:
            justify = "left" if i < self.left else "right"
            width = widths[i] - AROUND_CELL
            table.add_column(escape(self.columns[i]), justify=justify, overflow="fold", width=width)
        for row in self.rows:
            table.add_row(*(_coloured(row[i]) for i in part))
        return table


def _bold_if_slower(words: str) -> str:
    return f"**{words}**" if SLOWER in words else words


def _coloured(cell: str) -> Text:
    """A cell with its marks, and the figures behind them, in colour."""
    text = Text(cell)
    for mark, colour in COLOURS.items():
        text.highlight_regex(rf"{mark}\s*[\d.]+", colour)
    return text
