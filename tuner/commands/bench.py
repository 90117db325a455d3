"""The command that times tuned kernels beside others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked, suggestion
from ..request import Shapes
from .flags import DEFAULT_OUT, NO_SHAPES, DeviceOption, Jobs, Json, Minutes, Out, takes, takes_shapes_alone
from .terminal import console_for, ends_softly, print_json

if TYPE_CHECKING:
    from ..bench.figures import BenchRun
    from ..bench.plan import BenchOptions


@dataclass(frozen=True, kw_only=True)
class BenchWords:
    """The options of `flashgen bench` as they are typed."""

    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE]...",
            help="Of report, gpt2, fp32, llm, eight, odd, decode, masks, varlen, few, paged, mla, backward; "
            "all by default.",
        ),
    ] = None
    device: DeviceOption = "0"
    named: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME",
            help="Any shape, named as kernels are (bf16_d64_n512); repeatable.",
        ),
    ] = None
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row", metavar="NAME", help="A suite's row, by its name (bf16-d64-2048c); repeatable."
        ),
    ] = None
    shapes: Shapes = NO_SHAPES
    contenders: Annotated[
        str | None,
        typer.Option("--contenders", metavar="NAMES", help="As in flash,cudnn; all by default."),
    ] = None
    minutes: Minutes = None
    errors: Annotated[
        bool, typer.Option("--errors", help="Errors on inputs of two kinds beside PyTorch's, and no times.")
    ] = False
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            metavar="FILE",
            help="Another run's times as JSON: what was not timed here is shown too, scaled by cuDNN's.",
        ),
    ] = None
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="Show this run, time nothing; several are put together."),
    ] = None
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="The JSON to write; bench.json in the out folder."),
    ] = None
    readme: Annotated[
        list[Path] | None,
        typer.Option("--readme", metavar="FILE", help="Fill the tables between this file's bench markers."),
    ] = None
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="FOLDER", help="Write bars and a roofline, PNG and SVG.")
    ] = None
    out: Out = DEFAULT_OUT
    jobs: Jobs = None

    def options(self) -> BenchOptions:
        """Returns what the words ask to time. Raises UsageError, or FlashgenError for a missing card."""
        from ..bench.plan import BenchOptions, contender_names
        from ..build.compile import usable_cores
        from ..cards.names import resolve
        from ..option_words import parse_names
        from ..suites import SUITES, Workload, row_named, workload_named, workloads

        for name in self.suites or []:
            if name not in SUITES:
                raise UsageError(f"unknown suite {name!r}; {suggestion(name, list(SUITES))}")
        asked = [checked(lambda text=text: row_named(text)) for text in self.rows or []]
        asked += [checked(lambda text=text: workload_named(text)) for text in self.named or []]
        if self.shapes.is_given:
            asked += [Workload(problem.name, problem) for problem in self.shapes.problems()]
        suites = list(dict.fromkeys(self.suites or ([] if asked else list(SUITES))))
        contenders = None
        if self.contenders is not None:
            contenders = tuple(parse_names(self.contenders, contender_names(), "contender"))
        return BenchOptions(
            device=resolve(self.device),
            workloads=tuple(dict.fromkeys((*workloads(suites), *asked))),
            out=self.out,
            contenders=contenders,
            minutes=self.minutes,
            errors_alone=self.errors,
            jobs=self.jobs or usable_cores(),
        )

    @property
    def target(self) -> Path:
        """The JSON that a run is written to."""
        return self.to or self.out / ("bench-errors.json" if self.errors else "bench.json")


@takes("words", takes_shapes_alone(BenchWords))
def bench_command(words: BenchWords, json_: Json = False) -> None:
    """Times tuned kernels beside PyTorch, FlexAttention and others, in one run.

    Example: [bold]flashgen bench llm decode --minutes 5 --plots plots[/bold]

    Medians of CUDA events in turns, the L2 flushed before each call. Each workload is served by the kernel
    tuned for just it, else by the best of those for others. What fails leaves an empty cell, and its reason
    in the JSON.
    """
    from ..bench import figures
    from ..bench.reference_times import with_reference
    from ..shelf.library import check_writable
    from ..view.bench import show
    from ..view.drawing import require_matplotlib

    if words.plots is not None:
        require_matplotlib()
        check_writable(words.plots, "plots", "--plots")
    console = console_for(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    run = _recorded(words) if words.from_ else _timed(words, say)
    to = words.to if words.from_ else words.target
    if words.reference is not None:
        run = with_reference(run, words.reference)
    if to is not None:
        figures.write(to, run)
        say(f"wrote {to}")
    _fill_and_draw(run, words, say)
    if json_:
        print_json(json.loads(figures.as_json(run)))
        return
    show(console, run)


def _recorded(words: BenchWords) -> BenchRun:
    """The runs of the files that are named, put together."""
    from ..bench import figures
    from ..shelf import library

    if words.suites or words.rows or words.named or words.shapes.is_given or words.errors:
        raise UsageError("--from shows a run as it is; leave suites, rows, shapes and --errors out")
    run = figures.merged([figures.read(path) for path in words.from_ or []])
    return figures.with_later_kernels(run, library.entries(library.folders(words.out)))


def _timed(words: BenchWords, say: Callable[[str], None]) -> BenchRun:
    """A run timed now, which is kept as it goes on."""
    from ..bench import figures
    from ..bench.run import run_bench
    from ..view.bench import row_line

    options, target = words.options(), words.target
    with ends_softly(say) as stop:
        return run_bench(
            options,
            note=say,
            on_row=lambda row: say(row_line(row)),
            save=lambda run: figures.write(target, run),
            stop=stop,
        )


def _fill_and_draw(run: BenchRun, words: BenchWords, say: Callable[[str], None]) -> None:
    """Fills Markdown files and draws plots of a run."""
    from ..view.bench_markers import fill_file

    for path in words.readme or []:
        fill_file(path, run)
        say(f"filled {path}")
    if words.plots is not None:
        from ..view.bench_plots import write_plots

        for path in write_plots(words.plots, run):
            say(f"wrote {path}")
