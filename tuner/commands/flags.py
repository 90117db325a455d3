"""The options that commands share, as Typer wants them declared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ..errors import UsageError
from ..request import Shape, Shapes

T = TypeVar("T")

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
        help="How f32 is multiplied: auto (accurate to f32, whichever is fastest; the default), ieee, "
        "3xtf32, 3xf16 or tf32 (eleven bits).",
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
OfDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Of this card: 0, sim:gtx-1080 or a preset's name."),
]
OfFamily = Annotated[str | None, typer.Option("--family", metavar="NAME", help="Of this family.")]
StudyName = Annotated[
    str | None,
    typer.Option("--study", metavar="NAME", help="The study; else the last used that the options fit."),
]


def finite(value: float | None) -> float | None:
    """Returns an option's number; raises typer.BadParameter for one that is none or has no end."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


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
            "3xtf32, 3xf16 or tf32 (eleven bits).",
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


def parse_list(option: str, text: str | None, parse: Callable[[str], T]) -> tuple[T, ...]:
    """Returns the values of ``a,b,c``, each once; none where the option was not given. Raises UsageError."""
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is no whole number nor a list of them, as in {option} 64,128"
        ) from None


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


def takes(
    name: str, make: Callable[..., Any], command_class: type[TyperCommand] = TyperCommand
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of ``make`` where it declares its argument ``name``.

    ``command_class`` is what parses them. ``make`` may be a dataclass whose fields are options, or what this
    function made of one, which then has the options of both.
    """
    options = inspect.signature(make, eval_str=True).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        declared = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in declared.parameters.values():
            parameters += options.values() if parameter.name == name else [parameter]
        # Whatever order is declared, by name is how typer calls.
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]

        def run(**given: Any) -> Any:
            made = make(**{option: given.pop(option) for option in options})
            return command(**{name: made}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        # typer reads one or the other, depending on its version.
        run.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.command_class = command_class  # type: ignore[attr-defined]
        return run

    return decorate


takes_shape = takes("shape", _shape)
takes_shapes = takes("shapes", _shapes, ManyCommand)
