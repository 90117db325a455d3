"""What studies and folders call a card: ``nvidia_h200``, or emulated ``sim_h200``."""

from __future__ import annotations

from .device import Device

SIM_PREFIX = "sim_"


def device_slug(device: Device) -> str:
    """Returns the folder of a device's kernels: ``nvidia_h200``; emulated ``sim_h200``."""
    return (SIM_PREFIX if device.predicted else "") + device.limits.slug


def same_card(slug: str, other: str) -> bool:
    """Tells whether two slugs name one card: ``nvidia_h200``, ``sim_h200`` and ``h200`` do."""
    names = [s.removeprefix(SIM_PREFIX).split("_") for s in (slug, other)]
    short, long = sorted(names, key=len)
    return long[-len(short) :] == short
