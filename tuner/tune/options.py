"""What a tuning run is asked for: the problem, the cards, the families and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ...gen.variant import Value, Variant
from ..cards.device import Device
from ..search.sampler_names import SamplerName

#: Trials unless told otherwise: on a card, on an emulated card (where each takes seconds).
DEFAULT_TRIALS, DEFAULT_SIM_TRIALS = 200, 24


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune, on what, and for how long (``trials`` counts all of the studies, whoever ran them).

    ``more_devices`` are further cards of ``device``'s kind, which share its studies. Families without a legal
    variant are passed over, unless there is no other.
    """

    device: Device
    more_devices: tuple[Device, ...] = ()
    problem: Problem
    families: tuple[type[Variant], ...]
    held: Mapping[str, Value] = field(default_factory=dict)
    trials: int | None = None
    minutes: float | None = None
    sampler: SamplerName = SamplerName.GP
    seed: int = 0
    storage: str
    out: Path
    jobs: int = 1

    @property
    def devices(self) -> tuple[Device, ...]:
        """All cards, the first of which times the finalists."""
        return (self.device, *self.more_devices)

    @property
    def limits(self) -> DeviceLimits:
        """The limits of the cards, which are of one kind."""
        return self.device.limits
