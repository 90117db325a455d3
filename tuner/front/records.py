"""The records of tuned kernels that calls draw on: one's own, those given by file, and those that ship."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ...gen.variant import Variant
from ..shelf import library
from ..shelf.library import Entry

_LOCK = threading.Lock()


def home_folder() -> Path:
    """Returns the folder of kernels tuned on this machine: ``$FLASHGEN_HOME``, else in the user's data."""
    chosen = os.environ.get("FLASHGEN_HOME")
    return Path(chosen or platformdirs.user_data_dir("flashgen")).expanduser().absolute()


class Records:
    """All records that are known, read when they are first asked for."""

    def __init__(self) -> None:
        self._given: list[Entry] = []
        self._found: tuple[Entry, ...] | None = None
        self.version = 0
        """Raised with each change: who kept what followed from the records looks again."""

    def all(self) -> tuple[Entry, ...]:
        """Returns the records: those given last first, then of the own folder, of ``./out``, shipped ones."""
        with _LOCK:
            if self._found is None:
                self._found = (*self._given, *library.entries(self._places()))
            return self._found

    def find(self, slug: str, name: str, variant: Variant) -> Entry | None:
        """Returns the record of a variant that was tuned for the problem of that name; None: it is gone."""
        named = ((each.slug, each.kernel.problem.name, each.kernel.variant) for each in self.all())
        return next(
            (each for each, of in zip(self.all(), named, strict=True) if of == (slug, name, variant)), None
        )

    def fingerprint(self) -> str:
        """Returns what changes with any of the records, without reading them."""
        digest = hashlib.sha256()
        for folder in self._places():
            for path in sorted(folder.glob("*/*.json")):
                with contextlib.suppress(OSError):
                    told = path.stat()
                    digest.update(f"{path} {told.st_mtime_ns} {told.st_size}\n".encode())
        for each in self._given:
            digest.update(f"{each.slug} {each.kernel.problem.name} {each.kernel.tuned_at}\n".encode())
        return digest.hexdigest()

    @staticmethod
    def _places() -> list[Path]:
        return list(dict.fromkeys([home_folder(), Path("out").absolute(), library.shipped_folder()]))

    def give(self, entries: Iterable[Entry]) -> None:
        """Adds records, before all others."""
        with _LOCK:
            self._given = [*entries, *self._given]
        self.forget()

    def forget(self) -> None:
        """Has folders read again: for when something was tuned."""
        with _LOCK:
            self._found = None
            self.version += 1


RECORDS = Records()
