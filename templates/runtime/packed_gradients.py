"""What a module of packed sequences offers of the backward pass: gradients of each sequence by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .attention import _check_call, _default_mask
from .facts import Launch, Tuned
from .gradient_plans import _ReadByGradients
from .gradient_tensors import _Settings
from .gradients import Gradients
from .packed_attention import PackedAttention, _scoring_asked, _scoring_of, _sizes_of_sequences
from .packed_values import (
    _LENGTHS,
    SequencePlan,
    _check_lengths,
    _layout_of,
    _Packed,
    _PackedTable,
    _Sequences,
)
from .plans import _PLAN_MADE
from .scored_gradients import _in_order, _ScoredGradientTensors, _wanted, _WantedGradients
from .scored_values import Scored, _Asked
from .table import Choice


class _PackedGradientsRead(_WantedGradients):
    """What kernels of the backward pass read of packed sequences, and for masks and changes of scores."""

    def __init__(self, sequences: _Sequences, wanted: tuple[str, ...] = ()) -> None:
        super().__init__(sequences.tuned, sequences.scoring, wanted)
        self.sequences, self.has_plan = sequences, False

    @property
    def leaves_rows(self) -> bool:
        return True

    def values(self, plan: Any, q: Any, may_make: bool) -> dict[str, float]:
        values = self.sequences.values(plan, q, may_make)
        self.streams, self.has_plan = self.sequences.streams, bool(values[_PLAN_MADE])
        return values

    def skips(self, launch: Launch) -> bool:
        return (launch.plans and self.has_plan) or super().skips(launch)

    def on_device(self, put: Callable[[Any], Any]) -> "_PackedGradientsRead":
        return _PackedGradientsRead(self.sequences.on_device(put), self.wanted)

    def through(self, read: Callable[[Any], Any]) -> "_PackedGradientsRead":
        return _PackedGradientsRead(self.sequences.through(read), self.wanted)


class _PackedGradientTensors(_ScoredGradientTensors):
    """Such a kernel for tensors: the operator takes the arrays that tell where sequences are, and all that it
    reads, behind the settings."""

    settings = (
        "Tensor? dlse, bool? causal, float? scale, SymInt[] max_seqlens, bool deterministic, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor[] buffers, "
        "float[] numbers, bool[] wanted"
    )

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        return _Packed(taken[0].shape[0] - 1, *layout)

    def layout_in_graph(self, layout: Any) -> Any:
        return list(layout[1:])

    def scoring_in(self, buffers: list[Any], numbers: list[float]) -> _Asked | None:
        return _scoring_of(self.table.kernels[0], buffers, numbers)

    def numbers_in_graph(self, tuned: Scored) -> tuple[str, ...]:
        return tuple(tuned.scalars)

    def read_in(self, layout: Any, taken: tuple[Any, ...]) -> _ReadByGradients:
        *lengths, buffers, numbers, wanted = taken
        arrays = {name: array for name, array in zip(_LENGTHS, lengths, strict=True) if array is not None}
        packed, scoring = self.layout_in(layout, taken), self.scoring_in(buffers, numbers)
        sequences = _Sequences(self.table.kernels[0], arrays, packed, None, scoring)
        return _PackedGradientsRead(sequences, self.named(wanted))

    def in_graph(self, read: _ReadByGradients) -> tuple[Any, ...]:
        assert isinstance(read, _PackedGradientsRead)
        return *(read.sequences.arrays.get(name) for name in _LENGTHS), *super().in_graph(read)


class PackedGradients:
    """The gradients of attention of packed sequences by a kernel made for them. Modules offer its methods as
    functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, default_mask: bool | None = None) -> None:
        """`operator` names the kernel among torch's operators. Where a call does not say, the causal mask
        holds as `default_mask` says, or as the kernel was tuned."""
        (self.tuned,) = self.kernels = tuple(kernels)
        masked = _default_mask(kernels) if default_mask is None else default_mask
        name = f"{operator}_gradients"
        self._group = Gradients.__new__(Gradients)
        self._group._serve_by(_PackedGradientTensors(self.kernels, name, masked, _PackedTable))

    def gradients_varlen(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool | None = None,
        scale: float | None = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        plan: SequencePlan | None = None,
        dlse: Any = None,
        stream: Any = None,
        deterministic: bool | None = None,
        wanted: Sequence[str] = (),
        **values: Any,
    ) -> tuple[Any, ...]:
        """Computes the gradients dq, dk and dv of attention of each sequence by itself, given that of its
        output, and those of arrays that masks and changes of scores read.

        q, k, v, lengths and `values` are as `attention_varlen` takes them; o, (total_q, heads, head_dim_v),
        and lse, (heads, total_q), are what it made of them with return_lse=True, dout, of o's shape and type,
        is the gradient of o, and dlse, of lse's shape, that of lse; None: nothing depends on lse. Gradients
        are laid out as what they are of, in its type; those of rows and keys of no sequence are zero. Array
        libraries, `deterministic` and `wanted` are as `ScoredGradients.gradients` has them.

        plan: a `SequencePlan` for gradients alone, which keeps which block takes what for the next calls, for
            as long as lengths stand: all layers of a step may share one. None: it is made by each call.

        Under torch.compile it is an operator, without a graph break. Gradients of gradients are not taken.

        Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or the compiler
        fails, or where no kernel is deterministic as asked, ImportError without PyCUDA.
        """
        _check_call("bshd", scale)
        told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        arrays = {name: array for name, array in zip(_LENGTHS, told, strict=True) if array is not None}
        layout = _layout_of(q, arrays, max_seqlen_q, max_seqlen_k)
        if isinstance(q, np.ndarray) and len(q.shape) == len(k.shape) == 3:
            _check_lengths(arrays, (q.shape[0], k.shape[0]), layout)
        scoring = _scoring_asked(self.tuned, q, values, None, _sizes_of_sequences(q, k, layout), True)
        names = _wanted(self.tuned, wanted)
        sequences = _Sequences(self.tuned, arrays, layout, plan, scoring)
        read = _PackedGradientsRead(sequences, _in_order(self.tuned, names))
        settings = _Settings(causal, scale, stream, layout, deterministic, read)
        try:
            dq, dk, dv, *more = self._group._gradients((q, k, v, o, dout), lse, dlse, settings)
        except BaseException:
            sequences.forget()
            raise
        return dq, dk, dv, *(more[read.wanted.index(name)] for name in names)

    def explain(self, q: Any, k: Any, v: Any, causal: bool | None = None) -> Choice:
        """Says which kernel `gradients_varlen` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        return self._group.explain(q, k, v, causal, layout="bshd")

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve: there is but one. Raises ValueError for another name."""
        self._group.use(name)

    def register_torch(self) -> str:
        """Makes an operator of the kernel in torch.ops.flashgen, for graphs to hold, once. Returns its name:

            NAME(q, k, v, o, lse, dout, dlse, causal, scale, max_seqlens, deterministic, cu_seqlens_q,
                 cu_seqlens_k, seqused_q, seqused_k, buffers, numbers, wanted) -> (dq, dk, dv, more)

        It takes what `gradients_varlen` takes, arrays and numbers that masks and changes of scores read in
        the order of the kernel's arguments and for each array whether its gradient is wanted, and copies what
        no kernel can step by. Needs PyTorch 2.7 or newer."""
        return self._group.register_torch()

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        return self._group.compile(name, arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        self._group.carry(name, causal, cubin)


class DifferentiablePackedAttention(PackedAttention):
    """Attention of packed sequences by a kernel made for them, whose gradients another takes. Modules offer
    its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, gradients: Sequence[Tuned]) -> None:
        """`operator` names the kernels among torch's operators, `gradients` is that of the backward pass."""
        super().__init__(kernels, operator)
        # What says nothing of the mask means the same forwards and backwards.
        self._gradients = PackedGradients(gradients, operator, self._group._tensors.default_mask)
        self._group._tensors.gradients = self._gradients._group._tensors
        self.gradients_varlen = self._gradients.gradients_varlen

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve: there is but one forwards and one backwards. Raises ValueError
        for another name."""
        if name != self._gradients.tuned.name:
            super().use(name)

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        if name == self._gradients.tuned.name:
            return self._gradients.compile(name, arch, causal)
        return super().compile(name, arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        if name == self._gradients.tuned.name:
            self._gradients.carry(name, causal, cubin)
        else:
            super().carry(name, causal, cubin)
