"""What NVIDIA's management library knows of a card: its driver, who else uses it, what holds its clocks down,
how hot it is and what it draws.

All by ctypes and all optional: where the library is absent or refuses, the answers are empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

#: A process that keeps less than this share of the SMs busy does not disturb a measurement.
BUSY_PERCENT = 5
#: nvmlClocksEventReasons that make figures doubtful: hardware slowdown, thermal limits, power brake. The
#: software power cap is left out: heavy kernels meet it on every card, and that is how they run.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot",
    0x40: "too hot",
    0x80: "power brake",
}
#: nvmlPerfPolicyType of which the card counts how long they held its clocks down; by the same choice.
VIOLATIONS = {1: "too hot", 3: "board limit"}
#: Of a measurement that lasts a fraction of a second, held down for less than this is noise.
VIOLATION_NS = 1_000_000
#: nvmlClockType of the multiprocessors, nvmlTemperatureSensors of the chip.
SM_CLOCK, CHIP = 1, 0
MAX_PROCESSES = 256
STRING_BYTES = 96


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_gpu_memory", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    ]


class _Utilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("timestamp_us", ctypes.c_ulonglong),
        ("sm_percent", ctypes.c_uint),
        ("mem_percent", ctypes.c_uint),
        ("enc_percent", ctypes.c_uint),
        ("dec_percent", ctypes.c_uint),
    ]


class _Violation(ctypes.Structure):
    """nvmlViolationTime_t, in nanoseconds."""

    _fields_ = [("reference", ctypes.c_ulonglong), ("held_down", ctypes.c_ulonglong)]


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
def _library() -> ctypes.CDLL | None:
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if library.nvmlInit_v2() == 0:
                return library
    return None


def driver_version() -> str:
    """The driver's version ("580.95.05"), or an empty string."""
    library = _library()
    buffer = ctypes.create_string_buffer(STRING_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(buffer, STRING_BYTES) != 0:
        return ""
    return buffer.value.decode(errors="replace")


class CardMonitor:
    """Watches one card, named by its PCI bus id."""

    def __init__(self, pci_bus_id: str) -> None:
        self._handle: Any = None
        library = _library()
        if library is not None:
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle)) == 0:
                self._handle = handle

    def begin(self) -> Interval:
        """Called before a measurement; its `Interval.disturbance` afterwards says what happened meanwhile."""
        return Interval(self, time.time_ns() // 1000, self.violations())

    def condition(self) -> Condition:
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit")
        return Condition(
            self._number("nvmlDeviceGetTemperature", CHIP),
            self._number("nvmlDeviceGetClockInfo", SM_CLOCK),
            self._number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
            None if milliwatts is None else milliwatts / 1000,
            None if limit is None else limit / 1000,
        )

    def slowdowns(self) -> list[str]:
        """What holds the clocks down right now."""
        # Renamed by driver 535; the old name is not promised for ever.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        mask = ctypes.c_ulonglong()
        if not any(self._ask(name, ctypes.byref(mask)) for name in names):
            return []
        return list(dict.fromkeys(why for bit, why in SLOWDOWNS.items() if mask.value & bit))

    def violations(self) -> dict[str, int]:
        """For how many nanoseconds each of `VIOLATIONS` has held the clocks down, ever."""
        found: dict[str, int] = {}
        for policy, why in VIOLATIONS.items():
            spent = _Violation()
            if self._ask("nvmlDeviceGetViolationStatus", policy, ctypes.byref(spent)):
                found[why] = spent.held_down
        return found

    def others(self, since_us: int) -> list[str]:
        """Other processes at work on the card since that time (Unix, microseconds).

        Inside a container process ids may be those of the host. Where this process is not among them, one
        busy process is taken for it; two cannot be.
        """
        there = self._processes()
        samples = (_Utilization * MAX_PROCESSES)()
        count = ctypes.c_uint(MAX_PROCESSES)
        since = ctypes.c_ulonglong(since_us)
        if not self._ask("nvmlDeviceGetProcessUtilization", samples, ctypes.byref(count), since):
            return []
        busy: dict[int, int] = {}
        for sample in samples[: count.value]:
            # Those that have just ended leave samples too.
            if sample.pid in there and sample.sm_percent >= BUSY_PERCENT:
                busy[sample.pid] = max(sample.sm_percent, busy.get(sample.pid, 0))
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
        found: set[int] = set()
        for kind in ("Compute", "Graphics"):
            count = ctypes.c_uint(MAX_PROCESSES)
            processes = (_Process * MAX_PROCESSES)()
            if self._ask(f"nvmlDeviceGet{kind}RunningProcesses_v3", ctypes.byref(count), processes):
                found |= {process.pid for process in processes[: count.value]}
        return found

    def _number(self, name: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._ask(name, *arguments, ctypes.byref(value)) else None

    def _ask(self, name: str, *arguments: Any) -> bool:
        """Whether the library has the function and the card answers."""
        library = _library()
        function = getattr(library, name, None) if library is not None else None
        return self._handle is not None and function is not None and function(self._handle, *arguments) == 0


@dataclass(frozen=True)
class Interval:
    """The time of one measurement."""

    monitor: CardMonitor
    since_us: int
    violations: dict[str, int]

    def disturbance(self) -> str:
        """Why figures taken since are doubtful; empty when nothing speaks against them."""
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
