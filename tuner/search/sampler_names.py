"""The samplers that a search can be asked for, by name; importing this imports no sampler."""

from __future__ import annotations

import importlib.util
from enum import StrEnum

from ..errors import UsageError, suggestion
from ..extras import getting


class SamplerName(StrEnum):
    """The names of samplers that ``--sampler`` takes."""

    GP = "gp"
    FOREST = "forest"
    TPE = "tpe"
    RANDOM = "random"
    EXHAUSTIVE = "exhaustive"


def is_installed(sampler: SamplerName) -> bool:
    """Tells whether what the sampler is made of is here: forests are scikit-learn's."""
    return sampler is not SamplerName.FOREST or importlib.util.find_spec("sklearn") is not None


def parse_sampler(name: str) -> SamplerName:
    """Returns the sampler called ``name``. Raises UsageError for one that is unknown or not installed."""
    try:
        sampler = SamplerName(name)
    except ValueError:
        known = [each.value for each in SamplerName]
        raise UsageError(f"unknown sampler {name!r}; {suggestion(name, known)}") from None
    if not is_installed(sampler):
        raise UsageError(f"sampler {name} needs scikit-learn, which is not installed: {getting('forest')}")
    return sampler
