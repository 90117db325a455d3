"""The command line: one thin function per command. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from typer.core import TyperCommand

from ..gen.families import family_named
from ..gen.limits import PRESETS, DeviceLimits
from ..gen.problem import Problem
from .cache import DISK_ERRORS
from .compile import usable_cores
from .device import FlashgenError
from .options import (
    SamplerName,
    Shape,
    Shapes,
    UsageError,
    checked,
    one_family,
    parse_families,
    parse_list,
    parse_sampler,
    parse_settings,
    serving_families,
    suggestion,
)
from .version import flashgen_version

if TYPE_CHECKING:
    from .benchrun import BenchRun
    from .bundle import Pick

P = ParamSpec("P")

app = typer.Typer(
    name="flashgen",
    help="Generates and tunes flash-attention kernels for one GPU and one kind of problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

DEFAULT_OUT = Path("out")
NO_SHAPE, NO_SHAPES = Shape(), Shapes()
#: What ``--causal both`` is turned into, since a flag takes no word.
BOTH_MASKS = "--both-masks"

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="A CUDA card (0) or an emulated one (sim:gtx-1080).")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="Data type: f32 (the default), f16 or bf16.")
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="How f32 is multiplied: auto (accurate to f32, whichever is fastest; the default), ieee, 3xtf32 "
        "or tf32 (eleven bits).",
    ),
]
HeadDim = Annotated[int | None, typer.Option("--d", "--head-dim", help="Head dim, 1 to 256; 64 by default.")]
HeadDimV = Annotated[
    int | None, typer.Option("--dv", "--head-dim-v", help="Head dim of the values; as --d by default.")
]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch size; 4 by default.")]
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads; 16 by default.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", help="Key/value heads, a divisor of --heads; as many by default.")
]
Seqlen = Annotated[int | None, typer.Option("--seqlen", help="Length of queries and keys; 4096 by default.")]
SeqlenQ = Annotated[int | None, typer.Option("--seqlen-q", help="Length of the queries alone.")]
SeqlenK = Annotated[int | None, typer.Option("--seqlen-k", help="Length of keys and values alone.")]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="Causal mask, aligned bottom-right.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Hold a parameter of the family; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Processes to compile with; all cores by default.")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the search and of the test data.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the tuned kernels.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="FILE|URL",
        help="Where trials are kept: an SQLite file, a .journal file, a database URL or grpc://host:port; "
        "tuning.sqlite3 in the out folder by default.",
    ),
]


def _shape(
    dtype: Dtype = None,
    precision: Precision = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    seqlen: Seqlen = None,
    seqlen_q: SeqlenQ = None,
    seqlen_k: SeqlenK = None,
    causal: Causal = None,
) -> Shape:
    return Shape(
        dtype=dtype,
        precision=precision,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seqlen=seqlen,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=causal,
    )


def _shapes(
    suites: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAMES",
            help="The problems of a suite (report, gpt2, fp32, llm, odd, decode) that the options below fit.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAMES", help="Data type: f32 (the default), f16, bf16, e4m3."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="NAMES",
            help="How f32 is multiplied: auto (accurate to f32, whichever is fastest; the default), ieee, "
            "3xtf32 or tf32 (eleven bits).",
        ),
    ] = None,
    head_dim: Annotated[
        str | None,
        typer.Option("--d", "--head-dim", metavar="NUMBERS", help="Head dim, 1 to 256; 64 by default."),
    ] = None,
    head_dim_v: Annotated[
        str | None,
        typer.Option(
            "--dv", "--head-dim-v", metavar="NUMBERS", help="Head dim of the values; as --d by default."
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="NUMBERS", help="Batch size; 4 by default.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="NUMBERS", help="Query heads; 16 by default.")
    ] = None,
    kv_heads: Annotated[
        str | None,
        typer.Option(
            "--kv-heads",
            metavar="NUMBERS",
            help="Key/value heads, a divisor of --heads; as many by default.",
        ),
    ] = None,
    seqlen: Annotated[
        str | None,
        typer.Option("--seqlen", metavar="NUMBERS", help="Length of queries and keys; 4096 by default."),
    ] = None,
    seqlen_q: Annotated[
        str | None, typer.Option("--seqlen-q", metavar="NUMBERS", help="Length of the queries alone.")
    ] = None,
    seqlen_k: Annotated[
        str | None, typer.Option("--seqlen-k", metavar="NUMBERS", help="Length of keys and values alone.")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal", help="Causal mask, aligned bottom-right; `--causal both` for each."
        ),
    ] = None,
    both_masks: Annotated[bool, typer.Option(BOTH_MASKS, hidden=True)] = False,
) -> Shapes:
    return Shapes(
        suites=parse_list("--suite", suites, str),
        dtype=parse_list("--dtype", dtype, str),
        precision=parse_list("--precision", precision, str),
        head_dim=parse_list("--d", head_dim, int),
        head_dim_v=parse_list("--dv", head_dim_v, int),
        batch=parse_list("--batch", batch, int),
        heads=parse_list("--heads", heads, int),
        kv_heads=parse_list("--kv-heads", kv_heads, int),
        seqlen=parse_list("--seqlen", seqlen, int),
        seqlen_q=parse_list("--seqlen-q", seqlen_q, int),
        seqlen_k=parse_list("--seqlen-k", seqlen_k, int),
        causal=(False, True) if both_masks else () if causal is None else (causal,),
    )


class ManyCommand(TyperCommand):
    """A command whose flag ``--causal`` may be followed by the word ``both``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept: list[str] = []
        for word in args:
            if word == "both" and kept[-1:] == ["--causal"]:
                kept[-1] = BOTH_MASKS
            else:
                kept.append(BOTH_MASKS if word == "--causal=both" else word)
        return super().parse_args(ctx, kept)


