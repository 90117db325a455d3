"""Numbers of masks and changes of scores that suit a small problem: at which kernels go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ...gen.scoring.asked import Scoring

T = TypeVar("T")


def numbers_for(asked: Scoring, seqlen_k: int, bc: int, turn: int, rng: np.random.Generator) -> Scoring:
    """Returns what is asked with other numbers, for keys in tiles of ``bc``; those of another ``turn`` are
    others.

    What is asked stays the same but for its numbers, and so the kernels; scalars of expressions keep theirs.
    """
    few, some = int(rng.integers(1, 6)), int(rng.integers(1, bc + 3))
    found: dict[str, Any] = {}
    if asked.window is not None:
        # Less than a tile, some tiles, the row's own key alone, all keys of either side.
        windows = [(some, few), (bc + few, 0), (0, 0), (few, -1), (-1, some), (2 * bc, 1), (-1, -1)]
        found["window"] = _taken(windows, turn)
    if asked.always:
        left, right = found["window"]
        found["window"] = (max(left, 0), right)
        found["always"] = _taken([few, 1, bc + few, seqlen_k + 1], turn)
    if asked.chunk:
        found["chunk"] = _taken([some, bc, few, 2 * bc + few, 1], turn)
    if asked.prefix:
        found["prefix"] = _taken([seqlen_k + few, some, 1], turn)
    if asked.documents:
        found["documents"] = _taken([3, 2 + few, 1, 16], turn)
    if asked.dilation:
        found["dilation"] = _taken([2, 1 + few, 1, 7], turn)
    if asked.softcap:
        found["softcap"] = _taken([asked.softcap, 3.0, 50.0], turn)
    return replace(asked, **found)


def _taken(choices: Sequence[T], turn: int) -> T:
    return choices[turn % len(choices)]
