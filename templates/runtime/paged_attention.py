"""What a module of keys in pages offers: attention beside a cache that sequences share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .appended_values import (
    _NEW_IN_GRAPH,
    _NEW_SETTINGS,
    _NEW_STARTS,
    _WRITTEN_CACHES,
    _appends,
    _check_appending,
    _check_flash_call,
    _check_new,
    _check_pairs,
)
from .attention import _check_call
from .facts import Tuned
from .packed_attention import _PackedTensors, _SequenceAttention
from .packed_values import SequencePlan, _shape
from .paged_values import (
    _PACKED_QUERIES,
    _PAGE_ARRAYS,
    _check_paged,
    _Paged,
    _paged_layout,
    _PagedSequences,
    _PagedTable,
    _sizes_of_pages,
    _takes_packed,
)
from .plans import _ROTATED, _Beside
from .scored_values import TileLists
from .slots import _slots_as_pages
from .table import Choice
from .tensors import _register, _Tensors


class _PagedTensors(_PackedTensors):
    """Such a kernel for tensors: operators take the table of pages and all that tells of lengths. Caches are
    never copied."""

    copies = False

    @property
    def appends(self) -> bool:
        return _appends(self.table.kernels[0])

    @property
    def arrays(self) -> str:
        return _WRITTEN_CACHES if self.appends else super().arrays

    @property
    def settings(self) -> str:
        return (
            "bool? causal, float? scale, str layout, SymInt[] max_seqlens, Tensor page_table, "
            "Tensor? seqused_k, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor[] buffers, float[] numbers"
        ) + (_NEW_SETTINGS if self.appends else "")

    def autocast(self, torch: Any, x: Any) -> Any:
        return x

    def layout_in_graph(self, layout: Any) -> Any:
        return f"{layout.queries} {layout.cache}"

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        batch, max_pages = taken[1].shape
        queries, cache = layout.split()
        return _Paged(batch, taken[0][0], taken[0][1], max_pages, queries, cache)

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        assert isinstance(beside, _PagedSequences)
        longest = [beside.layout.max_seqlen_q, beside.layout.max_seqlen_k]
        told = (beside.arrays.get(name) for name in _PAGE_ARRAYS)
        new = (beside.arrays.get(name) for name in _NEW_IN_GRAPH if self.appends)
        return longest, *told, *self.read_in_graph(beside), *new

    def beside_in(self, layout: Any, taken: tuple[Any, ...]) -> _Beside:
        told = dict(zip(_PAGE_ARRAYS, taken[1:5], strict=True))
        told |= dict(zip(_NEW_IN_GRAPH, taken[7:], strict=False))
        arrays = {name: array for name, array in told.items() if array is not None}
        return _PagedSequences(
            self.table.kernels[0], arrays, self.layout_in(layout, taken), None, *self.read_in(*taken[5:7])
        )

    def rows_of(self, o: Any, layout: Any) -> tuple[int, ...]:
        if layout.queries == _PACKED_QUERIES:
            return super().rows_of(o, layout)
        return _Tensors.rows_of(self, o, layout.queries)


class PagedAttention(_SequenceAttention):
    """Attention beside caches of pages by a kernel made for them. Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernel among torch's operators."""
        super().__init__(kernels, operator, _PagedTable, _PagedTensors)

    def attention_paged(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        page_table: Any,
        seqused_k: Any = None,
        *,
        cu_seqlens_q: Any = None,
        max_seqlen_q: int | None = None,
        seqused_q: Any = None,
        max_seqlen_k: int | None = None,
        k: Any = None,
        v: Any = None,
        cu_seqlens_new: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        rotated: Any = None,
        causal: bool | None = None,
        scale: float | None = None,
        layout: str = "bhsd",
        kv_layout: str = "NHD",
        plan: SequencePlan | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
        scales: tuple[float, float, float] | None = None,
        lists: TileLists | None = None,
        **values: Any,
    ) -> Any:
        """Computes softmax(scale * q k^T) v of sequences whose keys and values lie in pages of a cache, in
        the arrays' type, summed in float32; scores are changed, and keys hidden, as the module's kernel has
        it.

        k_cache is (pages, page_size, kv_heads, head_dim) and v_cache (pages, page_size, kv_heads,
        head_dim_v); with kv_layout="HND" page_size and kv_heads are swapped. Any strides will do as long as
        the last dimension is contiguous: both may be views of one array, and neither is ever copied.
        page_table is int32 (batch, max_pages): each sequence's row lists its pages in order. Sequences may
        share pages; what stands behind a row's last is not read. seqused_k, int32 (batch), is how many keys
        each sequence has; without it all have max_seqlen_k.

        q is (batch, heads, seqlen_q, head_dim), with layout="bshd" (batch, seqlen_q, heads, head_dim), and
        the result alike. A kernel that was made for packed queries takes (total_q, heads, head_dim), with
        `cu_seqlens_q`, `max_seqlen_q`, and `seqused_q` and `plan` if wanted, as `attention_varlen` has them.

        Lengths and tables are read on the card alone: nothing comes back to the host, and what a CUDA graph
        has captured serves other lengths and pages. There a page that the cache has not is read as its last,
        and more keys than there is room for are none; those of numpy arrays are refused. With `out` (and for
        packed queries a `plan` that has its memory) nothing is allocated.

        max_seqlen_k: the most keys that a sequence may have, an int; None: as many as a row of the table has
            room for.
        k, v: new rows, laid out as q is, of kernels made with --append: they are written behind the
            seqused_k keys that each sequence has then, and attended to as well. Rows without room, or
            of pages that the cache has not, are not written. None: nothing is.
        cu_seqlens_new: int32 (batch + 1), beside packed queries: where each sequence's new rows begin; None:
            as its queries do.
        rotary_cos, rotary_sin: (positions, columns / 2), of kernels made with --rotary: keys in k are rotated
            by their positions, queries by theirs under a causal mask or a window, else by the first one's.
        rotated: memory for rotated queries, contiguous and like q; None: it is made.
        causal: True masks bottom-right by each sequence's own lengths; None: as the kernel was tuned.
        return_lse: also return the natural log-sum-exp, float32 (batch, heads, seqlen_q), of packed queries
            (heads, total_q).

        Scale, scales, lists, out, stream, values and arrays of other libraries are as `attention_varlen` has
        them. In torch.autocast nothing is cast. Gradients are not taken. Under torch.compile it is the
        operator of `register_torch`.

        Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or the compiler
        fails.
        """
        _check_call(layout, scale)
        value_scale = 1.0
        if scales is not None:
            scale, value_scale = self._group._fold(q, scale, scales)
        told = (page_table, seqused_k, cu_seqlens_q, seqused_q)
        arrays = {name: array for name, array in zip(_PAGE_ARRAYS, told, strict=True) if array is not None}
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        given = {"k": k, "v": v, _NEW_STARTS: cu_seqlens_new, **tables, "rotated": rotated}
        _check_new(self.tuned, given)
        made = _paged_layout(self.tuned, q, k_cache, arrays, max_seqlen_q, max_seqlen_k, layout, kv_layout)
        if plan is not None and not _takes_packed(self.tuned):
            raise TypeError(f"plan= is of packed queries, and {self.tuned.name} takes a batch: leave it out")
        if isinstance(q, np.ndarray) and isinstance(k_cache, np.ndarray):
            _check_paged(arrays, q, k_cache, made)
        if _appends(self.tuned):
            new = {"k_new": k, "v_new": v, **tables, _ROTATED: rotated, _NEW_STARTS: cu_seqlens_new}
            arrays |= {name: array for name, array in new.items() if array is not None}
            _check_appending(self.tuned, q, given)
        scoring = self._scoring(q, values, lists, _sizes_of_pages(q, k_cache, made))
        beside = _PagedSequences(self.tuned, arrays, made, plan, scoring, value_scale)
        return self._attend((q, k_cache, v_cache), causal, scale, out, stream, return_lse, beside)

    def flash_attn_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> Any:
        """Computes what flash-attn's function of that name does, by the module's kernel.

        q is (batch, seqlen_q, heads, head_dim), caches are (pages, page_size, kv_heads, head_dim), whatever
        the size of a page; cache_seqlens, int32 (batch) or one int for all, counts the keys that there are.
        Without a block_table caches are (slots, room, kv_heads, head_dim), a slot for each sequence, or that
        which cache_batch_idx, integers (batch), names. Where the kernel takes pages of one size alone, slots
        have room for a multiple of it, and no gaps between them; a small table is made by each such call.
        A window, a soft cap and ALiBi are served by kernels that were made with them, which cannot do
        without. Keys are split as the kernel was tuned, whatever num_splits. Rows that see no key have the
        log-sum-exp -inf. With return_softmax_lse the result is (out, lse).

        k and v, (batch, new rows, kv_heads, head_dim), are written behind those keys by kernels made with
        --append, and rotated with queries by those made with --rotary. k_descale and v_descale, float32
        (batch, kv_heads), are what keys and values of e4m3 are multiplied by beside queries of 16 bits;
        beside those of e4m3 all three are a float for all heads. None: 1.

        Raises ValueError for k, v and rotary embeddings that this kernel does not append, for cache_leftpad
        and for cache_batch_idx beside a block_table; otherwise as `attention_paged` does.
        """
        _check_pairs(self.tuned, rotary_cos, rotary_interleaved)
        _check_flash_call(cache_leftpad, num_splits)
        if block_table is None:
            caches = (k_cache, v_cache)
            slots = _slots_as_pages(self.tuned, caches, cache_batch_idx, _shape(q)[0])
            (k_cache, v_cache), block_table = slots
        elif cache_batch_idx is not None:
            raise ValueError("cache_batch_idx= is of caches without pages: leave it out, block_table tells")
        same = int(cache_seqlens) if isinstance(cache_seqlens, int | np.integer) else None
        if same is not None and k is not None:
            same += _shape(k)[1]
        return self.attention_paged(
            *(q, k_cache, v_cache, block_table),
            cache_seqlens if same is None else None,
            max_seqlen_k=same,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            causal=causal,
            scale=softmax_scale,
            layout="bshd",
            return_lse=return_softmax_lse,
            alibi_slopes=alibi_slopes,
            **self._asked_of_flash(q, window_size, softcap, (q_descale, k_descale, v_descale)),
        )

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
        seqused_k: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> Any:
        """Computes what flash-attn's function of that name does with a block_table, of tensors, by the
        module's kernel of packed queries.

        k and v are caches (pages, page_size, kv_heads, head_dim), in which sequences have as many keys as
        cu_seqlens_k, int32 (batch + 1), counts, or seqused_k, int32 (batch), where it is passed: then pass
        None for cu_seqlens_k. The scales of keys and values of e4m3, k_descale and v_descale, are float32
        (batch, kv_heads), beside queries of e4m3 all three a float. With return_attn_probs the result is
        (out, lse, an empty tensor). Raises ValueError for dropout and without a block_table, otherwise as
        `attention_paged` does.
        """
        self._check_dropout(dropout_p)
        self._check_table(block_table)
        if (cu_seqlens_k is None) == (seqused_k is None):
            raise ValueError("cu_seqlens_k= and seqused_k= both count keys: pass one of them")
        if seqused_k is None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        made = self.attention_paged(
            *(q, k, v, block_table, seqused_k),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            scale=softmax_scale,
            return_lse=return_attn_probs,
            alibi_slopes=alibi_slopes,
            **self._asked_of_flash(q, window_size, softcap, (q_descale, k_descale, v_descale)),
        )
        return self._as_flash_returns(made, q, return_attn_probs)

    def _check_table(self, block_table: Any) -> None:
        if block_table is None:
            raise ValueError(
                f"block_table= is missing, and {self.tuned.name} takes keys in pages: pass the pages of each "
                "sequence, int32 (batch, max_pages), or make a kernel without --page-size"
            )

    def explain(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        causal: bool | None = None,
        *,
        layout: str = "bhsd",
        kv_layout: str = "NHD",
    ) -> Choice:
        """Says which kernel `attention_paged` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        _check_call(layout)
        queries = _PACKED_QUERIES if _takes_packed(self.tuned) else layout
        made = _Paged(_shape(q)[0], 0, 0, 0, queries, kv_layout)
        return self._group._explain(q, k_cache, v_cache, causal, made)

    def register_torch(self) -> str:
        """Makes operators of the kernel in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first:

            NAME(q, k_cache, v_cache, causal, scale, layout, max_seqlens, page_table, seqused_k,
                 cu_seqlens_q, seqused_q, buffers, numbers) -> o
            NAME_lse(the same) -> (o, lse)
            NAME_out(q, k_cache, v_cache, out, the rest)

        They take what `attention_paged` takes, `layout` being that of the queries ("thd" where these are
        packed) and of the caches, as in "bshd NHD", and arrays and numbers that masks and changes of scores
        read in the order of the kernel's arguments. Those of kernels that append say that they write to the
        caches, and take k_new, v_new, rotary_cos, rotary_sin and cu_seqlens_new behind the rest. They have no
        gradients. Needs PyTorch 2.7 or newer."""
        return _register(self._group._tensors.operator)
