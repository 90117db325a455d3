"""The command that writes a kernel, or a module of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked
from ..request import Shapes
from .flags import DEFAULT_OUT, NO_SHAPES, Jobs, Json, Out, Settings, Storage, takes_shapes
from .terminal import console_for, print_json

if TYPE_CHECKING:
    from ..shelf.bundle import Pick


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
    capability, few query rows or many, the same mask, the nearest lengths and number of heads. With --set,
    that variant is rendered untuned. Of a .cu, --main makes a program and --cmake a library.

    With --suite, lists or several kernels, as in [bold]flashgen emit llm.py --suite llm[/bold], the module
    holds the best for each and calls the one that was tuned for the nearest shape. Lists without lengths,
    batch and heads, as in [bold]--d 64,128[/bold], mean all that were tuned.
    """
    from ...gen.families import family_named
    from ..build.compile import usable_cores
    from ..cards.names import limits_named, preset_named
    from ..option_words import one_family, parse_settings
    from ..serving import serving_families
    from ..shelf.emitting import (
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
    from ..store.studies import default_storage

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
        from ..shelf.bundle import kernels_of, named, pick, widened

        if settings:
            raise UsageError("--set renders one variant, untuned; leave it out, or ask for one problem")
        if kernels and (shapes.words() or limits is not None or kind is not None):
            raise UsageError("the kernels are named; leave out what would choose them")
        if kernels:
            picks = named(known, kernels)
        else:
            card = limits or card_of_last(known, problems)
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
        print_json({**files, **emitted.to_dict()})
    else:
        from ..view.emitted import show_emitted

        show_emitted(console_for(False), target, emitted, list(beside))


def _emit_bundle(target: Path, picks: list[Pick], command: list[str], embed: int, as_json: bool) -> None:
    """Writes a module of several kernels. ``embed`` is as in `bundle`."""
    from ..shelf.bundle import bundle, kernels_of
    from ..shelf.emitting import write_target
    from ..view.emitted import show_bundle

    entries = kernels_of(picks)
    if target.suffix != ".py":
        raise UsageError(f"{len(entries)} kernels make a module; name the file .py, or ask for one")
    words = [*command, "--embed"] if embed else command
    text = bundle(entries, name=target.stem, command=words, embed=embed)
    write_target(target, text)
    if as_json:
        kernels = [pick.to_dict() for pick in picks]
        print_json({"target": str(target), "embedded": bool(embed), "kernels": kernels})
    else:
        show_bundle(console_for(False), target, picks, len(text.encode()))
