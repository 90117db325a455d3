"""Compiling what a benchmark launches before it begins, on all cores: the card does not wait for nvcc."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...gen.limits import DeviceLimits
from ..errors import FlashgenError
from . import ceilings
from .emitted import compile_module, load
from .figures import OURS
from .plan import BenchOptions, Plan


def compile_ahead(
    plan: Plan, limits: DeviceLimits, options: BenchOptions, folder: Path, note: Callable[[str], None]
) -> Path | None:
    """Compiles every module on all cores, into ``folder``, and the ceilings' kernels, whose cubin it returns.
    What does not compile is left out with the reason.

    Modules are given their cubins: with the card waiting, none looks for a compiler."""
    wanted: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for index, row in enumerate(plan.rows):
        modules = {OURS: plan.modules[index], **plan.steps[index]}
        masks = (False, True) if options.errors_alone else (row.problem.causal,)
        for name, path in modules.items():
            if path is not None:
                for causal in masks:
                    wanted.setdefault((path, causal), []).append((index, name))
    note(f"compiling {len(wanted)} kernels on {options.jobs} cores")
    started = time.monotonic()
    cubin = None
    with ThreadPoolExecutor(options.jobs) as pool:
        rates = pool.submit(ceilings.build, limits.arch)
        futures = {key: pool.submit(_compile_module, *key, limits.arch) for key in wanted}
        for number, (key, future) in enumerate(futures.items()):
            path = folder / f"{number}.cubin"
            try:
                path.write_bytes(future.result())
                plan.cubins.setdefault(key[0], {})[str(key[1])] = str(path)
            except Exception as error:  # of a module from anywhere: a reason, not the end
                for index, name in wanted[key]:
                    plan.leave_out(index, name, f"does not compile: {_first_line(error)}")
        try:
            cubin = rates.result()
        except FlashgenError as error:
            note(f"no ceilings of instructions alone: {_first_line(error)}")
    note(f"compiled in {time.monotonic() - started:.0f} s")
    return cubin


def _compile_module(path: str, causal: bool, arch: int) -> bytes:
    """What the module's first call under that mask would do."""
    return compile_module(load(Path(path)), arch, causal)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
