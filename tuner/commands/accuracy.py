"""The command that measures errors on adversarial inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import checked
from .flags import Causal, Json, Seed, Settings, parse_list
from .terminal import console_for, print_json


def accuracy_command(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="A CUDA card (0) or an emulated one (sim:a100); by default an emulated one for each family.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAMES", help="Of these data types.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAMES", help="Of these precisions of f32.")
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", metavar="NAMES", help="Of these families.")
    ] = None,
    head_dim: Annotated[
        int, typer.Option("--d", "--head-dim", min=1, max=256, help="Head dim of the kernels.")
    ] = 32,
    causal: Causal = None,
    settings: Settings = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME", help="Only this case, told in full; repeatable."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Tell of every case that breaks a promise, not of groups alone.")
    ] = False,
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
    from ...gen.families import family_named
    from ..accuracy.subjects import Wanted, subjects
    from ..accuracy.survey import survey_accuracy
    from ..accuracy.table import error_table
    from ..evaluate.adversarial_inputs import adversarial_cases, case_named
    from ..option_words import parse_settings
    from ..view.accuracy import accuracy_tables, finding_line, surveyed_line

    families = tuple(
        checked(lambda: [family_named(name).family for name in parse_list("--family", family, str)])
    )
    held = parse_settings(family_named(families[0]), settings) if settings and families else {}
    wanted = Wanted(
        device=device,
        families=families,
        dtypes=parse_list("--dtype", dtype, str),
        precisions=parse_list("--precision", precision, str),
        masks=(False, True) if causal is None else (causal,),
        head_dim=head_dim,
        held=held,
    )
    console = console_for(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def tell(surveyed):
        say(surveyed_line(surveyed))
        for finding in surveyed.findings:
            if case or (every and not finding.kept):
                say("  " + finding_line(finding))

    surveyed = survey_accuracy(
        subjects(wanted),
        lambda problem: (
            [checked(lambda name=name: case_named(name, problem.dtype)) for name in case]
            if case
            else adversarial_cases(problem.dtype)
        ),
        seed=seed,
        on_surveyed=tell,
    )
    if json_:
        print_json([each.to_dict() for each in surveyed])
    elif not case:
        for table in accuracy_tables(error_table(surveyed), "Largest error per head against float64"):
            console.print(table.rich())
    if any(each.broken for each in surveyed):
        raise typer.Exit(1)
