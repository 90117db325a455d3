"""Packed sequences by kernels that are made as calls need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...gen.lengths import SAME
from ...gen.problem import Problem
from ...templates.runtime.arrays import _View
from ...templates.runtime.facts import Tuned
from ...templates.runtime.packed_attention import PackedAttention, _PackedTensors
from ...templates.runtime.packed_values import _Packed, _PackedTable
from .entry import outline_of
from .layouts import EmulatedLayout, MadeLayoutTable, MadeLayoutTensors, group_of
from .workshop import near

#: Sequences whose mean is so much of the longest count as of one length.
_ALIKE = 0.9


class MadePackedTable(MadeLayoutTable, _PackedTable):
    """A table of packed sequences' kernels, for calls with longest lengths of their own."""

    layout: _Packed

    def outlines(self, dtypes: tuple[str, ...]) -> tuple[Tuned, ...]:
        common: dict[str, Any] = {"scoring": self.scoring, "varlen": SAME, "backward": self.backward}
        return tuple(outline_of(Problem(dtype=each, **common)) for each in dtypes)

    def problem(self, query: _View, key: _View, value: _View, causal: bool) -> Problem:
        layout = self.layout
        batch = max(1, layout.batch)
        dense = super().problem(
            query._replace(shape=(batch, query.shape[1], layout.max_seqlen_q)),
            key._replace(shape=(batch, key.shape[1], layout.max_seqlen_k)),
            value,
            causal,
        )
        return packed_about(dense, query.shape[2], key.shape[2])


def packed_about(dense: Problem, total_q: int, total_k: int) -> Problem:
    """Returns the problem that is looked for where sequences, the longest of which a ``dense`` one has, come
    to so many rows and keys together: all that a call tells of their lengths."""
    rows, keys = near(dense.seqlen_q), near(dense.seqlen_k)
    lengths = [lengths_about(total_q / dense.batch, rows), lengths_about(total_k / dense.batch, keys)]
    told = lengths[0] if lengths[0] == lengths[1] else "/".join(lengths)
    return replace(dense, seqlen_q=rows, seqlen_k=keys, varlen=told)


def lengths_about(mean: float, longest: int) -> str:
    """Returns what sequences of such a mean and longest length are about, as problems have it."""
    if mean >= _ALIKE * longest:
        return SAME
    return f"uniform:{max(1, near(round(2 * mean)) - longest)}-{longest}"


class _MadePackedTensors(MadeLayoutTensors, _PackedTensors):
    """Tensors of packed sequences."""


class _EmulatedSequences(EmulatedLayout):
    """Packed sequences of numpy arrays on an emulated card."""

    def _as_kernels_have(self, layout: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        return [x.swapaxes(0, 1)[None] for x in (q, k, v)]


class MadePackedAttention(PackedAttention):
    """Attention of packed sequences under one kind of masks and changes of scores."""

    def __init__(self, table: MadePackedTable, operator: str) -> None:
        """``operator`` names the kernels among torch's operators."""
        self.kernels = table.kernels
        self.tuned = table.kernels[0]
        self._group = group_of(table, _MadePackedTensors(table, operator), _EmulatedSequences)
