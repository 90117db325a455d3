"""The commands that read and write studies: export, import, report, record and replay."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked, suggestion
from ..request import Shapes
from .flags import (
    DEFAULT_OUT,
    NO_SHAPES,
    Jobs,
    Json,
    OfDevice,
    OfFamily,
    Out,
    Storage,
    StudyName,
    takes_filter,
)
from .terminal import console_for, print_json

if TYPE_CHECKING:
    from ..exchange.portable import Trials


@takes_filter
def export_command(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The JSON file to write; of flashinfer-trace a folder.")
    ],
    style: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="kernel-tuner, the cache file its simulation replays, t4, or flashinfer-trace: the tuned "
            "kernels as FlashInfer-Bench's definitions, solutions, workloads and traces.",
        ),
    ] = "kernel-tuner",
    study: StudyName = None,
    device: OfDevice = None,
    shapes: Shapes = NO_SHAPES,
    family: OfFamily = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes a study's trials as a Kernel Tuner cache file or as T4 results, or tuned kernels as a FlashInfer
    Trace data set.

    Example: [bold]flashgen export trials.json --device gtx-1080 --d 64[/bold]
    """
    from ..exchange.trace_set import FLASHINFER_TRACE
    from ..exchange.trial_files import FORMATS, export

    if style not in (*FORMATS, FLASHINFER_TRACE):
        raise UsageError(f"unknown format {style!r}; {suggestion(style, (*FORMATS, FLASHINFER_TRACE))}")
    if style == FLASHINFER_TRACE:
        if study is not None:
            raise UsageError(f"--study names trials, and {style} is of tuned kernels; leave it out")
        _export_trace_set(target, shapes, device, family, storage, out, json_)
        return
    trials, others = _take(shapes, device, family, storage, out, study)
    export(target, trials, style)
    name, count = trials.about.study, len(trials.ended)
    if json_:
        print_json({"target": str(target), "format": style, "study": name, "trials": count, "others": others})
        return
    text = f"wrote {target}: {count} trials of {name}"
    if others:
        text += f"; --study names another ({', '.join(others)})"
    console_for(False).print(text, markup=False, highlight=False, soft_wrap=True)


def _export_trace_set(
    folder: Path,
    shapes: Shapes,
    device: str | None,
    family: str | None,
    storage: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Writes the tuned kernels that fit the options as a FlashInfer Trace data set."""
    from ...gen.families import family_named
    from ..cards.names import limits_named
    from ..cards.slug import same_card
    from ..exchange.trace_definitions import SCHEMA
    from ..exchange.trace_set import FLASHINFER_TRACE, write_trace_set
    from ..shelf.known_kernels import known_kernels
    from ..store.places import default_storage

    kind = None if family is None else checked(lambda: family_named(family))
    limits = None if device is None else limits_named(device)
    known = known_kernels(out, storage or default_storage(out), storage is not None)
    done = write_trace_set(
        folder,
        (
            entry
            for entry in known
            if (limits is None or same_card(entry.slug, limits.slug))
            and (kind is None or type(entry.kernel.variant) is kind)
            and shapes.fits(entry.kernel.problem)
        ),
    )
    if as_json:
        print_json({"target": str(folder), "format": FLASHINFER_TRACE, "schema": SCHEMA, **vars(done)})
        return
    text = (
        f"wrote {folder}: {done.definitions} definitions, {done.solutions} solutions, {done.workloads} "
        f"workloads, {done.traces} traces, as {SCHEMA} reads them"
    )
    for why, count in done.left_out.items():
        text += f"; {count} kernels left out: {why}"
    console_for(False).print(text, markup=False, highlight=False, soft_wrap=True)


def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `flashgen export` wrote.")],
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Adds the trials of an exported file to the storage, in either format.

    Example: [bold]flashgen import trials.json --storage trials.sqlite3[/bold]

    The file is data: parameters are checked against the family, figures against their ranges, and kernels are
    rendered anew.
    """
    from ..exchange.portable import put
    from ..exchange.trial_files import read
    from ..store.places import default_storage

    done = put(storage or default_storage(out), read(file))
    if json_:
        print_json(vars(done))
        return
    text = f"{done.added} trials added to {done.study} in {done.storage}"
    if done.known:
        text += f", {done.known} variants were tried there already"
    console_for(False).print(text, markup=False, highlight=False, soft_wrap=True)


@takes_filter
def report_command(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.html]", help="File to write; beside the kernel in the out folder."),
    ] = None,
    study: StudyName = None,
    device: OfDevice = None,
    shapes: Shapes = NO_SHAPES,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes what tuning found as one HTML file: the winner and why it wins, the search, every parameter.

    Example: [bold]flashgen report report.html --device gtx-1080 --d 64[/bold]

    Tells of the problem tuned last, or of the last one that fits the options, with all families that
    competed. The file needs no network.
    """
    from ..cards.names import limits_named
    from ..report.chosen import check_target, open_chosen
    from ..report.gathering import make_report
    from ..report.page import render_html
    from ..shelf.targets import write_target
    from ..store.places import default_storage

    where = storage or default_storage(out)
    check_target(target)
    card = None if device is None else limits_named(device).slug
    emulated = device is not None and device.startswith("sim:")
    opened, group, older = open_chosen(where, study=study, shapes=shapes, card=card, emulated=emulated)
    console = console_for(json_)
    with (
        console.status("counting what each rule removes") if console.is_terminal else contextlib.nullcontext()
    ):
        report = make_report(opened, where, group, out=out, older=older)
        page = render_html(report)
    path = target or out / group.slug / f"{group.problem.name}.html"
    write_target(path, page)
    if json_:
        print_json({"target": str(path), **report.to_dict()})
        return
    told = f"wrote {path} ({len(page.encode()) / 1024:.0f} KiB): {group.problem.name} on {report.device}, "
    told += f"{len(report.trials)} trials of {', '.join(part.name for part in report.families)}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)


@takes_filter
def record_command(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write: space.jsonl.xz or .gz.")],
    study: StudyName = None,
    device: OfDevice = None,
    shapes: Shapes = NO_SHAPES,
    family: OfFamily = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes what `tune --sampler exhaustive` found of a space, for `replay`.

    Example: [bold]flashgen record space.jsonl.xz --family simt --d 64[/bold]
    """
    from ..exchange.recorded_spaces import check_target, recorded, write

    check_target(target)
    trials, others = _take(shapes, device, family, storage, out, study)
    space = recorded(trials)
    write(target, space)
    name, count = trials.about.study, len(space.entries)
    if json_:
        print_json({"target": str(target), "study": name, "variants": count, "others": others})
        return
    text = f"wrote {target}: {count} variants of {name}"
    if others:
        text += f"; --study names another ({', '.join(others)})"
    console_for(False).print(text, markup=False, highlight=False, soft_wrap=True)


