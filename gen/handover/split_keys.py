"""Keys of a tile of query rows that several blocks share by way of memory, where no cluster forms.

Each block leaves what its range of keys makes of the rows in the kernel's workspace, in a place of its own;
another launch, of as many blocks, puts together what the blocks of a tile have left, always in the same
order. Of packed sequences the plan says how many blocks share the keys of each.
"""

from __future__ import annotations

from dataclasses import replace

from ..launch import COMBINE_ROLE, Launch
from ..limits import WARP, DeviceLimits
from ..problem import Problem
from .workspace import Region, Workspace

#: Warps of a block that puts results together, each of which does a row at a time: at least, and at most.
COMBINE_WARPS = (4, 16)
#: Blocks per multiprocessor that fill a card, and beyond which more of them only make shares smaller.
FILLING_BLOCKS, ENOUGH_BLOCKS = 2, 8
#: The most blocks that may share the keys of a tile.
MOST_SPLITS = 64
#: The region of the workspace that holds them.
PARTIAL_RESULTS = "partial_results"


def combine_launch(main: Launch, threads: int) -> Launch:
    """Returns the launch that puts together what the blocks of ``main`` leave, by blocks of so many
    threads."""
    return replace(main, threads=threads, smem_bytes=0, tensor_maps=(), role=COMBINE_ROLE)


def a_warp_for_each_row(main: Launch) -> int:
    """Returns the threads of a block that puts together what the blocks of ``main`` leave where a warp does a
    row: as many as it has rows where it is known how many blocks do a tile's, as far as there may be so
    many."""
    least, most = COMBINE_WARPS
    rows = least if main.packed else -(-(main.rows_per_block or 1) // main.workspace_splits)
    return WARP * min(most, max(least, 1 << (rows - 1).bit_length()))


def workspace_of_splits(main: Launch, floats: int) -> Workspace:
    """Returns the workspace of kernels whose blocks leave ``floats`` 32-bit words each."""
    return Workspace(
        (Region(PARTIAL_RESULTS, main.blocks * floats, "what each block's keys make of its rows"),)
    )


def no_need_to_split(
    splits: int,
    tiles: int,
    heads: int,
    problem: Problem,
    limits: DeviceLimits,
    *,
    enough_blocks: int = ENOUGH_BLOCKS,
) -> str | None:
    """Says why the search leaves out kernels of which so many blocks share the keys of a tile of rows, there
    being ``tiles`` of them for each of ``heads``; None where these leave the card idle. More than
    ``enough_blocks`` per multiprocessor only make shares smaller."""
    alone, filling = tiles * heads, FILLING_BLOCKS * limits.num_sms
    if splits == 1:
        return None
    keys = [keys for _, keys in problem.lengths.pairs] if problem.layout.is_packed else []
    is_even = not keys or max(keys) * filling <= sum(keys) * heads
    if alone >= filling and is_even:
        return f"workspace_splits={splits}: {alone} blocks occupy {limits.num_sms} multiprocessors without"
    enough = enough_blocks * limits.num_sms
    if splits * alone > enough and not keys:
        return f"workspace_splits={splits}: makes {splits * alone} blocks of {alone}, {enough} are enough"
    return None


def splits_too_little(splits: int, keys_of_share: int, keys: int, problem: Problem) -> str | None:
    """Says why another number is at least as good where a plan of packed sequences splits no more than there
    is need: one that allows for more, as long as the longest has as many shares."""
    if 1 < splits < MOST_SPLITS and problem.layout.is_packed and keys >= 2 * splits * keys_of_share:
        return f"workspace_splits={splits}: a plan splits as few keys as it can, {2 * splits} allow for more"
    return None
