"""Keys in pages by kernels that are made as calls need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...gen.lengths import SAME
from ...gen.problem import Problem
from ...templates.runtime.arrays import _address, _check_kinds, _check_output, _kind, _read, _torch_of, _View
from ...templates.runtime.driver import _stream_handle
from ...templates.runtime.facts import Tuned
from ...templates.runtime.paged_attention import PagedAttention, _PagedTensors
from ...templates.runtime.paged_values import _PACKED_QUERIES, _Paged, _PagedTable
from ...templates.runtime.plans import _check_alignment
from ...templates.runtime.scored_values import _place
from .emulated import as_read
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
        return {
            "seqused_k": np.full(layout.batch, layout.max_seqlen_k, np.int32),
            **super()._told(layout, beside),
        }

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

    def check(self, *arrays: Any, **told: Any) -> None:
        """Raises what `attention_paged` raises where it is told that, as far as anybody knows before it
        computes, and makes the kernel ready. Computes nothing and writes nothing."""
        _Checked(self).attention_paged(*arrays, **told)


class _Checked(PagedAttention):
    """Looks at calls, and computes none."""

    def __init__(self, of: MadePagedAttention) -> None:
        self.kernels, self.tuned, self._group = of.kernels, of.tuned, of._group

    def _attend(
        self,
        arrays: tuple[Any, Any, Any],
        causal: bool | None,
        scale: float | None,
        out: Any,
        stream: Any,
        return_lse: bool,
        beside: Any,
    ) -> None:
        tensors, layout, torch = self._group._tensors, beside.layout, _torch_of(arrays[0])
        named = dict(zip(("q", "k", "v"), arrays, strict=True)) | ({} if out is None else {"out": out})
        _check_kinds(arrays[0], tuple(named.items()))
        masked = tensors.is_masked(causal)
        if stream is not None:
            _stream_handle(stream)
        if isinstance(arrays[0], np.ndarray):
            self._check_host(named, layout, masked, beside)
            return
        described = {
            name: _described(x) if torch is not None else _read(name, x)[1] for name, x in named.items()
        }
        output = described.pop("out", None)
        plan = tensors.plan(
            torch, masked, layout, output, *(part for each in described.values() for part in each)
        )
        addresses = {name: x.data_ptr() if torch is not None else _address(x) for name, x in named.items()}
        at = (addresses["q"], addresses["k"], addresses["v"], addresses.get("out", 0))
        if plan.blocks and (at[0] | at[1] | at[2] | at[3]) & plan.misfit_bits:
            _check_alignment(plan, at)
        for name, array in beside.arrays.items():
            beside.place(name, array, plan, True)
        scoring = beside.scoring
        if scoring is not None:
            scoring.sizes = plan.sizes
            for name, array in scoring.buffers().items():
                called, exact = scoring.called.get(name, name), name in scoring.tuned.exact
                _place(called, array, scoring.tuned.buffers[name], exact, plan, True)

    def _check_host(self, named: Mapping[str, Any], layout: _Paged, masked: bool, beside: Any) -> None:
        """Looks at arrays of numpy, as which they will lie on the card."""
        table = self._group._table
        assert isinstance(table, MadePagedTable)
        table = table.of(layout)
        views = {}
        for name, x in named.items():
            if not isinstance(x, np.ndarray):
                raise TypeError(f"q is a numpy array, but {name} a {_kind(x)}; pass arrays of one library")
            table.check_type(name, x.dtype.name, False)
            views[name] = table.inspect(name, (x.dtype.name, x.shape, None, None), layout, None)
        query, key, value = views["q"], views["k"], views["v"]
        table.check_shapes(query, key, value)
        sizes = table.sizes(query, key, layout)
        if "out" in named:
            _check_output(views["out"], query, table.output_dtypes[table.dtypes.index(query.dtype)])
            if views["out"].head_dim != value.head_dim:
                raise ValueError(
                    f"v has the head dim {value.head_dim}, out {views['out'].head_dim}; they must be equal"
                )
            if not named["out"].flags.writeable:
                raise ValueError("out is read-only")
        if beside.scoring is not None:
            as_read(beside.scoring, sizes)
        if 0 not in (*query.shape, *key.shape):
            table.choose(query, key, value, (0,) * 12, masked)


def _described(tensor: Any) -> tuple[Any, ...]:
    """A tensor as calls describe it."""
    return tensor.dtype, tensor.shape, None if tensor.is_contiguous() else tensor.stride(), tensor.device
