"""flashgen's kernels that stand beside the one that serves a problem, gradients that have the same bits every
run and outputs of sixteen bits: which kernel makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...gen.emit.module import emit_module
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ..errors import NotServed
from ..front.candidates import candidates
from ..shelf import library
from .unserved import Unserved


def module_of(entry: library.Entry) -> Path:
    """Returns the emitted module beside a kernel's record."""
    assert entry.json_path is not None
    return entry.json_path.with_suffix(".py")


def chosen_module(
    known: Sequence[library.Entry],
    problem: Problem,
    limits: DeviceLimits,
    folder: Path,
    *,
    repeating: bool = False,
) -> Path:
    """Returns the module of the kernel that calls get: its own where it was tuned for just the problem, else
    one emitted into ``folder``. ``repeating``: that those get whose gradients must have the same bits every
    run. Raises `Unserved` where there is none."""
    try:
        found = candidates(problem, limits, known, repeating=repeating)
    except NotServed as why:
        raise Unserved(str(why)) from why
    if not found:
        does = "makes the same bits every run" if repeating else "is known"
        raise Unserved(f"no kernel for {problem.stem} {does} on {limits.name}")
    best = found[0]
    if best.record is not None and best.record.kernel.problem == problem:
        path = module_of(best.record)
        if path.exists():
            return path
    path = folder / f"{'same_bits' if repeating else 'chosen'}_{problem.name}.py"
    text = emit_module(render(best.variant, problem, limits), device=limits.name)
    path.write_text(text, encoding="utf-8")
    return path
