"""The options of the command line: each that several commands know is declared here, once.

An option that one command alone knows is declared where that command is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...gen.append import Append
from ...gen.lengths import parse_lengths, read_lengths
from ..asked_scoring import parse_scoring
from ..errors import UsageError, checked
from ..request import Shapes
from .parsing import BOTH_MASKS

T = TypeVar("T")

DEFAULT_OUT = Path("out")
NO_SHAPES = Shapes()
MAX_SEED = 2**32 - 1
#: Written out: importing the families takes longer than all of `--help`.
FAMILY_NAMES = "simt, mma, wgmma, latent, ladder, simt-backward, mma-backward, wgmma-backward"


# -- cards, families and their parameters --------------------------------------------------------------------

_CARD = "a CUDA card here (0) or a card by its name (h100), which is emulated"


def _device(help_text: str, metavar: str = "DEVICE") -> Any:
    return typer.Option("--device", metavar=metavar, help=help_text)


DeviceOption = Annotated[str, _device(f"Where to run: {_CARD}.")]
Devices = Annotated[
    str,
    _device(f"Where to run: {_CARD}; several as in 0,1,2; or all that are here (all).", metavar="DEVICES"),
]
MaybeDevice = Annotated[
    str | None, _device(f"Where to run: {_CARD}. By default the card here, else the file's own, emulated.")
]
ForDevice = Annotated[str, _device("For which card: one here (0), or any by its name (h100).")]
OfDevice = Annotated[
    str | None, _device("Of this card alone: one here (0), or any by its name (h100, sim:h100).")
]
EachDevice = Annotated[
    str | None, _device(f"Where to run: {_CARD}. By default one for each family, emulated.")
]
ForMaybeDevice = Annotated[
    str | None,
    _device("For which card: one here (0), or any by its name (h100). By default the last tuned on."),
]


def _family(help_text: str) -> Any:
    return typer.Option("--family", metavar="NAME", help=f"{help_text}: {FAMILY_NAMES}.")


Families = Annotated[
    list[str] | None, _family("The kernel family; repeatable; by default all that serve compete")
]
Family = Annotated[str | None, _family("The kernel family; by default one that serves")]
OfFamily = Annotated[str | None, _family("Of this kernel family alone")]
OfFamilies = Annotated[list[str] | None, _family("Of this kernel family alone; repeatable")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Hold a parameter of the family; repeatable."),
]


# -- trials, files and the run itself ------------------------------------------------------------------------


def _seed(value: int) -> int:
    if value > MAX_SEED:
        raise typer.BadParameter(f"{value} is not in the range 0<=x<={MAX_SEED}.")
    return value


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
    int | None,
    typer.Option("--jobs", min=1, metavar="COUNT", help="Processes at work; as many as cores by default."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0.01,
        callback=finite,
        metavar="NUMBER",
        help="Minutes after which nothing more is begun.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, metavar="NUMBER", callback=_seed, help="Seed of the search and of the test data."
    ),
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


# -- the problem ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ShapeOption:
    """An option that says what the problem is: what it means, and its default where a problem is made."""

    flags: tuple[str, ...]
    metavar: str
    parse: Callable[[str], Any]
    meaning: str
    default: str = ""
    panel: str = "Options"


#: The panel of help of what tells where sequences lie and how long they are.
SEQUENCES_PANEL = "Packed sequences and pages"

#: By the field of `Shapes` that each fills; `causal` stands apart, for it is a flag.
SHAPE_OPTIONS = {
    "suites": _ShapeOption(
        ("--suite",),
        "NAMES",
        str,
        "The problems of a suite (report, gpt2, fp32, llm, eight, odd, decode, masks, varlen, few, paged, "
        "mla, backward) that the options below fit",
    ),
    "dtype": _ShapeOption(("--dtype",), "NAMES", str, "Data type: f32, f16, bf16 or e4m3", "f32"),
    "kv_dtype": _ShapeOption(
        ("--kv-dtype",),
        "NAMES",
        str,
        "Data type of keys and values where it is another: e4m3, with a scale for each of their heads",
    ),
    "precision": _ShapeOption(
        ("--precision",),
        "NAMES",
        str,
        "How f32 is multiplied: auto (accurate to f32, whichever is fastest), ieee, 3xtf32, 3xf16 or tf32 "
        "(eleven bits); of e4m3: auto, or eight (weights of eight bits as well)",
        "auto",
    ),
    "head_dim": _ShapeOption(("--d", "--head-dim"), "NUMBERS", int, "Head dim, 1 to 256", "64"),
    "head_dim_v": _ShapeOption(("--dv", "--head-dim-v"), "NUMBERS", int, "Head dim of the values", "as --d"),
    "batch": _ShapeOption(("--batch",), "NUMBERS", int, "Batch size", "4"),
    "heads": _ShapeOption(("--heads",), "NUMBERS", int, "Query heads", "16"),
    "kv_heads": _ShapeOption(
        ("--kv-heads",), "NUMBERS", int, "Key/value heads, a divisor of --heads", "as many"
    ),
    "seqlen": _ShapeOption(("--seqlen",), "NUMBERS", int, "Length of queries and keys", "4096"),
    "seqlen_q": _ShapeOption(("--seqlen-q",), "NUMBERS", int, "Length of the queries alone"),
    "seqlen_k": _ShapeOption(("--seqlen-k",), "NUMBERS", int, "Length of keys and values alone"),
    "page_size": _ShapeOption(
        ("--page-size",),
        "NUMBERS",
        int,
        "Keys and values lie in a cache of pages of so many keys, which a table lists",
        panel=SEQUENCES_PANEL,
    ),
}


@dataclass(frozen=True)
class _ScoringOption:
    """An option that asks for a mask or a change of scores; ``name`` is `parse_scoring`'s argument."""

    name: str
    flag: str
    metavar: str
    kind: Any
    meaning: str


