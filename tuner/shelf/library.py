"""The tuned kernels on disk: ``out/<device>/<kernel>.{cu,py,json}``."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ...gen.kernel import Kernel
from ..errors import FlashgenError
from ..evaluate.outcome import TunedKernel
from ..files import read_text, write_text
from .records import from_record, to_record

#: The largest record or source that is read, and how much of what is wrong with one is told.
MAX_BYTES = 32 * 2**20
MAX_WHY = 300
#: What stands beside shipped kernels: their figures.
PAGE = "README.md"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """The three files of one kernel."""

    cu: Path
    py: Path
    json: Path

    @classmethod
    def of(cls, folder: Path, slug: str, name: str) -> Paths:
        stem = folder / slug / name
        return cls(*(stem.with_name(f"{name}.{suffix}") for suffix in ("cu", "py", "json")))


@dataclass(frozen=True)
class Entry:
    """A kernel found in a library folder (``json_path``) or in a study (``rendered``)."""

    kernel: TunedKernel
    slug: str
    json_path: Path | None = None
    rendered: Kernel | None = None

    @property
    def predicted(self) -> bool:
        return self.kernel.measurement.predicted


def check_writable(folder: Path, what: str = "out", option: str = "--out") -> None:
    """Raises FlashgenError unless files can be written in ``folder``, which is made where it is missing.

    ``what`` the folder is and the ``option`` that names it are for the message."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FlashgenError(
            f"the {what} folder {folder} cannot be written: {error.strerror or error}; choose another with "
            f"{option}"
        ) from error


def write(folder: Path, slug: str, kernel: TunedKernel, cuda: str, module: str) -> Paths:
    """Writes the kernel's three files (``cuda`` and ``module`` are the texts of the first two), each whole or
    not at all, the JSON, which makes the kernel known, last.

    Raises:
        FlashgenError: the folder cannot be written, or its disk is full.
    """
    paths = Paths.of(folder, slug, kernel.problem.name)
    try:
        write_text(paths.cu, cuda)
        write_text(paths.py, module)
        write_text(paths.json, json.dumps(to_record(kernel), indent=2) + "\n")
    except OSError as error:
        raise FlashgenError(
            f"{paths.cu.parent} cannot be written: {error.strerror or error}; the tuned kernel is kept with "
            "the trials: free some space or make the folder writable, then `flashgen emit best.cu` writes it"
        ) from error
    return paths


def read(path: Path, slug: str | None = None) -> Entry:
    """Reads the kernel of one JSON file and the ``.cu`` beside it.

    Raises:
        FlashgenError: it cannot be read, or is not a tuned kernel's record.
    """
    try:
        data = json.loads(read_text(path, MAX_BYTES))
        source = read_text(path.with_suffix(".cu"), MAX_BYTES)
        return Entry(from_record(data, source), slug or path.parent.name, path)
    except OSError as error:
        raise FlashgenError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise FlashgenError(_no_record(path, "it is nested too deeply")) from error
    except KeyError as error:
        raise FlashgenError(_no_record(path, f"it has no {error.args[0]}")) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise FlashgenError(_no_record(path, str(error)[:MAX_WHY])) from error


def _no_record(path: Path, why: str) -> str:
    return f"{path} is not the record of a tuned kernel of this flashgen ({why}); remove it or tune again"


def shipped_folder() -> Path:
    """Returns the folder in which the kernels measured by flashgen's authors are installed."""
    return Path(str(files("flashgen.out")))


def is_shipped(entry: Entry) -> bool:
    """Tells whether a kernel is one of those that come with flashgen: nobody tuned it here.

    In a checkout what is tuned lies beside them: theirs are the folders with a page of their figures.
    """
    if entry.json_path is None:
        return False
    folder = entry.json_path.resolve().parent
    return folder.is_relative_to(shipped_folder().resolve()) and (folder / PAGE).is_file()


def folders(out: Path) -> list[Path]:
    """Returns the folders in which kernels are looked for, in order and each once: the out folder, then the
    shipped ones."""
    found: dict[str, Path] = {}
    for folder in (out, shipped_folder()):
        # Not by resolve, which raises for links that lead in a circle.
        found.setdefault(os.path.realpath(folder), folder)
    return list(found.values())


def entries(places: Iterable[Path]) -> list[Entry]:
    """Returns every readable kernel under ``places``, in their order. Files that are none are passed over,
    each named in the log."""
    found: list[Entry] = []
    for place in places:
        for path in sorted(place.glob("*/*.json")):
            try:
                found.append(read(path))
            except FlashgenError as error:
                _log.warning("passed over: %s", error)
    return found
