"""Several tuned kernels in one module: which of those known, their source, and their cubins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...gen.emit.cuda import as_rendered
from ...gen.emit.made import Made
from ...gen.emit.module import emit_many, why_alone
from ...gen.emit.words import class_words
from ...gen.kernel import Kernel
from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..build.compile import CompilePool, cuda_toolchain
from ..cards.slug import same_card
from ..errors import BuildError, FlashgenError, UsageError
from ..request import Shapes
from . import choice, library, records
from .emitted_kernels import read_emitted
from .listing import find

#: Classes of problems that an error names.
LISTED = 6


@dataclass(frozen=True)
class Pick:
    """The kernel chosen for a problem, or given by itself."""

    asked: Problem | None
    match: choice.Match

    def to_dict(self) -> dict[str, Any]:
        return {
            "asked": self.asked.to_dict() if self.asked is not None else None,
            "how": self.match.how,
            "exact": self.match.exact,
            **records.to_record(self.match.entry.kernel),
        }


def pick(
    known: Sequence[library.Entry],
    problems: Sequence[Problem],
    limits: DeviceLimits,
    family: type[Variant] | None = None,
) -> list[Pick]:
    """Returns the best known kernel for each problem, as `choice.find` chooses it.

    Raises:
        FlashgenError: for some there is none; the message says for which.
    """
    picks = [
        Pick(problem, match)
        for problem in problems
        if (match := choice.find(known, problem, limits, family=family)) is not None
    ]
    if len(picks) < len(problems):
        found = {pick.asked for pick in picks}
        classes = dict.fromkeys(class_words(problem) for problem in problems if problem not in found)
        more = f" and {len(classes) - LISTED} more" if len(classes) > LISTED else ""
        raise FlashgenError(
            f"nothing was tuned on {limits.name} for {'; '.join(list(classes)[:LISTED])}{more}: "
            f"{len(problems) - len(picks)} of {len(problems)} problems; tune them with `flashgen tune` and "
            "the same options, or leave them out with --dtype and --d"
        )
    return picks


def widened(
    known: Sequence[library.Entry], shapes: Shapes, problems: Sequence[Problem], limits: DeviceLimits
) -> list[Problem]:
    """Returns the problems, or where lists name no sizes all on the card that were tuned and fit them, with
    no other masks and changes of scores than they have."""
    if shapes.suites or shapes.has_sizes:
        return list(problems)
    asked = {problem.scoring.stem for problem in problems}
    tuned = [
        entry.kernel.problem
        for entry in known
        if same_card(entry.slug, limits.slug)
        and shapes.fits(entry.kernel.problem)
        and entry.kernel.problem.scoring.stem in asked
        and why_alone(entry.kernel.problem) is None
    ]
    missing = [problem for problem in problems if problem.stem not in {each.stem for each in tuned}]
    return list(dict.fromkeys([*tuned, *missing]))


def named(known: Sequence[library.Entry], names: Sequence[str]) -> list[Pick]:
    """Returns the kernels of those names or files. Raises UsageError as `listing.find`."""
    return [Pick(None, choice.Match(find(known, name), f"{name}, as named", exact=True)) for name in names]


def kernels_of(picks: Sequence[Pick]) -> list[library.Entry]:
    """Returns the kernels, each once: several problems may be served by one."""
    return list({id(pick.match.entry): pick.match.entry for pick in picks}.values())


def rendered(entry: library.Entry) -> Kernel:
    """Returns the kernel as it was emitted when it was tuned. Raises FlashgenError where its files cannot be
    read."""
    if entry.rendered is not None:
        return entry.rendered
    assert entry.json_path is not None
    return as_rendered(read_emitted(entry.json_path.with_suffix(".cu")).kernel)


def bundle(entries: Sequence[library.Entry], *, name: str, command: Sequence[str], embed: int = 0) -> str:
    """Returns the text of a module of several kernels. ``embed``: compile them, so many at a time, and carry
    cubins.

    Raises:
        UsageError: they do not go together.
        FlashgenError: a file cannot be read or, to embed them, a compiler is missing or refuses one.
    """
    kernels = [rendered(entry) for entry in entries]
    made = [
        Made(kernel, entry.kernel.device, records.figures(entry.kernel))
        for kernel, entry in zip(kernels, entries, strict=True)
    ]
    cubins = build_cubins(kernels, embed) if embed else None
    try:
        return emit_many(made, name=name, command=command, cubins=cubins)
    except ValueError as error:
        raise UsageError(f"these kernels make no module: {error}") from error


def build_cubins(kernels: Sequence[Kernel], jobs: int) -> dict[tuple[str, bool], bytes]:
    """Compiles kernels for the cards they are for; returns cubins by digest and mask.

    Raises:
        FlashgenError: a compiler is missing or refuses one.
    """
    wanted = {
        (kernel.digest, causal): kernel.with_mask(causal) for kernel in kernels for causal in (False, True)
    }
    built: dict[tuple[str, bool], bytes] = {}
    for arch in sorted({kernel.arch for kernel in kernels}):
        with CompilePool(cuda_toolchain(arch), jobs) as pool:
            here = {key: pool.submit(kernel) for key, kernel in wanted.items() if kernel.arch == arch}
            for key, future in here.items():
                build = future.result()
                if isinstance(build, BuildError):
                    raise FlashgenError(f"{wanted[key].problem.name} cannot be embedded: {build}")
                built[key] = build.artifact.read_bytes()
    return built


def module_name(shapes: Shapes, problems: Sequence[Problem]) -> str:
    """Returns the name of the module of a run over several problems: by its suites, else by dtypes and head
    dims."""
    if shapes.suites:
        return "_".join(shapes.suites)
    dtypes = dict.fromkeys(problem.dtype for problem in problems)
    dims = dict.fromkeys(problem.stem.partition("_d")[2] for problem in problems)
    # A kernel of that dtype and head dim may lie beside it, under that name.
    return f"{'_'.join(dtypes)}_d{'_'.join(dims)}_many"
