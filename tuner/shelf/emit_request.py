"""What `flashgen emit` is asked for, and which kernels of those known that means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Variant
from ..errors import UsageError
from ..option_words import one_family, parse_settings
from ..request import Shapes
from ..serving import serving_families
from . import choice
from .bundle import Pick, named, pick, widened
from .emitting import Emitted, card_meant, choose, complete, emit_tuned, emit_untuned
from .library import Entry


@dataclass(frozen=True, kw_only=True)
class EmitRequest:
    """What to emit to ``target``: ``kernels`` by name, or the best for ``problems``, which ``shapes`` mean.

    ``settings`` are ``name=value`` texts of the one variant to render untuned. ``embed`` is how many kernels
    are compiled at a time for a module to carry, 0 for none; ``jobs`` at a time where a guess is built.
    """

    target: Path
    kernels: tuple[str, ...]
    shapes: Shapes
    problems: tuple[Problem, ...]
    limits: DeviceLimits | None
    family: type[Variant] | None
    settings: tuple[str, ...]
    embed: int
    jobs: int = 1

    @property
    def is_of_several(self) -> bool:
        """Whether kernels are named, or several problems meant."""
        return bool(self.kernels) or len(self.problems) > 1


def picks_for(request: EmitRequest, known: Sequence[Entry]) -> list[Pick]:
    """Returns the known kernels that a request of several means, one for each problem or name.

    Raises:
        UsageError: other options contradict, or a name is none.
        FlashgenError: nothing is known for some problem.
    """
    if request.settings:
        raise UsageError("--set renders one variant, untuned; leave it out, or ask for one problem")
    shapes, limits, family = request.shapes, request.limits, request.family
    if request.kernels:
        if shapes.words() or limits is not None or family is not None:
            raise UsageError("the kernels are named; leave out what would choose them")
        return named(known, request.kernels)
    card = limits or card_meant(known, request.problems)[0]
    return pick(known, widened(known, shapes, request.problems, card), card, family)


def emit_one(
    request: EmitRequest, known: Sequence[Entry], note: Callable[[str], None] = lambda text: None
) -> Emitted:
    """Renders the kernel for a request of one problem: the best known, or the variant asked for. ``note``
    hears what is waited for.

    Raises:
        UsageError: the settings are none of a family's, or make no legal variant.
        FlashgenError: nothing serves the problem.
    """
    problem, limits, target = request.problems[0], request.limits, request.target
    if not request.settings:
        shape = request.shapes.of_one(problem)
        return choose(
            known, shape, limits, request.family, target, embed=request.embed, jobs=request.jobs, note=note
        )
    if limits is None:
        raise UsageError("--set needs a card to render for; name one with --device or --preset")
    family = request.family or one_family(serving_families(problem, limits, request.settings))
    held = parse_settings(family, request.settings)
    variant = complete(family, problem, limits, held, family())
    if match := choice.just_this(known, variant, problem, limits):
        return emit_tuned(match, target, embed=request.embed)
    how = f"the variant asked for, untuned: {problem.name} for {limits.name}"
    return emit_untuned(variant, problem, limits, how, target, embed=request.embed)
