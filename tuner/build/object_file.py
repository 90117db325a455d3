"""Whether a compiler wrote what it was asked for: a whole object file, as its header tells.

A compiler may say that all is well and leave junk, or half a file where its disk filled up. Kept in the
cache, either would be taken for the kernel for good.
"""

from __future__ import annotations

import struct
from pathlib import Path

from ..errors import BuildError

#: The header of a 64-bit ELF file, of which the place, the size and the number of its sections say where it
#: ends: both Linux and CUDA write it.
HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
MAGIC, CLASS_64, LITTLE_ENDIAN = b"\x7fELF", 2, 1


def check_object_file(path: Path, compiler: str) -> None:
    """Raises BuildError unless the file is a whole ELF file; ``compiler`` is who wrote it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise BuildError(
            f"{compiler} said that all is well and wrote {size} bytes that are no object file; see what "
            "that program is (`flashgen devices` tells where it lies)"
        )
    fields = HEADER.unpack(head)
    sections_at, section_bytes, sections = fields[11], fields[16], fields[17]
    if fields[1] != CLASS_64 or fields[2] != LITTLE_ENDIAN:
        raise BuildError(f"{compiler} wrote an object file for another kind of machine")
    if size < sections_at + section_bytes * sections:
        raise BuildError(
            f"{compiler} said that all is well and wrote {size} bytes of an object file of "
            f"{sections_at + section_bytes * sections}; its disk may be full"
        )