def takes(name: str, make: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of ``make`` where it declares its argument ``name``."""
    options = inspect.signature(make, eval_str=True).parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in declared.parameters.values():
            parameters += options.values() if parameter.name == name else [parameter]

        def run(**given: Any) -> None:
            made = make(**{option: given.pop(option) for option in options})
            command(**{name: made}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        # typer reads one or the other, depending on its version.
        run.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


takes_shape = takes("shape", _shape)
takes_shapes = takes("shapes", _shapes)


def main() -> None:
    """The entry point of the ``flashgen`` program."""
    app()


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """What the user can mend ends a command with one message and exit code 1 or 2, without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json_"))
        try:
            command(*args, **kwargs)
        except FlashgenError as error:
            _fail(str(error), 2 if isinstance(error, UsageError) else 1, as_json)
        except KeyboardInterrupt:
            _fail("interrupted", 1, as_json)
        except BrokenPipeError:
            # The reader has gone; without this, closing stdout at exit complains once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror}; free some space or mend the permissions", 1, as_json)

    return run


def _fail(message: str, code: int, as_json: bool) -> None:
    if as_json:
        with contextlib.suppress(OSError):
            _print_json({"error": message, "exit_code": code})
    Console(stderr=True).print(
        f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    raise typer.Exit(code)


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2) + "\n")
    sys.stdout.flush()  # what cannot be written is told here, not while Python exits


def _console(as_json: bool) -> Console:
    """Where people read: stdout, or stderr when stdout is for JSON alone."""
    return Console(stderr=as_json)