#: The panel of help that they have.
SCORING_PANEL = "Masks and scores"
#: One value each, which all problems of lists have.
SCORING_OPTIONS = (
    _ScoringOption(
        "window",
        "--window",
        "LEFT,RIGHT",
        str,
        "How many keys a row sees before and after its place, as in 127,0; `all` without a limit, as the "
        "right side alone left out; 127,0,4 shows the first 4 keys to all.",
    ),
    _ScoringOption("chunk", "--chunk", "COUNT", str, "Rows see keys of their own chunk of so many."),
    _ScoringOption(
        "prefix", "--prefix", "COUNT", str, "With --causal: all rows see so many first keys, or fewer."
    ),
    _ScoringOption("lengths", "--lengths", "", bool, "Each batch has a number of keys of its own."),
    _ScoringOption(
        "documents", "--documents", "COUNT", str, "Rows see keys of their own document, of about so many."
    ),
    _ScoringOption(
        "dilation", "--dilation", "COUNT", str, "Rows see keys at distances that are multiples of this."
    ),
    _ScoringOption(
        "tree", "--tree", "", bool, "Rows are a tree's nodes, each with a word of bits of those it sees."
    ),
    _ScoringOption("softcap", "--softcap", "NUMBER", str, "Scores s become n tanh(s / n)."),
    _ScoringOption("alibi", "--alibi", "", bool, "Slopes times distances are subtracted (ALiBi)."),
    _ScoringOption(
        "bias",
        "--bias",
        "[DTYPE]",
        str,
        "A tensor is added: f32, f16 or bf16, else of the problem's type; u8: a boolean mask.",
    ),
    _ScoringOption("sinks", "--sinks", "", bool, "Each head has a logit in the denominator alone."),
    _ScoringOption(
        "mask", "--mask", "EXPR", str, "True where row q sees key k, as in 'doc\\[b, q] == doc\\[b, k]'."
    ),
    _ScoringOption(
        "score", "--score", "EXPR", str, "Takes the score's place, as in 'score + table\\[h, q - k]'."
    ),
    _ScoringOption(
        "buffers",
        "--buffer",
        "NAME=DTYPE",
        list[str],
        "An array's type in them, else f32 in a score and i32 in a mask; repeatable.",
    ),
    _ScoringOption(
        "scalars",
        "--scalar",
        "NAME=NUMBER",
        list[str],
        "A number in them, and what to tune it for; repeatable.",
    ),
)


#: What says how long packed sequences are.
VARLEN = typer.Option(
    "--varlen",
    metavar="LENGTHS",
    help="Packed sequences, --batch of them, and the lengths to tune and time with: same, uniform:512-4096 "
    "or, queries and keys apart, uniform:1-16/uniform:512-4096; drawn the same each time.",
    rich_help_panel=SEQUENCES_PANEL,
)
SEQLENS = typer.Option(
    "--seqlens",
    metavar="FILE",
    help="The same with lengths of a file: a line each of one number, or of two (queries, keys).",
    rich_help_panel=SEQUENCES_PANEL,
)


#: What asks that a call writes new keys and values.
APPEND = typer.Option(
    "--append",
    help="A call writes new keys and values behind those that are in the caches, and attends to them, too.",
    rich_help_panel=SEQUENCES_PANEL,
)
ROTARY = typer.Option(
    "--rotary",
    metavar="PAIRS:COLUMNS",
    help="With --append: so many first columns of new keys and of queries are rotated by their positions, in "
    "pairs of both halves (halves:64) or of neighbours (interleaved:64).",
    rich_help_panel=SEQUENCES_PANEL,
)
PAGE_SIZE = typer.Option(
    *SHAPE_OPTIONS["page_size"].flags,
    metavar="NUMBER",
    help="The same caches with pages of so many keys, where the kernel takes others than it was tuned for.",
    rich_help_panel=SEQUENCES_PANEL,
)


