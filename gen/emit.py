"""What a user takes away: a kernel as a .cu file and as a Python module, each standing alone.

Both are deterministic: they say what was measured where, never when.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from .abi import ARGS_FORMAT
from .kernel import Kernel
from .problem import Problem
from .render import environment, shape_options

WIDTH = 110
#: Bound on the per-head error of each dtype's kernels against float64.
TOLERANCES = {"f32": 2e-6}
_MASKS = {False: "without a mask", True: "with a causal mask"}


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
            access_width=kernel.variant.access_width(problem),
            args_format=ARGS_FORMAT,
            tolerance=TOLERANCES[problem.dtype],
            title=f"Flash attention for NVIDIA GPUs: {problem.dtype}, head dim {problem.head_dim}.",
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
        f"For {device} (sm_{kernel.arch}) at {_shape(problem)}, {_MASKS[problem.causal]}. Serves any batch, "
        "number of heads, lengths and strides, grouped-query heads, and either mask."
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
