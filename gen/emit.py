"""What a user takes away: a kernel as a .cu file and as a Python module, each standing alone.

Both are deterministic: they say what was measured where, never when.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .abi import args_formats
from .kernel import Kernel
from .problem import ITEM_BYTES, Problem
from .render import environment, shape_options

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


def emit_module(kernel: Kernel, *, device: str, measurement: Mapping[str, Any] | None = None) -> str:
    """A Python module around the kernel: its data, its source and ``attention(q, k, v, ...)``.

    ``device`` names the card. ``measurement`` is plain data: ``median_us``, ``spread``, ``tflops``,
    ``registers``, ``occupancy``, ``error``, ``predicted``, ``driver``, ``toolkit``, ``flashgen`` and ``seed``
    are told in words, and all of it but the single times (``times_us``) is carried as ``MEASUREMENT``. None:
    the kernel was not measured.
    """
    problem, variant = kernel.problem, kernel.variant
    carried = {key: value for key, value in (measurement or {}).items() if key != "times_us"}
    values = variant.to_dict()
    return (
        environment()
        .get_template("module.py.jinja")
        .render(
            problem=problem,
            variant=variant,
            launch=kernel.launch,
            symbol=kernel.symbol,
            operator=f"{kernel.entry}_{kernel.digest[:8]}",
            element=_ELEMENTS[problem.dtype],
            output=_ELEMENTS[problem.output_dtype],
            item_bytes=ITEM_BYTES[problem.dtype],
            access_width=kernel.variant.access_width(problem),
            oldest_arch=_oldest_arch(kernel),
            only_arch=kernel.arch if variant.arch_suffix else None,
            device=device,
            args_formats=args_formats(problem),
            tolerance=problem.tolerance,
            title=f"Flash attention for NVIDIA GPUs: {class_words(problem)}.",
            tune=" ".join(["flashgen tune", *_class_options(problem)]),
            summary=_wrap(_summary(kernel, device)),
            figures=_wrap(_figures(kernel, device, measurement)),
            regenerate=_regenerate(kernel),
            problem_data=to_literal(problem.to_dict()),
            variant_data=to_literal({"family": variant.family, **values}),
            device_data=to_literal({"name": device, "arch": kernel.arch}),
            measurement_data=to_literal(carried),
            source_literal=source_literal(kernel.source),
        )
    )


def class_words(problem: Problem) -> str:
    """What a kernel is made for whatever its lengths: ``f32 (tf32), head dim 192 (values 128)``."""
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f" (values {problem.head_dim_v})"
    return f"{problem.dtype}{precision}, head dim {problem.head_dim}{values}"


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
    """The first compute capability with the tensor-core instructions of the source; None: it has none."""
    if "mma.sync" not in kernel.source:
        return None
    # What is rendered for sm_80 and newer uses the deeper products and the types that came with it.
    return 80 if kernel.arch >= 80 else 75


def _class_options(problem: Problem) -> list[str]:
    """Of the options that say which problem a kernel is made for, those of its dtype and precision."""
    return [o for o in shape_options(problem) if o.startswith(("--dtype", "--precision"))]


def _arithmetic(kernel: Kernel) -> str:
    """What a reader must know of how float32 is multiplied; empty where it is plainly."""
    if kernel.problem.dtype != "f32" or ".tf32" not in kernel.source:
        return ""
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
    """The command that emits this variant again, indented, in lines that a shell joins."""
    problem, variant = kernel.problem, kernel.variant
    options = [f"--preset sm_{kernel.arch}", f"--family {variant.family}", *shape_options(problem)]
    options += [f"--set {name}={str(value).lower()}" for name, value in variant.to_dict().items()]
    # An option and its value stay on one line.
    unbroken = " ".join(option.replace(" ", "\0") for option in options)
    lines = [f"flashgen emit {problem.name}.py", *_wrap(unbroken, WIDTH - 10).split("\n")]
    return " \\\n".join(f"{'        ' if i else '    '}{line}" for i, line in enumerate(lines))


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
