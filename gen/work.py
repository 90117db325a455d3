"""What a kernel makes a card do: counts of warp-wide instructions, wavefronts, bytes and waits.

A family counts them from its variant (``families/*/work.py``, registered at `count_work`); the cost model in
``tuner/predict`` turns them into a time. Counts are of what the template writes, not of what a compiler makes
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, singledispatch
from math import gcd
from operator import add, attrgetter

import numpy as np

from .handover.reach import mean_tiles_in_reach
from .limits import DeviceLimits
from .problem import Problem
from .scored_tiles.seen import seen_shares
from .scoring.scores import BATCH, laid_over
from .scoring.values import typical_values

#: Warp schedulers among which the warps of a block are dealt out in turn (two on sm_60 alone).
SCHEDULERS = 4
#: Packed sequences of more lengths than this are counted as of so many.
MANY_LENGTHS = 24


@dataclass(frozen=True)
class Counts:
    """Warp-wide instructions, summed over the warps of a block, and what else takes time.

    Waits are counted along one warp: how often it has nothing to issue until something arrives.
    """

    ffma: float = 0.0
    """Multiply-adds on the CUDA cores."""
    products: float = 0.0
    """Matrix products on the tensor cores."""
    tensor: float = 0.0
    """Cycles that the matrix products take on the tensor core of one scheduler."""
    scattered: float = 0.0
    """The part of the multiply-adds whose row operand shares no vector with a neighbouring row's, so that
    nothing leads the compiler to put neighbours into different register banks. One of a vector of n rows
    counts 1 / n."""
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
    """Bytes that pass between the SM and L2."""
    shared_waits: float = 0.0
    """How often a warp waits for a shared-memory read, a shuffle or an exponential."""
    global_waits: float = 0.0
    barriers: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return _counts(map(add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> Counts:
        return _counts([value * factor for value in _values(self)])

    @property
    def instructions(self) -> float:
        issued = self.ffma + self.products + self.alu + self.exp + self.shuffles + self.accesses
        return issued + self.barriers

    def of_warps(self, warps: float) -> Counts:
        """Returns one warp's counts for a block of that many, which run side by side: waits do not add up."""
        waits = {name: getattr(self, name) for name in ("shared_waits", "global_waits", "barriers")}
        return (self * warps).but(**waits)

    def but(self, **counts: float) -> Counts:
        """Returns the same but for these counts, sooner than `dataclasses.replace` does."""
        made = object.__new__(Counts)
        made.__dict__.update(self.__dict__, **counts)
        return made


_NAMES = tuple(f.name for f in fields(Counts))
_values = attrgetter(*_NAMES)


def _counts(values: Iterable[float]) -> Counts:
    """Counts of all names: a frozen class's constructor takes three times as long."""
    made = object.__new__(Counts)
    made.__dict__.update(zip(_NAMES, values, strict=True))
    return made


@dataclass(frozen=True)
class Walk:
    """``blocks`` that walk alike: K/V tiles brought in, and tiles computed, summed over the block's warps.

    ``paced_tiles`` is that sum if every scheduler had as many to compute as the one with the most: the warps
    that leave tiles out are the same in every block, and so is the scheduler that they leave idle.
    """

    blocks: int
    tiles: int
    warp_tiles: int
    paced_tiles: int


@dataclass(frozen=True)
class Work:
    """The base of all kinds of counted work, each of which has a cost model of its own.

    ``registers`` are those per thread that the compiler takes, where they are not what the variant needs.
    ``launches_in_front`` split float32, turn values of eight bits or find which keys are in reach before
    blocks begin, and read and write ``bytes_in_front``.
    """

    registers: int | None = field(default=None, kw_only=True)
    launches_in_front: int = field(default=0, kw_only=True)
    bytes_in_front: float = field(default=0.0, kw_only=True)


@singledispatch
def count_work(variant: object, problem: Problem, limits: DeviceLimits) -> Work:
    """Returns the counted work of a variant's kernel on a problem and a card. Each family registers its own
    count; raises NotImplementedError for a family without one."""
    raise NotImplementedError(f"nobody counts the work of {type(variant).__name__}; register a count for it")


