"""The commands that look at this machine: what it can do, and what is cached on it."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from .flags import Json
from .terminal import console_for, print_json, waiting


class CacheAction(StrEnum):
    """What `flashgen cache` does."""

    SHOW = "show"
    CLEAR = "clear"


def cache_command(
    action: Annotated[
        CacheAction, typer.Argument(metavar="[ACTION]", help="show (by default), or clear.")
    ] = CacheAction.SHOW,
    json_: Json = False,
) -> None:
    """Shows what built kernels take on disk, or removes them all: they are built again when they are needed.

    Example: [bold]flashgen cache show[/bold]
    """
    from ..build.cache import cache_folder
    from ..build.cache_size import cache_use, clear
    from ..view.machine import show_cache

    folder, clearing = cache_folder(), action is CacheAction.CLEAR
    use = clear(folder) if clearing else cache_use(folder)
    if json_:
        print_json({"action": action.value, **asdict(use), "folder": str(use.folder)})
    else:
        show_cache(console_for(False), use, cleared=clearing)


def doctor_command(json_: Json = False) -> None:
    """Says what can be done on this machine, what is missing for the rest and how to get it.

    Example: [bold]flashgen doctor[/bold]
    """
    from ..cards.abilities import abilities
    from ..cards.names import cards, survey
    from ..variables import set_variables
    from ..view.machine import show_health

    with waiting(console_for(json_), "looking for cards, compilers and libraries"):
        able, tools = abilities(*cards()), survey()
    if json_:
        told = {"abilities": able, "tools": tools}
        print_json(
            {name: [asdict(each) for each in those] for name, those in told.items()}
            | {"variables": set_variables()}
        )
    else:
        show_health(console_for(False), able, tools, set_variables())
