"""Choosing and writing the kernel of `flashgen emit`: a tuned one, or a variant asked for untuned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...gen.emit.cuda import emit_cuda
from ...gen.emit.made import Made
from ...gen.emit.module import emit_module
from ...gen.emit.words import class_words
from ...gen.kernel import Kernel
from ...gen.limits import PRESETS, DeviceLimits, preset_of
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal, Value, Variant
from ..cards.names import cards
from ..cards.slug import same_card
from ..errors import FlashgenError, UsageError
from ..predict.catalogue import build_catalogue
from ..request import Shape
from ..serving import serving_families
from . import choice, library, records
from .guess import built_guess


@dataclass(frozen=True)
class Emitted:
    """What was written, and in one sentence why that kernel."""

    text: str
    how: str
    tuned: bool
    predicted: bool
    problem: Problem
    variant: Variant
    device: str
    arch: int
    measurement: Mapping[str, Any] | None
    build: Mapping[str, Any] | None = None

    @property
    def sm(self) -> str:
        """The architecture, as nvcc calls it."""
        return f"sm_{self.arch}{self.variant.arch_suffix}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "tuned": self.tuned,
            "predicted": self.predicted,
            "problem": self.problem.to_dict(),
            "family": self.variant.family,
            "variant": self.variant.to_dict(),
            "device": self.device,
            "arch": self.arch,
            "measurement": self.measurement,
            "build": self.build,
        }


def emit_tuned(match: choice.Match, target: Path, *, embed: int = 0) -> Emitted:
    """Emits the matched kernel as it was rendered when it was tuned, in a file as it is written today.

    ``embed``: compile it, so many at a time, for the module to carry. A .cu file that was edited since stays
    as it is. Raises FlashgenError where the kernel cannot be read from its files.
    """
    from .bundle import rendered

    entry = match.entry
    tuned = entry.kernel
    kernel = None
    try:
        kernel = rendered(entry)
    except FlashgenError:
        # Its facts are gone, but not its source.
        if target.suffix != ".cu":
            raise
    edited = entry.rendered is None and kernel is not None and kernel.source == tuned.source
    if kernel is None or (edited and target.suffix == ".cu"):
        text = tuned.source
    else:
        made = Made(kernel, tuned.device, records.figures(tuned))
        text = _text(made, target, _cubins(kernel, embed))
    return Emitted(
        text,
        match.how,
        True,
        entry.predicted,
        tuned.problem,
        tuned.variant,
        tuned.device,
        tuned.arch,
        tuned.measurement.to_dict(),
    )


def emit_untuned(
    variant: Variant,
    problem: Problem,
    limits: DeviceLimits,
    how: str,
    target: Path,
    *,
    build: Mapping[str, Any] | None = None,
    embed: int = 0,
) -> Emitted:
    """Emits a variant that was not timed; ``build`` is as in `Made`. Raises UsageError for an illegal one."""
    try:
        kernel = render(variant, problem, limits)
    except Illegal as error:
        raise UsageError(
            f"{error}; {variant.name} cannot run {problem.name} on {limits.name}: change it with --set, "
            "`flashgen space` lists what is legal"
        ) from error
    text = _text(Made(kernel, limits.name, None, build), target, _cubins(kernel, embed))
    return Emitted(text, how, False, False, problem, variant, limits.name, limits.arch, None, build)


def choose(
    known: Sequence[library.Entry],
    shape: Shape,
    limits: DeviceLimits | None,
    family: type[Variant] | None,
    target: Path,
    *,
    embed: int = 0,
    jobs: int = 1,
    note: Callable[[str], None] = lambda text: None,
) -> Emitted:
    """Emits the best known kernel for what was asked, or the cost model's best guess without one. ``embed``
    is as in `emit_tuned`, ``jobs`` and ``note`` as in `built_guess`.

    Raises:
        FlashgenError: nothing was asked for and nothing was tuned here.
    """
    if limits is None and not shape.is_given and family is None:
        match = choice.last_tuned([entry for entry in known if not library.is_shipped(entry)])
        if match is None:
            raise FlashgenError(
                "nothing was tuned here yet: tune with `flashgen tune --device 0 --d 64` (--device gtx-1080 "
                "without a GPU), or say for which problem and card to take a shipped kernel or a predicted "
                f"one: `flashgen emit {target.name} --device h200 --dtype bf16 --d 128`"
            )
        return emit_tuned(match, target, embed=embed)
    problem = shape.problem()
    remark = ""
    if limits is None:
        limits, remark = card_meant(known, [problem])
    match = choice.find(known, problem, limits, family=family, any_shape=not shape.has_sizes)
    if match is not None:
        return emit_tuned(replace(match, how=match.how + remark), target, embed=embed)
    families = (family,) if family is not None else serving_families(problem, limits)
    guess = built_guess(families, problem, limits, jobs=jobs, note=note)
    how = (
        f"nothing was tuned for {class_words(problem)} on {limits.name}: this is the cost model's guess, "
        f"untuned, {guess.how}; `flashgen tune` finds better{remark}"
    )
    return emit_untuned(guess.variant, problem, limits, how, target, build=guess.build, embed=embed)


def complete(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    held: Mapping[str, Value],
    start: Variant,
) -> Variant:
    """Returns the legal variant with the ``held`` values that is nearest to ``start``.

    Raises UsageError, naming the rule and both numbers, when the held values allow none.
    """
    wanted = family(**{**start.to_dict(), **held})
    try:
        wanted.check(problem, limits)
        return wanted
    except Illegal as error:
        reason = str(error)
    if len(held) == len(family.parameters()):
        raise UsageError(f"{reason} ({problem.name} on {limits.name}); `flashgen space` lists what is legal")
    catalogue = build_catalogue(family, problem, limits, held)
    row = catalogue.nearest(wanted)
    if row is None:
        raise UsageError(
            f"no variant with {' '.join(f'{k}={v}' for k, v in held.items())} is legal for {problem.name} on "
            f"{limits.name} ({reason}); `flashgen space` says which rules remove them"
        )
    return catalogue.variant(row)


def card_meant(known: Sequence[library.Entry], problems: Sequence[Problem]) -> tuple[DeviceLimits, str]:
    """Returns the card to emit for when none was named, and where it was neither tuned on nor is it here, a
    remark that says so.

    It is that of the kernel tuned last here, of one of the problems' types and head dims where there is any;
    else this machine's; else the one that most shipped kernels are of.
    """
    stems = {problem.stem for problem in problems}
    here = [entry for entry in known if not library.is_shipped(entry)]
    if match := choice.last_tuned([e for e in here if e.kernel.problem.stem in stems] or here):
        return limits_of(match.entry), ""
    found, _ = cards()
    if found:
        return found[0].limits, ""
    kernels_of = Counter(entry.slug for entry in known)
    most = max(kernels_of.values(), default=0)
    of_most = [entry for entry in known if kernels_of[entry.slug] == most]
    match = choice.last_tuned([e for e in of_most if e.kernel.problem.stem in stems] or of_most)
    if match is None:
        raise FlashgenError(
            "nothing was tuned yet, and no card was named; name one with --device (`flashgen devices` lists "
            "them)"
        )
    limits = limits_of(match.entry)
    return limits, f" (no card was named and none is here: {limits.name} is the shipped kernels')"


def limits_of(entry: library.Entry) -> DeviceLimits:
    """Returns the card a kernel was tuned for; the nearest preset's limits where it is none."""
    # Its folder may have any name, and cards of one architecture differ in what kernels are told of them.
    named = preset_of(entry.kernel.device)
    same = [c for c in PRESETS.values() if same_card(c.slug, entry.slug)]
    alike = [c for c in PRESETS.values() if c.arch == entry.kernel.arch]
    for card in [*([PRESETS[named]] if named else []), *same, *alike]:
        return replace(card, name=entry.kernel.device)
    raise FlashgenError(f"{entry.kernel.device} resembles no preset; name the card with --device")


def _text(made: Made, target: Path, cubins: Mapping[bool, bytes] | None = None) -> str:
    """The text of a file of that name."""
    told = {"device": made.device, "measurement": made.measurement, "build": made.build}
    if target.suffix == ".cu":
        return emit_cuda(made.kernel, **told, stem=target.stem)
    return emit_module(made.kernel, **told, cubins=cubins, name=target.stem)


def _cubins(kernel: Kernel, embed: int) -> dict[bool, bytes] | None:
    from .bundle import build_cubins

    if not embed:
        return None
    return {causal: cubin for (_, causal), cubin in build_cubins([kernel], embed).items()}