@contextlib.contextmanager
def _ends_softly(note: Callable[[str], None]) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second ends the program at once."""
    stop = threading.Event()

    def handle(signum: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        note(f"{signal.Signals(signum).name}: ending with the best so far (again to drop it)")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashgen {flashgen_version()}")
        raise typer.Exit()


@app.callback()
def _flashgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("tune", cls=ManyCommand)
@reports_errors
@takes_shapes
def tune_command(
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICES",
            help="A CUDA card (0), several (0,1,2), all of them (all) or an emulated one (sim:gtx-1080).",
        ),
    ] = "0",
    shapes: Shapes = NO_SHAPES,
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family", metavar="NAME", help="Kernel family; repeatable. All that serve compete by default."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="Variants to try in all, of each problem; 200 by default, 24 on an emulated card.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Time to search for, in all.")
    ] = None,
    settings: Settings = None,
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            metavar="NAME",
            help="What proposes variants: gp (a Gaussian process, the default), forest (a random forest), "
            "tpe, random, or exhaustive (every variant, each timed in full; as many as --trials if given).",
        ),
    ] = "gp",
    seed: Seed = 0,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Searches for the fastest variant and writes it to the out folder.

    Example: [bold]flashgen tune --device sim:gtx-1080 --d 64[/bold]

    The same command resumes an interrupted run; Ctrl-C ends one with the best so far. Cards of one kind share
    the work, each kind is tuned for itself. So do runs on many hosts that name one --storage.

    With --suite or lists, as in [bold]--seqlen 512,2048,8192 --causal both[/bold], problems are tuned in
    turn, each from what the ones before taught, and one module is written that holds all their kernels.
    """
    from .batch import BatchResult, Competing, tune_each, write_module
    from .bundle import module_name
    from .console import RunView, show_batch, show_result
    from .devices import resolve_all
    from .study import default_storage
    from .tune import DEFAULT_SIM_TRIALS, DEFAULT_TRIALS, TuneOptions

    problems = shapes.problems()
    how = parse_sampler(sampler)
    named = parse_families(family or [])
    if settings and named:
        parse_settings(one_family(named), settings)  # a wrong one is told before a card is looked for
    kinds = resolve_all(device)
    console = _console(json_)
    batches: list[BatchResult] = []

    def competing(limits: DeviceLimits, problem: Problem) -> Competing:
        families = named or serving_families(problem, limits, settings or [])
        return families, parse_settings(one_family(families), settings) if settings else {}

    with RunView(console) as view, _ends_softly(view.note) as stop:
        for card, *more in kinds:
            most = trials
            if trials is None and minutes is None and how is not SamplerName.EXHAUSTIVE:
                most = DEFAULT_SIM_TRIALS if card.predicted else DEFAULT_TRIALS
            options = TuneOptions(
                device=card,
                more_devices=tuple(more),
                problem=problems[0],
                families=named,
                trials=most,
                minutes=minutes,
                sampler=how,
                seed=seed,
                storage=storage or default_storage(out),
                out=out,
                jobs=jobs or usable_cores(),
            )
            if more or len(kinds) > 1:
                workers = "1 worker" if not more else f"{1 + len(more)} workers"
                view.note(f"{card.limits.name}: {workers} ({', '.join(d.spec for d in (card, *more))})")
            compete = functools.partial(competing, card.limits)
            batch = tune_each(options, problems, compete, view=view, stop=stop)
            if len(batch.results) > 1:
                batch = write_module(
                    batch, out, module_name(shapes, problems), shapes.words(), note=view.note
                )
            batches.append(batch)
            if stop.is_set():
                break
    if json_:
        told = [each.to_dict() if len(problems) > 1 else each.results[0].to_dict() for each in batches]
        _print_json(told[0] if len(kinds) == 1 else told)
    for batch in batches:
        if len(problems) > 1:
            show_batch(console, batch)
        elif not json_:
            show_result(console, batch.results[0])
    if any(batch.failed for batch in batches):
        raise typer.Exit(1)


@app.command("space")
@takes_shape
@reports_errors
def space_command(
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="A card (0), a preset (gtx-1080) or sim:gtx-1080."),
    ] = "0",
    shape: Shape = NO_SHAPE,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="NAME", help="Kernel family; the first that serves by default."),
    ] = None,
    settings: Settings = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Survivors to list.")] = 20,
    json_: Json = False,
) -> None:
    """Shows what each rule removes from a family's space, and the survivors.

    Example: [bold]flashgen space --device sim:rtx-3090 --d 64 --set bc=128 --set stages=2[/bold]

    With --set, also says whether that variant is legal, and which number stands against which limit.
    """
    from .console import show_space
    from .devices import limits_named
    from .prior import prior_of
    from .spaceview import view_space

    problem = shape.problem()
    kind = None if family is None else checked(lambda: family_named(family))
    if kind is not None:
        parse_settings(kind, settings or [])
    limits = limits_named(device)
    kind = kind or serving_families(problem, limits, settings or [])[0]
    held = parse_settings(kind, settings or [])
    view = view_space(kind, problem, limits, held, prior_of(problem, limits), count=limit)
    if json_:
        _print_json(view.to_dict())
    else:
        show_space(_console(False), view)


