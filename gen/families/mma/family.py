"""The tensor-core family: mma.sync fed by ldmatrix and cp.async, for f16, bf16, float32 and e4m3.

A block covers ``br`` query rows and walks the keys in tiles of ``bc``. Each warp owns ``rows_per_warp`` whole
rows, so that softmax stays within it, as fragments of the 16-row tiles that an mma takes. Scores are summed
in steps of the instruction's depth and outputs in columns of eight, so that any head dim pays for itself, not
for the next power of two.

float32 is multiplied as TF32 or as f16. The class ``3xtf32`` writes each factor as the sum of two TF32
numbers and keeps three of the four products, which loses 2^-22 (Markidis et al. 2018, "NVIDIA Tensor Core
Programmability, Performance & Precision"). The class ``3xf16`` does so with f16 numbers, which have as many
bits and multiply twice as fast, but reach from 2^-24 to 2^16 only: a power of two for each tensor, its unit,
which follows the largest element met so far, brings tiles into that range (Ootomo and Yokota 2022,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
performance", scale the small parts instead). Elements of at least 2^-14 of the largest keep 22 bits; what
smaller ones lose is up to 2^-37 of the largest. Where that could be felt in a row, as where its scores or
outputs are beyond the range of either kind of parts, the row is computed once more behind the last tile, in
double precision (templates/common/recomputation.cu.jinja). The class ``tf32`` rounds the factors.

Scores of e4m3 are products of eight bits, from sm_89 on. Its values become f16 in registers, exactly, as keys
and values of caches do that are of eight bits beside queries of 16.

Whatever is asked of masks and scores beside the causal mask, blocks walk the tiles from the first key of
their first row to the end of their last one, or a list of these where a predicate hides keys; warps leave
out what none of their rows sees, and mask what not all of them see. Changes of scores stand between the
products and the softmax, sinks in its sums before the walk
(templates/families/mma/scored_visibility.cu.jinja).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...layout import DENSE, PACKED, PACKED_PAGED, PAGED
from ...limits import DeviceLimits
from ...problem import EIGHT, ITEM_BYTES, Problem
from ...scored_tiles.arrays import met_by, tile_arrays
from ...scored_tiles.change import changed_tile, tile_predicate
from ...scored_tiles.period import split_period
from ...serves import Serves
from ..arithmetic import EXP2_CUBIC, LAG, LEAST_EXPONENT, PARTS_LAG, TOP_EXPONENT, WEIGHT_EXPONENT
from .layouts import CHUNK_BYTES, TILE_COLUMNS
from .parameters import EIGHT_BITS, WIDENED_KEYS
from .rules import RuledParameters
from .steps import steps_of

#: The template of what is multiplied, by `Mma.arithmetic`.
PRODUCTS = {
    "16-bit": "families/mma/products_16bit.cu.jinja",
    EIGHT_BITS: "families/mma/e4m3.cu.jinja",
    WIDENED_KEYS: "families/mma/e4m3_keys.cu.jinja",
    "3xf16": "families/mma/split_f32_f16.cu.jinja",
    "3xtf32": "families/mma/split_f32_tf32.cu.jinja",
    "tf32": "families/mma/split_f32_tf32.cu.jinja",
}
#: Of what rows see: where nothing is asked beside the causal mask, and of all else.
VISIBILITY, SCORED_VISIBILITY = (
    f"families/mma/{name}.cu.jinja" for name in ("visibility", "scored_visibility")
)
#: Steps of a TF32 product after which its accumulator, which cuts off what it cannot hold, starts afresh.
RESTART_STEPS = 8
RESTART_KEY_TILES = 4
#: Power of two in the units of 3xf16 to which an element may grow before a tensor's unit is found anew.
LIMIT_EXPONENT = 15


@dataclass(frozen=True)
class Mma(RuledParameters):
    """A variant of the tensor-core family, which computes attention by mma.sync."""

    family: ClassVar[str] = "mma"
    serves: ClassVar[Serves] = Serves(
        precisions={
            "f32": ("auto", "3xtf32", "3xf16", "tf32"),
            "f16": ("auto",),
            "bf16": ("auto",),
            "e4m3": ("auto", EIGHT),
        },
        float32="multiplies float32 as TF32 or f16",
        layouts=(DENSE, PACKED, PAGED, PACKED_PAGED),
        key_dtypes={"f16": ("e4m3",), "bf16": ("e4m3",)},
    )

    def template_for(self, problem: Problem) -> str:
        if self.key_shares() > 1:
            return "families/mma/decode.cu.jinja"
        return f"families/mma/{'heads_in_turn' if self.heads > 1 else 'main'}.cu.jinja"

    def constants(self, problem: Problem, limits: DeviceLimits) -> dict[str, Any]:
        size = ITEM_BYTES[problem.dtype]
        chunk = CHUNK_BYTES // size
        d = self.d_columns(problem)
        value_tiles = self.value_columns(problem) // TILE_COLUMNS
        tiles = self.tiles(problem)
        arithmetic = self.arithmetic(problem)
        scores, arrays = problem.scores, tile_arrays(problem.scores)
        period, predicate = split_period(scores.predicate)
        steps, widens = steps_of(self, problem, limits), self.widens(problem)
        # Queries of 16 bits beside keys of eight are in the order of these.
        wide_rows = problem.dtype != "f32" and not problem.kv_dtype and self.access_width(problem) == chunk
        # Of terms that are summed apart; a step of f16 is as deep as two of TF32.
        restart_after = {"3xtf32": 2 * RESTART_STEPS, "3xf16": RESTART_STEPS}
        restart_keys = {"3xtf32": RESTART_KEY_TILES, "3xf16": min(2 * RESTART_KEY_TILES, self.key_tiles)}
        return {
            "arithmetic": arithmetic,
            "number": steps.number,
            "instructions": steps.instructions,
            "ldmatrix_counts": {"plain": steps.plain, "trans": steps.trans},
            "heads_per_block": self.heads,
            "row_tiles": self.row_tiles,
            "key_tiles": self.key_tiles,
            "value_tiles": value_tiles,
            "wide": steps.wide,
            "wide_steps": steps.wide_steps,
            "narrow_steps": steps.narrow_steps,
            "wide_keys": steps.wide_keys,
            "narrow_keys": steps.narrow_keys,
            "q_fragments": steps.q_fragments,
            "chunk": chunk,
            "half_step": steps.half_step,
            "wide_queries": wide_rows,
            "wide_outputs": wide_rows and not widens,
            "key_type": "KeyElement" if problem.kv_dtype else "Element",
            "key_vec": "kKeyVec" if problem.kv_dtype else "kVec",
            "key_access_width": self.key_access_width(problem),
            "key_access_bytes": self.key_access_bytes(problem),
            # Of output columns a lane has four neighbours, in two tiles.
            "columns_in_fours": widens,
            "operand_keys": steps.operand_keys,
            "weighed_ahead": steps.weighed_ahead,
            "restart_steps": RESTART_STEPS,
            "restart_keys": restart_keys.get(arithmetic, self.key_tiles),
            "restarts": arithmetic in restart_after and steps.wide_steps > restart_after[arithmetic],
            # A few columns average nothing: what is left out must have no bias on either side.
            "split_k": "split_rounded" if problem.head_dim < 8 else "split",
            "d_columns": d,
            "padded_columns": self._padded_columns(problem),
            "strides": {name: tile.stride for name, tile in tiles.items()},
            "layouts": tiles,
            "plans": {name: self.copy_plan(name, problem) for name in ("q", "k", "v")},
            "products": PRODUCTS[arithmetic],
            "visibility": VISIBILITY if problem.scores.is_plain else SCORED_VISIBILITY,
            "arrays": arrays,
            "change": changed_tile(problem, met_by(scores.change, arrays), slides=not self.pack_heads),
            "period": period,
            "predicate": tile_predicate(predicate, scores.along_keys, met_by(predicate, arrays))
            if predicate
            else None,
            # Divided by, or read from arrays: once, and not for each tile.
            "finds_bounds": self.pack_heads or problem.scores.bounds_read_rows,
            "q_in_terms": arithmetic == "3xtf32" and not (self.q_in_registers or self.q_whole),
            "finds_units_together": self.finds_units_together(problem),
            "num_partial_results": self.num_partial_results,
            "partial_stride": self.partial_stride(problem),
            "partial_floats": self.partial_floats(problem),
            "partial_width": self.partial_width(problem),
            "own_columns": self.own_columns(problem),
            "async_copy": limits.has_async_copy,
            "poly": EXP2_CUBIC,
            "lag": PARTS_LAG if arithmetic == "3xf16" else LAG,
            "top_exponent": TOP_EXPONENT,
            "least_exponent": LEAST_EXPONENT,
            "limit_exponent": LIMIT_EXPONENT,
            "weight_exponent": WEIGHT_EXPONENT if arithmetic == "3xf16" else 0,
        }

    def _padded_columns(self, problem: Problem) -> list[tuple[str, str, int, str]]:
        """Shared tiles whose rows end in columns that no copy fills: name, rows, columns, from where."""
        extra = self.d_columns(problem) - problem.head_dim
        tiles = [] if self.q_in_registers else [("q", "kBr", extra, "kD")]
        more = self.value_columns(problem) - problem.head_dim_v
        tiles += [("k", "kBc", extra, "kD"), ("v", "kBc", more, "kDv")]
        return [tile for tile in tiles if tile[2]]
