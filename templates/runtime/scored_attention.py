"""What a module with masks and changes of scores offers: the kernels that serve just what a call asks."""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from .arrays import Array, _kind, _torch_of
from .attention import Attention, _check_call, _check_exact, _default_mask
from .facts import Tuned
from .huggingface import _register_transformers
from .plans import _Beside
from .scored_huggingface import _attend_scored, _make_scored_mask
from .scored_kinds import (
    _arrays_of,
    _ByKind,
    _either,
    _named,
    _operands,
    _ScoredTable,
    _sizes_of,
    _told,
)
from .scored_values import Scored, TileLists, _Asked
from .table import Choice
from .tensors import _Tensors

_S = TypeVar("_S", bound=Array)


class _ScoredTensors(_Tensors):
    """Such kernels for tensors: operators take the arrays and numbers that they read behind the settings."""

    reads_more = True

    @property
    def settings(self) -> str:
        return "bool? causal, float? scale, str layout, Tensor[] buffers, float[] numbers"

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        assert isinstance(beside, _Asked)
        return beside.in_graph(beside.tuned.numbers)

    def beside_in(self, layout: Any, taken: tuple[Any, ...]) -> _Beside:
        tuned, (buffers, numbers) = self.table.kernels[0], taken
        assert isinstance(tuned, Scored)
        return _operands(tuned, tuned.numbers, buffers, numbers)


