"""The suite of small problems at which kernels go wrong, made around a variant's own tile sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...gen.problem import Problem
from ...gen.variant import Variant
from . import reference
from .error_bounds import PLAIN_SCORE, plain_score

Depth = Literal["quick", "full"]
LAYOUTS = ("bhnd", "bnhd", "packed", "padded")


@dataclass(frozen=True)
class Case:
    """One attention problem to try a kernel on. ``scale`` multiplies 1/√d."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    inputs: str = "uniform"
    layout: str = "bhnd"
    scale: float = 1.0
    want_lse: bool = False

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}"
        if self.num_kv_heads != self.num_q_heads:
            heads += f"/{self.num_kv_heads}"
        return (
            f"{self.inputs} inputs, batch {self.batch}, heads {heads}, {self.seqlen_q} queries, "
            f"{self.seqlen_k} keys, {self.layout} layout, scale {self.scale:g}/√d"
        )


def cases(variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator) -> Iterator[Case]:
    """Returns small problems that no tile divides, around the variant's tiles of ``br`` rows and ``bc``
    keys."""
    br, bc = int(getattr(variant, "br", 64)), int(getattr(variant, "bc", 64))
    # Several tiles, the last one ragged: three key tiles go once around a two-stage pipeline.
    ragged_q = br + _ragged(br, rng)
    ragged_k = 2 * bc + _ragged(bc, rng)
    # Scores small enough for every class to be held to its bound alone, and so for an error to report.
    plain = 0.7 * plain_score(problem) / PLAIN_SCORE
    yield Case(1, 4, 2, ragged_q, ragged_k, "uniform", "bnhd", scale=plain, want_lse=True)
    yield Case(2, 1, 1, 1, _ragged(bc, rng), "normal", "padded", want_lse=True)
    # Queries beyond the keys: under a causal mask the first rows see nothing.
    yield Case(1, 1, 1, br + _ragged(br, rng), _ragged(bc, rng), "negative", "bhnd", want_lse=True)
    yield Case(1, 2, 2, ragged_k, ragged_k, "rising", "packed", scale=-1.0)
    # Fewer keys than any instruction takes at once.
    yield Case(2, 3, 3, 7, 5, "uniform", "bnhd", want_lse=True)
    together = variant.heads_per_block()
    if together > 1:
        # A last block with heads missing, and blocks whose heads lie in two batches.
        yield Case(together + 1, 1, 1, _ragged(br, rng), _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    shares = variant.key_shares()
    if shares > 1:
        # Some tiles of keys for each of those that share them, and more for some.
        yield Case(1, 2, 1, 3, (2 * shares + 1) * bc + _ragged(bc, rng), "rising", "bnhd", want_lse=True)
    if variant.packs_heads():
        # Three heads to a position, which rows' tiles cut through.
        yield Case(2, 6, 2, ragged_q // 3 + 1, bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    heads = variant.heads_per_cluster()
    if heads > 1:
        # A cluster with all its heads, and one with a single head.
        yield Case(2, 2 * (heads + 1), 2, ragged_q, bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    if depth == "quick":
        return
    if together > 1:
        yield Case(1, 2 * together + 1, 1, ragged_q, ragged_k, "uniform", "padded", want_lse=True)
        yield Case(together + 1, together - 1, together - 1, 49, 49, "rising", "packed")
    for keys in range(2, 9):
        yield Case(1, 2, 1, int(rng.integers(1, 12)), keys, "normal", want_lse=True)
    yield Case(1, 1, 1, 1, 1, "uniform", want_lse=True)
    yield Case(2, 2, 1, 1, 3 * bc + 1, "spiked", "bnhd", want_lse=True)
    yield Case(3, 2, 2, ragged_q, 1, "uniform", "packed" if ragged_q == 1 else "bhnd", want_lse=True)
    for distribution in reference.DISTRIBUTIONS:
        for layout in LAYOUTS:
            length = ragged_k + int(rng.integers(0, 3))
            yield Case(2, 2, 2, length, length, distribution, layout, want_lse=layout != "bhnd")
        yield Case(1, 3, 1, ragged_q, 3 * bc + _ragged(bc, rng), distribution, "bnhd", 1.3, True)
    # Exactly whole tiles, and one more or less of each.
    for off_q, off_k in ((0, 0), (-1, 1), (1, -1)):
        rows, keys = 2 * br + off_q, 3 * bc + off_k
        yield Case(1, 2, 1, rows, keys, "normal", "bnhd", want_lse=True)
        yield Case(1, 2, 2, keys, rows, "falling", "padded", want_lse=True)
    yield Case(1, 8, 2, 2 * br + 3, 4 * bc + 5, "uniform", "bhnd", scale=0.0, want_lse=True)
    yield Case(1, 6, 3, 3 * br - 1, 2 * bc + 7, "falling", "bnhd", scale=-0.5)
    yield Case(5, 6, 6, 49, 49, "normal", "packed")
    # Long enough for kernels that sum long rows in runs to close two of them, and rows enough to show the
    # error of such sums where signs are mixed.
    yield Case(1, 2, 1, 15, 2 * 2048 + 2 * bc + 1, "normal", "bnhd", want_lse=True)
    yield Case(2, 3, 3, 197, 197, "uniform", "packed", want_lse=True)


def _ragged(tile: int, rng: np.random.Generator) -> int:
    """An odd length below a tile."""
    return 1 + 2 * int(rng.integers(0, max(1, tile // 2)))
