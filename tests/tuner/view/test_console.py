"""What files hold is shown by the terminal, and never obeyed."""

from __future__ import annotations

import io

import pytest
from flashgen.tuner.printable import is_plain, printable, without_colours
from flashgen.tuner.view.console import SafeConsole
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b2J\r\x08\u202egnp\ud800\x00"


def shown(show) -> str:
    file = io.StringIO()
    show(SafeConsole(file=file, width=120, force_terminal=False, color_system=None))
    return file.getvalue()


def in_table(console: SafeConsole) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)


def in_progress(console: SafeConsole) -> None:
    with Progress(TextColumn("{task.fields[best]}"), console=console) as progress:
        progress.add_task("x", best=HOSTILE)


@pytest.mark.parametrize(
    "show",
    [
        lambda console: console.print(HOSTILE, markup=False, highlight=False, soft_wrap=True),
        lambda console: console.print(Panel(HOSTILE), style="red"),
        in_table,
        in_progress,
    ],
    ids=["line", "panel", "table", "progress"],
)
def test_no_control_character_passes(show):
    text = shown(show)
    assert "red" in text and r"\x1b" in text
    assert text.encode("utf-8") and is_plain(text.replace("\n", ""))


def test_colours_of_ours_pass():
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard")
    console.print("[red]ours[/red]", "\x1b[32mtheirs", highlight=False)
    assert "\x1b[31mours" in file.getvalue() and r"\x1b[32mtheirs" in file.getvalue()


def test_words_of_printable():
    assert printable("a\tb\nc é 漢") == "a\tb\nc é 漢"
    assert printable("\x1b[1m\u2028") == "\\x1b[1m\\u2028"
    assert not any(is_plain(text) for text in ("a\nb", "a\tb", "\x1b", "\udcff", "\u202e"))
    assert without_colours("\x1b[01;31m\x1b[Kerror:\x1b[m\x1b[K x") == "error: x"