LATENT = typer.Option(
    "--latent",
    help="Latent attention: values are the first columns of keys; --d 576 --dv 512 --kv-heads 1 by default.",
    rich_help_panel=SEQUENCES_PANEL,
)


#: What asks for gradients.
BACKWARD = typer.Option(
    "--backward", help="Gradients of queries, keys and values: what training computes after the outputs."
)


def _shape_parameters(
    *, filters: bool, names: Collection[str] = tuple(SHAPE_OPTIONS)
) -> Iterator[inspect.Parameter]:
    """The problem's options as parameters. ``filters``: they choose among what there is, so that what is not
    given fits any; else they make problems, of defaults where not given. ``names``: of those alone."""

    def parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )

    for name, each in SHAPE_OPTIONS.items():
        if name not in names:
            continue
        default = f"; {each.default} by default" if each.default and not filters else ""
        told = f"{each.meaning}{default}."
        option = typer.Option(*each.flags, metavar=each.metavar, help=told, rich_help_panel=each.panel)
        yield parameter(name, str | None, None, option)
    told = "With or without the causal mask, aligned bottom-right; `--causal both` means either."
    yield parameter("causal", bool | None, None, typer.Option("--causal/--no-causal", help=told))
    yield parameter("both_masks", bool, False, typer.Option(BOTH_MASKS, hidden=True))
    yield parameter("backward", bool, False, BACKWARD)
    yield parameter("latent", bool, False, LATENT)
    yield parameter("varlen", str | None, None, VARLEN)
    yield parameter("seqlens", Path | None, None, SEQLENS)
    yield parameter("append", bool, False, APPEND)
    yield parameter("rotary", str | None, None, ROTARY)
    for each in SCORING_OPTIONS:
        option = typer.Option(
            each.flag, metavar=each.metavar or None, help=each.meaning, rich_help_panel=SCORING_PANEL
        )
        kind, default = (bool, False) if each.kind is bool else (each.kind | None, None)
        yield parameter(each.name, kind, default, option)


def shapes_of(*, causal: bool | None = None, both_masks: bool = False, **given: Any) -> Shapes:
    """Returns the problems that the options' texts mean. Raises UsageError for what none can be."""
    lists = {
        name: parse_list(each.flags[0], given.get(name), each.parse) for name, each in SHAPE_OPTIONS.items()
    }
    masks = (False, True) if both_masks else () if causal is None else (causal,)
    scoring = parse_scoring(**{each.name: given[each.name] for each in SCORING_OPTIONS if each.name in given})
    varlen = lengths_asked(given.get("varlen"), given.get("seqlens"))
    append = append_asked(given.get("append", False), given.get("rotary"))
    return Shapes(
        causal=masks,
        varlen=varlen,
        append=append,
        latent=bool(given.get("latent")),
        backward=bool(given.get("backward")),
        scoring=scoring,
        **lists,
    )


def append_asked(append: bool, rotary: str | None) -> Append | None:
    """Returns what the two options say of new keys and values. Raises UsageError."""
    if rotary is not None and not append:
        raise UsageError(
            f"--rotary {rotary} rotates keys that a call appends, and queries with them; add --append, or "
            "leave --rotary out for keys that are rotated already"
        )
    return checked(lambda: Append.parsed(rotary or "")) if append else None


def lengths_asked(text: str | None, file: Path | None) -> str | None:
    """Returns what the two options say of packed sequences' lengths. Raises UsageError."""
    if text is not None and file is not None:
        raise UsageError(f"--varlen {text} and --seqlens {file} both say how long sequences are; give one")
    if file is None:
        return None if text is None else checked(lambda: parse_lengths(text))
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--seqlens: {file} cannot be read: {error}") from error
    return checked(lambda: read_lengths(content, str(file)))


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


# -- giving commands options ---------------------------------------------------------------------------------


def takes(
    name: str, make: Callable[..., Any], options: Mapping[str, inspect.Parameter] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of ``make`` where it declares its argument ``name``.

    ``make`` may be a dataclass whose fields are options, or what this function made of one, which then has
    the options of both. ``options`` are its parameters where its signature does not say them.
    """
    options = options or inspect.signature(make, eval_str=True).parameters

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
        return run

    return decorate


def _takes_shapes(**how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    parameters = {each.name: each for each in _shape_parameters(**how)}
    return takes("shapes", shapes_of, parameters)


#: The problems to make, and the same for commands that have words of their own for suites.
takes_shapes, takes_shapes_alone = (
    _takes_shapes(filters=False),
    _takes_shapes(filters=False, names=[name for name in SHAPE_OPTIONS if name != "suites"]),
)
#: Which of what there is.
takes_filter = _takes_shapes(filters=True)
#: Which classes of problems, whatever their sizes.
takes_classes = _takes_shapes(filters=True, names=("dtype", "precision", "head_dim"))
