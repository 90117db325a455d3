"""The command that writes a kernel, or a module of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError, checked
from ..request import Shapes
from .flags import (
    DEFAULT_OUT,
    NO_SHAPES,
    Family,
    ForMaybeDevice,
    Jobs,
    Json,
    Out,
    Settings,
    Storage,
    takes,
    takes_shapes,
)
from .terminal import console_for, print_json, waiting

if TYPE_CHECKING:
    from ..shelf.bundle import Pick
    from ..shelf.emit_request import EmitRequest
    from ..shelf.emitting import Emitted


@dataclass(frozen=True, kw_only=True)
class EmitWords:
    """The options of `flashgen emit` as they are typed."""

    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write: best.cu or best.py.")]
    kernels: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KERNEL]...", help="These, as `list` names them, or their files."),
    ] = None
    device: ForMaybeDevice = None
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help="For a card that need not be here: h200, or any of sm_90."
        ),
    ] = None
    shapes: Shapes = NO_SHAPES
    family: Family = None
    settings: Settings = None
    main: Annotated[
        bool,
        typer.Option("--main", help="A program that reads Q, K and V from a file and writes O to another."),
    ] = False
    cmake: Annotated[
        bool,
        typer.Option("--cmake", help="Also a header, CMakeLists.txt and an example that uses the library."),
    ] = False
    embed: Annotated[
        bool,
        typer.Option("--embed", help="Let a .py carry its kernels compiled; other cards compile the source."),
    ] = False
    storage: Storage = None
    out: Out = DEFAULT_OUT
    jobs: Jobs = None

    def request(self) -> EmitRequest:
        """Returns what the words ask for. Raises UsageError, or FlashgenError for a missing card."""
        from ...gen.families import family_named
        from ..build.compile import usable_cores
        from ..cards.names import limits_named, preset_named
        from ..shelf.emit_request import EmitRequest
        from ..shelf.targets import check_target

        check_target(self.target, native=self.main or self.cmake)
        if self.device is not None and self.preset is not None:
            raise UsageError("--device and --preset both name the card; give one")
        if self.embed and self.target.suffix != ".py":
            raise UsageError(f"--embed is for modules, and {self.target} is none; name a .py file")
        limits = None
        if self.preset is not None:
            limits = preset_named(self.preset)
        elif self.device is not None:
            limits = limits_named(self.device)
        problems = self.shapes.problems()
        name = self.family
        return EmitRequest(
            target=self.target,
            kernels=tuple(self.kernels or ()),
            shapes=self.shapes,
            problems=tuple(problems),
            limits=limits,
            family=None if name is None else checked(lambda: family_named(name)),
            settings=tuple(self.settings or ()),
            embed=(self.jobs or usable_cores()) if self.embed else 0,
            jobs=self.jobs or usable_cores(),
        )

    def again(self, picks: Sequence[Pick]) -> list[str]:
        """Returns the words that emit a module of the same kernels again: on their card, whatever is here or
        was tuned last by then."""
        from ...gen.emit.options import card_option

        words = [*(self.kernels or self.shapes.words())]
        if not self.kernels:
            kernel = picks[0].match.entry.kernel
            words.append(card_option(kernel.device, kernel.arch))
        words += [f"--family {self.family}"] if self.family is not None else []
        words += [f"--storage {self.storage}"] if self.storage is not None else []
        words += [f"--out {self.out}"] if self.out != DEFAULT_OUT else []
        return [*words, "--embed"] if self.embed else words


@takes("words", takes_shapes(EmitWords))
def emit_command(words: EmitWords, json_: Json = False) -> None:
    """Writes the best known kernel: the last tuned one, or the best for what the options ask.

    Example: [bold]flashgen emit best.py --device h200 --d 64[/bold]

    Chosen are, in this order: measured before predicted kernels, the same card before one of the same compute
    capability, what was tuned for just that, what should take the least time on it. With --set, that variant
    is rendered untuned. Of a .cu, --main makes a program and --cmake a library.

    With --suite, lists or several kernels, as in [bold]flashgen emit llm.py --suite llm[/bold], the module
    holds the best for each and calls the one that was tuned for the nearest shape. Lists without lengths,
    batch and heads, as in [bold]--d 64,128[/bold], mean all that were tuned.
    """
    from ..shelf.bundle import kernels_of
    from ..shelf.emit_request import emit_one, picks_for
    from ..shelf.emitting import emit_tuned
    from ..shelf.known_kernels import known_kernels
    from ..store.places import default_storage

    request = words.request()
    known = known_kernels(words.out, words.storage or default_storage(words.out), words.storage is not None)
    if not request.is_of_several:
        with waiting(console_for(json_), "choosing the kernel") as note:
            emitted = emit_one(request, known, note)
        _write_kernel(words, emitted, json_)
        return
    picks = picks_for(request, known)
    if len(kernels_of(picks)) > 1:
        _write_module(request, picks, words.again(picks), json_)
    else:
        emitted = emit_tuned(picks[0].match, request.target, embed=request.embed)
        _write_kernel(words, emitted, json_)


def _write_kernel(words: EmitWords, emitted: Emitted, as_json: bool) -> None:
    """Writes one kernel, and the files that make it a library."""
    from ..shelf.targets import files_beside, with_program, write_target

    target = words.target
    beside = files_beside(target, emitted) if words.cmake else {}
    write_target(target, with_program(emitted, target) if words.main else emitted.text)
    for path, text in beside.items():
        write_target(path, text)
    if as_json:
        files = {"target": str(target), **({"beside": [str(path) for path in beside]} if words.cmake else {})}
        print_json({**files, **emitted.to_dict()})
    else:
        from ..view.emitted import show_emitted

        show_emitted(console_for(False), target, emitted, list(beside))


def _write_module(request: EmitRequest, picks: list[Pick], again: list[str], as_json: bool) -> None:
    """Writes a module of several kernels, which ``again`` emits again."""
    from ..shelf.bundle import bundle, kernels_of
    from ..shelf.targets import write_target
    from ..view.emitted import show_bundle

    target, entries = request.target, kernels_of(picks)
    if target.suffix != ".py":
        raise UsageError(f"{len(entries)} kernels make a module; name the file .py, or ask for one")
    text = bundle(entries, name=target.stem, command=again, embed=request.embed)
    write_target(target, text)
    if as_json:
        kernels = [pick.to_dict() for pick in picks]
        print_json({"target": str(target), "embedded": bool(request.embed), "kernels": kernels})
    else:
        show_bundle(console_for(False), target, picks, len(text.encode()))
