"""Gradients of packed sequences by kernels that are made as calls need them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...templates.runtime.gradient_plans import _GradientPlan, _make_gradient_plan
from ...templates.runtime.gradient_tensors import _Settings
from ...templates.runtime.gradients import Gradients
from ...templates.runtime.packed_gradients import (
    PackedGradients,
    _PackedGradientsRead,
    _PackedGradientTensors,
)
from ..cards.sequences import rows_of_sequences, sequence_slices
from .card import SimCard
from .emulated import as_read, dense, gradients_of_nothing, of_what_is_read
from .packed import MadePackedTable


class _MadePackedGradientTensors(_PackedGradientTensors):
    """Tensors of packed sequences."""

    def __init__(self, table: MadePackedTable, repeating: MadePackedTable, operator: str) -> None:
        self.operator, self.default_mask = operator, False
        self.table, self.repeating = table, repeating
        self.plan = functools.lru_cache(maxsize=1024)(self.make_plan)

    def make_plan(self, deterministic: bool, *settings: Any) -> _GradientPlan:
        torch, masked, layout, *described = settings
        table = self.repeating if deterministic else self.table
        assert isinstance(table, MadePackedTable)
        return _make_gradient_plan(table.of(layout), torch, masked, layout, *described)


class _EmulatedSequences(Gradients):
    """Gradients of packed sequences of numpy arrays on an emulated card."""

    card: SimCard

    def _through_buffers(
        self,
        arrays: Sequence[np.ndarray],
        lse: np.ndarray,
        dlse: np.ndarray | None,
        settings: _Settings,
        dtype: str,
    ) -> list[np.ndarray]:
        tensors, layout, read = self._tensors, settings.layout, settings.read
        made = tensors.repeating if settings.deterministic else tensors.table
        assert isinstance(made, MadePackedTable) and isinstance(read, _PackedGradientsRead)
        table, masked = made.of(layout), tensors.is_masked(settings.causal)
        query, key, value = (
            table.inspect(name, (x.dtype.name, x.shape, None, None), layout, None)
            for name, x in zip("qkv", arrays[:3], strict=True)
        )
        table.check_shapes(query, key, value)
        values: dict[str, Any] = {name: dense(x) for name, x in read.sequences.arrays.items()}
        if read.scoring is not None:
            values |= as_read(read.scoring, table.sizes(query, key, layout))
        if 0 in (arrays[0].size, arrays[1].size, layout.batch, layout.max_seqlen_q, layout.max_seqlen_k):
            zeros = [np.zeros(x.shape, x.dtype) for x in arrays[:3]]
            found = gradients_of_nothing(settings, self._dlse_of_rows(dlse, values), values)
            return [*zeros, *of_what_is_read(settings, found)]
        tuned = table.choose(query, key, value, (0,) * 24, masked).tuned
        scale = 1 / math.sqrt(query.head_dim) if settings.scale is None else settings.scale
        named = zip(("q", "k", "v", "o", "dout"), arrays, strict=True)
        given = {name: dense(x.swapaxes(0, 1)[None]) for name, x in named} | {"lse": dense(lse[None])}
        given |= {} if dlse is None else {"dlse": dense(dlse[None])}
        build = self.card.builds[tuned, masked]
        found = self.card.device.open().differentiate(build, given, scale=scale, values=values)
        grads = []
        for name, x in zip("qkv", arrays[:3], strict=True):
            of = "q" if name == "q" else "k"
            rows = rows_of_sequences(build.kernel.problem, values, len(x), of)
            grads.append(np.zeros(x.shape, x.dtype))
            grads[-1][rows] = found[f"d{name}"][0].swapaxes(0, 1)[rows]
        return [*grads, *of_what_is_read(settings, found)]

    def _dlse_of_rows(self, dlse: np.ndarray | None, values: Mapping[str, Any]) -> np.ndarray | None:
        """The gradients of log-sum-exps of one batch, of rows of sequences alone."""
        if dlse is None:
            return None
        made = np.zeros((1, *dlse.shape), np.float32)
        for each in sequence_slices(values, "q"):
            made[0][:, each] = dlse[:, each]
        return made


class MadePackedGradients(PackedGradients):
    """The gradients of attention of packed sequences under one kind of masks and changes of scores."""

    def __init__(self, table: MadePackedTable, repeating: MadePackedTable, operator: str) -> None:
        """``repeating`` has kernels alone that make the same bits every time; ``operator`` names them all
        among torch's operators."""
        self.kernels = table.kernels
        self.tuned = table.kernels[0]
        kind = _EmulatedSequences if isinstance(table.card, SimCard) else Gradients
        self._group = kind.__new__(kind)
        self._group._serve_by(_MadePackedGradientTensors(table, repeating, operator))
        if isinstance(self._group, _EmulatedSequences) and isinstance(table.card, SimCard):
            self._group.card = table.card
