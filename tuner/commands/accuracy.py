"""The command that measures errors on adversarial inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import checked
from ..request import Shape
from .flags import DEFAULT_OUT, Json, Out, Seed, Settings, parse_list
from .terminal import console_for, print_json

if TYPE_CHECKING:
    from ...gen.problem import Problem
    from ..evaluate.adversarial_inputs import AdversarialCase


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
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--no-causal", help="Under this mask alone, the causal one or none."),
    ] = None,
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
    from ..evaluate.adversarial_inputs import adversarial_cases, case_named
    from ..option_words import one_family, parse_families, parse_settings
    from ..shelf import library
    from ..shelf.listing import find
    from ..view.accuracy import accuracy_tables, fill_file, finding_line, require_markers, surveyed_line
    from ..view.words import widen

    masks = (False, True) if causal is None else (causal,)
    families = parse_families(parse_list("--family", family, str))
    dtypes, precisions = parse_list("--dtype", dtype, str), parse_list("--precision", precision, str)
    for shape in (*(Shape(dtype=name) for name in dtypes), *(Shape(precision=name) for name in precisions)):
        shape.problem()  # which says of a name that it is none
    wanted = Wanted(
        device=device,
        families=families,
        dtypes=dtypes,
        precisions=precisions,
        masks=masks,
        head_dim=head_dim,
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
        return adversarial_cases(problem.dtype)

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
            console.print(table.rich())
    if write is not None:
        fill_file(write, surveyed)
    if not all(each.kept for each in surveyed):
        raise typer.Exit(1)