@app.command("emit", cls=ManyCommand)
@reports_errors
@takes_shapes
def emit_command(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write: best.cu or best.py.")],
    kernels: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KERNEL]...", help="These, as `list` names them, or their files."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="For this card: 0, sim:gtx-1080 or a preset's name."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help="For a card that need not be here: h200, or any of sm_90."
        ),
    ] = None,
    shapes: Shapes = NO_SHAPES,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="Kernel family.")] = None,
    settings: Settings = None,
    main: Annotated[
        bool,
        typer.Option("--main", help="A program that reads Q, K and V from a file and writes O to another."),
    ] = False,
    cmake: Annotated[
        bool,
        typer.Option("--cmake", help="Also a header, CMakeLists.txt and an example that uses the library."),
    ] = False,
    embed: Annotated[
        bool,
        typer.Option("--embed", help="Let a .py carry its kernels compiled; other cards compile the source."),
    ] = False,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    jobs: Jobs = None,
    json_: Json = False,
) -> None:
    """Writes the best known kernel: the last tuned one, or the best for what the options ask.

    Example: [bold]flashgen emit best.py --device 0 --d 64 --causal[/bold]

    Chosen are, in this order: measured before predicted kernels, the same card before one of the same compute
    capability, the same mask, the nearest lengths and number of heads. With --set, that variant is rendered
    untuned. Of a .cu, --main makes a program and --cmake a library.

    With --suite, lists or several kernels, as in [bold]flashgen emit llm.py --suite llm[/bold], the module
    holds the best for each and calls the one that was tuned for the nearest shape. Lists without lengths,
    batch and heads, as in [bold]--d 64,128[/bold], mean all that were tuned.
    """
    from .devices import limits_named, preset_named
    from .emitting import (
        card_of_last,
        check_target,
        choose,
        complete,
        emit_tuned,
        emit_untuned,
        files_beside,
        known_kernels,
        with_program,
        write_target,
    )
    from .study import default_storage

    check_target(target, native=main or cmake)
    if device is not None and preset is not None:
        raise UsageError("--device and --preset both name the card; give one")
    if embed and target.suffix != ".py":
        raise UsageError(f"--embed is for modules, and {target} is none; name a .py file")
    limits = None
    if preset is not None:
        limits = preset_named(preset)
    elif device is not None:
        limits = limits_named(device)
    problems = shapes.problems()
    kind = None if family is None else checked(lambda: family_named(family))
    known = known_kernels(out, storage or default_storage(out), storage is not None)
    at_once = (jobs or usable_cores()) if embed else 0
    if kernels or len(problems) > 1:
        from .bundle import kernels_of, named, pick, widened

        if settings:
            raise UsageError("--set renders one variant, untuned; leave it out, or ask for one problem")
        if kernels and (shapes.words() or limits is not None or kind is not None):
            raise UsageError("the kernels are named; leave out what would choose them")
        if kernels:
            picks = named(known, kernels)
        else:
            card = limits or card_of_last(known)
            picks = pick(known, widened(known, shapes, problems, card), card, kind)
        entries = kernels_of(picks)
        if len(entries) > 1:
            options = {"device": device, "preset": preset, "family": family}
            command = [*(kernels or shapes.words())]
            command += [f"--{name} {value}" for name, value in options.items() if value is not None]
            _emit_bundle(target, picks, command, at_once, json_)
            return
        emitted = emit_tuned(picks[0].match, target.suffix, embed=at_once)
    elif settings:
        problem = problems[0]
        if limits is None:
            raise UsageError("--set needs a card to render for; name one with --device or --preset")
        chosen = kind or one_family(serving_families(problem, limits, settings))
        held = parse_settings(chosen, settings)
        variant = complete(chosen, problem, limits, held, chosen())
        how = f"the variant asked for, untuned: {problem.name} for {limits.name}"
        emitted = emit_untuned(variant, problem, limits, how, target.suffix, embed=at_once)
    else:
        emitted = choose(known, shapes.of_one(problems[0]), limits, kind, target.suffix, embed=at_once)
    beside = files_beside(target, emitted) if cmake else {}
    write_target(target, with_program(emitted) if main else emitted.text)
    for path, text in beside.items():
        write_target(path, text)
    if json_:
        files = {"target": str(target), **({"beside": [str(path) for path in beside]} if cmake else {})}
        _print_json({**files, **emitted.to_dict()})
    else:
        from .console import show_emitted

        show_emitted(_console(False), target, emitted, list(beside))


