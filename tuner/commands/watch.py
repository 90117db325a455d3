"""The command that shows studies while they go on."""

from __future__ import annotations

import contextlib
import datetime
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .flags import DEFAULT_OUT, Json, Out, Storage
from .terminal import console_for, print_json

#: Reading the storage takes no more than this share of the time.
READING_SHARE = 0.2


def watch_command(
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="How often to look.")
    ] = 2.0,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="COUNT", help="Studies shown.")] = 15,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    json_: Json = False,
) -> None:
    """Shows the runs under way and the studies there are: trials, the best so far, failures, who is at work.

    Example: [bold]flashgen watch --once[/bold]

    Looks again and again until Ctrl-C; once where stdout is no terminal. It reads the storage alone, so that
    it sees runs of other hosts, too.
    """
    from rich.live import Live

    from ..store.places import default_storage, require_existing, without_password
    from ..store.studies import open_storage, storage_errors
    from ..store.under_way import studies_under_way
    from ..view.under_way import under_way_table
    from ..view.words import widen

    where = storage or default_storage(out)
    require_existing(where)
    console = console_for(json_)

    def look() -> list[Any]:
        # Opened anew: what is cached of trials that go on stays as it was.
        opened = open_storage(where)
        with storage_errors(where):
            return studies_under_way(opened)[:limit]

    if json_:
        studies = [asdict(each) for each in look()]
        print_json([{**each, "last_at": each["last_at"] and each["last_at"].isoformat()} for each in studies])
        return
    widen(console)

    def shown() -> Any:
        return under_way_table(without_password(where), look(), datetime.datetime.now())

    if once or not console.is_terminal:
        console.print(shown())
        return
    # Ctrl-C is how it ends.
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            live.update(shown(), refresh=True)
            time.sleep(max(interval, (time.monotonic() - began) / READING_SHARE))
