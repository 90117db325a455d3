"""Keys in pages by kernels that are made as calls need them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...gen.lengths import SAME
from ...gen.problem import Problem
from ...templates.runtime.arrays import _View
from ...templates.runtime.facts import Tuned
from ...templates.runtime.paged_attention import PagedAttention, _PagedTensors
from ...templates.runtime.paged_values import _PACKED_QUERIES, _Paged, _PagedTable
from .entry import outline_of
from .layouts import EmulatedLayout, MadeLayoutTable, MadeLayoutTensors, group_of
from .packed import lengths_about
from .workshop import near


class MadePagedTable(MadeLayoutTable, _PagedTable):
    """A table of kernels of pages of one size, for a batch of queries or packed ones."""

    layout: _Paged

    def __init__(self, *of: Any, page_size: int, packed: bool, **told: Any) -> None:
        self.page_size, self.packed = page_size, packed
        super().__init__(*of, **told)

    def outlines(self, dtypes: tuple[str, ...]) -> tuple[Tuned, ...]:
        layout: dict[str, Any] = {"page_size": self.page_size, "varlen": SAME if self.packed else ""}
        return tuple(outline_of(Problem(dtype=each, scoring=self.scoring, **layout)) for each in dtypes)

    def problem(self, query: _View, key: _View, value: _View, causal: bool) -> Problem:
        layout, batch = self.layout, max(1, self.layout.batch)
        rows = near(max(1, layout.max_seqlen_q)) if self.packed else query.shape[2]
        dense = super().problem(
            query._replace(shape=(batch, query.shape[1], rows)),
            key._replace(shape=(batch, key.shape[1], near(max(1, layout.max_seqlen_k)))),
            value,
            causal,
        )
        told = f"{lengths_about(query.shape[2] / batch, rows)}/{SAME}" if self.packed else ""
        return replace(dense, page_size=self.page_size, varlen=SAME if told == f"{SAME}/{SAME}" else told)


class _MadePagedTensors(MadeLayoutTensors, _PagedTensors):
    """Tensors beside caches of pages."""


class _EmulatedPages(EmulatedLayout):
    """Keys in pages of numpy arrays on an emulated card."""

    def _as_kernels_have(self, layout: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        caches = [x.swapaxes(1, 2) if layout.cache == "NHD" else x for x in (k, v)]
        if layout.queries == _PACKED_QUERIES:
            return [q.swapaxes(0, 1)[None], *caches]
        return [q.swapaxes(1, 2) if layout.queries == "bshd" else q, *caches]

    def _told(self, layout: Any, beside: Any) -> dict[str, Any]:
        # Without numbers of their own all sequences have the most.
        return {"seqused_k": np.full(layout.batch, layout.max_seqlen_k, np.int32), **beside.arrays}

    def _put(self, layout: Any, o: np.ndarray, out: np.ndarray) -> bool:
        if layout.queries == _PACKED_QUERIES:
            return False
        out[...] = o.swapaxes(1, 2) if layout.queries == "bshd" else o
        return True


class MadePagedAttention(PagedAttention):
    """Attention beside caches of pages of one size, under one kind of masks and changes of scores."""

    def __init__(self, table: MadePagedTable, operator: str) -> None:
        """``operator`` names the kernels among torch's operators."""
        self.kernels = table.kernels
        self.tuned = table.kernels[0]
        self._group = group_of(table, _MadePagedTensors(table, operator), _EmulatedPages)
