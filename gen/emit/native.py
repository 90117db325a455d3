"""A kernel's .cu in C and C++: as a program of its own, and as a library that CMake builds."""

from __future__ import annotations

import re
from typing import Any

from ..arguments import VOID_ELEMENTS, struct_of
from ..problem import ITEM_BYTES, Problem
from ..render import ELEMENTS, environment
from ..variant import Variant
from .words import architecture_option, class_words, dtype_name

#: How an element is made of a float and read as one, on the host.
_CONVERSIONS = {
    "f32": ("", ""),
    "f16": ("__float2half_rn", "__half2float"),
    "bf16": ("__float2bfloat16_rn", "__bfloat162float"),
}


def program(problem: Problem, sm: str, stem: str | None = None) -> str:
    """Returns the text that makes a kernel's .cu a program when it is put behind it: the program reads
    batches of Q, K and V from one file and writes O to another, both in float32 whatever the kernel's type,
    and prints what took how long.

    ``sm`` is the architecture the kernel was made for: ``sm_80``, ``sm_90a``. ``stem`` is the file's name
    without its suffix, by default the problem's.
    """
    return _render(
        "native/program.cu.jinja",
        problem,
        apart=problem.head_dim_v != problem.head_dim,
        half=problem.dtype != "f32",
        symbol=f"{_entry(problem)}_kernel",
        file=f"{stem or problem.name}.cu",
        architecture=architecture_option(sm),
        dtype_option="" if problem.dtype == "f32" else f"--dtype {problem.dtype} ",
    )


def library(problem: Problem, variant: Variant, sm: str, stem: str) -> dict[str, str]:
    """Returns the texts of files that make ``stem``.cu a library when they are put beside it, by name: a C
    header, ``CMakeLists.txt`` and an example that calls the kernel and checks it. ``stem`` is the library's
    name."""
    header = f"{stem}.h"
    access_bytes = variant.access_width(problem) * ITEM_BYTES[problem.dtype]
    shared: dict[str, Any] = {"stem": stem, "sm": sm, "words": class_words(problem)}
    guard = f"FLASHGEN_{re.sub(r'[^A-Za-z0-9]', '_', stem).upper()}_H"
    return {
        header: _render("native/library.h.jinja", problem, guard=guard, access_bytes=access_bytes, **shared),
        "CMakeLists.txt": _render("native/library.cmake.jinja", problem, **shared),
        "example.cpp": _render("native/library_example.cpp.jinja", problem, **shared),
    }


def _entry(problem: Problem) -> str:
    return f"attention_{problem.stem}"


def _render(template: str, problem: Problem, **values: Any) -> str:
    number, element_header = ELEMENTS[problem.dtype]
    from_float, to_float = _CONVERSIONS[problem.dtype]
    return (
        environment()
        .get_template(template)
        .render(
            problem=problem,
            arguments=struct_of(problem),
            elements=VOID_ELEMENTS,
            entry=_entry(problem),
            number=number,
            element_name=dtype_name(problem),
            element_header=element_header,
            from_float=from_float,
            to_float=to_float,
            **values,
        )
    )
