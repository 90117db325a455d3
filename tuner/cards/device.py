"""The one protocol behind which a CUDA card and an emulated card stand.

A `Device` is described anywhere (the coordinator never touches the GPU); its `Toolchain` builds kernels in
a pool of processes; its `Runner` lives in a worker process that may die.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...gen.limits import DeviceLimits
from ...gen.problem import Problem
from ..build.protocol import Build, Toolchain


@dataclass(frozen=True)
class Timing:
    """Times of repeated launches, in microseconds; ``stopped_early``: clearly beaten, few repeats."""

    times_us: tuple[float, ...]
    stopped_early: bool = False
    busy: str = ""
    """Why the figures are doubtful (another process on the GPU, throttling); empty when they are not."""


class Runner(Protocol):
    """Runs built kernels, in the process that created it."""

    def attend(
        self,
        build: Build,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float,
        want_lse: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Computes o (and the float32 log-sum-exp) of arrays shaped (batch, heads, seqlen, head_dim), any
        strides with a contiguous last dimension; the kernel's own mask applies. All are of the problem's type
        (see `dtypes`); o has v's columns and q's layout. ``values`` are what the problem's scores read,
        arrays and numbers by name; arrays are converted to the types of their buffers; and what tells of
        sequences, pages and scales of keys and values. Outputs are poisoned
        with NaN before and guarded around. Raises `LaunchError` and `CorruptedMemory`; ValueError for arrays
        of another type or width, and for values that are missing."""
        ...

    def differentiate(
        self,
        build: Build,
        inputs: Mapping[str, np.ndarray],
        *,
        scale: float,
        values: Mapping[str, Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Computes the gradients dq, dk and dv by a kernel of the backward pass, from its inputs by name: q,
        k, v, o, dout, lse and, if there is one, dlse. The rest is as with `attend`."""
        ...

    def measure(
        self, build: Build, problem: Problem, *, best_us: float | None = None, budget_ms: float = 200.0
    ) -> Timing:
        """Times launches on random inputs of the problem's shape, within about ``budget_ms`` of device time;
        stops early once past twice ``best_us``. Raises `LaunchError`."""
        ...

    def measure_interleaved(self, builds: list[Build], problem: Problem, *, rounds: int) -> list[Timing]:
        """Returns the finalists' times, taken in turns so that drift of the clocks meets all alike."""
        ...

    def occupancy(self, build: Build) -> float:
        """Returns the warps that are resident over the most that the card allows, 0 to 1."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """A card, live or emulated. Cheap to create and picklable."""

    @property
    def spec(self) -> str:
        """What the user typed after ``--device``: ``0`` or ``sim:gtx-1080``."""
        ...

    @property
    def limits(self) -> DeviceLimits: ...

    @property
    def predicted(self) -> bool:
        """Whether its times are a cost model's."""
        ...

    @property
    def driver(self) -> str: ...

    @property
    def lock_key(self) -> str:
        """Names what only one process of this host may time on at once; empty where that does not matter."""
        ...

    def toolchain(self) -> Toolchain: ...

    def open(self) -> Runner:
        """Opens the card and returns what runs kernels on it; called in the worker process."""
        ...
