"""The command that packs tuned kernels into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .flags import DEFAULT_OUT, Json, Out
from .terminal import console_for, print_json


def pack_command(
    target: Annotated[Path, typer.Argument(metavar="FILE.zip", help="File to write.")],
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes the kernels tuned here into one file, which `flashgen.load` gives to calls on other machines.

    Example: [bold]flashgen pack winners.zip[/bold]

    It holds records alone: problems, variants and what was measured. Kernels that ship are left out.
    """
    from ..front.records import home_folder
    from ..front.sharing import pack

    count = pack(target, [home_folder(), out.absolute()])
    if json_:
        print_json({"target": str(target), "kernels": count})
    else:
        kernels = "kernel" if count == 1 else "kernels"
        console_for(False).print(f"wrote {target}: {count} {kernels}", markup=False, highlight=False)
