"""What packed sequences and caches in pages have in common, where kernels are made as calls need them."""

from __future__ import annotations

import copy
import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ...templates.runtime.arrays import _View
from ...templates.runtime.attention import Attention
from ...templates.runtime.plans import _make_plan, _Plan
from ...templates.runtime.tensors import _REGISTERED
from ..cards.sequences import rows_of_sequences, sequence_slices
from .card import SimCard
from .emulated import EmulatedAttention, as_read, dense, lse_of_nothing
from .table import MadeTable


class MadeLayoutTable(MadeTable):
    """A table whose kernels are chosen by a call's layout, too."""

    layout: Any

    def of(self, layout: Any) -> Self:
        """Returns the same for calls of that layout."""
        made = copy.copy(self)
        made.layout = layout
        return made


class MadeLayoutTensors:
    """Tensors of such a table; beside a class of the runtime that knows their arrays."""

    def __init__(self, table: MadeLayoutTable, operator: str) -> None:
        self.table, self.operator, self.default_mask = table, operator, False
        self.plan = functools.lru_cache(maxsize=1024)(self.make_plan)
        of_sdpa = self.make_plan_sdpa  # pyright: ignore[reportAttributeAccessIssue]
        self.plan_sdpa = functools.lru_cache(maxsize=1)(of_sdpa)
        _REGISTERED[operator] = self  # pyright: ignore[reportArgumentType]

    def make_plan(self, torch: Any, masked: bool, layout: Any, *arrays: Any) -> _Plan:
        return _make_plan(self.table.of(layout), torch, masked, layout, *arrays)


class EmulatedLayout(EmulatedAttention):
    """Numpy arrays of such a table on an emulated card."""

    @abstractmethod
    def _as_kernels_have(self, layout: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        """Queries, keys and values as kernels are given them; packed ones are one batch."""

    def _told(self, layout: Any, beside: Any) -> dict[str, Any]:
        """What tells of the sequences."""
        return {name: dense(x) for name, x in beside.arrays.items()}

    def _put(self, layout: Any, o: np.ndarray, out: np.ndarray) -> bool:
        """Writes outputs of batches where the call has them; False where they are packed."""
        return False

    def _through_buffers(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        causal: bool | None,
        scale: float | None,
        out: np.ndarray,
        handle: int,
        return_lse: bool,
        layout: Any,
        dtype: str,
        beside: Any,
    ) -> Any:
        assert isinstance(self._table, MadeLayoutTable)
        table, masked = self._table.of(layout), self._tensors.is_masked(causal)
        query, key, value = (
            table.inspect(name, (x.dtype.name, x.shape, None, None), layout, None)
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        values, sizes = self._told(layout, beside), table.sizes(query, key, layout)
        if beside.scoring is not None:
            values |= as_read(beside.scoring, sizes)
        if 0 in (q.size, k.size, layout.batch, layout.max_seqlen_k):
            return self._of_nothing(layout, query, values, out, return_lse)
        tuned = table.choose(query, key, value, (0,) * 12, masked).tuned
        scale = 1 / math.sqrt(query.head_dim) if scale is None else scale
        build = self.card.builds[tuned, masked]
        given = [dense(x) for x in self._as_kernels_have(layout, q, k, v)]
        o, lse = self.card.device.open().attend(
            build, *given, scale=scale, want_lse=return_lse, values=values
        )
        if table.has_scales:
            o = (o.astype(np.float32) * beside.value_scale).astype(o.dtype)
        if self._put(layout, o, out):
            return (out, lse) if return_lse else out
        rows = rows_of_sequences(build.kernel.problem, values, len(q))
        out[rows] = o[0].swapaxes(0, 1)[rows]
        return (out, None if lse is None else lse[0]) if return_lse else out

    def _of_nothing(
        self, layout: Any, query: _View, values: Mapping[str, Any], out: np.ndarray, return_lse: bool
    ) -> Any:
        """What a call returns where no row sees a key; rows of no sequence are not written."""
        batch, heads, rows = query.shape
        lse = lse_of_nothing((batch, heads, rows), values)
        if self._put(layout, np.zeros((batch, heads, rows, out.shape[-1]), out.dtype), out):
            return (out, lse) if return_lse else out
        for each in sequence_slices(values, "q"):
            out[each] = 0
        return (out, lse[0]) if return_lse else out


def group_of(table: MadeLayoutTable, tensors: Any, emulated: type[EmulatedLayout]) -> Attention:
    """Returns what serves such tensors, on the table's card or an emulated one."""
    kind = emulated if isinstance(table.card, SimCard) else Attention
    group = kind.__new__(kind)
    group._serve_by(tensors)
    if isinstance(group, EmulatedLayout) and isinstance(table.card, SimCard):
        group.card = table.card
    return group
