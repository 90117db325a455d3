"""What NVIDIA's management library knows of a card: its driver, who else uses it, what holds its clocks down,
how hot it is and what it draws.

All optional: where the library is absent or refuses, the answers are empty.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

#: A process that keeps less than this share of the SMs busy does not disturb a measurement.
BUSY_PERCENT = 5
#: nvmlTemperatureSensors_t and nvmlClockType_t, as the library's interface has them.
TEMPERATURE_GPU, CLOCK_SM = 0, 1
#: What makes figures doubtful, by nvmlClocksEventReasons. The software power cap is left out: heavy kernels
#: meet it on every card, and that is how they run.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot",  # by software
    0x40: "too hot",  # by hardware
    0x80: "power brake",
}
#: Reasons for which a card counts how long it held its clocks down, by nvmlPerfPolicyType_t, chosen as
#: `SLOWDOWNS` are.
VIOLATIONS = {1: "too hot", 3: "board limit"}
#: Clocks held down for less than this, in a measurement that lasts a fraction of a second, are noise.
VIOLATION_NS = 1_000_000


@dataclass(frozen=True)
class Condition:
    """A card at one moment; None where it does not say."""

    celsius: int | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    watts: float | None = None
    limit_watts: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.celsius is not None:
            parts.append(f"{self.celsius} C")
        if self.clock_mhz is not None and self.max_clock_mhz is not None:
            parts.append(f"{self.clock_mhz} of {self.max_clock_mhz} MHz")
        if self.watts is not None and self.limit_watts is not None:
            parts.append(f"{self.watts:.0f} of {self.limit_watts:.0f} W")
        return ", ".join(parts)


@cache
def _library() -> ModuleType | None:
    """Returns the library's bindings where they and the library itself are there."""
    try:
        import pynvml
    except ModuleNotFoundError:  # it comes with the extra for tuning
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver_version() -> str:
    """Returns the driver's version ("580.95.05"), or an empty string."""
    return _answer("nvmlSystemGetDriverVersion") or ""


def _answer(question: str, *arguments: Any) -> Any:
    """Returns what the library answers; None where it is absent, does not know the question, or refuses."""
    library = _library()
    if library is None:
        return None
    try:
        return getattr(library, question)(*arguments)
    except library.NVMLError:
        return None


class CardMonitor:
    """Watches one card, named by its PCI bus id."""

    def __init__(self, pci_bus_id: str) -> None:
        self._handle = _answer("nvmlDeviceGetHandleByPciBusId", pci_bus_id)

    def begin(self) -> Interval:
        """Begins an interval before a measurement; its `Interval.disturbance` says afterwards what happened
        meanwhile."""
        return Interval(self, time.time_ns() // 1000, self.violations())

    def condition(self) -> Condition:
        """Returns how hot and how fast the card is now, and what it draws."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return Condition(
            self._ask("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
            self.clock_mhz(),
            self._ask("nvmlDeviceGetMaxClockInfo", CLOCK_SM),
            None if milliwatts is None else milliwatts / 1000,
            None if limit is None else limit / 1000,
        )

    def clock_mhz(self) -> int | None:
        """Returns the clock that the multiprocessors run at now; None where the card does not say."""
        return self._ask("nvmlDeviceGetClockInfo", CLOCK_SM)

    def slowdowns(self) -> list[str]:
        """Names what holds the clocks down right now."""
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            # The name before driver 535.
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return list(dict.fromkeys(why for bit, why in SLOWDOWNS.items() if mask & bit))

    def violations(self) -> dict[str, int]:
        """Returns for how many nanoseconds each of `VIOLATIONS` has held the clocks down, ever."""
        spent = {why: self._ask("nvmlDeviceGetViolationStatus", policy) for policy, why in VIOLATIONS.items()}
        return {why: status.violationTime for why, status in spent.items() if status is not None}

    def others(self, since_us: int) -> list[str]:
        """Names other processes at work on the card since that time (Unix, microseconds).

        Inside a container process ids may be those of the host. Where this process is not among them, one
        busy process is taken for it; two cannot be.
        """
        there = self._processes()
        busy: dict[int, int] = {}
        for sample in self._ask("nvmlDeviceGetProcessUtilization", since_us) or ():
            # Those that have just ended leave samples too.
            if sample.pid in there and sample.smUtil >= BUSY_PERCENT:
                busy[sample.pid] = max(sample.smUtil, busy.get(sample.pid, 0))
        if os.getpid() in there:
            busy.pop(os.getpid(), None)
            return [
                f"process {pid} keeps {percent}% of the SMs busy" for pid, percent in sorted(busy.items())
            ]
        if len(busy) < 2:
            return []
        told = " and ".join(f"{percent}%" for percent in sorted(busy.values(), reverse=True))
        return [f"{len(busy)} processes keep {told} of the SMs busy, and only one of them is this one"]

    def _processes(self) -> set[int]:
        """Who has a context on the card, for computing or for drawing."""
        computing = self._ask("nvmlDeviceGetComputeRunningProcesses") or ()
        drawing = self._ask("nvmlDeviceGetGraphicsRunningProcesses") or ()
        return {process.pid for process in (*computing, *drawing)}

    def _ask(self, question: str, *arguments: int) -> Any:
        return None if self._handle is None else _answer(question, self._handle, *arguments)


@dataclass(frozen=True)
class Interval:
    """The time of one measurement."""

    monitor: CardMonitor
    since_us: int
    violations: dict[str, int]

    def disturbance(self) -> str:
        """Says why figures taken since the interval began are doubtful; empty when nothing speaks against
        them."""
        held_down = dict.fromkeys(self.monitor.slowdowns())
        for why, now in self.monitor.violations().items():
            if now - self.violations.get(why, now) > VIOLATION_NS:
                held_down[why] = None
        reasons = []
        if held_down:
            condition = str(self.monitor.condition())
            reasons.append(
                f"clocks held down: {', '.join(held_down)}" + (f" ({condition})" if condition else "")
            )
        return "; ".join([*reasons, *self.monitor.others(self.since_us)])
