"""Building what is likely to be asked for soon, while compilers have nothing else to do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from ...gen.kernel import Kernel
from ..errors import BuildError
from .compile import CompilePool
from .protocol import Build, Toolchain

#: What tells builds apart, whatever sizes the kernels are meant for: the card's architecture and the source.
Key = tuple[str, str]


class PoolAhead:
    """A pool that builds what is submitted and, as far as compilers are free, what is wanted ahead.

    Who submits a kernel that is being built ahead gets that build. What is built ahead never makes a build
    wait that was submitted, but shares the cores with it once it has begun.
    """

    def __init__(self, toolchain: Toolchain, size: int | None = None) -> None:
        self.toolchain = toolchain
        self._in_turn = CompilePool(toolchain, size)
        self._ahead = CompilePool(toolchain, size)
        # Builds end in threads of their own, some of them within a call of ours.
        self._lock = threading.RLock()
        self._wanted: dict[Key, Kernel] = {}
        self._begun: dict[Key, Future[Build | BuildError]] = {}
        self._under_way: set[Key] = set()

    @property
    def size(self) -> int:
        """How many kernels are built at a time."""
        return self._in_turn.size

    def submit(self, kernel: Kernel) -> Future[Build | BuildError]:
        """Has a kernel built, as `CompilePool.submit`; it is there sooner if it was begun ahead."""
        key = _key(kernel)
        with self._lock:
            self._wanted.pop(key, None)
            begun = self._begun.pop(key, None)
            if begun is not None:
                return _as_build_of(kernel, begun)
            self._under_way.add(key)
            future = self._in_turn.submit(kernel)

        def ended(future: Future[Build | BuildError]) -> None:
            with self._lock:
                self._under_way.discard(key)
            self._fill()

        future.add_done_callback(ended)
        return future

    def want(self, kernels: Iterable[Kernel]) -> None:
        """Builds these ahead, in their order, instead of what was wanted before and has not begun."""
        wanted = {_key(kernel): kernel for kernel in kernels}
        with self._lock:
            # What has been built and is wanted no more is in the cache.
            self._begun = {k: future for k, future in self._begun.items() if k in wanted or not future.done()}
            taken = self._begun.keys() | self._under_way
            self._wanted = {key: kernel for key, kernel in wanted.items() if key not in taken}
        self._fill()

    def _fill(self) -> None:
        """Begins with as much of what is wanted as there are free compilers."""
        with self._lock:
            while self._wanted and self._in_turn.num_unfinished + self._ahead.num_unfinished < self.size:
                key = next(iter(self._wanted))
                self._begun[key] = future = self._ahead.submit(self._wanted.pop(key))
                future.add_done_callback(lambda _: self._fill())

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Has all compilers stand still inside, as `CompilePool.quiet`."""
        with self._in_turn.quiet(), self._ahead.quiet():
            yield

    def drop(self) -> None:
        """Drops what was submitted and is not built; what is built ahead goes on."""
        self._in_turn.drop()

    def close(self) -> None:
        """Drops what has not started of either kind, and kills what has."""
        self.want(())
        self._in_turn.close()
        self._ahead.close()

    def __enter__(self) -> PoolAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(kernel: Kernel) -> Key:
    return kernel.sm, kernel.source


def _as_build_of(kernel: Kernel, begun: Future[Build | BuildError]) -> Future[Build | BuildError]:
    """The same build as one of that kernel, whose source is the same."""
    told: Future[Build | BuildError] = Future()

    def tell(begun: Future[Build | BuildError]) -> None:
        if begun.cancelled():
            told.cancel()
        if not told.set_running_or_notify_cancel():
            return
        if error := begun.exception():
            told.set_exception(error)
        else:
            build = begun.result()
            told.set_result(replace(build, kernel=kernel) if isinstance(build, Build) else build)

    begun.add_done_callback(tell)
    return told
