"""Units in which times read best."""

from __future__ import annotations

from dataclasses import dataclass

#: Between a number and its unit.
NO_BREAK = "\u00a0"


@dataclass(frozen=True)
class Unit:
    """A unit to tell times in."""

    name: str
    us: float

    def number(self, us: float) -> str:
        value = us / self.us
        return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")

    def words(self, us: float) -> str:
        return f"{self.number(us)}{NO_BREAK}{self.name}"

    def tick(self, us: float) -> str:
        value = us / self.us
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def unit_for(us: float) -> Unit:
    """Returns the unit in which a time reads best."""
    if us >= 1e6:
        return Unit("s", 1e6)
    return Unit("ms", 1e3) if us >= 1e3 / 2 else Unit("µs", 1.0)
