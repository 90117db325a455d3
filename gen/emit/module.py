"""What a user takes away: a kernel as a .cu file and as a Python module, each standing alone.

Both are deterministic: they say what was measured where, never when.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import format_groups
from ..kernel import Kernel
from ..problem import FEW_QUERIES, ITEM_BYTES, Problem
from ..render import environment, shape_options

WIDTH = 110
_MASKS = {False: "without a mask", True: "with a causal mask"}


@dataclass(frozen=True)
class Element:
    """A dtype as the array libraries know it: its name, what the CUDA array interface calls it, the method of
    torch that converts to it, and what a few of them are called."""

    name: str
    typestr: str
    method: str
    plural: str


#: The array interface has no name for bfloat16; the emitted modules' own memory goes by this one.
_ELEMENTS = {
    "f32": Element("float32", "<f4", "float", "floats"),
    "f16": Element("float16", "<f2", "half", "elements"),
    "bf16": Element("bfloat16", "bfloat16", "bfloat16", "elements"),
    "e4m3": Element("float8_e4m3fn", "float8_e4m3fn", "", "elements"),
}


def emit_cuda(kernel: Kernel, *, device: str, measurement: Mapping[str, Any] | None = None) -> str:
    """The kernel's source with its figures in the header comment.

    ``device`` names the card, ``measurement`` is as in `emit_module`.
    """
    figures = _figures(kernel, device, measurement)
    paragraph = textwrap.indent(_wrap(figures, WIDTH - 3), "// ")
    head, marker, tail = kernel.source.partition("// Build:")
    if not marker:
        return f"{paragraph}\n\n{kernel.source}"
    return f"{head}{paragraph}\n//\n{marker}{tail}"


@dataclass(frozen=True)
class Made:
    """A kernel, the card it is for, and how fast it was there, as `emit_module` takes them."""

    kernel: Kernel
    device: str
    measurement: Mapping[str, Any] | None = None


def emit_module(
    kernel: Kernel,
    *,
    device: str,
    measurement: Mapping[str, Any] | None = None,
    cubins: Mapping[bool, bytes] | None = None,
) -> str:
    """A Python module around the kernel: its data, its source and ``attention(q, k, v, ...)``.

    ``device`` names the card. ``measurement`` is plain data: ``median_us``, ``spread``, ``tflops``,
    ``registers``, ``occupancy``, ``error``, ``predicted``, ``driver``, ``toolkit``, ``flashgen`` and ``seed``
    are told in words, and all of it but the single times (``times_us``) is carried as ``MEASUREMENT``. None:
    the kernel was not measured. ``cubins``, by mask, are carried along, for which its own cards need no
    compiler.
    """
    values = _values(Made(kernel, device, measurement))
    embedded = "" if cubins is None else kernel.sm
    return _render(
        **values,
        many=False,
        n=_names(kernel.problem),
        problem=kernel.problem,
        operator=f"{kernel.entry}_{kernel.digest[:8]}",
        title=f"Flash attention for NVIDIA GPUs: {class_words(kernel.problem)}.",
        tune=" ".join(["flashgen tune", *_class_options(kernel.problem)]),
        summary=_wrap(_summary(kernel, device)),
        figures=_wrap(_figures(kernel, device, measurement)),
        regenerate=_regenerate(kernel),
        source_literal=source_literal(kernel.source),
        embedded=embedded,
        needs=_needs(bool(kernel.launch.tensor_maps), embedded, False),
        cubins_literal="" if cubins is None else _cubins_literal(cubins),
    )


def emit_many(
    made: Sequence[Made],
    *,
    name: str,
    command: Sequence[str],
    cubins: Mapping[tuple[str, bool], bytes] | None = None,
) -> str:
    """A module of several kernels, of which ``attention(q, k, v, ...)`` calls the one that was tuned for the
    arrays' shapes, or the nearest.

    ``name`` is the module's, ``command`` what emits it again, a word and its value an entry. ``cubins``, by a
    kernel's digest and mask, are carried along.

    Raises:
        ValueError: there are fewer than two kernels, two of one problem, or two precisions of one dtype.
    """
    names = [each.kernel.problem.name for each in made]
    if len(names) < 2:
        raise ValueError(f"a module of several kernels was asked for with {len(names)}")
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(f"two kernels were tuned for {', '.join(twice)}; give one of each")
    scaled = [each.kernel.problem.name for each in made if each.kernel.problem.has_scales]
    if scaled:
        raise ValueError(
            f"{scaled[0]} takes scales, which calls of several kernels do not; make a module of it alone"
        )
    for dtype in dict.fromkeys(each.kernel.problem.dtype for each in made):
        classes = {each.kernel.problem.precision for each in made if each.kernel.problem.dtype == dtype}
        if len(classes) > 1:
            raise ValueError(
                f"a call does not say which precision of {dtype} it wants, and there are kernels of "
                f"{', '.join(sorted(classes))}; make a module of each"
            )
    kernels = [_values(each) | {"problem": each.kernel.problem} for each in made]
    launches = [each.kernel.launch for each in made]
    embedded = " and ".join(dict.fromkeys(each.kernel.sm for each in made)) if cubins else ""
    sources = {_source_key(each.kernel): each.kernel for each in made}
    digest = hashlib.sha256("".join(kernel.digest for kernel in sources.values()).encode()).hexdigest()
    cards = dict.fromkeys(f"{each.device} (sm_{each.kernel.arch})" for each in made)
    return _render(
        many=True,
        n=_names(None),
        name=name,
        kernels=kernels,
        dtypes=list(dict.fromkeys(each["element"].name for each in kernels)),
        few_queries=FEW_QUERIES,
        any_maps=any(launch.tensor_maps for launch in launches),
        any_heads=any(launch.heads_per_block > 1 for launch in launches),
        any_splits=any(launch.splits > 1 for launch in launches),
        any_large_clusters=any(launch.exceeds_portable_cluster for launch in launches),
        any_packed=any(launch.pack_heads for launch in launches),
        any_clusters=any(launch.cluster > 1 for launch in launches),
        any_heads_clusters=any(launch.heads_per_cluster > 1 for launch in launches),
        any_shared_heads=any(launch.pack_heads or launch.heads_per_cluster > 1 for launch in launches),
        any_max_blocks=any(launch.max_blocks for launch in launches),
        args_formats=kernels[0]["args_formats"],
        operator=f"attention_{len(made)}_{digest[:8]}",
        title=f"Flash attention for NVIDIA GPUs: {_classes_words(made)}.",
        summary=_wrap(
            f"{len(made)} kernels for {' and '.join(cards)}. Each serves any batch, number of heads, lengths "
            "and strides, grouped-query heads, and either mask; the one tuned for the nearest shape runs."
        ),
        figures=_wrap(_figures_of_many(made)),
        listed=_listed(made),
        regenerate=_shell([f"flashgen emit {name}.py", *command]),
        sources={key: source_literal(kernel.source) for key, kernel in sources.items()},
        embedded=embedded,
        needs=_needs(any(launch.tensor_maps for launch in launches), embedded, True),
        cubins={
            (key, causal): _bytes_literal(cubins[kernel.digest, causal])
            for key, kernel in sources.items()
            for causal in (False, True)
        }
        if cubins
        else {},
    )


def _needs(maps: bool, archs: str, several: bool) -> str:
    """What the module needs; empty where its template says it."""
    if not archs and not several:
        return ""
    nvcc = "nvcc 12.5 or newer" if maps else "nvcc"
    rest = (
        "(PyCUDA keeps the result in its cache). Make that call before capturing a CUDA graph. Forward only."
    )
    if not archs:
        needs = f"numpy, PyCUDA and {nvcc}; a kernel is compiled by its first call {rest}"
    else:
        carried = "Kernels are in it as compiled" if several else "The kernel is in it as compiled"
        needs = (
            f"numpy. {carried} for {archs}; for other cards the first call compiles the source, which takes "
            f"PyCUDA and {nvcc} {rest}"
        )
    return _wrap(f"Needs an NVIDIA driver for CUDA 12 or newer{',' if not archs else ' and'} {needs}")


def _render(**values: Any) -> str:
    return environment().get_template("module/module.py.jinja").render(**values)


def _values(made: Made) -> dict[str, Any]:
    """What the template asks of a kernel."""
    kernel, problem, variant = made.kernel, made.kernel.problem, made.kernel.variant
    carried = {key: value for key, value in (made.measurement or {}).items() if key != "times_us"}
    return {
        "variant": variant,
        "launch": kernel.launch,
        "symbol": kernel.symbol,
        "source_key": _source_key(kernel),
        "element": _ELEMENTS[problem.dtype],
        "output": _ELEMENTS[problem.output_dtype],
        "item_bytes": ITEM_BYTES[problem.dtype],
        "access_width": variant.access_width(problem),
        "oldest_arch": _oldest_arch(kernel),
        "only_arch": kernel.arch if variant.arch_suffix else None,
        "device": made.device,
        "args_formats": format_groups(problem),
        "tolerance": problem.tolerance,
        "problem_data": to_literal(problem.to_dict()),
        "variant_data": to_literal({"family": variant.family, **variant.to_dict()}),
        "device_data": to_literal({"name": made.device, "arch": kernel.arch}),
        "measurement_data": to_literal(carried),
    }


def _names(problem: Problem | None) -> dict[str, str]:
    """What the module's functions call the figures of a kernel: constants of a module with the one of that
    problem, fields of the kernel chosen where there are several."""
    if problem is None:
        figures = ("head_dim", "head_dim_v", "threads", "smem_bytes", "maps", "symbol", "problem")
        return {name: f"tuned.{name}" for name in (*figures, "item_bytes", "access_bytes", "can_step")} | {
            "columns": "head_dim",
            "access_bytes_of_plan": "plan.tuned.access_bytes",
            "default_scale_of_plan": "plan.tuned.default_scale",
            "dtype_of_plan": "plan.tuned.dtype, ",
        }
    figures = ("head_dim", "threads", "smem_bytes", "maps", "symbol", "problem")
    columns = "HEAD_DIM" if problem.head_dim_v == problem.head_dim else "HEAD_DIM_V"
    item_bytes = str(ITEM_BYTES[problem.dtype])
    return {name: name.upper() for name in figures} | {
        "head_dim_v": columns,
        "columns": columns,
        "item_bytes": "size" if problem.has_scales else item_bytes,
        "access_bytes": "_ACCESS_BYTES",
        "access_bytes_of_plan": "_ACCESS_BYTES",
        "default_scale_of_plan": "_DEFAULT_SCALE",
        "dtype_of_plan": "OUT_DTYPE, " if problem.has_scales else "DTYPE, ",
        "can_step": "_can_step",
    }


def class_words(problem: Problem) -> str:
    """What a kernel is made for whatever its lengths: ``f32 (tf32), head dim 192 (values 128)``."""
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f" (values {problem.head_dim_v})"
    return f"{problem.dtype}{precision}, head dim {problem.head_dim}{values}"


def dtype_name(problem: Problem) -> str:
    """What array libraries call the problem's type: ``bfloat16``."""
    return _ELEMENTS[problem.dtype].name


