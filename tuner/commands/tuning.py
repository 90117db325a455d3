"""The commands that search and time: tune, space and ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import checked
from ..request import Shapes
from .flags import (
    DEFAULT_OUT,
    NO_SHAPES,
    DeviceOption,
    Devices,
    Families,
    Family,
    ForDevice,
    Jobs,
    Json,
    Minutes,
    Out,
    Seed,
    Settings,
    Storage,
    finite,
    takes,
    takes_shapes,
)
from .terminal import console_for, ends_softly, print_json, waiting

if TYPE_CHECKING:
    from ..tune.request import TuneRequest


@dataclass(frozen=True, kw_only=True)
class TuneWords:
    """The options of `flashgen tune` as they are typed."""

    device: Devices = "0"
    shapes: Shapes = NO_SHAPES
    family: Families = None
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            metavar="COUNT",
            help="Variants to try in all, of each problem; 200 by default, 24 on an emulated card.",
        ),
    ] = None
    minutes: Minutes = None
    settings: Settings = None
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="What proposes variants: gp (a Gaussian process, the default), forest (a random forest), "
            "tpe, random, or exhaustive (every variant, each timed in full; as many as --trials if given).",
        ),
    ] = "gp"
    seed: Seed = 0
    storage: Storage = None
    out: Out = DEFAULT_OUT
    jobs: Jobs = None

    def request(self) -> TuneRequest:
        """Returns what the words ask for. Raises UsageError, or FlashgenError for a missing card."""
        from ..build.compile import usable_cores
        from ..cards.names import resolve_all
        from ..option_words import one_family, parse_families, parse_settings
        from ..search.sampler_names import parse_sampler
        from ..shelf.bundle import module_name
        from ..store.places import default_storage
        from ..tune.request import TuneRequest

        problems = self.shapes.problems()
        sampler = parse_sampler(self.sampler)
        families = parse_families(self.family or [])
        if self.settings and families:
            # A wrong one is told before a card is looked for.
            parse_settings(one_family(families), self.settings)
        return TuneRequest(
            kinds=tuple(resolve_all(self.device)),
            problems=tuple(problems),
            families=families,
            settings=tuple(self.settings or ()),
            trials=self.trials,
            minutes=self.minutes,
            sampler=sampler,
            seed=self.seed,
            storage=self.storage or default_storage(self.out),
            out=self.out,
            jobs=self.jobs or usable_cores(),
            module=module_name(self.shapes, problems),
            words=tuple(self.shapes.words()),
        )


@takes("words", takes_shapes(TuneWords))
def tune_command(words: TuneWords, json_: Json = False) -> None:
    """Searches for the fastest variant and writes it to the out folder.

    Example: [bold]flashgen tune --device gtx-1080 --d 64[/bold]

    The same command resumes an interrupted run; Ctrl-C ends one with the best so far. Cards of one kind share
    the work, each kind is tuned for itself. So do runs on many hosts that name one --storage.

    With --suite or lists, as in [bold]--seqlen 512,2048,8192 --causal both[/bold], problems are tuned in
    turn, each from what the ones before taught, and one module is written that holds all their kernels.
    """
    console = console_for(json_)
    with waiting(console, "starting: looking for the card"):
        from ..tune.batch import tune_kinds
        from ..view.progress import RunView
        from ..view.tuned import show_batch, show_result

        request = words.request()
    several = len(request.problems) > 1
    with RunView(console) as view, ends_softly(view.note) as stop:
        batches = tune_kinds(request, view=view, stop=stop)
    if json_:
        told = [(batch if several else batch.results[0]).to_dict() for batch in batches]
        print_json(told[0] if len(request.kinds) == 1 else told)
    for batch in batches:
        if several:
            show_batch(console, batch)
        elif not json_:
            show_result(console, batch.results[0])
    if any(batch.failed for batch in batches):
        raise typer.Exit(1)


@takes_shapes
def space_command(
    device: ForDevice = "0",
    shapes: Shapes = NO_SHAPES,
    family: Family = None,
    settings: Settings = None,
    limit: Annotated[int, typer.Option("--limit", min=0, metavar="COUNT", help="Survivors to list.")] = 20,
    json_: Json = False,
) -> None:
    """Shows what each rule removes from a family's space, and the survivors.

    Example: [bold]flashgen space --device rtx-3090 --d 64 --set br=64 --set bc=32[/bold]

    With --set, also says whether that variant is legal, and which number stands against which limit.
    """
    from ...gen.families import family_named
    from ..cards.names import limits_named
    from ..option_words import parse_settings
    from ..predict.prior import prior_of
    from ..predict.space_survey import survey_space
    from ..serving import serving_families
    from ..view.space import show_space

    problems = shapes.problems()
    named = None if family is None else checked(lambda: family_named(family))
    if named is not None:
        parse_settings(named, settings or [])
    limits = limits_named(device)
    surveys = []
    console = console_for(json_)
    for problem in problems:
        kind = named or serving_families(problem, limits, settings or [])[0]
        held = parse_settings(kind, settings or [])
        prior = prior_of(problem, limits)
        with waiting(console, f"enumerating and ranking the variants of {kind.family}"):
            surveys.append(survey_space(kind, problem, limits, held, prior, count=limit))
        if not json_:
            show_space(console, surveys[-1])
    if json_:
        told = [survey.to_dict() for survey in surveys]
        print_json(told[0] if len(told) == 1 else told)


def ladder_command(
    device: DeviceOption = "0",
    cases: Annotated[
        str | None, typer.Option("--cases", metavar="NAMES", help="Of t10,t11,t22,t29,t30; all by default.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="NAMES", help="As in 4.2.9,4.2.10; all by default.")
    ] = None,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Time PyTorch too, if installed.")] = True,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            min=0.001,
            callback=finite,
            metavar="SECONDS",
            help="Longest launch that is made; then scaled.",
        ),
    ] = None,
    seed: Seed = 0,
    out: Out = DEFAULT_OUT,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Times every step of the teaching family, the tuned kernel and PyTorch on the report's cases.

    Example: [bold]flashgen ladder --device 0 --cases t10,t22[/bold]
    """
    from ...gen.families.ladder.family import STEPS
    from ..bench.ladder import LIMIT_S, run_ladder
    from ..bench.ladder_result import CASES, Row
    from ..cards.names import resolve
    from ..option_words import parse_names
    from ..view.ladder import ladder_tables, row_line

    case_names = parse_names(cases, list(CASES), "case")
    step_names = parse_names(steps, list(STEPS), "step")
    console = console_for(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with waiting(console, "building the first steps") as doing, ends_softly(say) as stop:

        def told(row: Row) -> None:
            say(row_line(row))
            doing(f"building and timing what follows {row.name} of {row.case}")

        result = run_ladder(
            resolve(device),
            case_names,
            step_names,
            out=out,
            with_torch=torch,
            limit_s=LIMIT_S if limit is None else limit,
            seed=seed,
            jobs=jobs,
            on_row=told,
            stop=stop,
        )
    if json_:
        print_json(result.to_dict())
        return
    for table in ladder_tables(result):
        console.print(table)
    for note in result.notes:
        say(note)
