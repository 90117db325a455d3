"""What a kernel makes a card do: counts of warp-wide instructions, wavefronts, bytes and waits.

A family counts them from its variant; ``tuner/costmodel.py`` turns them into a time. Counts are of what the
template writes, not of what a compiler makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from .problem import Problem


@dataclass(frozen=True)
class Counts:
    """Warp-wide instructions, summed over the warps of a block, and what else takes time.

    Waits are counted along one warp: how often it has nothing to issue until something arrives.
    """

    ffma: float = 0.0
    """Multiply-adds."""
    alu: float = 0.0
    """Other additions, multiplications, maxima, selections, integer and address arithmetic."""
    exp: float = 0.0
    """Exponentials, logarithms, reciprocals."""
    shuffles: float = 0.0
    accesses: float = 0.0
    """Loads, stores and asynchronous copies, of shared or global memory."""
    wavefronts: float = 0.0
    """Passes through the banks of shared memory or the lines of L1, conflicts included."""
    delivered: float = 0.0
    """Words per lane that loads bring into registers: broadcast or not, a warp's cost 128 bytes each."""
    l2_bytes: float = 0.0
    """Between the SM and L2."""
    shared_waits: float = 0.0
    """For a shared-memory read, a shuffle or an exponential."""
    global_waits: float = 0.0
    barriers: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, n) + getattr(other, n) for n in _NAMES))

    def __mul__(self, factor: float) -> Counts:
        return Counts(*(getattr(self, n) * factor for n in _NAMES))

    @property
    def instructions(self) -> float:
        return self.ffma + self.alu + self.exp + self.shuffles + self.accesses + self.barriers

    def of_warps(self, warps: float) -> Counts:
        """One warp's counts for a block of that many, which run side by side: waits do not add up."""
        alone = {"shared_waits", "global_waits", "barriers"}
        return Counts(*(getattr(self, n) * (1 if n in alone else warps) for n in _NAMES))


_NAMES = tuple(f.name for f in fields(Counts))


@dataclass(frozen=True)
class Walk:
    """``blocks`` that walk alike: K/V tiles brought in, and tiles computed, summed over the block's warps."""

    blocks: int
    tiles: int
    warp_tiles: int


@dataclass(frozen=True)
class Work:
    """All of a launch: what a block does once and for each K/V tile it brings in, and what one warp does for
    each tile it computes; and how often, for the blocks of one head in the order in which they start."""

    once: Counts
    per_tile: Counts
    per_warp_tile: Counts
    walks: tuple[Walk, ...]
    heads: int
    """Of all batches together."""
    warps: int
    heads_interleaved: bool = False
    """Whether neighbouring blocks belong to different heads, instead of sharing one's K and V."""

    @property
    def blocks(self) -> int:
        return self.heads * sum(walk.blocks for walk in self.walks)

    def of(self, walk: Walk) -> Counts:
        """Everything one block of that walk does."""
        computed = self.per_warp_tile.of_warps(self.warps) * (walk.warp_tiles / self.warps)
        return self.once + self.per_tile * walk.tiles + computed

    @property
    def mean(self) -> Counts:
        """Everything an average block does."""
        blocks = sum(walk.blocks for walk in self.walks)
        tiles = sum(walk.blocks * walk.tiles for walk in self.walks) / blocks
        warp_tiles = sum(walk.blocks * walk.warp_tiles for walk in self.walks) / blocks
        computed = self.per_warp_tile.of_warps(self.warps) * (warp_tiles / self.warps)
        return self.once + self.per_tile * tiles + computed

    @property
    def is_even(self) -> bool:
        """Whether all blocks bring in about as many tiles, as without a causal mask."""
        tiles = [walk.tiles for walk in self.walks]
        return max(tiles) <= min(tiles) + 1

    @property
    def heaviest(self) -> Walk:
        return max(self.walks, key=lambda walk: (walk.warp_tiles, walk.tiles))


@lru_cache(maxsize=4096)
def walk_tiles(problem: Problem, br: int, bc: int, warps: int, *, skips: bool) -> tuple[Walk, ...]:
    """The walks of one head's query tiles, the last tile first: under a causal mask only tiles that some row
    of the block sees are brought in. ``skips``: a warp leaves out tiles that none of its own rows sees."""
    q_tiles = -(-problem.seqlen_q // br)
    if not problem.causal:
        tiles = -(-problem.seqlen_k // bc)
        last_rows = problem.seqlen_q - (q_tiles - 1) * br
        busy = -(-last_rows // (br // warps)) if skips else warps
        last = Walk(1, tiles, tiles * busy)
        return (last, Walk(q_tiles - 1, tiles, tiles * warps)) if q_tiles > 1 else (last,)
    diagonal = problem.seqlen_k - problem.seqlen_q
    rows_per_warp = br // warps

    def seen(end_row: int) -> int:
        """Tiles that rows up to ``end_row`` see."""
        keys = min(problem.seqlen_k, min(end_row, problem.seqlen_q) + diagonal)
        return -(-keys // bc) if keys > 0 else 0

    walks = []
    for q_tile in reversed(range(q_tiles)):
        first_row = q_tile * br
        tiles = seen(first_row + br)
        if skips:
            starts = range(first_row, min(first_row + br, problem.seqlen_q), rows_per_warp)
            warp_tiles = sum(seen(start + rows_per_warp) for start in starts)
        else:
            warp_tiles = warps * tiles
        walks.append(Walk(1, tiles, warp_tiles))
    return tuple(walks)
