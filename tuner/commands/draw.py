"""The command that draws masks and changes of scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..request import Shapes
from .flags import NO_SHAPES, Json, takes_shapes_alone
from .terminal import console_for, print_json, waiting


@takes_shapes_alone
def draw_command(
    shapes: Shapes = NO_SHAPES,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture to this file as well.")
    ] = None,
    values: Annotated[
        Path | None,
        typer.Option(
            "--values",
            metavar="FILE.npz",
            help="Arrays that the mask reads, by name; the others, or all, are typical ones.",
        ),
    ] = None,
    of: Annotated[
        str,
        typer.Option("--of", metavar="BATCH,HEAD", help="Which batch and query head to draw."),
    ] = "0,0",
    json_: Json = False,
) -> None:
    """Draws what rows see of the keys, and what is added to scores; says what share of tiles is skipped.

    Example: [bold]flashgen draw --causal --seqlen 20[/bold]

    Long sequences are drawn in cells of several rows and keys.
    """
    from ..view.draw import drawing, show_drawing

    problems = shapes.problems()
    if len(problems) != 1:
        raise UsageError(f"the options mean {len(problems)} problems; one at a time is drawn")
    with waiting(console_for(json_), "looking at pairs of rows and keys"):
        made = drawing(problems[0], of=of, values=values)
    if svg is not None:
        made.write(svg)
    if json_:
        print_json(made.to_dict())
    else:
        show_drawing(console_for(False), made)
