"""The Hopper family: products by warpgroups (wgmma), copies by the tensor memory engine (TMA).

One warpgroup, the producer, copies and gives most of its registers to the consumers, of which each
computes 64 rows of ``br``. Tiles of keys come from the last to the first through stages in shared memory,
so that those with a mask come first. Two schedules keep the tensor cores busy beside softmax:
``overlapped`` starts the next scores before these outputs and makes weights while both are multiplied
(Shah et al. 2024, "FlashAttention-3", section 3.2); ``chained`` lets the next scores follow these outputs
and leaves the rest to the other consumer. The blocks of a ``cluster``, with neighbouring query tiles of
one head or the same rows of heads that share keys, walk the same keys: each copies a share of every tile
of K and V to all, which divides what they ask of L2. Of packed sequences, blocks take what a plan lists,
and maps with two dimensions of rows let copies and stores end where each sequence does. Caches in pages
come by such maps too, a box for each piece of a tile that is of one page, by the lanes of one warp or of
several (``copiers``): a warp asks for boxes one after the other.

Few query rows fill tiles with those of all heads that share keys (``pack_heads``), which lie apart, so that
threads read and write them; and where there are few tiles, ``splits`` blocks, a cluster, share the keys of
each: what they make of the rows is put together through their shared memory. Or ``workspace_splits`` of no
cluster do, as many as fill the card, which leave that in memory for a launch more. Of many tiles that fill no
whole number of turns, all blocks may share the keys of the last ones, and hand on what these make of the rows
to the one that has the last of a tile (``last_turn``).

Scores of e4m3 are products of eight bits, at twice the rate. Its values come as they are and are turned
into f16, exactly, by the producer's warps that have nothing to copy: wgmma reads no eight bits by rows of
keys, and weights in f16 lose nothing worth mention, where in e4m3 they keep four bits. Where precision
``eight`` is asked for, they may be of e4m3 (``weights``): then both products are of eight bits, and the same
warps transpose values, sixteen columns of 32 keys at a time, by matrices of pairs of bytes. The order of keys
that this leaves is that in which a thread has the weights. Of sums of such products the tensor cores keep
fourteen bits, so that a tile's outputs are summed apart, in as many registers again. Either way values may
instead be turned once for all blocks, by a launch in front (``values``), into tiles that lie in memory as
products read them: of long rows, each block would else turn the same ones again.

Biases and boolean masks that scores meet at their own row and key come by the copy engine as well, to stages
of their own (``bias_stages``), told by a warp that has nothing else to copy. Where heads share a bias, the
blocks of a cluster may take the same rows of neighbouring heads (``bias_heads``) and copy a share of it each
to all: a bias of 16 bits is more than half of what such a block asks of L2. Or what rows see of single keys
is asked once, by the launch that lists tiles, which leaves a bit for each pair in the order in which threads
have their scores (``seen_bits``): a thread then reads a word for 32 scores, a tile ahead. Where rows see keys
at every so many, it else makes such bits itself, of a pattern.

float32 comes as it is too, and is split in its place into two f16 numbers each, by the same warps (Q by
the consumers that own it); three of the four products count, as in the class ``3xf16`` of family mma.
Every eight rows have a unit of their own, a power of two that brings them into the range of f16. Or launches
in front split it once for all blocks (``split``), into tiles that lie in memory as products read them, each
in a unit of its own: blocks copy bytes, scores leave their unit as they are scaled, and no warp has anything
to split but weights. Of wide rows a tile's outputs are then summed some columns at a time
(``summed_columns``), which relieves registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...expression import Constant, loads_of
from ...handover.last_turn import CLEAR_THREADS, MOST_SHARES, handed_regions
from ...handover.split_tiles import (
    ARRAYS_OF_OUTPUTS,
    TILE_ROWS,
    UNIT_WORDS,
    WALKED_TILE_THREADS,
    walked_regions,
    walked_tile_launches,
)
from ...handover.value_tiles import VALUE_TILE_THREADS, value_region, value_tile_launch
from ...handover.workspace import Region, Workspace
from ...launch import Launch
from ...layout import DENSE, PACKED, PACKED_PAGED, PAGED
from ...limits import DeviceLimits
from ...problem import EIGHT, Problem
from ...scored_tiles.arrays import met_by
from ...scored_tiles.change import tile_predicate
from ...scored_tiles.period import split_period
from ...serves import Serves
from ..arithmetic import (
    EIGHT_BITS_EXPONENT,
    EIGHT_BITS_LAG,
    EXP2_CUBIC,
    LAG,
    LEAST_EXPONENT,
    PAIRS_TRUSTED,
    PARTS_LAG,
    STRAIGHT_BIAS,
    STRAIGHT_LAG,
    STRAIGHT_ROOM,
    STRAIGHT_STEPS,
    TOP_EXPONENT,
    WEIGHT_EXPONENT,
)
from .advice import AdvisedParameters
from .caps import cap_in_exponents
from .parameters import PRODUCT_COLUMNS, SEGMENT_KEYS, is_split
from .ramps import change_of_tiles
from .registers import (
    CONVERTED_TOGETHER,
    CONVERTERS,
    ENOUGH_REGISTERS,
    consumer_registers,
    launch_registers,
    producer_registers,
)
from .shared_memory import (
    ALIGNMENT,
    RAW_STAGES,
    bytes_of_storage,
    chunks,
    piece,
    pieces,
    qk_chunks,
    raw_chunks,
    tensor_maps,
    tiles_ahead,
    value_bytes,
)


@dataclass(frozen=True)
class Wgmma(AdvisedParameters):
    """Attention by wgmma and TMA."""

    family: ClassVar[str] = "wgmma"
    template: ClassVar[str] = "families/wgmma/main.cu.jinja"
    arch_suffix: ClassVar[str] = "a"
    serves: ClassVar[Serves] = Serves(
        precisions={"f32": ("auto", "3xf16"), "f16": ("auto",), "bf16": ("auto",), "e4m3": ("auto", EIGHT)},
        float32="multiplies float32 in parts of f16",
        archs=(90,),
        units="warpgroups multiply",
        layouts=(DENSE, PACKED, PAGED, PACKED_PAGED),
    )

    def template_for(self, problem: Problem) -> str:
        if self.splits_in_front:
            return "families/wgmma/split_in_front_f32.cu.jinja"
        if is_split(problem):
            return "families/wgmma/split_f32.cu.jinja"
        if not problem.has_scales:
            return self.template
        file = "e4m3_weights" if self.has_small_weights() else "fp8"
        return f"families/wgmma/{file}{'_in_front' if self.turns_values_in_front else ''}.cu.jinja"

    def smem_bytes(self, problem: Problem, limits: DeviceLimits) -> int:
        return bytes_of_storage(self, problem, tiles_ahead(self, problem, limits))

    def registers(self, problem: Problem, limits: DeviceLimits) -> int:
        """Returns what a launch gives each thread before the warpgroups share them out."""
        return launch_registers(self, limits)

    def knows_page_size(self, problem: Problem) -> bool:
        return problem.layout.is_paged  # boxes have a size

    def float32_products(self, problem: Problem) -> str:
        return "3xf16" if problem.dtype == "f32" else ""

    def launch(self, problem: Problem, limits: DeviceLimits) -> Launch:
        return Launch(
            self.threads(),
            self.smem_bytes(problem, limits),
            self.br,
            tensor_maps=tensor_maps(self, problem),
            max_blocks=limits.blocks_at_once(self.min_blocks, self.cluster * self.bias_heads)
            if self.persistent
            else None,
            cluster=self.tiles_per_cluster(),
            heads_per_cluster=self.heads_per_cluster(),
            heads_together=self.heads_together(),
            pack_heads=self.packs_heads(),
            splits=self.blocks_per_tile(),
            packed=problem.layout.is_packed,
            workspace_splits=self.workspace_splits,
            wanted_blocks=self.wanted_by_plan(problem, limits),
            shares_turn=self.shares_last_turn(),
        )

    def launches_in_front(self, problem: Problem) -> tuple[Launch, ...]:
        if self.splits_in_front:
            return walked_tile_launches(self.bc)
        if self.turns_values_in_front:
            return (value_tile_launch(self.bc),)
        return super().launches_in_front(problem)

    def workspace_of(self, problem: Problem, main: Launch) -> Workspace | None:
        if self.shares_last_turn():
            return Workspace(handed_regions(main, self.consumers, self.handed_floats(problem)))
        if self.splits_in_front:
            return Workspace(walked_regions(self.bc, qk_chunks(problem), chunks(problem.head_dim_v)))
        regions: list[Region] = []
        if self.keeps_sums():
            floats = (main.max_blocks or 0) * self.kept_floats(problem)
            regions.append(Region("o_sums", Constant(floats), "outputs so far"))
        if self.turns_values_in_front:
            regions.append(value_region(self.bc, value_bytes(self, problem)))
        if regions:
            return Workspace(tuple(regions))
        return super().workspace_of(problem, main)

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        return {
            **self._constants(problem, limits),
            **(self._constants_in_front() if self.splits_in_front else {}),
        }

    def _constants_in_front(self) -> dict[str, Any]:
        """What the template of kernels needs beside, whose tiles come by copies of bytes."""
        return {
            "split_arrays": ARRAYS_OF_OUTPUTS,
            "split_threads": WALKED_TILE_THREADS,
            "tile_rows": TILE_ROWS,
            "unit_words": UNIT_WORDS,
            "smem_alignment": ALIGNMENT,
        }

    def _constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        shares = launch_registers(self, limits) < ENOUGH_REGISTERS
        scores, ahead = problem.scores, tiles_ahead(self, problem, limits)
        along_keys, arrays = scores.along_keys, self.met_arrays(problem) if ahead or self.bias_stages else ()
        period, predicate = split_period(scores.predicate)
        changing, seeing = (met_by(tree, arrays) for tree in (scores.change, predicate))
        return {
            "visibility": f"families/wgmma/{'' if scores.is_plain else 'scored_'}visibility.cu.jinja",
            "change": change_of_tiles(problem, changing, self.tangent, slides=not self.pack_heads),
            "cap": cap_in_exponents(problem, self.tangent),
            "period": period,
            "predicate": tile_predicate(predicate, along_keys, seeing) if predicate else None,
            "ahead": ahead,
            "arrays": arrays,
            "ends_of_batches": scores.ends_of_batches(),
            "bounds_are_read": bool(loads_of(*(each.key for each in (*scores.begins, *scores.ends)))),
            "lag": self._lag(problem),
            "top_exponent": TOP_EXPONENT,
            "least_exponent": LEAST_EXPONENT,
            "weight_exponent": EIGHT_BITS_EXPONENT if self.has_small_weights() else WEIGHT_EXPONENT,
            "d_chunks": qk_chunks(problem),
            "dv_chunks": chunks(problem.head_dim_v),
            "value_tiles": problem.head_dim_v // 8,
            "value_columns": self.value_columns(problem),
            # Where one product has no room for the columns that sum weights, another makes them.
            "sums_alone": self.value_columns(problem) > PRODUCT_COLUMNS,
            "outputs": "kOutputs" if self.sums_by_products else "kDv / 2",
            "straight_steps": STRAIGHT_STEPS,
            "straight_bias": STRAIGHT_BIAS,
            "straight_room": STRAIGHT_ROOM,
            **({"trusted_exponent": PAIRS_TRUSTED} if self.pairs_scores else {}),
            "partial_stride": self.partial_stride(problem),
            "partial_width": 4,
            "partial_floats": self.partial_floats(problem),
            "shares_keys": self.key_shares() > 1 or self.shares_last_turn(),
            "most_shares": MOST_SHARES,
            "clear_threads": CLEAR_THREADS,
            "writes_rows": self.writes_rows(problem),
            "producer_registers": producer_registers(self, problem, limits) if shares else 0,
            "consumer_registers": consumer_registers(self, problem, limits) if shares else 0,
            "poly": EXP2_CUBIC,
            "piece": piece(self, problem),
            "by_pieces": pieces(self, problem) > 1,  # each copied by another lane
            "raw_stages": RAW_STAGES,
            "raw_columns": raw_chunks(self, problem)[1],
            "converters": CONVERTERS,
            "converted_together": CONVERTED_TOGETHER,
            "value_threads": VALUE_TILE_THREADS,
            "summed_tiles": max(1, SEGMENT_KEYS // self.bc),
        }

    def _lag(self, problem: Problem) -> float:
        """By which power of two a maximum may be out of date."""
        if is_split(problem):
            return PARTS_LAG
        if self.sums_by_products:
            return STRAIGHT_LAG
        return EIGHT_BITS_LAG if self.has_small_weights() else LAG
