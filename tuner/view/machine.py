"""What this machine can do, and what is cached on it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..build.cache_size import CacheUse
from ..cards.abilities import Ability
from ..cards.names import Tool
from .devices import tools_table
from .words import widen

DAY_S = 24 * 3600


def show_cache(console: Console, use: CacheUse, *, cleared: bool) -> None:
    """Prints what a cache holds or, where it was cleared, held."""
    verb = "removed" if cleared else "holds"
    entries = "entry" if use.entries == 1 else "entries"
    console.print(f"{use.folder} {verb} {use.entries} {entries}, {use.told}", markup=False, highlight=False)
    if use.oldest_at is not None and not cleared:
        days = (time.time() - use.oldest_at) / DAY_S
        console.print(
            f"the first to go was used {days:.0f} days ago; FLASHGEN_CACHE_LIMIT sets the limit",
            markup=False,
            highlight=False,
        )


def show_health(
    console: Console, able: Sequence[Ability], tools: Sequence[Tool], variables: Mapping[str, str]
) -> None:
    """Prints what can be done, by what, what tools there are, and which variables are set."""
    widen(console)
    table = Table(title="what can be done here")
    table.add_column("to")
    table.add_column("")
    table.add_column("by, or what is missing", overflow="fold")
    for each in able:
        mark = "[red]no[/red]" if each.missing else "[green]yes[/green]"
        table.add_row(escape(each.does), mark, escape(each.missing or each.by))
    console.print(table)
    console.print(tools_table(tools))
    for name, value in variables.items():
        console.print(f"{name}={value}", markup=False, highlight=False, soft_wrap=True)
