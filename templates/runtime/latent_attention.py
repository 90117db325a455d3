"""What a module of latent attention offers: one cache, whose first columns are the values."""

from typing import Any

from .latent_keys import _keys_and_values
from .paged_attention import PagedAttention
from .table import Choice


class LatentAttention(PagedAttention):
    """Attention beside a cache of pages whose first columns are the values. Modules offer its methods as
    functions."""

    def attention_latent(
        self,
        q: Any,
        cache: Any,
        page_table: Any,
        seqused_k: Any = None,
        *,
        max_seqlen_k: int | None = None,
        causal: bool | None = None,
        scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Computes softmax(scale * q k^T) v of sequences whose keys k lie in pages of a cache, and whose
        values v are the keys' first columns, in the arrays' type, summed in float32.

        q is (batch, seqlen_q, heads, head_dim), the result (batch, seqlen_q, heads, head_dim_v). cache is
        (pages, page_size, head_dim) of the one head that all query heads share, or (pages, page_size,
        kv_heads, head_dim); any strides will do as long as the last dimension is contiguous. It is read once
        for both products, and never copied. page_table is int32 (batch, max_pages): each sequence's row lists
        its pages in order. seqused_k, int32 (batch), is how many keys each sequence has; without it all have
        max_seqlen_k.

        scale: by default 1 / sqrt(head_dim), which models that fold projections into q do not want: pass
            theirs.
        causal: True masks bottom-right by each sequence's own lengths; None: as the kernel was tuned.
        return_lse: also return the natural log-sum-exp, float32 (batch, heads, seqlen_q).

        Lengths, tables, max_seqlen_k, out, stream and arrays of other libraries are as `attention_paged` of
        other modules has them: all is read on the card alone, and may be captured in a CUDA graph. Gradients
        are not taken. Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU
        or the compiler fails.
        """
        k, v = _keys_and_values(cache, self.tuned.head_dim_v)
        return self.attention_paged(
            *(q, k, v, page_table, seqused_k),
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            scale=scale,
            layout="bshd",
            out=out,
            return_lse=return_lse,
            stream=stream,
        )

    def explain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q: Any, cache: Any, causal: bool | None = None
    ) -> Choice:
        """Says which kernel `attention_latent` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        k, v = _keys_and_values(cache, self.tuned.head_dim_v)
        return super().explain(q, k, v, causal, layout="bshd")