def _emit_bundle(target: Path, picks: list[Pick], command: list[str], embed: int, as_json: bool) -> None:
    """Writes a module of several kernels. ``embed`` is as in `bundle`."""
    from .bundle import bundle, kernels_of
    from .console import show_bundle
    from .emitting import write_target

    entries = kernels_of(picks)
    if target.suffix != ".py":
        raise UsageError(f"{len(entries)} kernels make a module; name the file .py, or ask for one")
    words = [*command, "--embed"] if embed else command
    text = bundle(entries, name=target.stem, command=words, embed=embed)
    write_target(target, text)
    if as_json:
        kernels = [pick.to_dict() for pick in picks]
        _print_json({"target": str(target), "embedded": bool(embed), "kernels": kernels})
    else:
        show_bundle(_console(False), target, picks, len(text.encode()))


@app.command("list", cls=ManyCommand)
@reports_errors
@takes_shapes
def list_command(
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of this card: 0, sim:gtx-1080 or a preset's name."),
    ] = None,
    shapes: Shapes = NO_SHAPES,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="Of this family.")] = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Lists the tuned kernels: those of the out folder, those shipped, those that only a study holds.

    Example: [bold]flashgen list --dtype bf16 --d 64,128 --causal[/bold]
    """
    from .devices import limits_named
    from .emitting import known_kernels
    from .listing import fitting, to_dict
    from .listview import show_kernels
    from .study import default_storage

    limits = None if device is None else limits_named(device)
    kind = None if family is None else checked(lambda: family_named(family))
    known = known_kernels(out, storage or default_storage(out), storage is not None)
    entries = fitting(known, shapes, limits, kind)
    if json_:
        _print_json([to_dict(entry) for entry in entries])
    elif entries:
        show_kernels(_console(False), entries)
    else:
        console = _console(False)
        why = f"none of {len(known)} fits the options" if known else "tune with `flashgen tune`"
        console.print(f"no kernels: {why}", markup=False, highlight=False)


@app.command("diff")
@reports_errors
def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A kernel as `list` names it, or its file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    source: Annotated[bool, typer.Option("--source/--no-source", help="Show how the sources differ.")] = True,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Compares two tuned kernels: problem, parameters, figures and source.

    Example: [bold]flashgen diff nvidia_h200/f32_d64 nvidia_h200/f32_d128 --no-source[/bold]
    """
    from .emitting import known_kernels
    from .listing import compare
    from .listview import show_difference
    from .study import default_storage

    known = known_kernels(out, storage or default_storage(out), storage is not None)
    difference = compare(known, a, b)
    if json_:
        _print_json(difference.to_dict())
    else:
        show_difference(_console(False), difference, source=source)


