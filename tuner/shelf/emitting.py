"""Choosing and writing the kernel of `flashgen emit`: a tuned one, or a variant asked for untuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...gen.emit.cuda import emit_cuda
from ...gen.emit.module import emit_module
from ...gen.emit.words import class_words
from ...gen.kernel import Kernel
from ...gen.limits import PRESETS, DeviceLimits
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.variant import Illegal, Value, Variant
from ..cards.slug import same_card
from ..errors import FlashgenError, UsageError
from ..predict.catalogue import build_catalogue
from ..predict.prior import prior_of
from ..predict.ranking import predicted_fastest
from ..request import Shape
from ..serving import serving_families, why_not
from . import choice, library, records


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
        }


def emit_tuned(match: choice.Match, suffix: str, *, embed: int = 0) -> Emitted:
    """Emits the matched kernel as it was written when it was tuned, in a module as it is made today.
    ``embed``: compile it, so many at a time, for the module to carry."""
    from .bundle import rendered

    entry = match.entry
    tuned = entry.kernel
    if suffix == ".cu" and entry.rendered is None:
        text = tuned.source
    else:
        kernel = rendered(entry)
        text = _text(kernel, suffix, tuned.device, records.figures(tuned), _cubins(kernel, embed))
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
    variant: Variant, problem: Problem, limits: DeviceLimits, how: str, suffix: str, *, embed: int = 0
) -> Emitted:
    """Emits a variant that was not tried. Raises UsageError for an illegal one."""
    try:
        kernel = render(variant, problem, limits)
    except Illegal as error:
        raise UsageError(
            f"{error}; {variant.name} cannot run {problem.name} on {limits.name}: change it with --set, "
            "`flashgen space` lists what is legal"
        ) from error
    text = _text(kernel, suffix, limits.name, None, _cubins(kernel, embed))
    return Emitted(text, how, False, False, problem, variant, limits.name, limits.arch, None)


def choose(
    known: Sequence[library.Entry],
    shape: Shape,
    limits: DeviceLimits | None,
    family: type[Variant] | None,
    suffix: str,
    *,
    embed: int = 0,
) -> Emitted:
    """Emits the best known kernel for what was asked, or the cost model's best guess without one. ``embed``
    is as in `emit_tuned`.

    Raises:
        FlashgenError: nothing was asked for and nothing was ever tuned.
    """
    if limits is None and not shape.is_given and family is None:
        match = choice.last_tuned(known)
        if match is None:
            raise FlashgenError(
                "nothing was tuned yet; tune with `flashgen tune --device 0 --d 64` (--device sim:gtx-1080 "
                "without a GPU), or emit an untuned kernel with --preset or --device"
            )
        return emit_tuned(match, suffix, embed=embed)
    problem = shape.problem()
    if limits is None:
        limits = card_of_last(known, [problem])
    match = choice.find(known, problem, limits, family=family, any_shape=not shape.has_sizes)
    if match is not None:
        return emit_tuned(match, suffix, embed=embed)
    how = (
        f"nothing was tuned for {class_words(problem)} on {limits.name}: this is the cost model's guess, "
        "untuned; `flashgen tune` finds better"
    )
    families = (family,) if family is not None else serving_families(problem, limits)
    return emit_untuned(best_guess(families, problem, limits), problem, limits, how, suffix, embed=embed)


def best_guess(families: Sequence[type[Variant]], problem: Problem, limits: DeviceLimits) -> Variant:
    """Returns the variant of the families that the cost model calls fastest. Raises UsageError when none is
    legal."""
    guesses: list[tuple[float, Variant]] = []
    for family in families:
        catalogue = build_catalogue(family, problem, limits)
        if len(catalogue):
            us, row = predicted_fastest(catalogue, prior_of(problem, limits))[0]
            guesses.append((us, catalogue.variant(row)))
    if not guesses:
        names = " or ".join(repr(family.family) for family in families)
        reasons = [reason for family in families if (reason := why_not(family, problem, limits))]
        told = f": {'; '.join(reasons)}" if reasons else "; `flashgen space` says which rules remove them"
        raise UsageError(f"no variant of {names} is legal for {problem.name} on {limits.name}{told}")
    return min(guesses, key=lambda guess: guess[0])[1]


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


def card_of_last(known: Sequence[library.Entry], problems: Sequence[Problem]) -> DeviceLimits:
    """Returns the card to emit for when none was named: that of the kernel tuned last, of one of the
    problems' types and head dims where there is any."""
    stems = {problem.stem for problem in problems}
    match = choice.last_tuned([e for e in known if e.kernel.problem.stem in stems] or known)
    if match is None:
        raise FlashgenError(
            "nothing was tuned yet, and no card was named; name one with --device or --preset (`flashgen "
            "devices` lists them)"
        )
    return limits_of(match.entry)


def limits_of(entry: library.Entry) -> DeviceLimits:
    """Returns the card a kernel was tuned for; the nearest preset's limits where it is none."""
    same = [c for c in PRESETS.values() if same_card(c.slug, entry.slug)]
    alike = [c for c in PRESETS.values() if c.arch == entry.kernel.arch]
    for card in same + alike:
        return replace(card, name=entry.kernel.device)
    raise FlashgenError(f"{entry.kernel.device} resembles no preset; name the card with --device")


def _text(
    kernel: Kernel,
    suffix: str,
    device: str,
    measurement: Mapping[str, Any] | None,
    cubins: Mapping[bool, bytes] | None = None,
) -> str:
    if suffix == ".cu":
        return emit_cuda(kernel, device=device, measurement=measurement)
    return emit_module(kernel, device=device, measurement=measurement, cubins=cubins)


def _cubins(kernel: Kernel, embed: int) -> dict[bool, bytes] | None:
    from .bundle import build_cubins

    if not embed:
        return None
    return {causal: cubin for (_, causal), cubin in build_cubins([kernel], embed).items()}
