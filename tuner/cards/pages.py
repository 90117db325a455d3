"""Caches of keys and values in pages: which pages a sequence has, and its keys in them and out of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_INT32 = np.dtype(np.int32)
_SEED = 29


@dataclass(frozen=True)
class PageTable:
    """The pages of each sequence, in an order that follows no rule.

    ``table`` is int32, (batch, max_pages), and has no meaning behind a sequence's last page. Of ``num_pages``
    in a cache some may be of no sequence.
    """

    table: np.ndarray
    num_pages: int
    page_size: int


def draw_table(
    lengths: tuple[int, ...],
    page_size: int,
    *,
    hostile: bool = False,
    share: bool = False,
    cached: tuple[int, ...] | None = None,
) -> PageTable:
    """Returns pages for sequences of so many keys, the same each time.

    ``hostile``: the first and the last page and others are of no sequence; numbers behind a sequence's last
    page are no pages; and rows of the table have gaps. ``share``: some sequences have their first whole pages
    in common; only of ``cached`` keys, where not all are there yet.
    """
    counts = [-(-n // page_size) for n in lengths]
    rng = np.random.default_rng([_SEED, page_size, *lengths])
    spare = 3 if hostile else 0
    order = rng.permutation(sum(counts) + spare)
    num_pages = len(order) + (2 if hostile else 0)
    order += 1 if hostile else 0
    width = max(1, *counts) + (1 if hostile else 0)
    whole = np.zeros((len(lengths), width + (3 if hostile else 0)), _INT32)
    if hostile:
        whole[...] = rng.choice([-1, num_pages, -(2**31), 2**31 - 1, 0, num_pages - 1], whole.shape)
    table, first = whole[:, :width], 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[first : first + count]
        first += count
    if share:
        there = lengths if cached is None else cached
        longest = int(np.argmax(there))
        for row, length in zip(table[::2], there[::2], strict=True):
            both = min(length, there[longest]) // page_size
            row[: both // 2] = table[longest, : both // 2]
    return PageTable(table, num_pages, page_size)


def told_of_pages(lengths: tuple[int, ...], pages: PageTable) -> dict[str, np.ndarray]:
    """Returns what tells a kernel of sequences of so many keys in pages."""
    return {"page_table": pages.table, "seqused_k": np.array(lengths, _INT32)}


def scatter(array: np.ndarray, lengths: tuple[int, ...], pages: PageTable) -> np.ndarray:
    """Returns the cache (pages, heads, page_size, columns) of an array (1, heads, all keys, columns) of
    sequences one behind the other. What is of no sequence is no number; a page of several has the last
    one's."""
    size = pages.page_size
    cache = np.full((pages.num_pages, array.shape[1], size, array.shape[3]), np.nan, array.dtype)
    first = 0
    for row, length in zip(pages.table, lengths, strict=True):
        for nth, key in enumerate(range(0, length, size)):
            there = min(size, length - key)
            cache[row[nth], :, :there] = array[0, :, first + key : first + key + there]
        first += length
    return cache


def gather(cache: np.ndarray, lengths: tuple[int, ...], table: np.ndarray) -> np.ndarray:
    """Returns the keys of sequences one behind the other, (1, heads, all keys, columns), of a cache."""
    _, heads, size, columns = cache.shape
    parts = []
    for row, length in zip(table, lengths, strict=True):
        of_sequence = cache[row[: -(-length // size)]].transpose(1, 0, 2, 3)
        parts.append(of_sequence.reshape(heads, -1, columns)[:, :length])
    return np.concatenate(parts, axis=1)[None]