@dataclass(frozen=True)
class BlockWork(Work):
    """The work of a whole launch: what a block does once and for each K/V tile it brings in, and what one
    warp does for each tile it computes; and how often, for the blocks of one head in the order in which they
    start."""

    once: Counts
    per_tile: Counts
    per_warp_tile: Counts
    walks: tuple[Walk, ...]
    heads: int
    """Query heads of all batches together, where those that blocks take along, packed or in turn, count as
    one."""
    warps: int
    heads_share_keys: bool = True
    """Whether ``heads`` counts query heads that share keys apart; packed, they are one."""
    bytes_ahead: float | None = None
    """Bytes that a block has under way from device memory while it computes; None where other things bound
    it."""
    cluster: int = 1
    """Blocks of a cluster, which start together, near each other."""
    heads_interleaved: bool = False
    """Whether neighbouring blocks belong to different heads, instead of sharing one's K and V."""
    loop_instructions: float = 0.0
    """Instructions in the code of the loop over K/V tiles, as they lie in memory."""
    moved_bytes: float | None = None
    """Bytes through device memory however much L2 holds; None for those of the problem."""
    passing_bytes: float | None = None
    """Bytes that pass by the blocks of one head, each of which reads them again; None for its K and V."""
    left_bytes: float = 0.0
    """Bytes that a block leaves for another launch, which puts together what blocks with the same rows made
    of shares of the keys."""
    shares: int = 1
    """Blocks that leave something for the same rows."""
    late: float = 0.0
    """Tiles that a block waits for with all its warps, by tile that it brings in: there is room for no other
    beside the one that is computed."""
    evicts_first: bool = False
    """Whether what is read is marked as what L2 should give up first."""
    stays: bool = False
    """Whether blocks take one tile after the other, and have what the next one needs brought meanwhile."""
    pace: float = 1.0
    """How much longer the loop takes than its counts tell, where times of a card say so of a parameter."""
    last_slices: int = 1
    """Slices of each tile of a last turn, where there are fewer tiles left than blocks that stay."""
    last_turns: int = 1
    """Turns, of a slice each, that the last turn then takes."""

    @cached_property
    def blocks(self) -> int:
        return self.heads * sum(walk.blocks for walk in self.walks)

    @cached_property
    def loop(self) -> Counts:
        """What an average block does in its loop at the pace of the busiest scheduler: instructions and
        waits of ``paced_tiles``, traffic of ``warp_tiles``."""
        paced, moved = self._loop(self._average("paced_tiles")), self._moved
        return paced.but(wavefronts=moved.wavefronts, delivered=moved.delivered, l2_bytes=moved.l2_bytes)

    @cached_property
    def mean(self) -> Counts:
        """Everything an average block does."""
        return self.once + self._moved

    @cached_property
    def mean_tiles(self) -> float:
        """K/V tiles that an average block brings in."""
        return self._average("tiles")

    @cached_property
    def _moved(self) -> Counts:
        """What an average block does in its loop."""
        return self._loop(self._average("warp_tiles"))

    def _loop(self, warp_tiles: float) -> Counts:
        computed = self.per_warp_tile.of_warps(self.warps) * (warp_tiles / self.warps)
        return self.per_tile * self.mean_tiles + computed

    def _average(self, name: str) -> float:
        blocks = sum(walk.blocks for walk in self.walks)
        return sum(walk.blocks * getattr(walk, name) for walk in self.walks) / blocks

    @property
    def is_even(self) -> bool:
        """Whether all blocks bring in about as many tiles, as without a causal mask; one is not as none."""
        most, least = max(walk.tiles for walk in self.walks), min(walk.tiles for walk in self.walks)
        return most <= least + 1 and (least > 0 or most == 0)


@dataclass(frozen=True)
class LaunchWork:
    """What one launch of several makes a card do, and what its blocks take of an SM."""

    work: BlockWork
    threads: int
    smem_bytes: int
    registers: int


@dataclass(frozen=True)
class LaunchesWork(Work):
    """The work of launches that run one after the other; ``moved_bytes`` are what further ones bring through
    device memory, ``others`` of them, which do nothing else that takes time."""

    launches: tuple[LaunchWork, ...]
    others: int = 0
    moved_bytes: float = 0.0
    by_warpgroups: bool = False
    """Whether products are of whole warpgroups, which issue one and go on."""
    last_beside: bool = False
    """Whether blocks of the last of ``launches`` begin as soon as the one before it leaves multiprocessors
    idle, instead of once that has ended."""


def heads_alike(problem: Problem) -> int:
    """Returns how many heads have the walks of `walk_tiles`: of all batches, or of packed sequences, whose
    walks are those of all, of one."""
    return problem.num_q_heads * (1 if problem.layout.is_packed else problem.batch)


