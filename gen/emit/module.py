"""Tuned kernels as a Python module: thin beside the package, or standing alone with the runtime in it.

Both are deterministic: they say what was measured where, never when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..arguments import argument_struct
from ..kernel import Kernel
from ..launch import Launch
from ..problem import Problem
from ..render import environment
from .inline import heading, import_lines, inline_runtime
from .literals import packed_literal, source_literal, to_literal
from .made import Made
from .words import (
    class_words,
    classes_words,
    figures,
    figures_of_many,
    listing,
    needs,
    regenerating,
    shell,
    summary,
    wrap,
)

#: What a module offers of its functions; of tensors with scales only the first.
_FUNCTIONS = ("attention", "explain", "register_torch", "use")
_WITHOUT_SCALES = ("register_transformers", "sdpa")


def emit_module(
    kernel: Kernel,
    *,
    device: str,
    measurement: Mapping[str, Any] | None = None,
    build: Mapping[str, Any] | None = None,
    cubins: Mapping[bool, bytes] | None = None,
    name: str | None = None,
) -> str:
    """Returns a Python module around a kernel that stands alone: data, source and ``attention(q, k, v)``.

    ``device``, ``measurement`` and ``build`` are as in `Made`. ``cubins``, by mask, are carried along, for
    which its own cards need no compiler. ``name`` is the module's, by default the problem's.
    """
    made = Made(kernel, device, measurement, build)
    carried = {} if cubins is None else {(kernel.digest, causal): cubins[causal] for causal in cubins}
    return _render([made], thin=False, cubins=carried, **_told_of_one(made, name or kernel.problem.name))


def emit_thin_module(kernel: Kernel, *, device: str, measurement: Mapping[str, Any] | None = None) -> str:
    """Returns a Python module of a kernel's data: it takes the runtime from the package, and the source from
    the .cu file beside it. ``device`` and ``measurement`` are as in `Made`."""
    made = Made(kernel, device, measurement)
    return _render([made], thin=True, cubins={}, **_told_of_one(made, kernel.problem.name))


def emit_many(
    made: Sequence[Made],
    *,
    name: str,
    command: Sequence[str],
    cubins: Mapping[tuple[str, bool], bytes] | None = None,
) -> str:
    """Returns a module of several kernels, of which ``attention(q, k, v)`` calls the one tuned for the
    arrays' shapes, or the nearest.

    ``name`` is the module's, ``command`` what emits it again, a word and its value an entry. ``cubins``, by a
    kernel's digest and mask, are carried along.

    Raises:
        ValueError: there are fewer than two kernels, two of one problem, or two precisions of one dtype.
    """
    _check_together([each.kernel.problem for each in made])
    cards = dict.fromkeys(f"{each.device} (sm_{each.kernel.arch})" for each in made)
    digests = dict.fromkeys(each.kernel.digest for each in made)
    return _render(
        made,
        thin=False,
        cubins=cubins or {},
        name=name,
        operator=f"attention_{len(made)}_{hashlib.sha256(''.join(digests).encode()).hexdigest()[:8]}",
        title=f"Flash attention for NVIDIA GPUs: {classes_words(made)}.",
        summary=wrap(
            f"{len(made)} kernels for {' and '.join(cards)}. Each serves any batch, number of heads, lengths "
            "and strides, grouped-query heads, and either mask; the one tuned for the nearest shape runs."
        ),
        figures=wrap(figures_of_many(made)),
        listing=listing(made),
        regenerate=shell([f"flashgen emit {name}.py", *command]),
    )


def _check_together(problems: Sequence[Problem]) -> None:
    """Raises ValueError for problems whose kernels make no module of several."""
    names = [problem.name for problem in problems]
    if len(names) < 2:
        raise ValueError(f"a module of several kernels was asked for with {len(names)}")
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise ValueError(f"two kernels were tuned for {', '.join(twice)}; give one of each")
    scaled = [problem.name for problem in problems if problem.has_scales]
    if scaled:
        raise ValueError(
            f"{scaled[0]} takes scales, which calls of several kernels do not; make a module of it alone"
        )
    for dtype in dict.fromkeys(problem.dtype for problem in problems):
        precisions = {problem.precision for problem in problems if problem.dtype == dtype}
        if len(precisions) > 1:
            raise ValueError(
                f"a call does not say which precision of {dtype} it wants, and there are kernels of "
                f"{', '.join(sorted(precisions))}; make a module of each"
            )


def _told_of_one(made: Made, name: str) -> dict[str, str]:
    """What the template is told of a module with one kernel, as `emit_many` tells it of several."""
    kernel = made.kernel
    return {
        "name": name,
        "operator": f"{kernel.entry}_{kernel.digest[:8]}",
        "title": f"Flash attention for NVIDIA GPUs: {class_words(kernel.problem)}.",
        "summary": wrap(summary(kernel, made.device)),
        "figures": wrap(figures(made)),
        "listing": "",
        "regenerate": regenerating(made, f"{name}.py"),
    }


def _render(
    made: Sequence[Made], *, thin: bool, cubins: Mapping[tuple[str, bool], bytes], **told: str
) -> str:
    problem, several = made[0].kernel.problem, len(made) > 1
    has_scales = problem.has_scales
    arguments = argument_struct(problem.operation, problem.layout, has_scales=has_scales)
    kernels = {_source_key(each): each.kernel for each in made}
    imports, code = _imports_and_code(made, thin)
    functions = _FUNCTIONS if has_scales else (*_FUNCTIONS, *_WITHOUT_SCALES)
    data = (
        ["KERNELS", "SOURCES"]
        if several
        else ["DEVICE", "KERNELS", "MEASUREMENT", "PROBLEM", "SOURCE", "VARIANT"]
    )
    classes = [] if thin else ["Choice", "Launch", "TensorMap", "Tuned"]
    return (
        environment()
        .get_template("module/module.py.jinja")
        .render(
            several=several,
            thin=thin,
            has_scales=has_scales,
            imports=imports,
            code=code,
            exported=[*data, *classes, *sorted(functions)],
            kernels_heading=heading("kernels" if several else "the kernel"),
            arguments=[(field.name, field.code) for field in arguments.fields],
            sources={} if thin else {key: source_literal(kernel.source) for key, kernel in kernels.items()},
            cubins={
                key: {causal: packed_literal(cubins[kernel.digest, causal]) for causal in (False, True)}
                for key, kernel in kernels.items()
            }
            if cubins
            else {},
            embedded=" and ".join(dict.fromkeys(each.kernel.sm for each in made)),
            kernels=[_values(each) for each in made],
            needs=needs(made, embedded=bool(cubins), thin=thin),
            **told,
        )
    )


def _imports_and_code(made: Sequence[Made], thin: bool) -> tuple[str, str]:
    """What the module imports, and what of the runtime is in it."""
    if not thin:
        runtime = inline_runtime()
        return import_lines(runtime.imports), runtime.code.rstrip("\n")
    maps = ", TensorMap" if any(launch.tensor_maps for launch in made[0].kernel.launches) else ""
    runtime_names = f"Attention, Launch{maps}, Tuned, run_module"
    return (
        "import sys\nfrom pathlib import Path\n\n"
        + f"from flashgen.templates.runtime import {runtime_names}",
        "",
    )


def _values(made: Made) -> dict[str, Any]:
    """What the template asks of a kernel."""
    kernel, problem, variant = made.kernel, made.kernel.problem, made.kernel.variant
    carried = {key: value for key, value in (made.measurement or {}).items() if key != "times_us"}
    return {
        "name": problem.name,
        "problem": to_literal(problem.to_dict()),
        "variant": to_literal({"family": variant.family, **variant.to_dict()}),
        "device": to_literal({"name": made.device, "arch": kernel.arch}),
        "measurement": to_literal(carried),
        "vector": variant.access_width(problem),
        "launches": [
            {
                "symbol": kernel.symbol_of(each),
                "count": each.blocks.python(),
                "numbers": _numbers(each),
                "maps": each.tensor_maps,
            }
            for each in kernel.launches
        ],
        "tolerance": problem.tolerance,
        "oldest_arch": variant.oldest_arch(kernel.arch),
        "arch": kernel.arch,
        "arch_suffix": variant.arch_suffix,
        "source": _source_key(made),
    }


def _numbers(launch: Launch) -> dict[str, Any]:
    """A launch's fields that are not as usual, but its maps and its role, which its function's name tells."""
    usual = Launch(-1, -1, None)
    names = [field.name for field in fields(Launch) if field.name not in ("tensor_maps", "role")]
    return {name: getattr(launch, name) for name in names if getattr(launch, name) != getattr(usual, name)}


def _source_key(made: Made) -> str:
    return made.kernel.digest[:8]
