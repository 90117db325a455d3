"""Devices by name, and a survey of what this machine has and lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from ...gen.limits import PRESETS, DeviceLimits
from ..build.toolchain import GET_OLD_NVRTC, find_host_compiler, find_nvcc, find_nvrtc
from ..errors import FlashgenError, UsageError, suggestion
from ..extras import getting
from .cuda import CudaDevice, count_devices, find_device
from .device import Device
from .emulated import PREFIX, SimDevice

GET_PYCUDA = f"{getting('cuda')} (it builds against an installed CUDA toolkit), or do without"
#: Stands for all CUDA cards of this machine.
ALL = "all"
#: Of a card's number: no host has a thousand.
MAX_DIGITS = 3
GET_TORCH = "`pip install torch` (only to compare with PyTorch)"


@dataclass(frozen=True)
class Tool:
    """A program or library flashgen uses: its version where it is found, else how to get it."""

    name: str
    found: str
    missing: str
    needed_for: str


def resolve(spec: str) -> Device:
    """Returns the device of that name: ``0`` or ``cuda:0``, a CUDA card; ``gtx-1080`` or ``sim:gtx-1080``,
    an emulated one.

    Raises:
        UsageError: nothing is called so.
        FlashgenError: there is no such card here, or no driver.
    """
    ordinal = _ordinal(spec)
    if ordinal is not None:
        return find_device(ordinal)
    return SimDevice(spec.removeprefix(PREFIX), limits_named(spec))


def resolve_all(specs: str) -> list[tuple[Device, ...]]:
    """Returns the devices of a list like ``0,1,2`` or of ``all`` CUDA cards here, those of one kind together.

    An emulated card may be named several times: as many workers emulate it. Raises as `resolve` does.
    """
    if specs == ALL:
        found = [find_device(ordinal) for ordinal in range(count_devices())]
        if not found:
            resolve("0")  # which says why there is none
        devices: list[Device] = [*found]
    else:
        devices = [resolve(spec.strip()) for spec in specs.split(",")]
        twice = [
            d.spec for i, d in enumerate(devices) if d.lock_key and d.spec in [e.spec for e in devices[:i]]
        ]
        if twice:
            raise UsageError(f"device {twice[0]} is named twice in {specs!r}; name each card once")
    kinds: dict[tuple[bool, DeviceLimits], list[Device]] = {}
    for device in devices:
        kinds.setdefault((device.predicted, device.limits), []).append(device)
    return [tuple(kind) for kind in kinds.values()]


def limits_named(spec: str) -> DeviceLimits:
    """Returns the limits of a card of this machine, a ``sim:`` device or a preset; raises as `resolve`."""
    ordinal = _ordinal(spec)
    if ordinal is not None:
        return find_device(ordinal).limits
    name = spec.removeprefix(PREFIX)
    if spec == name and _preset(name) is None:
        raise UsageError(
            f"unknown device {spec!r}; {suggestion(spec, ['0', *PRESETS])} (a number is a CUDA card, "
            "`flashgen devices` lists all)"
        )
    return preset_named(name)


def preset_named(name: str) -> DeviceLimits:
    """Returns a preset by name, or by ``sm_86`` the first of that compute capability. Raises UsageError."""
    card = _preset(name)
    if card is None:
        raise UsageError(f"unknown preset {name!r}; {suggestion(name, list(PRESETS))}")
    return card


def _preset(name: str) -> DeviceLimits | None:
    alike = (card for card in PRESETS.values() if card.sm == name)
    return PRESETS.get(name) or next(alike, None)


def _ordinal(spec: str) -> int | None:
    """The number of the CUDA card that is meant, if one is."""
    number = spec.removeprefix("cuda:")
    is_number = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return int(number) if is_number else None


def cards() -> tuple[list[CudaDevice], str]:
    """Returns the CUDA cards of this machine; where there is none, why and what to do."""
    try:
        return [find_device(ordinal) for ordinal in range(count_devices())], ""
    except FlashgenError as error:
        return [], str(error)


def survey() -> list[Tool]:
    """Looks for what tuning, emulating and comparing need, and returns what is found and what is missing."""
    return [
        _probe(
            "nvcc", "building kernels for a card", lambda: _versioned(find_nvcc().version, find_nvcc().path)
        ),
        _probe(
            "g++",
            "emulated cards, and nvcc itself",
            lambda: _versioned(find_host_compiler().version, find_host_compiler().path),
        ),
        _probe(
            "NVRTC",
            f"cards that nvcc no longer compiles for: {GET_OLD_NVRTC}",
            lambda: _versioned(find_nvrtc().version, find_nvrtc().path),
        ),
        _module(
            "PyCUDA",
            "pycuda",
            "its arrays; the driver serves all else",
            GET_PYCUDA,
        ),
        _module("PyTorch", "torch", "comparing with it in `flashgen bench` and `ladder`", GET_TORCH),
    ]


def _versioned(version: str, path: object) -> str:
    return f"{version} ({path})"


def _probe(name: str, needed_for: str, find: Callable[[], str]) -> Tool:
    try:
        return Tool(name, find(), "", needed_for)
    except FlashgenError as error:
        return Tool(name, "", str(error), needed_for)


def _module(name: str, module: str, needed_for: str, get: str) -> Tool:
    """Found by its metadata alone: importing PyCUDA or torch takes long and may touch the card."""
    from importlib.metadata import PackageNotFoundError, version

    if importlib.util.find_spec(module) is None:
        return Tool(name, "", get, needed_for)
    try:
        return Tool(name, version(module), "", needed_for)
    except PackageNotFoundError:
        return Tool(name, "of unknown version", "", needed_for)