class ScoredAttention(_ByKind[Attention]):
    """Attention by kernels with masks and changes of scores, those that compute just what is asked. Modules
    offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernels among torch's operators."""
        self._default_mask = _default_mask(kernels)
        super().__init__(kernels, operator)

    def _serving_plain(self, kernels: Sequence[Tuned], operator: str) -> Attention:
        return Attention(kernels, operator)

    def _serving(self, kernels: tuple[Scored, ...], numbers: tuple[float, ...], operator: str) -> Attention:
        made = Attention.__new__(Attention)
        made._serve_by(_ScoredTensors(_ScoredTable(kernels, numbers), operator, self._default_mask))
        return made

    @overload
    def attention(
        self,
        q: _S,
        k: _S,
        v: _S,
        causal: bool | None = ...,
        scale: float | None = ...,
        out: _S | None = ...,
        stream: Any = ...,
        return_lse: Literal[False] = ...,
        *,
        layout: Literal["bhsd", "bshd"] = ...,
        recompute: bool = ...,
        strict: bool = ...,
        scales: tuple[float, float, float] | None = ...,
        window: tuple[int | None, int | None] | None = ...,
        always: int | None = ...,
        chunk: int | None = ...,
        prefix: Any = ...,
        lengths: Any = ...,
        documents: Any = ...,
        dilation: int | None = ...,
        tree: Any = ...,
        softcap: float | None = ...,
        alibi_slopes: Any = ...,
        bias: Any = ...,
        attn_mask: Any = ...,
        sinks: Any = ...,
        lists: TileLists | None = ...,
        **values: Any,
    ) -> _S: ...

    @overload
    def attention(
        self,
        q: _S,
        k: _S,
        v: _S,
        causal: bool | None = ...,
        scale: float | None = ...,
        out: _S | None = ...,
        stream: Any = ...,
        return_lse: bool = ...,
        *,
        layout: Literal["bhsd", "bshd"] = ...,
        recompute: bool = ...,
        strict: bool = ...,
        scales: tuple[float, float, float] | None = ...,
        window: tuple[int | None, int | None] | None = ...,
        always: int | None = ...,
        chunk: int | None = ...,
        prefix: Any = ...,
        lengths: Any = ...,
        documents: Any = ...,
        dilation: int | None = ...,
        tree: Any = ...,
        softcap: float | None = ...,
        alibi_slopes: Any = ...,
        bias: Any = ...,
        attn_mask: Any = ...,
        sinks: Any = ...,
        lists: TileLists | None = ...,
        **values: Any,
    ) -> Any: ...

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool | None = None,
        scale: float | None = None,
        out: Any = None,
        stream: Any = None,
        return_lse: bool = False,
        *,
        layout: str = "bhsd",
        recompute: bool = False,
        strict: bool = False,
        scales: tuple[float, float, float] | None = None,
        window: tuple[int | None, int | None] | None = None,
        always: int | None = None,
        chunk: int | None = None,
        prefix: Any = None,
        lengths: Any = None,
        documents: Any = None,
        dilation: int | None = None,
        tree: Any = None,
        softcap: float | None = None,
        alibi_slopes: Any = None,
        bias: Any = None,
        attn_mask: Any = None,
        sinks: Any = None,
        lists: TileLists | None = None,
        **values: Any,
    ) -> Any:
        """Computes softmax(s) v in the arrays' type, where s are the scores scale * q k^T as the module's
        kernels change them, of the keys that their masks let a row see.

        q is (batch, heads, seqlen_q, head_dim), k is (batch, kv_heads, seqlen_k, head_dim) and v (batch,
        kv_heads, seqlen_k, head_dim_v), where kv_heads divides heads; the result is (batch, heads, seqlen_q,
        head_dim_v). With layout="bshd", heads and seqlen are swapped in all of them. Strides, array
        libraries, `out`, `stream`, `return_lse` and `scales` are as `Attention.attention` has them; `causal`
        adds the causal mask, None: as a module's only kernel was tuned, else False.

        What the kernels read is told by keyword, and changes nothing that was compiled. Arrays have no
        defaults; numbers left out are those that the kernels were tuned for. Of a module with kernels for
        several combinations only those serve that compute just what is named, the nearest as `explain` says;
        what is not named is not meant there. Arrays are of q's library, on its device and of the type that
        the kernel was made for; axes of one entry, and leading ones left out, are repeated without a copy.
        What must be copied, or made of segment ids, is so on the stream in use: beside `stream` nothing is.

        A row's place among the keys is i + seqlen_k - seqlen_q, the last row's is that of the last key. All
        masks hold at once; rows that see no key are zero, their log-sum-exp -inf, or the sink. The soft cap
        comes first, then ALiBi, then a bias, then an expression.

        window: (left, right), so many keys before a row's place and after it, inclusive; -1 or None: all.
        always: the first keys, which all rows see beside their window.
        chunk: rows see keys of their own chunk of so many places.
        prefix: int32 (batch): so many first keys are seen by all rows, whatever the causal mask says.
        lengths: int32 (batch): the number of keys of each; rows keep their places.
        documents: rows see keys of their own document: sorted ids of the keys, (batch, seqlen_k), of any
            integers, or what `document_bounds` returns of them, which is then made but once.
        dilation: rows see keys at distances from their place that are multiples of this.
        tree: int64 (batch, seqlen_q), of at most 64 rows: row i sees the keys before the last seqlen_q, and
            of these the j-th where bit j of its word is set, its own only if bit i is.
        softcap: scores s become softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads) or (batch, heads): times a key's distance from the row's place, this is
            subtracted.
        bias: what is added to the scores, or a boolean mask that is false where nothing is seen, (batch,
            heads, seqlen_q, seqlen_k); `attn_mask` is another name for it.
        sinks: float32 (heads): a logit beside a row's scores, in the denominator alone.
        lists: of masks that no interval says, a `TileLists` that keeps which tiles are seen for the next
            calls, for as long as what the masks read stands; None: they are listed by each call, and where
            numbers alone tell, by the first on a stream. Graphs list them each time.
        values: what expressions read, by its name. Arrays may be longer than needed.

        Gradients of q, k, v and of the float arrays among these are taken where the module has kernels for
        them; else not: `recompute` is refused.

        Raises TypeError and ValueError for what no kernel here serves, and otherwise as `explain` and the
        module's other functions do.
        """
        if scale is not None or layout != "bhsd":
            _check_call(layout, scale)
        named = _named(
            window=window,
            always=always,
            chunk=chunk,
            prefix=prefix,
            lengths=lengths,
            documents=documents,
            dilation=dilation,
            tree=tree,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            bias=_either(bias, attn_mask),
            sinks=sinks,
        )
        asked = {**named, **values}
        served = self._served_by(asked)
        if served is None:
            assert self._plain is not None
            attention: Any = self._plain.attention
            return attention(
                *(q, k, v, causal, scale, out, stream, return_lse),
                layout=layout,
                recompute=recompute,
                strict=strict,
                scales=scales,
            )
        if recompute:
            raise ValueError(
                "recompute=True is PyTorch's attention, which has none of these masks: leave it out"
            )
        kind, group, numbers, beside = served
        if strict:
            _check_exact(self.explain(q, k, v, causal, layout=layout, **asked))
        if group._table.has_scales:
            scale, value_scale = group._fold(q, scale, scales or (1.0, 1.0, 1.0))
            numbers = {**numbers, "value_scale": value_scale}
        elif scales is not None:
            group._fold(q, scale, scales)
        if beside is None:
            arrays = _arrays_of(kind, asked, q, group._tensors.gradients is not None)
            beside = _Asked(kind, numbers, arrays, _sizes_of(q, k, layout), lists)
        torch = sys.modules.get("torch")
        try:
            if torch is not None and isinstance(q, torch.Tensor):
                return group._attend_tensors(
                    torch, q, k, v, causal, scale, out, stream, return_lse, layout, False, beside
                )
            return group._attend_others(q, k, v, causal, scale, out, stream, return_lse, layout, beside)
        except BaseException:
            if lists is not None:
                lists.forget()
            raise

    # ---- which kernels

    def explain(
        self, q: Array, k: Array, v: Array, causal: bool | None = None, *, layout: str = "bhsd", **asked: Any
    ) -> Choice:
        """Says which kernel `attention` would run on these arrays, and why. Nothing is compiled or launched.

        What `attention` is told by keyword is told here, too. Raises TypeError and ValueError as `attention`
        does where none serves.
        """
        asked = _told(asked)
        alike = self._alike(asked)
        if alike is None:
            assert self._plain is not None
            return self._plain.explain(q, k, v, causal, layout=layout)
        group, numbers = self._group(alike, asked)
        choice = group.explain(q, k, v, causal, layout=layout)
        assert isinstance(choice.tuned, Scored)
        if choice.exact and choice.tuned.scalars != numbers:
            told = ", ".join(f"{name} {value:g}" for name, value in choice.tuned.scalars.items())
            return choice._replace(exact=False, how=f"{choice.how}, but for {told}")
        return choice

    # ---- in PyTorch

    def sdpa(
        self,
        query: _S,
        key: _S,
        value: _S,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _S:
        """Computes what torch.nn.functional.scaled_dot_product_attention does, by a kernel where one serves
        and by PyTorch elsewhere.

        Kernels with a bias of the mask's type, or with a boolean mask, serve `attn_mask`, whatever it is
        broadcast from; those without masks serve what has none; the others serve `attention` alone. PyTorch
        computes what has dropout, a type, head dim, device or number of dimensions that no kernel is for,
        strides that none can step by, no rows or keys, and what a gradient must be taken of."""
        torch = _torch_of(query)
        if torch is None:
            raise TypeError(f"query is a {_kind(query)}; pass torch tensors, or other arrays to attention")
        o: Any = None
        if dropout_p == 0 and not (is_causal and attn_mask is not None):
            asked = {} if attn_mask is None else {"bias": attn_mask}
            o = self._serve(torch, query, key, value, is_causal, scale, enable_gqa, asked)
        if o is None:
            o = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        result: _S = o
        return result

    def _serve(
        self,
        torch: Any,
        q: Any,
        k: Any,
        v: Any,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        asked: Mapping[str, Any],
    ) -> Any:
        """Computes as PyTorch's attention does with what is asked beside; None where no kernel serves just
        that."""
        if not asked and self._plain is not None:
            return self._plain._tensors.serve(torch, q, k, v, is_causal, scale, enable_gqa)
        # A window of all keys is none.
        ways = [dict(asked), {"window": (-1, -1), **asked}]
        found = [(each, way) for way in ways for each in self._kinds if each.serves(way)]
        if not found or len(q.shape) != 4:
            return None
        alike, asked = found[0]
        arrays = {each: asked[each] for each in alike.first.required}
        wanted = (*q.shape[:3], k.shape[2])
        for array in arrays.values():
            if not isinstance(array, torch.Tensor) or array.device != q.device:
                return None
            # PyTorch tells what is wrong with others.
            if "bias" in asked and array is asked["bias"] and not _broadcasts(tuple(array.shape), wanted):
                return None
        group, numbers = self._group(alike, asked)
        beside = _Asked(alike.first, numbers, arrays, _sizes_of(q, k, "bhsd"))
        return group._tensors.serve(torch, q, k, v, is_causal, scale, enable_gqa, beside)

    def register_torch(self) -> str:
        """Makes operators of the kernels in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first of them:

            NAME(q, k, v, causal, scale, layout, buffers, numbers) -> o
            NAME_lse(q, k, v, causal, scale, layout, buffers, numbers) -> (o, lse)
            NAME_out(q, k, v, out, causal, scale, layout, buffers, numbers)

        They take what `attention` takes, arrays and numbers in the order of the kernel's arguments, and
        copy what no kernel can step by. They have gradients where the module has kernels for them.
        `attention` and `sdpa` register them as needed. Needs PyTorch 2.7 or newer."""
        names = [group.register_torch() for group in self._groups()]
        return names[0]

    def register_transformers(self, name: str = "tuned") -> None:
        """Registers the kernels with Hugging Face's transformers: attn_implementation=name then has models
        call them.

        Kernels serve a model's sliding window, soft cap and sinks where the module has those for just what
        a layer asks, its masks where there is one with a boolean mask; PyTorch's attention computes the rest
        but for sinks and soft caps, which are refused. A window's mask is not made where a kernel serves it.
        Raises ValueError for a name with "flash" in it, which transformers takes for one of FlashAttention's,
        ImportError without transformers or with one before 4.53."""

        def windows() -> bool:
            return any("window" in alike.first.named for alike in self._kinds)

        attend = functools.partial(_attend_scored, self._serve)
        _register_transformers(attend, functools.partial(_make_scored_mask, windows), name)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of that shape can be repeated to another."""
    if len(shape) > len(wanted):
        return False
    return all(each in (1, whole) for each, whole in zip(shape[::-1], wanted[::-1], strict=False))
