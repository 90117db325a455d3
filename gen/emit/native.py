"""A kernel's .cu in C and C++: as a program of its own, and as a library that CMake builds."""

from __future__ import annotations

import re
from typing import Any

from ..arguments import BUFFER_ELEMENTS, VOID_ELEMENTS, struct_of
from ..expression import Kind
from ..kernel import Kernel
from ..layout import DENSE
from ..problem import ITEM_BYTES, Problem
from ..render import ELEMENTS, environment
from ..scoring.scores import Buffer
from ..scoring.values import scalar_values
from .words import WIDTH, architecture_option, class_words, dtype_name, mask_words, wrap

#: How an element is made of a float and read as one, on the host.
_CONVERSIONS = {
    "f32": ("", ""),
    "f16": ("__float2half_rn", "__half2float"),
    "bf16": ("__float2bfloat16_rn", "__bfloat162float"),
}


def program(kernel: Kernel, stem: str | None = None) -> str:
    """Returns the text that makes a kernel's .cu a program when it is put behind it: the program reads
    batches of Q, K and V, or sequences of lengths of their own, from one file and writes O to another, both
    in float32 whatever the kernel's type, and prints what took how long. One of gradients draws what it
    computes from, and checks itself.

    ``stem`` is the file's name without its suffix, by default the problem's.
    """
    problem = kernel.problem
    return _render(
        f"native/{'gradients_' if problem.backward else ''}program.cu.jinja",
        kernel,
        apart=problem.head_dim_v != problem.head_dim,
        half=problem.dtype != "f32",
        symbol=f"{kernel.entry}_kernel",
        file=f"{stem or problem.name}.cu",
        architecture=architecture_option(kernel.sm),
        dtype_option="".join(f"{word} " for word in _asked(problem)),
        page_known=kernel.variant.knows_page_size(problem),
    )


def library(kernel: Kernel, stem: str) -> dict[str, str]:
    """Returns the texts of files that make ``stem``.cu a library when they are put beside it, by name: a C
    header, ``CMakeLists.txt`` and an example that calls the kernel and checks it. ``stem`` is the library's
    name."""
    header, problem = f"{stem}.h", kernel.problem
    access_bytes = kernel.variant.access_width(problem) * ITEM_BYTES[problem.dtype]
    shared: dict[str, Any] = {"stem": stem, "sm": kernel.sm, "words": class_words(problem)}
    example = "sequences" if _is_serving(problem) else "library"
    guard = f"FLASHGEN_{re.sub(r'[^A-Za-z0-9]', '_', stem).upper()}_H"
    return {
        header: _render(
            "native/library.h.jinja",
            kernel,
            guard=guard,
            access_bytes=access_bytes,
            page_known=kernel.variant.knows_page_size(problem),
            **shared,
        ),
        "CMakeLists.txt": _render("native/library.cmake.jinja", kernel, **shared),
        "example.cpp": _render(f"native/{example}_example.cpp.jinja", kernel, **shared),
    }


def _asked(problem: Problem) -> list[str]:
    """The options of the command line that ask for such arrays, but for those of layouts."""
    dtype = [] if problem.dtype == "f32" else [f"--dtype {problem.dtype}"]
    keys = [f"--kv-dtype {problem.kv_dtype}"] if problem.kv_dtype else []
    grown = problem.append.options if problem.append is not None else []
    return [*dtype, *keys, *["--latent"] * problem.latent, *grown]


def _is_apart(problem: Problem) -> bool:
    """Whether a kernel takes more than queries, keys and values of one type, or less: it appends, keys are of
    e4m3, or attention is latent."""
    return problem.append is not None or problem.has_key_scales or problem.latent


def _is_serving(problem: Problem) -> bool:
    """Whether it is one of those, or of sequences of lengths of their own."""
    return _is_apart(problem) or problem.layout is not DENSE


def _render(template: str, kernel: Kernel, **values: Any) -> str:
    problem, has_workspace = kernel.problem, kernel.workspace is not None
    number, element_header = ELEMENTS[problem.dtype]
    from_float, to_float = _CONVERSIONS[problem.dtype]
    return (
        environment()
        .get_template(template)
        .render(
            problem=problem,
            arguments=struct_of(problem, has_workspace=has_workspace),
            workspace=has_workspace,
            is_sequences=problem.layout is not DENSE,
            separate=_is_apart(problem),
            elements=VOID_ELEMENTS,
            entry=kernel.entry,
            lists=problem.scores.needs_lists,
            told=wrap(mask_words(problem), WIDTH - 5).split("\n"),
            scalars=_scalars(problem),
            buffers=[_buffer(each, problem) for each in problem.scores.buffers],
            number=number,
            element_name=dtype_name(problem),
            element_header=element_header,
            from_float=from_float,
            to_float=to_float,
            **values,
        )
    )


