"""The command that measures errors on adversarial inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked
from ..request import Shapes
from .flags import (
    DEFAULT_OUT,
    NO_SHAPES,
    EachDevice,
    Json,
    OfFamilies,
    Out,
    Seed,
    Settings,
    takes_classes,
)
from .terminal import console_for, print_json

if TYPE_CHECKING:
    from ...gen.problem import Problem
    from ..evaluate.adversarial_inputs import AdversarialCase


#: Of the kernels that are tried, where none is asked for.
HEAD_DIM = 32


@takes_classes
def accuracy_command(
    device: EachDevice = None,
    shapes: Shapes = NO_SHAPES,
    family: OfFamilies = None,
    settings: Settings = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel", metavar="NAME", help="Only this tuned kernel, as `list` names it, or its file."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME", help="Only this case, told in full; repeatable."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Tell of every case that breaks a promise, not of groups alone.")
    ] = False,
    out: Out = DEFAULT_OUT,
    seed: Seed = 0,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="FILE", help="Fill the block between accuracy markers of this Markdown file."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Measures errors against float64 on adversarial inputs, for every family and class.

    Example: [bold]flashgen accuracy --family mma --precision 3xf16 --d 64[/bold]

    One kernel each is tried on magnitudes from 1e-38 to 1e38, outliers, huge scores, infinities, NaN and
    subnormal numbers, and held to what its class promises.
    """
    from ...gen.families import FAMILIES
    from ..accuracy.subjects import Wanted, subjects, subjects_of
    from ..accuracy.survey import Surveyed, survey_accuracy
    from ..accuracy.table import error_table
    from ..evaluate.adversarial_inputs import case_named, cases_for
    from ..option_words import one_family, parse_families, parse_settings
    from ..shelf import library
    from ..shelf.listing import find
    from ..view.accuracy import accuracy_tables, fill_file, finding_line, require_markers, surveyed_line
    from ..view.words import widen

    masks = shapes.causal or (False, True)
    families = parse_families(family or [])
    if len(shapes.head_dim) > 1:
        raise UsageError("kernels of one head dim are tried at a time; give --d one number")
    head_dim = shapes.head_dim[0] if shapes.head_dim else HEAD_DIM
    wanted = Wanted(
        device=device,
        families=families,
        dtypes=shapes.dtype,
        precisions=shapes.precision,
        masks=masks,
        head_dim=head_dim,
        scoring=shapes.scoring,
        held=parse_settings(one_family(families or tuple(FAMILIES.values())), settings) if settings else {},
    )
    found = subjects(wanted)
    if kernel is not None:
        tuned = find(library.entries(library.folders(out)), kernel).kernel
        found = subjects_of(tuned.variant, tuned.problem, device, masks)
    if write is not None:
        require_markers(write)
    console = console_for(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tell(surveyed: Surveyed) -> None:
        say(surveyed_line(surveyed))
        for finding in surveyed.findings:
            if case or (every and not finding.kept):
                say("  " + finding_line(finding))

    def choose(problem: Problem) -> Sequence[AdversarialCase]:
        if case:
            return [checked(lambda name=name: case_named(name, problem.dtype)) for name in case]
        return cases_for(problem, "all")

    with console.status("choosing kernels") as status:
        surveyed = survey_accuracy(
            found,
            choose,
            seed=seed,
            on_subject=lambda subject: status.update(f"building and trying {subject.name}"),
            on_surveyed=tell,
        )
    if json_:
        print_json([each.to_dict() for each in surveyed])
    elif not case:
        widen(console)
        for table in accuracy_tables(error_table(surveyed)):
            table.print(console)
    if write is not None:
        fill_file(write, surveyed)
    if not all(each.kept for each in surveyed):
        raise typer.Exit(1)
