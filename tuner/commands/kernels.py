"""The commands that look at kernels and cards: list, diff, devices and validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import checked
from ..request import Shapes
from .flags import (
    DEFAULT_OUT,
    NO_SHAPES,
    PAGE_SIZE,
    SEQLENS,
    VARLEN,
    Json,
    MaybeDevice,
    OfDevice,
    OfFamily,
    Out,
    Seed,
    Storage,
    lengths_asked,
    takes_filter,
)
from .terminal import console_for, print_json, waiting


@takes_filter
def list_command(
    device: OfDevice = None,
    shapes: Shapes = NO_SHAPES,
    family: OfFamily = None,
    storage: Storage = None,
    out: Out = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Lists the tuned kernels: those of the out folder, those shipped, those that only a study holds.

    Example: [bold]flashgen list --dtype bf16 --d 64,128 --causal[/bold]
    """
    from ...gen.families import family_named
    from ..cards.names import limits_named
    from ..shelf.known_kernels import known_kernels
    from ..shelf.listing import fitting, to_dict
    from ..store.places import default_storage
    from ..view.listing import show_kernels

    limits = None if device is None else limits_named(device)
    kind = None if family is None else checked(lambda: family_named(family))
    with waiting(console_for(json_), "reading the kernels there are"):
        known = known_kernels(out, storage or default_storage(out), storage is not None)
    entries = fitting(known, shapes, limits, kind)
    if json_:
        print_json([to_dict(entry) for entry in entries])
    elif entries:
        show_kernels(console_for(False), entries)
    else:
        console = console_for(False)
        why = f"none of {len(known)} fits the options" if known else "tune with `flashgen tune`"
        console.print(f"no kernels: {why}", markup=False, highlight=False)


def renew_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A card's kernels: out/nvidia_h200.")],
    json_: Json = False,
) -> None:
    """Writes the .cu and .py files of a folder's kernels anew, from their records, as emitted today.

    Example: [bold]flashgen renew out/nvidia_h200[/bold]
    """
    from ..shelf.listing import name_of
    from ..shelf.renewing import renew

    names = [name_of(entry) for entry in renew(folder)]
    if json_:
        print_json({"renewed": names})
    else:
        console = console_for(False)
        console.print(f"wrote {len(names)} kernels in {folder} anew", markup=False, highlight=False)


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
    from ..shelf.known_kernels import known_kernels
    from ..shelf.listing import compare
    from ..store.places import default_storage
    from ..view.listing import show_difference

    known = known_kernels(out, storage or default_storage(out), storage is not None)
    difference = compare(known, a, b)
    if json_:
        print_json(difference.to_dict())
    else:
        show_difference(console_for(False), difference, source=source)


def devices_command(json_: Json = False) -> None:
    """Lists the cards here, the presets and the toolchain, what is missing and how to get it.

    Example: [bold]flashgen devices --json[/bold]
    """
    from ...gen.limits import PRESETS
    from ..cards.names import cards, survey
    from ..view.devices import show_devices

    with waiting(console_for(json_), "looking for cards, compilers and libraries"):
        found, trouble = cards()
        tools = survey()
    if json_:
        print_json(
            {
                "cards": [{"spec": c.spec, "driver": c.driver, **c.limits.to_dict()} for c in found],
                "no_card_because": trouble,
                "presets": {name: limits.to_dict() for name, limits in PRESETS.items()},
                "tools": [vars(tool) for tool in tools],
            }
        )
    else:
        show_devices(console_for(False), found, trouble, tools)


def validate_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .py or .cu file that flashgen emitted.")],
    device: MaybeDevice = None,
    sanitize: Annotated[
        bool,
        typer.Option(
            "--sanitize", help="Under AddressSanitizer (emulated card) or compute-sanitizer (CUDA card)."
        ),
    ] = False,
    seed: Seed = 0,
    varlen: Annotated[str | None, VARLEN] = None,
    seqlens: Annotated[Path | None, SEQLENS] = None,
    page_size: Annotated[int | None, PAGE_SIZE] = None,
    json_: Json = False,
) -> None:
    """Proves an emitted kernel correct again, on this machine, against float64.

    Example: [bold]flashgen validate best.py --device h200[/bold]

    Of a module that holds several, each. Packed sequences have the lengths that the kernel was tuned for, or
    those of --varlen or --seqlens. What the file holds is run, as native code and with your rights: name
    files that you trust.
    """
    from ..prove.proof import prove_emitted
    from ..shelf.emitted_kernels import read_each

    lengths = lengths_asked(varlen, seqlens)
    kernels = read_each(file)
    console_for(True).print(
        f"running what {file} holds as native code on this machine, with your rights",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

    proofs = []
    console = console_for(json_)
    with waiting(console, f"reading {file}") as doing:
        for kernel in kernels:
            proof = prove_emitted(
                kernel,
                device=device,
                sanitize=sanitize,
                seed=seed,
                varlen=lengths,
                page_size=page_size,
                doing=doing,
            )
            proofs.append(proof.to_dict())
            masks = ", ".join(f"{mask} mask {error:.1e}" for mask, error in proof.errors.items())
            of_several = f", {proof.kernel}," if proof.kernel else ""
            adversarial = f" and {proof.adversarial} adversarial ones" if proof.adversarial else ""
            console.print(
                f"{proof.file}{of_several} is correct on {proof.device}: {proof.how}"
                f"{', sanitized' if proof.sanitized else ''}, {proof.cases} cases{adversarial}, largest "
                f"error per head {masks} ({proof.bound:.0e} allowed)",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if json_:
        print_json(proofs[0] if len(proofs) == 1 else proofs)
