"""Axes: from values to places in a drawing, and the round numbers that are written along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

#: A logarithmic axis gets round numbers of these mantissas, the first that give enough.
MANTISSAS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
ENOUGH_TICKS, MOST_TICKS = 4, 7
#: Below this ratio of its ends a logarithmic axis is nearly linear, and so are its ticks.
NEARLY_LINEAR = 3.0


@dataclass(frozen=True)
class Axis:
    """Maps ``low..high`` to ``start..end`` of a drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns a handful of round numbers within the axis."""
        if self.log and self.high / self.low >= NEARLY_LINEAR:
            found: list[float] = []
            for mantissas in MANTISSAS:
                finer = _log_ticks(self.low, self.high, mantissas)
                if len(finer) > MOST_TICKS and len(found) > 1:
                    break
                found = finer
                if len(found) >= ENOUGH_TICKS:
                    break
            if len(found) > 1:
                return found[:: ceil(len(found) / MOST_TICKS)]
        return _linear_ticks(self.low, self.high)


def padded(
    values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False
) -> Axis:
    """Returns an axis that holds all values with some air, from zero where ``zero`` asks for it."""
    known = list(values)
    low, high = min(known), max(known)
    if log:
        air = max((high / low) ** 0.05, 1.01)
        return Axis(low / air, high * air, start, end, log=True)
    if zero:
        return Axis(0.0, high * 1.05 or 1.0, start, end)
    air = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return Axis(low - air, high + air, start, end)


def _log_ticks(low: float, high: float, mantissas: Sequence[float]) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    every = [m * 10.0**decade for decade in decades for m in mantissas]
    return [tick for tick in every if low <= tick <= high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    scale = 10.0 ** floor(log10(rough))
    step = next(step for step in (1, 2, 2.5, 5, 10) if step * scale >= rough) * scale
    first = ceil(low / step)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]
