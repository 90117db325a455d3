"""Caches of slots, one for each sequence, as those of pages that they are as well."""

import importlib
from typing import Any

from .arrays import _kind, _library, _torch_of
from .facts import Tuned
from .packed_values import _shape
from .paged_values import _own_page_size

_GAPS = "has gaps between its slots, of which no pages are made without a copy: pass a block_table="


def _slots_as_pages(
    tuned: Tuned, caches: tuple[Any, Any], slots: Any, batch: int
) -> tuple[tuple[Any, Any], Any]:
    """Two caches (slots, room, kv_heads, head_dim) as those of pages, without a copy, and the table of each
    sequence's pages: of its own slot, or of that which `slots`, integers (batch), name.

    Raises TypeError and ValueError for caches that are not of whole pages of the kernel's size, or have gaps.
    """
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        if len(_shape(cache)) != 4:
            raise ValueError(
                f"{name} has {len(_shape(cache))} dimensions, {_shape(cache)}; 4 are needed, (slots, room, "
                "kv_heads, head_dim)"
            )
    num_slots, room = _shape(caches[0])[:2]
    if slots is None and num_slots != batch:
        raise ValueError(
            f"q has the batch {batch}, and the caches have {num_slots} slots; pass cache_batch_idx=, or a "
            "slot for each sequence"
        )
    page_size = _own_page_size(tuned) or max(room, 1)
    if room % page_size:
        raise ValueError(
            f"slots have room for {room} keys, and {tuned.name} takes pages of {page_size}: make room for a "
            f"multiple of them, or another kernel with {tuned.command} --page-size {max(room, 1)}"
        )
    pages = tuple(
        _in_pages(name, cache, room // page_size, page_size)
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True)
    )
    return (pages[0], pages[1]), _table_of(caches[0], slots, batch, room // page_size)


def _in_pages(name: str, cache: Any, count: int, page_size: int) -> Any:
    """A cache whose slots are `count` pages each."""
    slots, _, heads, columns = _shape(cache)
    if count == 1:
        return cache
    wanted = (slots * count, page_size, heads, columns)
    if _torch_of(cache) is not None:
        try:
            return cache.view(wanted)
        except RuntimeError as error:
            raise ValueError(f"{name} {_GAPS}") from error
    flags = getattr(cache, "flags", None)
    if not hasattr(cache, "reshape") or not getattr(flags, "c_contiguous", False):
        raise ValueError(f"{name} {_GAPS}")
    return cache.reshape(wanted)


def _table_of(cache: Any, slots: Any, batch: int, count: int) -> Any:
    """The pages of each sequence's slot, int32 (batch, count), on the cache's device."""
    torch = _torch_of(cache)
    if torch is not None:
        of_slot = torch.arange(count, dtype=torch.int32, device=cache.device)
        if slots is None:
            slots = torch.arange(batch, dtype=torch.int32, device=cache.device)
        return slots.to(torch.int32)[:, None] * count + of_slot
    if _library(cache) not in ("numpy", "cupy"):
        raise TypeError(
            f"k_cache is a {_kind(cache)}, of whose slots this module makes no table: pass a block_table="
        )
    library: Any = importlib.import_module(_library(cache))
    slots = library.arange(batch, dtype="int32") if slots is None else slots.astype("int32")
    return slots[:, None] * library.int32(count) + library.arange(count, dtype="int32")