def _take(
    shapes: Shapes, device: str | None, family: str | None, storage: str | None, out: Path, study: str | None
) -> tuple[Trials, list[str]]:
    """The trials of the study that the options choose, and the names of others that fit them."""
    from ...gen.families import family_named
    from ..cards.names import limits_named
    from ..exchange.portable import fits, take
    from ..store.places import default_storage

    kind = None if family is None else checked(lambda: family_named(family))
    wanted = fits(shapes, None if device is None else limits_named(device), kind)
    return take(storage or default_storage(out), wanted, study)


def replay_command(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Recorded spaces, as `flashgen record` writes.")
    ],
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="gp, forest, tpe, random, exhaustive (in the cost model's order), gp:no-prior (started at "
            "random), or kt:STRATEGY of Kernel Tuner; repeatable. By default all worth comparing.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="COUNT", help="Starts of each sampler.")
    ] = 20,
    evaluations: Annotated[
        int, typer.Option("--evaluations", min=1, metavar="COUNT", help="Variants each start evaluates.")
    ] = 200,
    batch: Annotated[
        int,
        typer.Option(
            "--batch", min=1, metavar="COUNT", help="Proposals out at once, as with many compilers."
        ),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves: a .png, .svg or .pdf.")
    ] = None,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Replays searches on recorded spaces, without a card: how soon which sampler finds how much.

    Example: [bold]flashgen replay space.jsonl.xz --sampler gp --sampler tpe --plot curves.png[/bold]
    """
    from ..build.compile import usable_cores
    from ..exchange.recorded_spaces import read
    from ..exchange.replay import ReplayOptions, replay
    from ..exchange.replay_methods import default_methods, parse_methods
    from ..view.replay import check_plot, replay_progress, show_replays
    from ..view.replay import plot as draw

    if plot is not None:
        check_plot(plot)
    options = ReplayOptions(
        methods=parse_methods(sampler) if sampler else default_methods(),
        seeds=seeds,
        evaluations=evaluations,
        batch=batch,
        jobs=jobs or usable_cores(),
    )
    spaces = [(str(file), read(file)) for file in files]
    console = console_for(json_)
    with replay_progress(console) as progress:
        replays = replay(spaces, options, progress)
    if plot is not None:
        draw(plot, replays)
    if json_:
        print_json([each.to_dict() for each in replays])
        return
    show_replays(console, replays)
    if plot is not None:
        console.print(f"wrote {plot}", markup=False, highlight=False, soft_wrap=True)
