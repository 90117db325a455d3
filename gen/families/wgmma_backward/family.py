"""Gradients on Hopper: a producer warpgroup copies by TMA, consumers multiply by wgmma.

A consumer that keeps 64 keys computes scores the other way round, a row for each of its keys: what wgmma
leaves in registers is then, as weights and as gradients of scores, the left operand of the products that make
the gradients of values and of keys (Shah et al. 2024, "FlashAttention-3", its backward pass). Query rows and
gradients of outputs pass by through stages in shared memory, each read by columns for scores and by rows for
sums from one swizzled tile. Weights are made once their gradients are there, too, or before, beside the
products that make these (as in FlashAttention-3's backward pass).

Gradients of queries are made by another launch, which keeps query rows and lets keys pass by: two products
more of seven, for which nothing is added up in memory, and the same bits come out every run. Or by the blocks
that keep keys: gradients of scores then also pass through shared memory, from which consumers take all keys'
for rows, or columns, of their own; the copy engine, or the threads, add what comes out to sums in memory, in
whatever order, and a last launch reads these. Or the blocks of a cluster, which keep neighbouring keys of a
head and walk the same rows in step, send these sums to each other, and each adds up and writes a share: in
one order, and without a launch or memory beside, but where a head has more keys, which the cluster then takes
in turns, leaving sums in memory from one to the next. Or blocks hand sums on: those of each tile of rows go
through memory from block to block, in one order of keys: who begins stores them, who ends writes gradients.
So nothing is cleared before or read behind, either, and what is under way stays in L2. Blocks take tiles of
keys in that order, too, so that none waits for one that nobody has begun, and rows against it (as in
FlashAttention-2's and -3's deterministic backward passes, whose sums are cleared and read by launches).

Where the rows that pass by are no tiles of 64, blocks of keys make the gradients of queries across: keys are
the left factor, read by columns, so that a product has 64 columns of gradients and as many rows as pass by.
Products of 80 rows read a thirteenth less of shared memory than those of 64, which keep it as busy as the
tensor cores. Sums lie in memory as these products leave them.

Blocks of keys need nothing that the launch of query rows leaves, which comes first. They may begin ``beside``
its last ones, whose number is hardly ever one that keeps all multiprocessors busy, without waiting for it:
statistics, which both read, were there before the first launch let the second begin. The second still ends
behind the first, for which its last block waits, so that whoever comes behind the call finds both ended.

Gradients leave by the copy engine wherever shared memory has room for them by then: that of keys, values or
query rows once a block has done with them, of sums on their way to memory, or of what a block hands on,
behind which consumers go on with the next tile of keys at once.

Neighbouring keys have the same rows pass by. Blocks of a ``cluster`` that take turns in a fixed order may
each copy a part of every tile to all of them, which divides what they ask of L2; a stage is brought anew once
all have read it.

Head dims whose sums are more than a thread's registers are made ``apart``: of the same keys one warpgroup
makes weights and dv, another the gradients of scores and dk, to which weights come through shared memory;
what both add up for queries they then make in as many passes as there are registers for.

float32 is multiplied as sums of two f16 numbers, three products of four. Launches in front leave tiles of 64
rows of the four arrays in parts, as they lie in shared memory, each in a unit of its own, a power of two: so
the copy engine takes bytes, and nothing is split twice. Weights are split where they are made, in a unit of
each key; gradients of scores, which also pass through shared memory, in one of 64 keys besides. What a tile
adds to a gradient is summed apart, a chunk of columns at a time: so accumulators, which cut off what they
cannot hold, never grow large. Beside three products each, what is added up in memory is little: each
consumer adds for its own keys, and waits for no other.

Blocks that stay may leave fewer tiles of keys for a last turn than there are blocks. Each of these can be
cut into slices of its rows, of which every one is a turn: the block that has it takes over what the slices
before it make of the keys' gradients, adds its own and hands that on, or writes it (``last_turn``).

Packed sequences are copied by boxes that end where each of them does; what is left of their rows in memory
has room for whole tiles of each, so that tiles begin with sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

from ...expression import Constant, divided_up
from ...handover.last_turn import handed_regions
from ...handover.reach import reach_regions
from ...handover.split_tiles import (
    ARRAYS_OF_GRADIENTS,
    TILE_ROWS,
    TILE_THREADS,
    UNIT_WORDS,
    split_tile_launches,
    tile_regions,
)
from ...handover.statistics import RowSums, sums_by_products
from ...handover.workspace import Region, Workspace
from ...launch import BATCH, Q_HEADS, QUERIES_ROLE, ROWS, Launch
from ...layout import DENSE, PACKED
from ...limits import DeviceLimits
from ...operation import BACKWARD
from ...problem import Problem
from ...serves import Serves
from ..arithmetic import LEAST_EXPONENT, TOP_EXPONENT
from ..used_tiles import UsedTiles
from ..wgmma.parameters import GROUP, is_split
from ..wgmma.shared_memory import ALIGNMENT, CHUNK, chunks
from .advice import AdvisedParameters
from .parameters import CONSUMERS, DOWN, HANDED_ON, HELD, SUM_COLUMNS, SUM_ROWS, UP, WIDE
from .registers import consumer_registers, launch_registers, producer_registers
from .shared_memory import ADDING_WARPS, smem_bytes, smem_bytes_of_rows
from .slices import MOST_SLICES, SLICE_TILES

#: The region of a workspace that counts the turns which blocks have taken.
TURNS = "turns"
#: That which says into how many slices tiles of keys of the last turn are cut.
SLICES = "slices"
#: And that which says of each tile of rows whose keys come next.
NEXT_KEYS = "next_keys"
#: Tiles of sums that a warp of the producer reads at once, four registers of a thread each.
FINISHED_TILES = 2


@dataclass(frozen=True)
class WgmmaBackward(UsedTiles, AdvisedParameters):
    """Gradients of attention by wgmma and TMA."""

    family: ClassVar[str] = "wgmma-backward"
    template: ClassVar[str] = "families/wgmma_backward/main.cu.jinja"
    template_of_parts: ClassVar[str] = "families/wgmma_backward/parts.cu.jinja"
    arch_suffix: ClassVar[str] = "a"
    serves: ClassVar[Serves] = Serves(
        precisions={"f32": ("auto", "3xf16"), "f16": ("auto",), "bf16": ("auto",)},
        float32="multiplies float32 as f16",
        operations=(BACKWARD,),
        layouts=(DENSE, PACKED),
        archs=(90,),
        units="warpgroups multiply",
    )

    def template_for(self, problem: Problem) -> str:
        return self.template_of_parts if is_split(problem) else self.template

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return smem_bytes(self, problem)

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        return launch_registers(self.threads() * self.min_blocks, limits)

    def blocks_of_queries(self, problem: Problem) -> tuple[int, int, int]:
        return GROUP * (1 + self.row_consumers), smem_bytes_of_rows(self, problem), self.rows

    def with_same_bits(self, problem: Problem) -> WgmmaBackward:
        if not self.adds_in_between:
            return self
        # Each block waits for the one before it then, so that they had better start one behind the other.
        walk, sections = UP if problem.causal else DOWN, HELD if self.sections == WIDE else self.sections
        return replace(self, sums=HANDED_ON, walk=walk, sections=sections, finisher=CONSUMERS)

    def row_sums(self, problem: Problem) -> RowSums:
        return super().row_sums(problem) if is_split(problem) else sums_by_products(problem.head_dim_v)

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        launch = replace(super().launch(problem, limits), tensor_maps=self.tensor_maps(problem))
        if self.sums_in_cluster:
            return replace(launch, rows_per_block=None, heads_per_block=self.heads, cluster=self.cluster)
        if self.persistent:
            blocks = limits.blocks_at_once(self.min_blocks, self.cluster)
            return replace(launch, max_blocks=blocks, cluster=self.cluster)
        return launch

    def launches(self, problem: Problem, limits: DeviceLimits) -> tuple[Launch, ...]:
        made = super().launches(problem, limits)
        if is_split(problem):
            statistics, *others = made
            return (statistics, *split_tile_launches(), *others)
        maps = self.tensor_maps(problem)
        return tuple(replace(each, tensor_maps=maps) if each.role == QUERIES_ROLE else each for each in made)

    def workspace_of(self, problem: Problem, main: Launch) -> Workspace:
        # Right behind the sums, where kernels look for them.
        regions = (*super().workspace_of(problem, main).regions, *self._behind_sums(problem, main).regions)
        if self.hands_on_sums:
            tiles = BATCH * Q_HEADS * divided_up(ROWS, Constant(self.br))
            next_keys = Region(NEXT_KEYS, tiles, "of tiles of rows, the tile of keys that adds to them next")
            regions = (*regions, next_keys)
        if is_split(problem):
            regions += tile_regions(chunks(problem.head_dim), chunks(problem.head_dim_v))
        if self.leaves_far_keys_out:
            regions += reach_regions(of_heads=True)
        return Workspace(regions)

    def _behind_sums(self, problem: Problem, main: Launch) -> Workspace:
        """Returns what is told of turns, in regions of one size for all problems."""
        regions: tuple[Region, ...] = ()
        if self.counts_turns:
            regions += (Region(TURNS, Constant(1), "the turns that blocks have taken"),)
        if self.shares_last_turn():
            slices = Region(SLICES, Constant(3), "turns of whole tiles, slices of each other one, all turns")
            regions += (slices, *handed_regions(main, self.consumers, self.handed_floats(problem)))
        return Workspace(regions)

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        row_threads, smem_of_rows, _ = self.blocks_of_queries(problem)
        producer = producer_registers(self, problem)
        d_widths, dv_widths = _widths(problem.head_dim), _widths(problem.head_dim_v)
        return {
            **super().constants(problem, limits),
            "smem_alignment": ALIGNMENT,
            "tile_rows": TILE_ROWS,
            "split_threads": TILE_THREADS,
            "split_arrays": ARRAYS_OF_GRADIENTS,
            "unit_words": UNIT_WORDS,
            "top_exponent": TOP_EXPONENT,
            "least_exponent": LEAST_EXPONENT,
            # Of each chunk its columns, which are summed at a time in parts.
            "d_widths": d_widths,
            "dv_widths": dv_widths,
            "widths": (*d_widths, *dv_widths),
            "query_share": self.query_share(problem),
            "query_passes": self.query_passes(problem),
            "sends_queries": self.sends_queries(problem),
            "sends_keys": self.sends_keys(problem),
            "smem_of_rows": smem_of_rows,
            "row_threads": row_threads,
            "section_bytes": self.section_bytes(limits),
            "d_chunks": chunks(problem.head_dim),
            "dv_chunks": chunks(problem.head_dim_v),
            # As many as have room in a thread's registers, of a share of columns.
            "finished_tiles": gcd(problem.head_dim // SUM_COLUMNS, FINISHED_TILES),
            "producer_registers": producer,
            "consumer_registers": consumer_registers(self.threads(), limits, producer, self.min_blocks),
            "most_slices": MOST_SLICES,
            "slice_tiles": SLICE_TILES,
            "behind_sums": self._behind_sums(problem, self.launch(problem, limits)),
            "sums_of_block": self.sums_of_block(problem) if self.sums_in_cluster else 0,
            "sum_tile": (SUM_ROWS, SUM_COLUMNS),
            "adding_warps": ADDING_WARPS,
            "row_consumer_registers": consumer_registers(row_threads, limits),
        }


def _widths(columns: int) -> tuple[int, ...]:
    """Returns the columns of each chunk of rows of so many."""
    return tuple(min(CHUNK, columns - first) for first in range(0, columns, CHUNK))
