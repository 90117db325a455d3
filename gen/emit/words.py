"""What emitted files tell in words: what a kernel is for, how it was measured, what makes it again."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel import Kernel
from ..lengths import lengths_words
from ..problem import Problem
from ..scoring.words import feature_words, scoring_words
from .made import Made
from .options import card_option, shape_options, size_options, variant_options

WIDTH = 110
_MASKS = {False: "without a mask", True: "with a causal mask"}
#: What array libraries call a problem's type.
_DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


def dtype_name(problem: Problem) -> str:
    """Returns what array libraries call the problem's type: ``bfloat16``."""
    return _DTYPE_NAMES[problem.dtype]


def class_words(problem: Problem) -> str:
    """Returns what a kernel is made for whatever its lengths: ``f32 (tf32), head dim 192 (values 128)``."""
    precision = "" if problem.precision == "auto" else f" ({problem.precision})"
    values = "" if problem.head_dim_v == problem.head_dim else f" (values {problem.head_dim_v})"
    values = f" (latent values {problem.head_dim_v})" if problem.latent else values
    features = "" if problem.scoring.is_plain else f" with {feature_words(problem.scoring)}"
    layout = ", packed sequences" if problem.layout.is_packed else ""
    layout += f", pages of {problem.page_size} keys" if problem.page_size else ""
    layout += f", {problem.append.words}" if problem.append is not None else ""
    keys = f" beside keys of {problem.kv_dtype}" if problem.kv_dtype else ""
    made = "gradients, " if problem.backward else ""
    return f"{made}{problem.dtype}{precision}{keys}, head dim {problem.head_dim}{values}{layout}{features}"


def classes_words(made: Sequence[Made]) -> str:
    """Returns what kernels are made for: ``bf16, head dim 64, 128 and f32, head dim 192 (values 128)``."""
    classes: dict[str, dict[str, None]] = {}
    for each in made:
        kind, _, dims = class_words(each.kernel.problem).partition(", head dim ")
        classes.setdefault(kind, {})[dims] = None
    return " and ".join(f"{kind}, head dim {', '.join(dims)}" for kind, dims in classes.items())


def _shape(problem: Problem) -> str:
    heads = f"{problem.num_q_heads} heads"
    if problem.num_kv_heads != problem.num_q_heads:
        heads = f"{problem.num_q_heads} query and {problem.num_kv_heads} key/value heads"
    lengths = f"{problem.seqlen_q} rows"
    if problem.seqlen_k != problem.seqlen_q:
        lengths = f"{problem.seqlen_q} query and {problem.seqlen_k} key rows"
    lengths += f", {lengths_words(problem.varlen)}" if problem.varlen else ""
    lengths += f", pages of {problem.page_size}" if problem.page_size else ""
    lengths += f", {problem.append.words}" if problem.append is not None else ""
    return f"batch {problem.batch}, {heads}, {lengths}"


def mask_words(problem: Problem) -> str:
    """Returns which masks and changes of scores a kernel is tuned with: ``with a causal mask``, ``with a
    causal mask, soft cap 30``."""
    if problem.scoring.is_plain:
        return _MASKS[problem.causal]
    return f"with {'a causal mask, ' if problem.causal else ''}{scoring_words(problem.scoring)}"


def summary(kernel: Kernel, device: str) -> str:
    """Returns what a kernel was made for, and what it serves all the same."""
    problem = kernel.problem
    either = "either mask" if problem.scoring.is_plain else "the causal mask or none beside"
    return (
        f"For {device} ({kernel.sm}) at {_shape(problem)}, {mask_words(problem)}. Serves any batch, "
        f"number of heads, lengths and strides, grouped-query heads, and {either}.{_arithmetic(kernel)}"
    )


def _arithmetic(kernel: Kernel) -> str:
    """What a reader must know of how float32 is multiplied; empty where it is plainly."""
    match kernel.variant.float32_products(kernel.problem):
        case "3xf16" if kernel.problem.backward:
            return (
                " Tensor cores multiply: each float32 product is three of f16, of the factors' upper and "
                "lower parts. Elements below 2^-14 of the largest that shares a power of two with them, of "
                "their row or of their tile of rows, lose bits."
            )
        case "3xf16":
            return (
                " Tensor cores multiply: each float32 product is three of f16, of the factors' upper and "
                "lower parts. Rows for which that is less accurate than float32, as beside elements 2^16 "
                "times as large, are computed again in double precision, which is slow."
            )
        case "tf32":
            return (
                " Tensor cores multiply, and round float32 to TF32's eleven bits: errors up to "
                f"{kernel.problem.tolerance:.0e} are within its class."
            )
        case "3xtf32":
            return (
                " Tensor cores multiply: each float32 product is three of TF32, of the factors' upper and "
                "lower parts, as accurate as float32. Rows beyond their range are computed again in double "
                "precision, which is slow."
            )
    return ""