def source_literal(source: str) -> str:
    """``source`` as a Python string literal, raw wherever that yields exactly the same text."""
    for quote in ('"""', "'''"):
        literal = f"r{quote}{source}{quote}"
        if quote not in source and "\r" not in source and _evaluates_to(literal, source):
            return literal
    return repr(source)


def to_literal(data: Mapping[str, Any]) -> str:
    """A flat mapping as Python source, an entry a line."""
    if not data:
        return "{}"
    lines = [f"    {json.dumps(key)}: {_value(value)},\n" for key, value in data.items()]
    return "{\n" + "".join(lines) + "}"


def _value(value: Any) -> str:
    """A scalar as a formatter would write it: strings in the quotes that need fewer escapes."""
    if isinstance(value, str) and value.count('"') <= value.count("'"):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _evaluates_to(literal: str, text: str) -> bool:
    try:
        return ast.literal_eval(literal) == text
    except (SyntaxError, ValueError):
        return False


def _wrap(text: str, width: int = WIDTH) -> str:
    """In lines of that width; a number and its unit stay together."""
    unbroken = re.sub(r"(?<=\d) (?=ms|us|%|TFLOP/s)", "\0", text)
    lines = textwrap.wrap(unbroken, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _oldest_arch(kernel: Kernel) -> int | None:
    """The first compute capability with the tensor-core instructions of the source; None: it has none.
    Clusters of blocks came later."""
    if kernel.launch.splits > 1:
        return 90
    if "mma.sync" not in kernel.source:
        return None
    # What is rendered for sm_80 and newer uses the deeper products and the types that came with it.
    return 80 if kernel.arch >= 80 else 75


def _class_options(problem: Problem) -> list[str]:
    """Of the options that say which problem a kernel is made for, those of its dtype and precision."""
    return [o for o in shape_options(problem) if o.startswith(("--dtype", "--precision"))]


def _arithmetic(kernel: Kernel) -> str:
    """What a reader must know of how float32 is multiplied; empty where it is plainly."""
    if kernel.problem.dtype != "f32" or not (".tf32" in kernel.source or ".f16" in kernel.source):
        return ""
    if ".f16" in kernel.source:
        return (
            " Tensor cores multiply: each float32 product is three of f16, of the factors' upper and lower "
            "parts. That is as accurate as float32 for elements of at least 2^-14 of the largest in their "
            "tensor; smaller ones lose bits, up to 2^-37 of the largest."
        )
    if kernel.problem.precision == "tf32":
        return (
            " Tensor cores multiply, and round float32 to TF32's eleven bits: errors up to "
            f"{kernel.problem.tolerance:.0e} are within its class."
        )
    return (
        " Tensor cores multiply: each float32 product is three of TF32, of the factors' upper and lower "
        "parts, as accurate as float32."
    )


def _regenerate(kernel: Kernel) -> str:
    """The command that emits this variant again."""
    problem, variant = kernel.problem, kernel.variant
    options = [f"--preset sm_{kernel.arch}", f"--family {variant.family}", *shape_options(problem)]
    options += [f"--set {name}={str(value).lower()}" for name, value in variant.to_dict().items()]
    return _shell([f"flashgen emit {problem.name}.py", *options])


def _shell(words: Sequence[str]) -> str:
    """A command, its first word on a line of its own, indented, in lines that a shell joins."""
    command, *options = words
    if not options:
        return f"    {command}"
    # An option and its value stay on one line.
    unbroken = " ".join(option.replace(" ", "\0") for option in options)
    lines = [command, *_wrap(unbroken, WIDTH - 10).split("\n")]
    return " \\\n".join(f"{'        ' if i else '    '}{line}" for i, line in enumerate(lines))


def _source_key(kernel: Kernel) -> str:
    return kernel.digest[:8]


def _classes_words(made: Sequence[Made]) -> str:
    """``bf16, head dim 64, 128 and f32 (tf32), head dim 192 (values 128)``."""
    classes: dict[str, dict[str, None]] = {}
    for each in made:
        kind, _, dims = class_words(each.kernel.problem).partition(", head dim ")
        classes.setdefault(kind, {})[dims] = None
    return " and ".join(f"{kind}, head dim {', '.join(dims)}" for kind, dims in classes.items())


def _figures_of_many(made: Sequence[Made]) -> str:
    """How the kernels' times came about."""
    measured = [each.measurement for each in made if each.measurement]
    if not measured:
        return "Not measured: emitted of variants that were chosen, not tuned."
    predicted = [m for m in measured if m.get("predicted")]
    told = "Times are medians as measured; errors are the largest per head against float64."
    if predicted:
        which = "Times" if len(predicted) == len(measured) else f"{len(predicted)} of the times"
        told = f"{which} are predicted by a cost model, not measured."
    tools = dict.fromkeys(str(m["toolkit"]) for m in measured if "toolkit" in m)
    versions = dict.fromkeys(str(m["flashgen"]) for m in measured if "flashgen" in m)
    built = f" Built by {' and '.join(tools)}." if tools else ""
    return told + built + (f" Tuned by flashgen {' and '.join(versions)}." if versions else "")


def _listed(made: Sequence[Made]) -> str:
    """The kernels in a table of text."""
    rows = []
    for each in made:
        m = each.measurement or {}
        rows.append(
            (
                each.kernel.problem.name,
                each.kernel.variant.family,
                _time(m["median_us"]) if "median_us" in m else "",
                f"{m['tflops']:.1f} TFLOP/s" if "tflops" in m else "",
                f"{m['error']:.1e}" if "error" in m else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for row in rows:
        name, family, *numbers = row
        cells = [f"{name:{widths[0]}}", f"{family:{widths[1]}}"]
        cells += [f"{number:>{width}}" for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("    " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _bytes_literal(data: bytes) -> str:
    """Bytes, packed, as text; the module unpacks them."""
    return json.dumps(base64.b85encode(zlib.compress(data, 9)).decode())


def _cubins_literal(cubins: Mapping[bool, bytes]) -> str:
    entries = "".join(f"    {causal}: {_bytes_literal(cubins[causal])},\n" for causal in (False, True))
    return f"CUBINS: dict[bool, str] = {{\n{entries}}}"


def _shape(problem: Problem) -> str:
    heads = f"{problem.num_q_heads} heads"
    if problem.num_kv_heads != problem.num_q_heads:
        heads = f"{problem.num_q_heads} query and {problem.num_kv_heads} key/value heads"
    lengths = f"{problem.seqlen_q} rows"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"{problem.seqlen_q} query and {problem.seqlen_k} key rows"
    return f"batch {problem.batch}, {heads}, {lengths}"


def _summary(kernel: Kernel, device: str) -> str:
    problem = kernel.problem
    return (
        f"For {device} ({kernel.sm}) at {_shape(problem)}, {_MASKS[problem.causal]}. Serves any batch, "
        f"number of heads, lengths and strides, grouped-query heads, and either mask.{_arithmetic(kernel)}"
    )


def _figures(kernel: Kernel, device: str, measurement: Mapping[str, Any] | None) -> str:
    """The measurement in words."""
    if not measurement:
        return f"Not measured: emitted for {device}, of a variant that was chosen, not tuned."
    m = measurement
    predicted = bool(m.get("predicted"))
    where = f"{device}, {_shape(kernel.problem)}, {_MASKS[kernel.problem.causal]}"
    told = f"Predicted by a cost model, not measured, for {where}" if predicted else f"Measured on {where}"
    parts: list[str] = []
    if "median_us" in m:
        parts.append(f"{_time(m['median_us'])}{'' if predicted else ' (median)'}")
    if not predicted and "spread" in m:
        parts.append(f"spread {100 * m['spread']:.1f} %")
    if "tflops" in m:
        parts.append(f"{m['tflops']:.1f} TFLOP/s")
    if "registers" in m:
        parts.append(f"{m['registers']} registers per thread")
    if "occupancy" in m:
        parts.append(f"occupancy {100 * m['occupancy']:.0f} %")
    sentence = f"{told}: {', '.join(parts)}."
    if "error" in m:
        sentence += f" Largest error per head against float64: {m['error']:.1e}."
    if "toolkit" in m:
        driver = f", driver {m['driver']}" if "driver" in m and not predicted else ""
        sentence += f" Built by {m['toolkit']}{driver}."
    if "flashgen" in m:
        seed = f", seed {m['seed']}" if "seed" in m else ""
        sentence += f" Tuned by flashgen {m['flashgen']}{seed}."
    return sentence


def _time(median_us: float) -> str:
    return f"{median_us / 1000:.4g} ms" if median_us >= 1000 else f"{median_us:.4g} us"
