"""Problem and variant to CUDA C++ source, by one strict Jinja environment."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .arguments import struct_of
from .handover.reach import REACH_DEPTH
from .kernel import Kernel
from .launch import MAIN_ROLE, in_turn
from .limits import DeviceLimits
from .operation import FLOAT, INPUT, KEYS, OUTPUT
from .problem import ITEM_BYTES, Problem
from .scoring.words import feature_words
from .variant import Variant

#: A dtype's name in CUDA C++ and the header that declares it.
ELEMENTS = {
    "f32": ("float", ""),
    "f16": ("__half", "cuda_fp16.h"),
    "bf16": ("__nv_bfloat16", "cuda_bf16.h"),
    "e4m3": ("__nv_fp8_e4m3", "cuda_fp8.h"),
}
TEMPLATES = Path(__file__).resolve().parents[1] / "templates"


@cache
def environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(variant: Variant, problem: Problem, limits: DeviceLimits) -> Kernel:
    """Renders the kernel of ``variant``, deterministic to the byte.

    Raises `Illegal` when the variant cannot run that problem on that card.
    """
    variant.check(problem, limits)
    return render_unchecked(variant, problem, limits)


def render_unchecked(variant: Variant, problem: Problem, limits: DeviceLimits) -> Kernel:
    """Returns the kernel of a variant that the rules may forbid: for who compares texts and runs nothing."""
    launches = in_turn(variant.launches(problem, limits), limits.arch)
    launch = next(each for each in launches if each.role == MAIN_ROLE)
    workspace = variant.workspace(problem, limits)
    entry = f"attention_{problem.stem}"
    element, element_header = ELEMENTS[problem.dtype]
    constants = variant.constants(problem, limits)
    source = (
        environment()
        .get_template(variant.template_for(problem))
        .render(
            variant=variant,
            problem=problem,
            limits=limits,
            launch=launch,
            launches=launches,
            lists=variant.tile_lists(problem, limits),
            plan=variant.plan(problem, limits),
            workspace=workspace,
            features=feature_words(problem.scoring),
            entry=entry,
            symbol=f"{entry}_kernel",
            arguments=struct_of(problem, has_workspace=workspace is not None),
            elements=elements_of(problem),
            element=element,
            output=ELEMENTS[problem.output_dtype][0],
            element_header=element_header,
            access_width=variant.access_width(problem),
            access_bytes=variant.access_width(problem) * ITEM_BYTES[problem.dtype],
            reach_depth=REACH_DEPTH,
            settings={p.name: str(getattr(variant, p.name)).lower() for p in variant.named_parameters()},
            p=variant,
            c=constants,
        )
    )
    source = _tidy(source)
    return Kernel(problem, variant, limits.arch, source, entry, launches, workspace)


def elements_of(problem: Problem) -> dict[str, str]:
    """Returns what the elements of the problem's arrays are called in CUDA C++."""
    element, output = ELEMENTS[problem.dtype][0], ELEMENTS[problem.output_dtype][0]
    # Keys of another type are known by their bits: no compiler needs a header for them.
    keys = "unsigned char" if problem.kv_dtype else element
    return {INPUT: element, KEYS: keys, OUTPUT: output, FLOAT: "float"}


def _tidy(source: str) -> str:
    """Without what template blocks leave behind: blanks at the ends of lines, more than one blank line in
    a row, or one beside a brace."""
    source = re.sub(r"[ \t]+\n", "\n", source)
    source = re.sub(r"\n{3,}", "\n\n", source)
    source = re.sub(r"\{\n\n", "{\n", source)
    return re.sub(r"\n\n(\s*\})", r"\n\1", source)
