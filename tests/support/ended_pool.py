"""Processes side by side that end when their work is over, and with their parent, however that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PARENT_LOOKS_S, ENDED_S = 0.5, 10.0


@contextlib.contextmanager
def pool_of(processes: int, begin: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes each begin with a call. Afterwards all have ended: those at work are not waited
    for."""
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), begin, arguments),
    )
    try:
        yield pool
    finally:
        begun = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in begun:
            process.terminate()
        for process in begun:
            process.join(ENDED_S)


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOKS_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    begin(*arguments)
