"""The command that times tuned kernels beside others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked, suggestion
from ..request import Shape
from .flags import DEFAULT_OUT, NO_SHAPE, DeviceOption, Jobs, Json, Out, takes_shape
from .terminal import console_for, ends_softly, print_json

if TYPE_CHECKING:
    from ..bench.figures import BenchRun


@takes_shape
def bench_command(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="Of report, gpt2, fp32, llm, odd, decode; all by default."),
    ] = None,
    device: DeviceOption = "0",
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME",
            help="Any shape, named as kernels are: bf16_d128_causal_n8192; repeatable.",
        ),
    ] = None,
    shape: Shape = NO_SHAPE,
    contenders: Annotated[
        str | None,
        typer.Option(
            "--contenders", metavar="NAMES", help="As in flash,cudnn,ladder-4.2.10; all by default."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="After these nothing more is begun.")
    ] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Errors on inputs of two kinds beside PyTorch's, and no times.")
    ] = False,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            metavar="FILE",
            help="Another run's times as JSON: what was not timed here is shown too, scaled by cuDNN's.",
        ),
    ] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="Show this run, time nothing; several are put together."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="The JSON to write; bench.json in the out folder."),
    ] = None,
    readme: Annotated[
        list[Path] | None,
        typer.Option("--readme", metavar="FILE", help="Fill the tables between this file's bench markers."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="FOLDER", help="Write bars and a roofline, PNG and SVG.")
    ] = None,
    out: Out = DEFAULT_OUT,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Times tuned kernels beside PyTorch, FlexAttention and others, in one run.

    Example: [bold]flashgen bench llm decode --minutes 5 --plots plots[/bold]

    Medians of CUDA events in turns, the L2 flushed before each call. Each workload is served by the kernel
    tuned for just it, else by the nearest. What fails leaves an empty cell, and its reason in the JSON.
    """
    from ..bench import figures
    from ..bench.plan import BenchOptions, contender_names
    from ..bench.run import run_bench
    from ..build.compile import usable_cores
    from ..cards.names import resolve
    from ..option_words import parse_names
    from ..suites import SUITES, Workload, workload_named, workloads
    from ..view.bench import row_line, show
    from ..view.drawing import require_matplotlib

    if plots is not None:
        require_matplotlib()
    console = console_for(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if from_:
        if suites or shapes or shape.is_given or errors:
            raise UsageError("--from shows a run as it is; leave suites, shapes and --errors out")
        run = figures.merged([figures.read(path) for path in from_])
    else:
        for name in suites or []:
            if name not in SUITES:
                raise UsageError(f"unknown suite {name!r}; {suggestion(name, list(SUITES))}")
        asked = [checked(lambda text=text: workload_named(text)) for text in shapes or []]
        if shape.is_given:
            problem = shape.problem()
            asked.append(Workload(problem.name, problem))
        named = list(dict.fromkeys(suites or ([] if asked else list(SUITES))))
        wanted = None if contenders is None else parse_names(contenders, contender_names(), "contender")
        target = to or out / ("bench-errors.json" if errors else "bench.json")
        card = resolve(device)
        with ends_softly(say) as stop:
            run = run_bench(
                BenchOptions(
                    device=card,
                    workloads=(*workloads(named), *asked),
                    out=out,
                    contenders=None if wanted is None else tuple(wanted),
                    minutes=minutes,
                    errors_alone=errors,
                    jobs=jobs or usable_cores(),
                ),
                note=say,
                on_row=lambda row: say(row_line(row)),
                save=lambda run: figures.write(target, run),
                stop=stop,
            )
        to = target
    if reference is not None:
        run = figures.with_reference(run, reference)
    if to is not None:
        figures.write(to, run)
    _show_bench(run, say, to, readme or [], plots)
    if json_:
        print_json(json.loads(figures.as_json(run)))
        return
    show(console, run)


def _show_bench(
    run: BenchRun, say: Callable[[str], None], written: Path | None, readme: list[Path], plots: Path | None
) -> None:
    """Fills Markdown files and draws plots of a run."""
    from ..view.bench_markers import fill_file

    if written is not None:
        say(f"wrote {written}")
    for path in readme:
        fill_file(path, run)
        say(f"filled {path}")
    if plots is not None:
        from ..view.bench_plots import write_plots

        for path in write_plots(plots, run):
            say(f"wrote {path}")
