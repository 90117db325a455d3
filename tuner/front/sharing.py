"""`flashgen.load` and `flashgen.pack`: tuned kernels as one file, for a fleet to share."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ..errors import FlashgenError
from ..files import write_bytes
from ..shelf import library, records
from ..shelf.library import MAX_BYTES, Entry
from .bound import forget_choices
from .records import RECORDS, home_folder

#: The most records of a file: ten times what there is of any card.
MAX_RECORDS = 10_000


def pack(path: Path | str, places: Sequence[Path] | None = None) -> int:
    """Writes the records of the kernels tuned here into a zip file and returns how many there are.

    ``places`` are folders of kernels, by default that of `flashgen.tune` and ``./out``; kernels that ship are
    left out. Raises FlashgenError where there are none, or the file cannot be written.
    """
    folders = [home_folder(), Path("out").absolute()] if places is None else places
    found = {
        (each.slug, each.kernel.problem.name): each
        for each in library.entries(folders)
        if not library.is_shipped(each)
    }
    if not found:
        told = ", ".join(map(str, folders))
        raise FlashgenError(f"nothing was tuned in {told}; tune with `flashgen tune`, or name another folder")
    target = Path(path)
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as packed:
        for (slug, name), each in sorted(found.items()):
            packed.writestr(f"{slug}/{name}.json", json.dumps(records.to_record(each.kernel), indent=1))
    try:
        write_bytes(target, memory.getvalue())
    except OSError as error:
        raise FlashgenError(f"{target} cannot be written: {error.strerror or error}") from error
    return len(found)


def load(path: Path | str) -> int:
    """Has calls draw on the kernels of a file that `pack` wrote, and returns how many there are.

    A file holds data alone: variants and their measurements, of which sources are rendered here. Raises
    FlashgenError for a file that is none.
    """
    found: list[Entry] = []
    try:
        with zipfile.ZipFile(path) as packed:
            members = [each for each in packed.infolist() if each.filename.endswith(".json")]
            if len(members) > MAX_RECORDS or any(each.file_size > MAX_BYTES for each in members):
                raise FlashgenError(f"{path} holds more than records of kernels; name a file of `pack`")
            for each in members:
                data = json.loads(packed.read(each))
                slug = PurePosixPath(each.filename).parent.name
                found.append(Entry(records.from_record(data, ""), slug))
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FlashgenError(
            f"{path} is no file of tuned kernels of this flashgen ({error}); write one with `flashgen.pack`"
        ) from error
    if not found:
        raise FlashgenError(f"{path} holds no tuned kernel; write one with `flashgen.pack`")
    RECORDS.give(found)
    forget_choices()
    return len(found)
