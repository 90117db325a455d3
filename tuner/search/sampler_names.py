"""The samplers that a search can be asked for, by name; importing this imports no sampler."""

from __future__ import annotations

from enum import StrEnum

from ..errors import UsageError, suggestion


class SamplerName(StrEnum):
    """What ``--sampler`` takes."""

    GP = "gp"
    FOREST = "forest"
    TPE = "tpe"
    RANDOM = "random"
    EXHAUSTIVE = "exhaustive"


def parse_sampler(name: str) -> SamplerName:
    """The sampler called ``name``. Raises UsageError."""
    try:
        return SamplerName(name)
    except ValueError:
        known = [each.value for each in SamplerName]
        raise UsageError(f"unknown sampler {name!r}; {suggestion(name, known)}") from None
