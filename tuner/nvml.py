"""What NVIDIA's management library knows of a card: its driver, who else uses it, what holds its clocks down.

All by ctypes and all optional: where the library is absent or refuses, the answers are empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache
from typing import Any

#: A process that keeps less than this share of the SMs busy does not disturb a measurement.
BUSY_PERCENT = 5
#: nvmlClocksEventReasons that make figures doubtful: hardware slowdown, thermal limits, power brake. The
#: software power cap is left out: heavy kernels meet it on every card, and that is how they run.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
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

    def disturbance(self, since_us: int) -> str:
        """Why figures taken since that time (Unix, microseconds) are doubtful; empty when nothing speaks
        against them."""
        if self._handle is None:
            return ""
        reasons = [*self._slowdowns(), *self._others(since_us)]
        return "; ".join(reasons)

    def _slowdowns(self) -> list[str]:
        library = _library()
        mask = ctypes.c_ulonglong()
        # Renamed by driver 535; the old name is not promised for ever.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        ask = next((found for name in names if (found := getattr(library, name, None))), None)
        if ask is None or ask(self._handle, ctypes.byref(mask)) != 0:
            return []
        return [f"clocks held down: {why}" for bit, why in SLOWDOWNS.items() if mask.value & bit]

    def _others(self, since_us: int) -> list[str]:
        """Other processes at work on the card. Inside a container process ids may be those of the host; where
        this process is not among them, nothing can be said."""
        library = _library()
        if library is None:
            return []
        count = ctypes.c_uint(MAX_PROCESSES)
        processes = (_Process * MAX_PROCESSES)()
        list_processes = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if list_processes is None or list_processes(self._handle, ctypes.byref(count), processes) != 0:
            return []
        others = {processes[i].pid for i in range(count.value)}
        if os.getpid() not in others:
            return []
        others.discard(os.getpid())
        if not others:
            return []
        count = ctypes.c_uint(MAX_PROCESSES)
        samples = (_Utilization * MAX_PROCESSES)()
        status = library.nvmlDeviceGetProcessUtilization(
            self._handle, samples, ctypes.byref(count), ctypes.c_ulonglong(since_us)
        )
        if status != 0:
            return []
        busy = {
            samples[i].pid: samples[i].sm_percent
            for i in range(count.value)
            if samples[i].pid in others and samples[i].sm_percent >= BUSY_PERCENT
        }
        return [f"process {pid} keeps {percent}% of the SMs busy" for pid, percent in sorted(busy.items())]
