"""A kernel with what is known of it, as emitted files tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernel import Kernel


@dataclass(frozen=True)
class Made:
    """A kernel, the card it is for, and how fast it was there.

    ``device`` names the card. ``measurement`` is plain data: ``median_us``, ``spread``, ``tflops``,
    ``registers``, ``occupancy``, ``error``, ``predicted``, ``driver``, ``toolkit``, ``flashgen`` and ``seed``
    are told in words, and modules carry all of it but the single times (``times_us``). None: the kernel was
    not measured; then ``build`` has ``toolkit``, ``registers`` and ``spill_bytes`` of one that was built.
    """

    kernel: Kernel
    device: str
    measurement: Mapping[str, Any] | None = None
    build: Mapping[str, Any] | None = None
