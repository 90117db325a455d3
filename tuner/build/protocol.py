"""What builds kernels, for a CUDA card or an emulated one, and what it makes of one."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...gen.kernel import Kernel
from ..errors import BuildError


@dataclass(frozen=True)
class Build:
    """A compiled kernel. ``artifact`` is a cubin or, emulated, a shared library."""

    kernel: Kernel
    artifact: Path
    registers: int
    spill_bytes: int
    seconds: float
    cached: bool = False


class Toolchain(Protocol):
    """Builds kernels. Picklable: it is sent to the processes of the compile pool."""

    def build(self, kernel: Kernel) -> Build:
        """Returns the compiled kernel, from the cache where it is there. Raises `BuildError`."""
        ...

    @property
    def version(self) -> str:
        """The compiler and its version, part of the cache key and of every record."""
        ...


class Pool(Protocol):
    """Compilers that build kernels beside each other."""

    @property
    def toolchain(self) -> Toolchain:
        """What builds them."""
        ...

    @property
    def size(self) -> int:
        """How many kernels are built at a time."""
        ...

    def submit(self, kernel: Kernel) -> Future[Build | BuildError]:
        """Has a kernel built. The future raises only what is no fault of the kernel."""
        ...

    def quiet(self) -> AbstractContextManager[None]:
        """Has compilers stand still inside; builds go on afterwards."""
        ...

    def drop(self) -> None:
        """Drops what was submitted and is not built yet."""
        ...