@app.command("export")
@takes_shape
@reports_errors
def export_command(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The JSON file to write.")],
    style: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="kernel-tuner, the cache file its simulation replays, or t4."
        ),
    ] = "kernel-tuner",
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="NAME", help="The study; else the last used that the options fit."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of this card: 0, sim:gtx-1080 or a preset's name."),
    ] = None,
    shape: Shape = NO_SHAPE,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="Of this family.")] = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes a study's trials as a Kernel Tuner cache file or as T4 results.

    Example: [bold]flashgen export trials.json --device sim:gtx-1080 --d 64[/bold]
    """
    from .devices import limits_named
    from .exchange import FORMATS, export
    from .portable import fits, take
    from .study import default_storage

    if style not in FORMATS:
        raise UsageError(f"unknown format {style!r}; {suggestion(style, FORMATS)}")
    kind = None if family is None else checked(lambda: family_named(family))
    wanted = fits(shape, None if device is None else limits_named(device), kind)
    trials, others = take(storage or default_storage(out), wanted, study)
    export(target, trials, style)
    name, count = trials.about.study, len(trials.ended)
    if json_:
        _print_json(
            {"target": str(target), "format": style, "study": name, "trials": count, "others": others}
        )
        return
    text = f"wrote {target}: {count} trials of {name}"
    if others:
        text += f"; --study names another ({', '.join(others)})"
    _console(False).print(text, markup=False, highlight=False, soft_wrap=True)


@app.command("import")
@reports_errors
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
    from .exchange import read
    from .portable import put
    from .study import default_storage

    done = put(storage or default_storage(out), read(file))
    if json_:
        _print_json(vars(done))
        return
    text = f"{done.added} trials added to {done.study} in {done.storage}"
    if done.known:
        text += f", {done.known} variants were tried there already"
    _console(False).print(text, markup=False, highlight=False, soft_wrap=True)


@app.command("report")
@takes_shape
@reports_errors
def report_command(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.html]", help="File to write; beside the kernel in the out folder."),
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="NAME", help="Name of a study, or how it starts.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of this card: 0, sim:gtx-1080 or a preset's name."),
    ] = None,
    shape: Shape = NO_SHAPE,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes what tuning found as one HTML file: the winner and why it wins, the search, every parameter.

    Example: [bold]flashgen report --dtype bf16 --d 128 report.html[/bold]

    Tells of the problem tuned last, or of the last one that fits the options, with all families that
    competed. The file needs no network.
    """
    from .chosen import check_target, open_chosen
    from .devices import limits_named
    from .emitting import write_target
    from .report import make_report
    from .reportview import render_html
    from .study import default_storage

    where = storage or default_storage(out)
    check_target(target)
    card = None if device is None else limits_named(device).slug
    emulated = device is not None and device.startswith("sim:")
    opened, group, older = open_chosen(where, study=study, shape=shape, card=card, emulated=emulated)
    console = _console(json_)
    with (
        console.status("counting what each rule removes") if console.is_terminal else contextlib.nullcontext()
    ):
        report = make_report(opened, where, group, out=out, older=older)
        page = render_html(report)
    path = target or out / group.slug / f"{group.problem.name}.html"
    write_target(path, page)
    if json_:
        _print_json({"target": str(path), **report.to_dict()})
        return
    told = f"wrote {path} ({len(page.encode()) / 1024:.0f} KiB): {group.problem.name} on {report.device}, "
    told += f"{len(report.trials)} trials of {', '.join(part.name for part in report.families)}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)