def figures(made: Made) -> str:
    """Returns a kernel's measurement in words."""
    kernel, device, m = made.kernel, made.device, made.measurement
    if not m:
        told = f"Not measured: emitted for {device}, of a variant that was chosen, not tuned."
        return f"{told} {_built(made.build)}"
    predicted = bool(m.get("predicted"))
    where = f"{device}, {_shape(kernel.problem)}, {mask_words(kernel.problem)}"
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


def _built(build: Mapping[str, Any] | None) -> str:
    """What a compiler said of a kernel that was not run."""
    if build is None:
        return "Not built either: it may spill registers."
    spilled = f"{build['spill_bytes']} bytes spilled" if build["spill_bytes"] else "none spilled"
    return f"Built by {build['toolkit']}: {build['registers']} registers per thread, {spilled}."


def figures_of_many(made: Sequence[Made]) -> str:
    """Returns how the times of several kernels came about."""
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


def listing(made: Sequence[Made]) -> str:
    """Returns the kernels in a table of text."""
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


def needs(made: Sequence[Made], *, embedded: bool, thin: bool) -> str:
    """Returns what a module of the kernels needs of a machine, in words."""
    maps = any(launch.tensor_maps for each in made for launch in each.kernel.launches)
    compiler = f"a CUDA compiler{', 12.5 or newer' if maps else ''}: nvcc, or the NVRTC that PyTorch brings"
    what = "a kernel is compiled by its first call" if len(made) > 1 else "the first call compiles"
    forward = not any(each.kernel.problem.backward for each in made)
    rest = "(and keeps the result). Make that call before capturing a CUDA graph."
    rest += " Forward only." if forward else ""
    driver = "Needs an NVIDIA driver for CUDA 12 or newer"
    if embedded:
        archs = " and ".join(dict.fromkeys(each.kernel.sm for each in made))
        carried = "Kernels are in it as compiled" if len(made) > 1 else "The kernel is in it as compiled"
        told = (
            f"{driver} and numpy. {carried} for {archs}; for other cards the first call compiles the source "
            f"{rest} That takes {compiler}."
        )
    elif thin:
        told = (
            f"{driver}, flashgen and {compiler}; {what} the .cu beside it {rest} `flashgen emit` makes a "
            "module of it that stands alone."
        )
    else:
        told = f"{driver}, numpy and {compiler}; {what} {rest}"
    return wrap(told)


def regenerating(made: Made, file: str, width: int = WIDTH) -> str:
    """Returns the command that emits a kernel into ``file`` again, measured where that is known."""
    problem, variant = made.kernel.problem, made.kernel.variant
    options = [card_option(made.device, made.kernel.arch), *shape_options(problem), *size_options(problem)]
    return shell([f"flashgen emit {file}", *options, *variant_options(variant)], width)


def building(kernel: Kernel, file: str) -> str:
    """Returns the commands that build a kernel's ``file``, with the mask it was tuned with or the other."""
    none = "no mask" if kernel.problem.scoring.is_plain else "no causal mask"
    other = "the causal mask" if not kernel.problem.causal else none
    return (
        f"    nvcc -std=c++17 -O3 -ftz=true {architecture_option(kernel.sm)} -c {file}\n"
        f"    (-DFLASHGEN_CAUSAL={int(not kernel.problem.causal)} builds it with {other})"
    )


def architecture_option(sm: str) -> str:
    """Returns nvcc's option for one architecture."""
    if sm.endswith("a"):
        return f"-gencode arch={sm.replace('sm', 'compute')},code={sm}"
    return f"-arch={sm}"


def shell(words: Sequence[str], width: int = WIDTH) -> str:
    """Returns a command, its first word on a line of its own, indented, in lines that a shell joins."""
    command, *options = words
    if not options:
        return f"    {command}"
    # An option and its value stay on one line.
    unbroken = " ".join(option.replace(" ", "\0") for option in options)
    lines = [command, *wrap(unbroken, width - 10).split("\n")]
    return " \\\n".join(f"{'        ' if i else '    '}{line}" for i, line in enumerate(lines))


def _time(median_us: float) -> str:
    return f"{median_us / 1000:.4g} ms" if median_us >= 1000 else f"{median_us:.4g} us"


def wrap(text: str, width: int = WIDTH) -> str:
    """Returns a text in lines of that width; a number and its unit stay together."""
    unbroken = re.sub(r"(?<=\d) (?=ms|us|%|TFLOP/s)", "\0", text)
    lines = textwrap.wrap(unbroken, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
