"""flashgen's gradients that have the same bits every run, beside those of the kernel that serves, whose may
differ: which kernel makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...gen.emit.module import emit_module
from ...gen.families.mma_backward.parameters import LAUNCH
from ...gen.launch import repeats_bits
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Variant
from ..errors import FlashgenError
from ..shelf import choice, library
from ..shelf.emitting import complete
from .unserved import Unserved

#: What is held of a family's variants so that no blocks add up what others do.
HELD = {"dq_path": LAUNCH}


def module_of(entry: library.Entry) -> Path:
    """Returns the emitted module beside a kernel's record."""
    assert entry.json_path is not None
    return entry.json_path.with_suffix(".py")


def makes_same_bits(variant: Variant, problem: Problem, limits: DeviceLimits) -> bool:
    """Tells whether a kernel makes the same bits every run."""
    return repeats_bits(variant.launches(problem, limits))


def same_bits_module(
    serving: library.Entry | None,
    known: Sequence[library.Entry],
    problem: Problem,
    limits: DeviceLimits,
    folder: Path,
) -> Path:
    """Returns the module of a kernel whose gradients have the same bits every run: what was tuned for just
    the problem; failing that the nearest variant, untuned and emitted into ``folder``, of the kernel that is
    ``serving``; failing that the nearest tuned. Raises `Unserved` where there is none."""
    same = [
        each
        for each in known
        if each.kernel.problem.stem == problem.stem
        and makes_same_bits(each.kernel.variant, each.kernel.problem, limits)
        and module_of(each).exists()
    ]
    exact = choice.find([each for each in same if each.kernel.problem == problem], problem, limits)
    if exact is not None:
        return module_of(exact.entry)
    if serving is not None and any(p.name in HELD for p in serving.kernel.variant.parameters()):
        variant = _nearest(serving.kernel.variant, problem, limits)
        if variant is not None:
            path = folder / f"same_bits_{problem.name}.py"
            text = emit_module(render(variant, problem, limits), device=limits.name)
            path.write_text(text, encoding="utf-8")
            return path
    nearest = choice.find(same, problem, limits)
    if nearest is None:
        raise Unserved(f"no kernel that makes the same bits every run is known for {problem.stem}")
    return module_of(nearest.entry)


def _nearest(serving: Variant, problem: Problem, limits: DeviceLimits) -> Variant | None:
    """Returns the nearest variant that makes the same bits every run; None where none is legal. What has its
    default stays so where that is possible: of the rest there are hundreds of variants, of all, half a
    million."""
    values = serving.to_dict()
    alike = {p.name: p.default for p in serving.parameters() if values[p.name] == p.default} | HELD
    for held in (alike, HELD):
        try:
            return complete(type(serving), problem, limits, held, start=serving)
        except FlashgenError:
            continue
    return None
