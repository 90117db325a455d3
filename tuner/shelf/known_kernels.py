"""All kernels that are known: those of the library folders, and those that a storage alone holds."""

from __future__ import annotations

from pathlib import Path

from ..errors import FlashgenError
from ..extras import needing
from ..store.places import require_existing
from . import library


def known_kernels(out: Path, storage: str, storage_named: bool) -> list[library.Entry]:
    """Returns the kernels of the library folders, then those that only the trials' storage holds.

    Raises FlashgenError where the storage cannot be read and was named, or is all there is.
    """
    found = library.entries(library.folders(out))
    if storage_named:
        require_existing(storage)
    if storage_named or Path(storage).exists():
        have = {(e.slug, e.kernel.problem, e.kernel.variant) for e in found}
        try:
            with needing(f"reading {storage}"):
                from .winners import kernels_in_storage
            kept = kernels_in_storage(storage)
        except FlashgenError:
            if storage_named or not found:
                raise
            kept = []
        found += [e for e in kept if (e.slug, e.kernel.problem, e.kernel.variant) not in have]
    return found