@app.command("record")
@takes_shape
@reports_errors
def record_command(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write: space.jsonl.xz or .gz.")],
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="NAME", help="The study; else the last used that the options fit."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="Of this card: 0, sim:gtx-1080 or a preset's name."),
    ] = None,
    shape: Shape = NO_SHAPE,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="Of this family.")] = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Writes what `tune --sampler exhaustive` found of a space, for `replay`.

    Example: [bold]flashgen record space.jsonl.xz --family simt --d 64[/bold]
    """
    from .devices import limits_named
    from .portable import fits, take
    from .record import check_target, recorded, write
    from .study import default_storage

    check_target(target)
    kind = None if family is None else checked(lambda: family_named(family))
    wanted = fits(shape, None if device is None else limits_named(device), kind)
    trials, others = take(storage or default_storage(out), wanted, study)
    space = recorded(trials)
    write(target, space)
    name, count = trials.about.study, len(space.entries)
    if json_:
        _print_json({"target": str(target), "study": name, "variants": count, "others": others})
        return
    text = f"wrote {target}: {count} variants of {name}"
    if others:
        text += f"; --study names another ({', '.join(others)})"
    _console(False).print(text, markup=False, highlight=False, soft_wrap=True)


@app.command("replay")
@reports_errors
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
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Starts of each sampler.")] = 20,
    evaluations: Annotated[
        int, typer.Option("--evaluations", min=1, help="Variants each start evaluates.")
    ] = 200,
    batch: Annotated[
        int,
        typer.Option("--batch", min=1, help="Proposals of ours out at once, as with many compilers."),
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
    from .record import read
    from .replay import ReplayOptions, default_methods, parse_methods, replay
    from .replayview import check_plot, replay_progress, show_replays
    from .replayview import plot as draw

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
    console = _console(json_)
    with replay_progress(console) as progress:
        replays = replay(spaces, options, progress)
    if plot is not None:
        draw(plot, replays)
    if json_:
        _print_json([each.to_dict() for each in replays])
        return
    show_replays(console, replays)
    if plot is not None:
        console.print(f"wrote {plot}", markup=False, highlight=False, soft_wrap=True)


@app.command("devices")
@reports_errors
def devices_command(json_: Json = False) -> None:
    """Lists the cards here, the presets and the toolchain, what is missing and how to get it.

    Example: [bold]flashgen devices --json[/bold]
    """
    from .console import show_devices
    from .devices import cards, survey

    found, trouble = cards()
    tools = survey()
    if json_:
        _print_json(
            {
                "cards": [{"spec": c.spec, "driver": c.driver, **c.limits.to_dict()} for c in found],
                "no_card_because": trouble,
                "presets": {name: limits.to_dict() for name, limits in PRESETS.items()},
                "tools": [vars(tool) for tool in tools],
            }
        )
    else:
        show_devices(_console(False), found, trouble, tools)


@app.command("validate")
@reports_errors
def validate_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .py or .cu file that flashgen emitted.")],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Where to run it; this machine's card, or else the file's own card emulated.",
        ),
    ] = None,
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize", help="Under AddressSanitizer (emulated card) or compute-sanitizer (CUDA card)."
        ),
    ] = False,
    seed: Seed = 0,
    json_: Json = False,
) -> None:
    """Proves an emitted kernel correct again, on this machine, against float64.

    Example: [bold]flashgen validate best.py --device sim:gtx-1080[/bold]

    Of a module that holds several, each.
    """
    from .prove import prove_each

    proofs = []
    for proof in prove_each(file, device=device, sanitize=sanitize, seed=seed):
        proofs.append(proof.to_dict())
        masks = ", ".join(f"{mask} mask {error:.1e}" for mask, error in proof.errors.items())
        of_several = f", {proof.kernel}," if proof.kernel else ""
        _console(json_).print(
            f"{proof.file}{of_several} is correct on {proof.device}: {proof.how}"
            f"{', sanitized' if proof.sanitized else ''}, {proof.cases} cases, largest error per head "
            f"{masks} ({proof.bound:.0e} allowed)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if json_:
        _print_json(proofs[0] if len(proofs) == 1 else proofs)


@app.command("ladder")
@reports_errors
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
            "--limit", min=0.001, metavar="SECONDS", help="Longest launch that is made; then scaled."
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
    from ..gen.families.ladder import STEPS
    from .devices import resolve
    from .ladder import CASES, LIMIT_S, parse_names, run_ladder
    from .ladderview import ladder_tables, row_line

    case_names = parse_names(cases, list(CASES), "case")
    step_names = parse_names(steps, list(STEPS), "step")
    console = _console(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with _ends_softly(say) as stop:
        result = run_ladder(
            resolve(device),
            case_names,
            step_names,
            out=out,
            with_torch=torch,
            limit_s=LIMIT_S if limit is None else limit,
            seed=seed,
            jobs=jobs,
            on_row=lambda row: say(row_line(row)),
            stop=stop,
        )
    if json_:
        _print_json(result.to_dict())
        return
    for table in ladder_tables(result):
        console.print(table)
    for note in result.notes:
        say(note)


@app.command("bench")
@takes_shape
@reports_errors
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
    from . import benchrun
    from .bench import BenchOptions, contender_names, run_bench
    from .benchview import row_line, show
    from .devices import resolve
    from .ladder import parse_names
    from .suites import SUITES, Workload, workload_named, workloads

    console = _console(json_)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if from_:
        if suites or shapes or shape.is_given or errors:
            raise UsageError("--from shows a run as it is; leave suites, shapes and --errors out")
        run = benchrun.merged([benchrun.read(path) for path in from_])
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
        with _ends_softly(say) as stop:
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
                save=lambda run: benchrun.write(target, run),
                stop=stop,
            )
        to = target
    if reference is not None:
        run = benchrun.with_reference(run, reference)
    if to is not None:
        benchrun.write(to, run)
    _show_bench(run, say, to, readme or [], plots)
    if json_:
        _print_json(json.loads(benchrun.as_json(run)))
        return
    show(console, run)


def _show_bench(
    run: BenchRun, say: Callable[[str], None], written: Path | None, readme: list[Path], plots: Path | None
) -> None:
    """Fills Markdown files and draws plots of a run."""
    from .benchview import fill_file

    if written is not None:
        say(f"wrote {written}")
    for path in readme:
        fill_file(path, run)
        say(f"filled {path}")
    if plots is not None:
        from .benchplot import write_plots

        for path in write_plots(plots, run):
            say(f"wrote {path}")
