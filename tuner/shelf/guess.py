"""The cost model's guess at what is fastest, where nothing was tuned: the first that builds clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...gen.kernel import Kernel
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Variant
from ..build.compile import CompilePool, cuda_toolchain
from ..build.protocol import Build, Toolchain
from ..errors import FlashgenError, UsageError
from ..predict.catalogue import build_catalogue
from ..predict.prior import prior_of
from ..predict.ranking import predicted_fastest
from ..serving import why_not

#: How many of the ranking are built before the one that spills least is taken.
MOST_BUILT = 48


@dataclass(frozen=True)
class Guess:
    """A variant that nobody timed.

    ``build`` is what its compiler said, ``toolkit``, ``registers`` and ``spill_bytes``; None where there is
    none for the card. ``how`` says in words what was built.
    """

    variant: Variant
    build: dict[str, Any] | None
    how: str


def best_guess(families: Sequence[type[Variant]], problem: Problem, limits: DeviceLimits) -> Variant:
    """Returns the variant of the families that the cost model calls fastest. Raises UsageError when none is
    legal."""
    return next(_ranked(families, problem, limits))


def built_guess(
    families: Sequence[type[Variant]],
    problem: Problem,
    limits: DeviceLimits,
    *,
    jobs: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> Guess:
    """Returns the first variant of the cost model's ranking that a compiler builds without spilling
    registers, ``jobs`` being compiled at a time; the very first where there is no compiler for the card.

    ``note`` hears what is waited for. Raises UsageError when none is legal, FlashgenError when none builds.
    """
    note("ranking the legal variants by the cost model")
    ranked = _ranked(families, problem, limits)
    try:
        toolchain = cuda_toolchain(limits.arch)
    except FlashgenError:
        how = f"unbuilt, for no compiler for {limits.sm} is here: it may spill registers"
        return Guess(next(ranked), None, how)
    found, tried = _first_clean(ranked, problem, limits, toolchain, jobs, note)
    build = {
        "toolkit": toolchain.version,
        "registers": found.registers,
        "spill_bytes": found.spill_bytes,
    }
    how = f"built by {toolchain.version} without spills"
    if found.spill_bytes:
        how = f"built by {toolchain.version}: it spills {found.spill_bytes} bytes, the least of {tried}"
    elif tried > 1:
        how += f", the {_ordinal(tried)} of its ranking"
    return Guess(found.kernel.variant, build, how)


def _first_clean(
    ranked: Iterator[Variant],
    problem: Problem,
    limits: DeviceLimits,
    toolchain: Toolchain,
    jobs: int,
    note: Callable[[str], None],
) -> tuple[Build, int]:
    """The first build without spills and its place in the ranking, else that which spills least."""
    built: list[Build] = []
    place, why = 0, ""
    with CompilePool(toolchain, jobs) as pool:
        candidates = islice(ranked, MOST_BUILT)
        while batch := list(islice(candidates, max(1, jobs))):
            spilled = f", {place} spilled" if place else ""
            note(f"building the cost model's first choices with {toolchain.version}{spilled}")
            for future in [pool.submit(render(variant, problem, limits)) for variant in batch]:
                build = future.result()
                place += 1
                if isinstance(build, Build):
                    built.append(build)
                    if not build.spill_bytes and _is_clean(pool, build.kernel.with_mask(not problem.causal)):
                        return build, place
                else:
                    why = str(build)
    if not built:
        raise FlashgenError(f"none of the {place} variants that the cost model calls fastest builds: {why}")
    return min(built, key=lambda build: build.spill_bytes), place


def _is_clean(pool: CompilePool, kernel: Kernel) -> bool:
    """Whether a kernel builds without spills: its file serves the other mask as well."""
    build = pool.submit(kernel).result()
    return isinstance(build, Build) and not build.spill_bytes


def _ranked(families: Sequence[type[Variant]], problem: Problem, limits: DeviceLimits) -> Iterator[Variant]:
    """The legal variants of all families that the cost model looked at, fastest first."""
    ranking = []
    for family in families:
        catalogue = build_catalogue(family, problem, limits)
        if len(catalogue):
            ranking += [
                (us, catalogue, row) for us, row in predicted_fastest(catalogue, prior_of(problem, limits))
            ]
    if not ranking:
        names = " or ".join(repr(family.family) for family in families)
        reasons = [reason for family in families if (reason := why_not(family, problem, limits))]
        told = f": {'; '.join(reasons)}" if reasons else "; `flashgen space` says which rules remove them"
        raise UsageError(f"no variant of {names} is legal for {problem.name} on {limits.name}{told}")
    for _, catalogue, row in sorted(ranking, key=lambda each: each[0]):
        yield catalogue.variant(row)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"
