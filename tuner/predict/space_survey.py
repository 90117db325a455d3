"""A family's space surveyed: how it is pruned, the fastest predicted survivors, one variant's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Illegal, Value, Variant
from .catalogue import Catalogue, build_catalogue
from .prior import Prior
from .ranking import predicted_fastest


@dataclass(frozen=True)
class Survivor:
    """A legal variant with its use of the card. ``registers`` is an estimate, ``predicted_us`` the cost
    model's time (None without a cost model)."""

    variant: Variant
    threads: int
    smem_bytes: int
    registers: int
    blocks_per_sm: int
    occupancy: float
    predicted_us: float | None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "variant": self.variant.to_dict()}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one variant: whether it is legal; else the rule it breaks and why.

    ``completed`` names the parameters that were not given and stand at the family's defaults.
    ``advice`` is why the search leaves a legal variant out, else empty. ``nearest`` is the closest legal
    variant with the values that were given, where this one is illegal.
    """

    variant: Variant
    legal: bool
    rule: str
    reason: str
    advice: str
    completed: tuple[str, ...]
    use: Survivor | None
    nearest: Variant | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "variant": self.variant.to_dict(),
            "legal": self.legal,
            "rule": self.rule,
            "reason": self.reason,
            "advice": self.advice,
            "completed_by_defaults": list(self.completed),
            "use": self.use.to_dict() if self.use else None,
            "nearest_legal": self.nearest.to_dict() if self.nearest else None,
        }


@dataclass(frozen=True)
class SpaceSurvey:
    """What a survey of a family's space found.

    ``survivors`` are the first few, fastest predicted first; ``looked_at`` says among how many they were
    chosen.
    """

    catalogue: Catalogue
    survivors: tuple[Survivor, ...]
    looked_at: int
    verdict: Verdict | None

    def to_dict(self) -> dict[str, Any]:
        catalogue = self.catalogue
        return {
            "family": catalogue.family.family,
            "problem": catalogue.problem.to_dict(),
            "device": catalogue.limits.name,
            "sm": catalogue.limits.sm,
            "total": catalogue.total,
            "removed": dict(catalogue.removed),
            "waived_advice": list(catalogue.waived),
            "legal": len(catalogue),
            "verdict": self.verdict.to_dict() if self.verdict else None,
            "looked_at": self.looked_at,
            "survivors": [s.to_dict() for s in self.survivors],
        }


def survey_space(
    family: type[Variant],
    problem: Problem,
    limits: DeviceLimits,
    held: Mapping[str, Value],
    prior: Prior,
    *,
    count: int,
    seed: int = 0,
) -> SpaceSurvey:
    """Enumerates the space with the ``held`` parameters and looks for the ``count`` fastest predicted."""
    catalogue = build_catalogue(family, problem, limits, held)
    ranked: list[tuple[float, int]] = []
    if len(catalogue) and count > 0:
        ranked = predicted_fastest(catalogue, prior, seed)
    survivors = tuple(
        resource_use(catalogue.variant(row), problem, limits, predicted_us=us) for us, row in ranked[:count]
    )
    verdict = judge(catalogue, held, prior) if held else None
    return SpaceSurvey(catalogue, survivors, len(ranked), verdict)


def judge(catalogue: Catalogue, held: Mapping[str, Value], prior: Prior) -> Verdict:
    """Says whether the variant with the ``held`` values, defaults elsewhere, is legal.

    The catalogue has the legal variants with those values.
    """
    family, problem, limits = catalogue.family, catalogue.problem, catalogue.limits
    variant = family(**held)
    completed = tuple(p.name for p in family.parameters() if p.name not in held)
    try:
        variant.check(problem, limits)
    except Illegal as error:
        row = catalogue.nearest(variant)
        nearest = None if row is None else catalogue.variant(row)
        return Verdict(variant, False, error.rule, error.reason, "", completed, None, nearest)
    use = resource_use(variant, problem, limits, predicted_us=prior(variant))
    advice = variant.advice(problem, limits) or ""
    return Verdict(variant, True, "", "", advice, completed, use, None)


def resource_use(
    variant: Variant, problem: Problem, limits: DeviceLimits, predicted_us: float | None = None
) -> Survivor:
    """Returns what a variant takes of the card: threads, shared memory, registers, blocks, occupancy."""
    threads, smem = variant.threads(), variant.smem_bytes(problem, limits)
    registers = variant.registers(problem, limits)
    blocks = limits.blocks_per_sm(threads, registers, smem)
    occupancy = blocks * threads / limits.max_threads_per_sm
    return Survivor(variant, threads, smem, registers, blocks, occupancy, predicted_us)
