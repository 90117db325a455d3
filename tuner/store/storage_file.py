"""Notices that the file under the trials was taken away. Its readers and writers would not: SQLite goes on in
a file that no longer has a name, and a journal starts anew with half of its history."""

from __future__ import annotations

from pathlib import Path

from ..errors import FlashgenError


class StorageFile:
    """The file of an SQLite or journal storage, which must stay the one that was opened."""

    def __init__(self, where: str) -> None:
        self._path = storage_path(where)
        self._identity = self._look()

    def check(self) -> None:
        """Raises FlashgenError when the file is gone or another one."""
        if self._path is not None and self._look() != self._identity:
            what = "replaced" if self._path.exists() else "removed"
            raise FlashgenError(
                f"the trials cannot be kept in {self._path}: it was {what} while in use; put it back if you "
                "can, and repeat the command: it goes on from the trials that are there"
            )

    def _look(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino


def storage_path(where: str) -> Path | None:
    """Returns the file behind a storage, None where there is none on this host."""
    if "://" not in where:
        return Path(where)
    return Path(where.split(":///", 1)[1]) if where.startswith("sqlite") and ":///" in where else None