def shared_walks(
    walks: tuple[Walk, ...], blocks: int, warps: int = 1, *, wanted: int | None = None
) -> tuple[Walk, ...]:
    """Returns walks that so many blocks share, and warps of each: what one block then does by turns of its
    warps. With ``wanted`` walks are shared as a plan of packed sequences does: by so many blocks at most, and
    all together by no more than are wanted."""
    if wanted is None:
        return tuple(_shared(walk, blocks, warps) for walk in walks)

    def shares(tiles_each: int) -> list[int]:
        return [min(blocks, max(1, -(-walk.tiles // tiles_each))) for walk in walks]

    room = max(wanted, sum(walk.blocks for walk in walks))
    below, enough = 0, max(walk.tiles for walk in walks) + 1
    while enough - below > 1:
        middle = (below + enough) // 2
        made = sum(walk.blocks * share for walk, share in zip(walks, shares(middle), strict=True))
        below, enough = (below, middle) if made <= room else (middle, enough)
    return tuple(_shared(walk, share, warps) for walk, share in zip(walks, shares(enough), strict=True))


def _shared(walk: Walk, blocks: int, warps: int) -> Walk:
    """A walk that so many blocks share, and warps of each: what one block then does by turns of its warps."""
    if blocks * warps == 1:
        return walk

    def share(tiles: int) -> int:
        return -(-tiles // (blocks * warps))

    return Walk(
        walk.blocks * blocks,
        share(walk.tiles),
        share(walk.warp_tiles) * warps,
        share(walk.paced_tiles) * warps,
    )


def sequences_alone(problem: Problem) -> Iterator[tuple[int, Problem]]:
    """Yields packed sequences as dense problems, and before each how many of it there are: of many lengths,
    neighbours are counted as one."""
    pairs = sorted(pair for pair in problem.lengths.pairs if pair[0])
    step = -(-len(pairs) // MANY_LENGTHS) or 1
    for first in range(0, len(pairs), step):
        alike = pairs[first : first + step]
        rows, keys = alike[len(alike) // 2]
        yield len(alike), replace(problem, batch=1, seqlen_q=rows, seqlen_k=max(1, keys), varlen="")


@lru_cache(maxsize=4096)
def walk_tiles(
    problem: Problem,
    br: int,
    bc: int,
    warps: int,
    *,
    skips: bool,
    packed: int = 1,
    reaches: tuple[float, ...] = (),
) -> tuple[Walk, ...]:
    """Counts the walks of one head's query tiles, the last tile first: only tiles between what a block's
    first row sees first and what its last row sees last are brought in. ``skips``: a warp leaves out tiles
    that none of its own rows sees. ``packed``: so many rows, of different heads, stand at one position.
    ``reaches``: how far from their places the rows of each head look, of which the mean counts. Where a
    predicate hides keys, as many of the tiles are left out as a sample of rows tells. Of packed sequences the
    walks are those of all, the longest first."""
    if problem.layout.is_packed:
        found: Counter[tuple[int, int, int]] = Counter()
        for count, alone in sequences_alone(problem):
            for each in walk_tiles(alone, br, bc, warps, skips=skips, packed=packed):
                found[each.tiles, each.warp_tiles, each.paced_tiles] += count * each.blocks
        return tuple(Walk(found[tiles], *tiles) for tiles in sorted(found, reverse=True))
    rows = problem.seqlen_q * packed
    q_tiles = -(-rows // br)
    # Of what differs from batch to batch, the first stands for all.
    values = laid_over(typical_values(problem), {BATCH.name: 0})
    begins, ends = problem.scores.interval(
        np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k, values
    )
    first_keys, end_keys = begins.tolist(), ends.tolist()
    rows_per_warp = br // warps
    schedulers = gcd(warps, SCHEDULERS)
    listed = seen_shares(problem, -(-br // packed), bc, q_tiles).tolist()
    shift = problem.seqlen_k - problem.seqlen_q

    def seen(first_row: int, end_row: int) -> int:
        """Returns how many tiles lie between what the first of these rows sees first and what the last of
        them sees last."""
        first_position, last_position = first_row // packed, -(-min(end_row, rows) // packed) - 1
        first_key, end_key = first_keys[first_position], end_keys[last_position]
        if reaches:
            places = first_position + shift, last_position + shift
            return round(mean_tiles_in_reach(reaches, places, (first_key, end_key), bc))
        return -(-end_key // bc) - first_key // bc if first_key < end_key else 0

    def walk(q_tile: int, blocks: int = 1) -> Walk:
        first_row = q_tile * br
        tiles = round(listed[q_tile] * seen(first_row, first_row + br))
        if not skips:
            return Walk(blocks, tiles, warps * tiles, warps * tiles)
        starts = [first_row + warp * rows_per_warp for warp in range(warps)]
        share = listed[q_tile]
        by_warp = [round(share * seen(each, each + rows_per_warp)) if each < rows else 0 for each in starts]
        paced = schedulers * max(sum(by_warp[i::schedulers]) for i in range(schedulers))
        return Walk(blocks, tiles, sum(by_warp), paced)

    if problem.scores.all_rows_alike:
        last = walk(q_tiles - 1)
        return (last, walk(0, q_tiles - 1)) if q_tiles > 1 else (last,)
    return tuple(walk(q_tile) for q_tile in reversed(range(q_tiles)))
