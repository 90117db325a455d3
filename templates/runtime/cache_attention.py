"""What a module of caches that grow offers: attention beside keys and values that a call adds to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .appended_values import (
    _NEW_FIELDS,
    _NEW_IN_GRAPH,
    _NEW_SETTINGS,
    _WRITTEN_CACHES,
    _check_appending,
    _check_flash_call,
    _check_new,
    _check_pairs,
    _placed_new,
)
from .arrays import _View
from .attention import _check_call
from .facts import Tuned
from .packed_attention import _PackedTensors, _SequenceAttention
from .packed_values import _check_longest, _is_symbol, _PackedTable, _Sequences, _shape
from .plans import _ROTATED, _Beside, _Plan
from .scored_kinds import _sizes_of
from .scored_values import TileLists, _Placed
from .table import Choice, _Output, _Table
from .tensors import _register, _Tensors


class _Grown(NamedTuple):
    """The layout of queries beside caches of slots: how many keys each sequence has once the new ones are
    there, and the order of the arrays' axes."""

    seqlen_k: int
    queries: str


class _GrownTable(_PackedTable):
    """A kernel that appends to caches of slots, in which there may be room for more keys."""

    def inspect(self, name: str, described: tuple[Any, ...], layout: Any, torch: Any) -> _View:
        return _Table.inspect(self, name, described, layout.queries, torch)

    def output_like(self, query: _View, head_dim: int, layout: Any) -> _Output:
        return _Table.output_like(self, query, head_dim, layout.queries)

    def sizes(self, query: _View, key: _View, layout: Any) -> dict[str, int]:
        room, keys = key.shape[2], layout.seqlen_k
        if keys > room:
            raise ValueError(
                f"sequences have {keys} keys with the new ones, and k_cache has room for {room}: pass a "
                "larger cache"
            )
        return _Table.sizes(self, query, key, layout) | {"seqlen_k": keys}

    def sizes_of_grid(self, sizes: dict[str, int]) -> tuple[int, int, int, int]:
        return _Table.sizes_of_grid(self, sizes)


class _GrownSequences(_Sequences):
    """What a call says of new keys and values, and of masks and changes of scores."""

    names = _NEW_FIELDS

    def place(self, name: str, array: Any, plan: _Plan, may_copy: bool) -> tuple[_Placed, dict[str, float]]:
        return _placed_new(name, array, self.layout.queries, plan)


class _GrownTensors(_PackedTensors):
    """Such a kernel for tensors: operators say that they write to caches, which are never copied."""

    copies = False

    @property
    def arrays(self) -> str:
        return _WRITTEN_CACHES

    @property
    def settings(self) -> str:
        told = "bool? causal, float? scale, str layout, SymInt seqlen_k, Tensor[] buffers, float[] numbers"
        return told + _NEW_SETTINGS

    def autocast(self, torch: Any, x: Any) -> Any:
        return x

    def layout_in_graph(self, layout: Any) -> Any:
        return layout.queries

    def layout_in(self, layout: Any, taken: tuple[Any, ...]) -> Any:
        return _Grown(taken[0], layout)

    def in_graph(self, beside: _Beside) -> tuple[Any, ...]:
        assert isinstance(beside, _GrownSequences)
        new = (beside.arrays.get(name) for name in _NEW_IN_GRAPH)
        return beside.layout.seqlen_k, *self.read_in_graph(beside), *new

    def beside_in(self, layout: Any, taken: tuple[Any, ...]) -> _Beside:
        told = zip(_NEW_IN_GRAPH, taken[3:], strict=True)
        arrays = {name: array for name, array in told if array is not None}
        grown = self.layout_in(layout, taken)
        return _GrownSequences(self.table.kernels[0], arrays, grown, None, *self.read_in(*taken[1:3]))

    def rows_of(self, o: Any, layout: Any) -> tuple[int, ...]:
        return _Tensors.rows_of(self, o, layout.queries)


