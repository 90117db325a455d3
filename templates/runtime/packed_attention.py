"""What a module of packed sequences offers: attention of sequences one behind the other."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import _kind, _torch_of
from .attention import Attention, _check_call, _default_mask
from .facts import Tuned
from .huggingface import _register_transformers
from .packed_huggingface import _make_packed_mask, _PackedBatches
from .packed_values import (
    _LENGTHS,
    SequencePlan,
    _check_lengths,
    _layout_of,
    _Packed,
    _PackedTable,
    _Sequences,
    _shape,
)
from .plans import _Beside
from .scored_kinds import _arrays_of, _operands, _told
from .scored_values import Scored, TileLists, _Asked, _check_asked
from .table import _SIZES, Choice, _Table
from .tensors import _register, _Tensors

#: What flash-attn calls the scales of q, k and v.
_DESCALES = ("q_descale", "k_descale", "v_descale")


class _PackedTensors(_Tensors):
    """Such a kernel for tensors: operators take the arrays that tell where sequences are, and all that it
    reads, behind the settings."""

    reads_more = True

    @property
    def settings(self) -> str:
        return (
            "bool? causal, float? scale, SymInt[] max_seqlens, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
            "Tensor? seqused_q, Tensor? seqused_k, Tensor[] buffers, float[] numbers"
        )

    def layout_in_graph(self, layout: Any) -> Any:
        return list(layout[1:])

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        return _Packed(taken[0].shape[0] - 1, *layout)

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        assert isinstance(beside, _Sequences)
        return *(beside.arrays.get(name) for name in _LENGTHS), *self.read_in_graph(beside)

    def beside_in(self, layout: Any, taken: tuple[Any, ...]) -> _Beside:
        arrays = {name: array for name, array in zip(_LENGTHS, taken[:4], strict=True) if array is not None}
        packed = self.layout_in(layout, taken)
        return _Sequences(self.table.kernels[0], arrays, packed, None, *self.read_in(*taken[4:]))

    def read_in_graph(self, beside: _Sequences) -> tuple[list[Any], list[float]]:
        """Returns the arrays and numbers that operators take of what masks and changes of scores read."""
        tuned, scoring = self.table.kernels[0], beside.scoring
        values = [beside.value_scale] if self.table.has_scales else []
        if scoring is None:
            return [], values
        assert isinstance(tuned, Scored)
        buffers, numbers = scoring.in_graph(tuple(tuned.scalars))
        return buffers, [*numbers, *values]

    def read_in(self, buffers: list[Any], numbers: list[float]) -> tuple[_Asked | None, float]:
        """Returns what masks and changes of scores read, and the scale of v, of what `read_in_graph` made of
        them."""
        tuned, has_scales = self.table.kernels[0], self.table.has_scales
        value_scale = numbers[-1] if has_scales and numbers else 1.0
        numbers = numbers[: len(numbers) - has_scales]
        return _scoring_of(tuned, buffers, numbers), value_scale

    def rows_of(self, o: Any, layout: Any) -> tuple[int, ...]:
        return o.shape[1], o.shape[0]


def _scoring_asked(
    tuned: Tuned,
    q: Any,
    values: Mapping[str, Any],
    lists: TileLists | None,
    sizes: Mapping[str, int],
    differentiable: bool,
) -> _Asked | None:
    """What a call of those sizes says of masks and changes of scores, of whose arrays kernels may take
    gradients; None where a kernel has none."""
    asked = _told(values)
    if not isinstance(tuned, Scored):
        if asked:
            raise TypeError(
                f"{next(iter(asked))}= is nothing that this kernel reads; kernels are made by "
                f"{tuned.command} with options for what is wanted"
            )
        return None
    _check_asked(tuned, asked)
    numbers = dict(tuned.scalars)
    for keyword, value in asked.items():
        if keyword not in tuned.required:
            numbers |= tuned.numbers_of(keyword, value)
    return _Asked(tuned, numbers, _arrays_of(tuned, asked, q, differentiable), sizes, lists)


def _sizes_of_sequences(q: Any, k: Any, layout: _Packed) -> dict[str, int]:
    """The sizes of arrays that are as they should be; whether they are, is found out later."""
    of_q, of_k = _shape(q), _shape(k)
    if len(of_q) != 3 or len(of_k) != 3:
        return {}
    return dict(zip(_SIZES, (layout.batch, of_q[1], of_k[1], *layout[1:]), strict=True))


def _scoring_of(tuned: Tuned, buffers: list[Any], numbers: list[float]) -> _Asked | None:
    """What a kernel reads for masks and changes of scores, of what an operator was told; None where it has
    none."""
    if isinstance(tuned, Scored):
        return _operands(tuned, tuple(tuned.scalars), buffers, numbers)
    if buffers or numbers:
        raise ValueError(f"the operator takes no buffers and numbers, not {len(buffers)} and {len(numbers)}")
    return None


class _SequenceAttention:
    """What modules of sequences of lengths of their own have in common."""

    def __init__(self, kernels: Sequence[Tuned], operator: str, table: type[_Table], tensors: type[_Tensors]):
        """`operator` names the kernel among torch's operators."""
        (self.tuned,) = self.kernels = tuple(kernels)
        if isinstance(self.tuned, Scored):
            for name in ("named", "keywords", "called", "required", "reads", "numbers", "integers", "exact"):
                getattr(self.tuned, name)  # torch.compile reads what is there, and makes none of them
        self._group = Attention.__new__(Attention)
        self._group._serve_by(tensors(table(self.kernels), operator, _default_mask(kernels)))

    def _attend(
        self,
        arrays: tuple[Any, Any, Any],
        causal: bool | None,
        scale: float | None,
        out: Any,
        stream: Any,
        return_lse: bool,
        beside: _Sequences,
    ) -> Any:
        """Computes attention of q, k and v as `beside` has it laid out."""
        group, layout, torch = self._group, beside.layout, sys.modules.get("torch")
        q, k, v = arrays
        try:
            if torch is not None and isinstance(q, torch.Tensor):
                return group._attend_tensors(
                    torch, q, k, v, causal, scale, out, stream, return_lse, layout, False, beside
                )
            return group._attend_others(q, k, v, causal, scale, out, stream, return_lse, layout, beside)
        except BaseException:
            beside.forget()
            raise

    def _scoring(
        self, q: Any, values: Mapping[str, Any], lists: TileLists | None, sizes: Mapping[str, int]
    ) -> _Asked | None:
        """What a call of those sizes says of masks and changes of scores; None where the kernel has none."""
        return _scoring_asked(self.tuned, q, values, lists, sizes, self._group._tensors.gradients is not None)

    def _asked_of_flash(
        self, q: Any, window_size: tuple[int, int], softcap: float, descales: tuple[Any, Any, Any]
    ) -> dict[str, Any]:
        """What a call says whose arguments are flash-attn's: kernels with a window or a soft cap read it, and
        those of eight bits the `descales` of q, k and v."""
        asked = self._scales_of_flash(q, descales)
        named: Mapping[str, Any] = self.tuned.named if isinstance(self.tuned, Scored) else {}
        if "window" in named or any(side is not None and side >= 0 for side in window_size):
            asked["window"] = tuple(-1 if side is None or side < 0 else side for side in window_size)
        if "softcap" in named or softcap > 0:
            asked["softcap"] = softcap
        return asked

    def _scales_of_flash(self, q: Any, descales: tuple[Any, Any, Any]) -> dict[str, Any]:
        """What stands for scales that have flash-attn's names: 1 for each that is not there."""
        table = self._group._table
        if table.has_scales:
            for name, given in zip(_DESCALES, descales, strict=True):
                if given is not None and not isinstance(given, float | int):
                    raise TypeError(
                        f"{name} is a {_kind(given)}, and {self.tuned.name} takes one number for all heads: "
                        "pass a float; keys of e4m3 beside queries of 16 bits have one a head (--kv-dtype)"
                    )
            of_q, of_k, of_v = (1.0 if each is None else float(each) for each in descales)
            return {"scales": (of_q, of_k, of_v)}
        served = _DESCALES[1:] if table.has_key_scales else ()
        told = dict(zip(_DESCALES, descales, strict=True))
        for name, given in told.items():
            if given is not None and name not in served:
                of = "queries" if name in _DESCALES[:1] else "keys and values"
                raise TypeError(
                    f"{name}= is of {of} of eight bits, which {self.tuned.name} has not: leave it out"
                )
        if any(told[name] is None for name in served):
            if _torch_of(q) is None:
                raise TypeError(
                    f"q is a {_kind(q)}, of which no scales are made: pass {' and '.join(served)}"
                )
            one = q.new_ones((1,), dtype=_torch_of(q).float32)
            told = {name: one if given is None else given for name, given in told.items()}
        return {name.replace("_descale", "_scale"): told[name] for name in served}

    @staticmethod
    def _check_dropout(dropout_p: float) -> None:
        if dropout_p:
            raise ValueError(f"dropout_p is {dropout_p}, and kernels here drop nothing: pass 0")

    @staticmethod
    def _as_flash_returns(made: Any, q: Any, with_probabilities: bool) -> Any:
        """Returns a result, or out and log-sum-exp with the empty tensor that flash-attn adds."""
        if not with_probabilities:
            return made
        if _torch_of(q) is None:
            raise TypeError(f"q is a {_kind(q)}; with return_attn_probs pass torch tensors")
        return *made, q.new_empty((0,), dtype=q.dtype)

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve: there is but one. Raises ValueError for another name."""
        self._group.use(name)

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        return self._group.compile(name, arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        self._group.carry(name, causal, cubin)


class PackedAttention(_SequenceAttention):
    """Attention of packed sequences by a kernel made for them. Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernel among torch's operators."""
        super().__init__(kernels, operator, _PackedTable, _PackedTensors)

    def attention_varlen(
        self,
        q: Any,
        k: Any,
        v: Any,
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
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
        scales: tuple[float, float, float] | None = None,
        lists: TileLists | None = None,
        **values: Any,
    ) -> Any:
        """Computes softmax(scale * q k^T) v of each sequence by itself, in the arrays' type, summed in
        float32; scores are changed, and keys hidden, as the module's kernel has it.

        All sequences stand one behind the other: q is (total_q, heads, head_dim), k is (total_k, kv_heads,
        head_dim) and v (total_k, kv_heads, head_dim_v), where kv_heads divides heads; the result is (total_q,
        heads, head_dim_v). Sequence i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] of q, and the keys
        cu_seqlens_k[i] .. cu_seqlens_k[i + 1]; both are int32 arrays of batch + 1 entries. A sequence may
        have no rows, or no keys: then its rows are zero, their log-sum-exp -inf. Rows of no sequence are not
        written. Strides, array libraries, `out` and `stream` are as `Attention.attention` has them.

        Lengths are read on the card alone: nothing comes back to the host, and what a CUDA graph has captured
        serves other lengths of as many rows. There offsets that fall or lead beyond the arrays are cut to
        them; those of numpy arrays are refused. With `out` and a `plan` that has its memory nothing is
        allocated.

        max_seqlen_q, max_seqlen_k: the most rows and keys that a sequence may have, ints.
        causal: True masks bottom-right by each sequence's own lengths; None: as the kernel was tuned.
        scale: None for 1 / sqrt(head_dim).
        seqused_q, seqused_k: int32 (batch): how many of each sequence's rows and keys count, the first of
            them; None: all.
        plan: a `SequencePlan` that keeps which block takes what for the next calls, for as long as lengths
            stand: all layers of a step may share one. None: it is made by each call.
        return_lse: also return the natural log-sum-exp, float32 (heads, total_q).
        scales: of float8_e4m3fn alone, what q, k and v must be multiplied by, a number each.
        lists: of masks that no interval says, a `TileLists` that keeps which tiles are seen, for as long as
            lengths and what masks read stand.
        values: what masks and changes of scores read, by keyword, as `ScoredAttention.attention` has it:
            window, softcap, alibi_slopes and others, and what expressions read by its name. Axes of rows and
            of keys are as long as the longest sequence may be.

        Gradients of q, k, v and of the float arrays among `values` are taken where the module has a kernel
        for them. Under torch.compile it is the operator of `register_torch`.

        Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or the compiler
        fails.
        """
        _check_call("bshd", scale)
        value_scale = 1.0
        if scales is not None:
            scale, value_scale = self._group._fold(q, scale, scales)
        told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        arrays = {name: array for name, array in zip(_LENGTHS, told, strict=True) if array is not None}
        layout = _layout_of(q, arrays, max_seqlen_q, max_seqlen_k)
        if isinstance(q, np.ndarray) and len(q.shape) == len(k.shape) == 3:
            _check_lengths(arrays, (q.shape[0], k.shape[0]), layout)
        scoring = self._scoring(q, values, lists, _sizes_of_sequences(q, k, layout))
        beside = _Sequences(self.tuned, arrays, layout, plan, scoring, value_scale)
        return self._attend((q, k, v), causal, scale, out, stream, return_lse, beside)

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> Any:
        """Computes what flash-attn's function of that name does, of tensors, by the module's kernel.

        k_descale and v_descale, float32 (batch, kv_heads), are what keys and values of e4m3 are multiplied by
        beside queries of 16 bits; beside those of e4m3 all three are a float for all heads. None: 1.

        A window, a soft cap and ALiBi are served by kernels that were made with them, which cannot do
        without. Rows that see no key have the log-sum-exp -inf. With return_attn_probs the result is (out,
        lse, an empty tensor). Raises ValueError for dropout and page tables, which no kernel here has, and
        otherwise as `attention_varlen` does.
        """
        self._check_dropout(dropout_p)
        if block_table is not None:
            raise ValueError("block_table= is of paged keys, and this kernel's are packed: leave it out")
        made = self.attention_varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            scale=softmax_scale,
            return_lse=return_attn_probs,
            alibi_slopes=alibi_slopes,
            **self._asked_of_flash(q, window_size, softcap, (q_descale, k_descale, v_descale)),
        )
        return self._as_flash_returns(made, q, return_attn_probs)

    def register_transformers(self, name: str = "tuned") -> None:
        """Registers the kernel with Hugging Face's transformers: attn_implementation=name then has models
        call it for packed batches, of one row of several sequences.

        Sequences are told by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, as a
        DataCollatorWithFlattening makes them, or by position_ids that begin anew, for which one layer looks
        once what they are; for neither a mask is made. Sliding windows, soft caps and sinks are served by
        kernels that were made with them. PyTorch's attention computes all else, with a mask of the sequences:
        batches that are not packed, other types and head dims, dropout, and, where the module has no kernel
        for them, what a gradient must be taken of. Raises ValueError for a name with "flash" in it, which
        transformers takes for one of FlashAttention's, ImportError without transformers or with one before
        4.53."""
        differentiable = self._group._tensors.gradients is not None
        batches = _PackedBatches(self.tuned, self.attention_varlen, differentiable)
        _register_transformers(batches.attend, _make_packed_mask, name)

    def explain(self, q: Any, k: Any, v: Any, causal: bool | None = None) -> Choice:
        """Says which kernel `attention_varlen` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        return self._group.explain(q, k, v, causal, layout="bshd")

    def register_torch(self) -> str:
        """Makes operators of the kernel in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first:

            NAME(q, k, v, causal, scale, max_seqlens, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                 buffers, numbers) -> o
            NAME_lse(the same) -> (o, lse)
            NAME_out(q, k, v, out, the rest)

        They take what `attention_varlen` takes, arrays and numbers that masks and changes of scores read in
        the order of the kernel's arguments, and copy what no kernel can step by. They have gradients where
        the module has a kernel for them. Needs PyTorch 2.7 or newer."""
        return _register(self._group._tensors.operator)