def _scalars(problem: Problem) -> dict[str, str]:
    """The numbers that kernels take, as they were tuned for, in C++."""
    values = scalar_values(problem.scoring)
    return {
        each.name: f"{float(values[each.name])!r}f" if each.kind is Kind.FLOAT else f"{values[each.name]}"
        for each in problem.scores.scalars
    }


#: What the example calls the sizes of its arrays.
_SIZES = {"batch": "kBatch", "num_q_heads": "kHeads", "seqlen_q": "kRows", "seqlen_k": "kKeys"}
#: What the program calls them, and how it says so.
_EXTENTS = {"batch": "input.batch", "num_q_heads": "1", "seqlen_q": "input.rows", "seqlen_k": "input.rows"}
_WORDS = {"input.batch": "B", "1": "1", "input.rows": "N"}
#: The same of sequences of lengths of their own.
_LONGEST = _EXTENTS | {"seqlen_k": "input.keys"}
_LONGEST_WORDS = _WORDS | {"input.rows": "most rows", "input.keys": "most keys"}
#: What the example fills arrays of a type with, ``i`` being the place of an element.
_FILLS = {
    "f32": "normal(generator)",
    "f16": "normal(generator) < 0 ? 0xb800 : 0x3c00",  # -0.5 or 1
    "bf16": "normal(generator) < 0 ? 0xbf00 : 0x3f80",
    "u8": "i % 10 != 0",
}


def _buffer(buffer: Buffer, problem: Problem) -> dict[str, Any]:
    """How the example makes an array that masks or changes of scores read."""
    lengths = [_length(names) for names in buffer.axes]
    strides = [_product(lengths[axis + 1 :]) for axis in range(len(lengths) - 1)]
    return {
        "name": buffer.name,
        "type": BUFFER_ELEMENTS[buffer.dtype],
        "count": _product(lengths),
        "fill": _fill(buffer, problem, lengths[-1]),
        "told": [
            *zip(buffer.strides, strides, strict=True),
            *((name, lengths[axis]) for axis, name in buffer.sizes),
        ],
        "read": _read(buffer, problem),
    }


def _read(buffer: Buffer, problem: Problem) -> dict[str, Any]:
    """How the program reads it from a file: of batches of one head and as many keys as rows, or of sequences
    of as many as the longest has."""
    computed = dict(buffer.sizes)
    named, called = (_LONGEST, _LONGEST_WORDS) if _is_serving(problem) else (_EXTENTS, _WORDS)
    lengths, words = [], []
    for axis, names in enumerate(buffer.axes):
        name = computed.get(axis, "")
        extents = dict.fromkeys(named[each] for each in sorted(names)) or {f"input.{name}": "any"}
        longest = list(extents) if len(extents) == 1 else [f"std::max({{{', '.join(extents)}}})"]
        lengths += longest
        words.append(" or ".join(dict.fromkeys(called.get(each, "M") for each in extents)))
    strides = [_product(lengths[axis + 1 :]) for axis in range(len(lengths) - 1)]
    told = f"{' x '.join(words)} of {buffer.dtype}"
    return {
        "words": told + ("; before it the length M of each such axis, int32" if computed else ""),
        "sizes": list(computed.values()),
        "count": _product(lengths),
        "told": [
            *zip(buffer.strides, strides, strict=True),
            *((name, f"input.{name}") for name in computed.values()),
        ],
    }


def _product(lengths: list[str]) -> str:
    """A number of elements in C++."""
    return lengths[0] if len(lengths) == 1 else f"1LL * {' * '.join(lengths)}"


def _length(names: frozenset[str]) -> str:
    sizes = sorted(_SIZES[each] for each in names)
    if not sizes:
        return "(kRows + kKeys)"
    return sizes[0] if len(sizes) == 1 else f"std::max({{{', '.join(sizes)}}})"


def _fill(buffer: Buffer, problem: Problem, last: str) -> str:
    scoring = problem.scoring
    # Documents of 40 keys: a row's place is that of the last of its keys.
    place = "(int(i % kRows) + kKeys - kRows) / 40 * 40"
    match buffer.name:
        case "prefix" if scoring.prefix:
            return "20 + int(i)"
        case "lengths" if scoring.lengths:
            return "kKeys - 15 * int(i)"
        case "document_begin" if scoring.documents:
            return place
        case "document_end" if scoring.documents:
            return f"std::min({place} + 40, kKeys)"
        case "tree" if scoring.tree:
            # Two branches, of the even and of the odd rows.
            return "0x5555555555555555LL << i % kRows % 2 & ((2LL << i % kRows % 64) - 1)"
        case "slopes" if scoring.alibi:
            return "std::exp2(-2.0f * (i % kHeads + 1))"
    return _FILLS.get(buffer.dtype, f"int(8 * (i % {last}) / {last})")