class CacheAttention(_SequenceAttention):
    """Attention beside caches by a kernel that appends to them. Modules offer its methods as functions."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernel among torch's operators."""
        super().__init__(kernels, operator, _GrownTable, _GrownTensors)

    def attention_append(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        *,
        cache_seqlens: int | None = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        rotated: Any = None,
        causal: bool | None = None,
        scale: float | None = None,
        layout: str = "bhsd",
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
        scales: tuple[float, float, float] | None = None,
        lists: TileLists | None = None,
        **values: Any,
    ) -> Any:
        """Writes new keys and values into caches, and computes softmax(scale * q k^T) v of all that is there
        then, in the arrays' type, summed in float32; scores are changed, and keys hidden, as the module's
        kernel has it.

        q is (batch, heads, seqlen_q, head_dim), k_cache (batch, kv_heads, room, head_dim) and v_cache (batch,
        kv_heads, room, head_dim_v), where kv_heads divides heads; k and v, laid out alike, are new rows, as
        many of each sequence. With layout="bshd" heads and seqlen are swapped in all of them, and in the
        result. Any strides will do as long as the last dimension is contiguous; caches are never copied.

        cache_seqlens: how many keys each sequence has in the caches before the new ones, which come behind
            these: an int, the same of all. None: as many as leave room for just the new ones. Where sequences
            have different numbers, a kernel of pages serves (--page-size), whose page a slot may be.
        k, v: None: nothing is appended.
        rotary_cos, rotary_sin: (positions, columns / 2), of kernels made with --rotary: keys in k are rotated
            by their positions, queries by theirs under a causal mask or a window, else by the first one's.
        rotated: memory for rotated queries, contiguous and like q; None: it is made.
        causal: True masks bottom-right: the last row sees all keys; None: as the kernel was tuned.
        return_lse: also return the natural log-sum-exp, float32 (batch, heads, seqlen_q).

        Scale, scales, lists, out, stream, values and arrays of other libraries are as `attention` of other
        modules has them, but those of numpy are refused: caches on the card are written. In torch.autocast
        nothing is cast. Gradients are not taken. Under torch.compile it is the operator of `register_torch`.
        A CUDA graph keeps the number of keys that it was captured with; one of a kernel of pages does not.

        Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or the compiler
        fails.
        """
        _check_call(layout, scale)
        value_scale = 1.0
        if scales is not None:
            scale, value_scale = self._group._fold(q, scale, scales)
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        given = {"k": k, "v": v, **tables, "rotated": rotated}
        _check_new(self.tuned, given)
        _check_appending(self.tuned, q, given)
        new = {"k_new": k, "v_new": v, **tables, _ROTATED: rotated}
        arrays = {name: array for name, array in new.items() if array is not None}
        grown = _Grown(_keys_with_new(k_cache, k, cache_seqlens, layout), layout)
        sizes = _sizes_of(q, k_cache, layout) | {"seqlen_k": grown.seqlen_k}
        scoring = self._scoring(q, values, lists, sizes)
        beside = _GrownSequences(self.tuned, arrays, grown, None, scoring, value_scale)
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
        cache_seqlens: int | None = None,
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
        """Computes what flash-attn's function of that name does beside caches of slots, by the module's
        kernel.

        q is (batch, seqlen_q, heads, head_dim), caches are (batch, room, kv_heads, head_dim), k and v (batch,
        new rows, kv_heads, head_dim); cache_seqlens is one int for all, without which all of the cache is
        there and nothing is appended. A window, a soft cap and ALiBi are served by kernels that were made
        with them, which cannot do without. Keys are split as the kernel was tuned, whatever num_splits. Rows
        that see no key have the log-sum-exp -inf. Descales, of e4m3 alone, are a float each. With
        return_softmax_lse the result is (out, lse).

        Raises ValueError for cache_batch_idx, cache_leftpad and a block_table, and for cache_seqlens that
        differ from sequence to sequence, which kernels of pages take; otherwise as `attention_append` does.
        """
        _check_pairs(self.tuned, rotary_cos, rotary_interleaved)
        _check_flash_call(cache_leftpad, num_splits)
        of_pages = {"cache_batch_idx": cache_batch_idx, "block_table": block_table}
        of_pages |= {} if _is_count(cache_seqlens) else {"cache_seqlens": cache_seqlens}
        for name, given in of_pages.items():
            if given is not None:
                raise ValueError(
                    f"{name}= is read on the card by kernels of pages, of which a slot may be one: make one "
                    f"with {self.tuned.command} --append --page-size 16, or pass one int as cache_seqlens"
                )
        if k is not None and cache_seqlens is None:
            raise ValueError("cache_seqlens= is missing: it says behind how many keys k and v are written")
        return self.attention_append(
            *(q, k_cache, v_cache, k, v),
            cache_seqlens=cache_seqlens,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            causal=causal,
            scale=softmax_scale,
            layout="bshd",
            return_lse=return_softmax_lse,
            alibi_slopes=alibi_slopes,
            **self._asked_of_flash(q, window_size, softcap, (q_descale, k_descale, v_descale)),
        )

    def explain(
        self, q: Any, k_cache: Any, v_cache: Any, causal: bool | None = None, *, layout: str = "bhsd"
    ) -> Choice:
        """Says which kernel `attention_append` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        _check_call(layout)
        return self._group._explain(q, k_cache, v_cache, causal, _Grown(0, layout))

    def register_torch(self) -> str:
        """Makes operators of the kernel in torch.ops.flashgen, for graphs to hold, once. Returns the name of
        the first:

            NAME(q, k_cache, v_cache, causal, scale, layout, seqlen_k, buffers, numbers, k_new, v_new,
                 rotary_cos, rotary_sin, cu_seqlens_new) -> o
            NAME_lse(the same) -> (o, lse)
            NAME_out(q, k_cache, v_cache, out, the rest)

        They take what `attention_append` takes, `seqlen_k` being the number of keys with the new ones, and
        arrays and numbers that masks and changes of scores read in the order of the kernel's arguments; and
        say that they write to the caches. cu_seqlens_new is None. They have no gradients. Needs PyTorch 2.7
        or newer."""
        return _register(self._group._tensors.operator)


def _is_count(given: Any) -> bool:
    return given is None or isinstance(given, int | np.integer) or _is_symbol(given)


def _keys_with_new(k_cache: Any, k: Any, cached: Any, layout: str) -> Any:
    """How many keys each sequence has once the new ones are there; what is no cache is found out later."""
    axis = 2 if layout == "bhsd" else 1
    if cached is None:
        shape = _shape(k_cache)
        return shape[axis] if len(shape) == 4 else 0
    _check_longest("cache_seqlens", cached)
    shape = (0,) * 4 if k is None else _shape(k)
    return cached + (shape[axis] if len(shape) == 4 else 0)
