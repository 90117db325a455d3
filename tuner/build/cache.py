"""The content-addressed cache of built kernels: an artifact per key, complete or absent.

An entry is the artifact and a JSON record beside it, which holds the artifact's SHA-256 and is written last.
What a crash, a full disk or a bit flip left incomplete does not match and is built again. Several processes
may share the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import FlashgenError
from ..files import SCRATCH_PREFIX, left_by_the_dead, scratch_name, write_text
from .cache_size import limit_bytes, trim

#: Scratch folders older than this belong to a process of another host that was killed.
STALE_SCRATCH_SECONDS = 3600
#: What only a disk raises, and what a folder that is not ours raises too.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
FOLDER_ERRORS = DISK_ERRORS | {
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG),
}
#: A use is noted if the last one was noted so long ago.
NOTED_EVERY_S = 300
#: How often the folder is looked through while as much is added as it may hold.
LOOKS_PER_LIMIT = 64


@dataclass(frozen=True)
class Entry:
    """A cached artifact, what its builder recorded, and whether it was there already."""

    path: Path
    metadata: Mapping[str, Any]
    hit: bool


def cache_folder() -> Path:
    """Returns the folder of built kernels: ``$FLASHGEN_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("FLASHGEN_CACHE")
    # Absolute: artifacts are opened later, and by other processes.
    return Path(chosen or platformdirs.user_cache_dir("flashgen")).expanduser().absolute()


def cache_key(parts: Sequence[str]) -> str:
    """Returns the SHA-256 over the parts; how the text is split into parts counts."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode())
        digest.update(encoded)
    return digest.hexdigest()


def cached(parts: Sequence[str], suffix: str, produce: Callable[[Path], Mapping[str, Any]]) -> Entry:
    """Returns the artifact for ``parts`` (all that determines it: source, flags, compiler, target), built on
    a miss.

    ``produce`` writes the artifact to the path it is given, in a scratch folder of its own that it may use
    freely, and returns what to record: JSON values only. Its exceptions pass through; nothing is left then.

    Raises:
        FlashgenError: the folder cannot be written or its disk is full.
    """
    key = cache_key(parts)
    folder = cache_folder() / key[:2]
    artifact = folder / f"{key}{suffix}"
    record = folder / f"{key}.json"
    metadata = _load(artifact, record)
    if metadata is not None:
        _note_use(record)
        return Entry(artifact, metadata, hit=True)
    with disk_errors(cache_folder()):
        folder.mkdir(parents=True, exist_ok=True)
    with _scratch() as scratch:
        built = scratch / f"kernel{suffix}"
        with disk_errors(cache_folder(), DISK_ERRORS):
            metadata = dict(produce(built))
        with disk_errors(cache_folder()):
            text = json.dumps({"sha256": _sha256(built), "metadata": metadata}, indent=1)
            # One rename each, the record last: a reader sees the old entry, none, or the whole new one.
            _sync(built)
            built.replace(artifact)
            write_text(record, text)
    limit = limit_bytes()
    if _GROWTH.is_worth_a_look(len(text) + artifact.stat().st_size, limit):
        trim(cache_folder(), limit)
    return Entry(artifact, metadata, hit=False)


@contextlib.contextmanager
def disk_errors(folder: Path, blamed: frozenset[int] = FOLDER_ERRORS) -> Iterator[None]:
    """Turns an OSError that the disk or its permissions caused into a FlashgenError with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in blamed:
            raise
        raise cache_unwritable(folder, error.strerror or str(error)) from error


def cache_unwritable(folder: Path, why: str) -> FlashgenError:
    """Returns the error for a cache that cannot be written: the folder, what is free and the way out."""
    free = ""
    with contextlib.suppress(OSError):
        exists = next(p for p in (folder, *folder.parents) if p.exists())
        free = f" ({shutil.disk_usage(exists).free / 2**20:.0f} MiB free)"
    return FlashgenError(
        f"the kernel cache {folder} cannot be written: {why}{free}; "
        "free some space or set FLASHGEN_CACHE to another folder"
    )


def _note_use(record: Path) -> None:
    """Makes the record as young as its use, by which entries are chosen that go."""
    with contextlib.suppress(OSError):  # a folder that is read alone
        if time.time() - record.stat().st_mtime > NOTED_EVERY_S:
            os.utime(record)


class _Growth:
    """What this process has added to the cache since the folder was looked through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes = math.inf

    def is_worth_a_look(self, num_bytes: int, limit: int) -> bool:
        """Adds so many bytes; true at the first build of a process, and whenever enough came together."""
        with self._lock:
            self._num_bytes += num_bytes
            if self._num_bytes < limit / LOOKS_PER_LIMIT:
                return False
            self._num_bytes = 0.0
            return True


_GROWTH = _Growth()


def _load(artifact: Path, record: Path) -> dict[str, Any] | None:
    """The entry's metadata, or None when it is absent, incomplete or damaged."""
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
        if data["sha256"] == _sha256(artifact):
            return dict(data["metadata"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder on the cache's own file system, gone afterwards; clears those that killed processes left."""
    root = cache_folder()
    folder = root / scratch_name()
    with disk_errors(root):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in root.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):
                old = time.time() - left.stat().st_mtime > STALE_SCRATCH_SECONDS
                if old or left_by_the_dead(left.name):
                    shutil.rmtree(left, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
