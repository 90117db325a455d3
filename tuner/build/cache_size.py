"""How much the cache of built kernels takes, and keeping it below its limit: what was not used for longest
goes first."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import FlashgenError
from ..files import SCRATCH_PREFIX, left_by_the_dead

#: The environment's limit, and what holds without it.
LIMIT_VARIABLE = "FLASHGEN_CACHE_LIMIT"
DEFAULT_LIMIT = 2 * 2**30
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: A cache that is too large is cut down to this share of its limit, so as not to be cut at every build.
KEPT_SHARE = 0.9
#: What was used within this time is left alone: a process may be about to load it.
IN_USE_S = 600
#: An entry's files are called by its key.
_KEY = re.compile(r"[0-9a-f]{64}(?=\.)")


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache: its files, what they take and when it was used last (Unix time)."""

    key: str
    files: tuple[Path, ...]
    num_bytes: int
    used_at: float


@dataclass(frozen=True)
class CacheUse:
    """What a cache holds and may hold, in bytes."""

    folder: Path
    entries: int
    num_bytes: int
    limit_bytes: int
    oldest_at: float | None
    """When the entry was used that was not used for longest; None of an empty cache."""

    @property
    def told(self) -> str:
        """What it takes, of how much, in words."""
        return f"{self.num_bytes / 2**20:.0f} of {self.limit_bytes / 2**20:.0f} MiB"


def limit_bytes() -> int:
    """Returns the most that the cache may take: ``$FLASHGEN_CACHE_LIMIT`` ("500M", "4G", plain bytes), else
    2 GiB; 0 keeps nothing that is not in use. Raises FlashgenError for what is no size."""
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return DEFAULT_LIMIT
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise FlashgenError(f"{LIMIT_VARIABLE} is {text!r}; it must be a size, as in 500M or 4G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def cache_use(folder: Path) -> CacheUse:
    """Returns what the cache in ``folder`` holds. Raises FlashgenError for a limit that is no size."""
    found = _entries(folder)
    oldest = min((each.used_at for each in found), default=None)
    return CacheUse(folder, len(found), sum(each.num_bytes for each in found), limit_bytes(), oldest)


def trim(folder: Path, limit: int) -> int:
    """Removes the entries that were not used for longest until the rest is well below the limit, in bytes,
    if it is above; returns the bytes freed. What was used within minutes stays."""
    found = sorted(_entries(folder), key=lambda each: each.used_at)
    total = sum(each.num_bytes for each in found)
    if total <= limit:
        return 0
    freed, recently = 0, time.time() - IN_USE_S
    for each in found:
        if total - freed <= KEPT_SHARE * limit or each.used_at > recently:
            break
        freed += _remove([each])
    return freed


def clear(folder: Path) -> CacheUse:
    """Removes all entries, and nothing else that lies in the folder; returns what there was."""
    use = cache_use(folder)
    _remove(_entries(folder))
    for left in folder.glob(f"{SCRATCH_PREFIX}*"):
        if left_by_the_dead(left.name):
            shutil.rmtree(left, ignore_errors=True)
    for subfolder in folder.glob("[0-9a-f][0-9a-f]"):
        with contextlib.suppress(OSError):  # it holds something of somebody else's
            subfolder.rmdir()
    return use


def _entries(folder: Path) -> list[CacheEntry]:
    """What the cache holds; other processes may add and remove meanwhile."""
    files: dict[str, list[tuple[Path, os.stat_result]]] = {}
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        if match := _KEY.match(path.name):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.setdefault(match[0], []).append((path, status))
    return [
        CacheEntry(
            key,
            tuple(path for path, _ in those),
            sum(status.st_size for _, status in those),
            max(status.st_mtime for _, status in those),
        )
        for key, those in files.items()
    ]


def _remove(entries: Iterable[CacheEntry]) -> int:
    """Removes entries, the record of each first: without it there is no entry. Returns the bytes freed."""
    freed = 0
    for each in entries:
        with contextlib.suppress(OSError):
            for path in sorted(each.files, key=lambda path: path.suffix != ".json"):
                path.unlink(missing_ok=True)
            freed += each.num_bytes
    return freed
