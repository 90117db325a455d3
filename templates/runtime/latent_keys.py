"""What a module of latent attention offers: keys whose first columns are the values."""

from typing import Any

from .attention import Attention
from .facts import Tuned
from .table import Choice


class LatentKeys(Attention):
    """Attention beside keys whose first columns are the values. Modules offer its methods as functions."""

    def attention_latent(
        self,
        q: Any,
        cache: Any,
        *,
        causal: bool | None = None,
        scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Computes softmax(scale * q k^T) v of keys k whose first columns are the values v, in the arrays'
        type, summed in float32.

        q is (batch, seqlen_q, heads, head_dim), the result (batch, seqlen_q, heads, head_dim_v). cache is
        (batch, seqlen_k, head_dim) of the one head that all query heads share, or (batch, seqlen_k, kv_heads,
        head_dim). It is read once for both products.

        scale: by default 1 / sqrt(head_dim), which models that fold projections into q do not want: pass
            theirs.
        causal: True masks bottom-right; None: as the kernel was tuned.
        return_lse: also return the natural log-sum-exp, float32 (batch, heads, seqlen_q).

        Out, stream and arrays of other libraries are as `attention` of other modules has them. Gradients are
        not taken. Raises TypeError and ValueError for arrays it cannot serve, RuntimeError when the GPU or
        the compiler fails.
        """
        k, v = _keys_and_values(cache, self.tuned.head_dim_v)
        return self.attention(q, k, v, causal, scale, out, stream, return_lse, layout="bshd")

    @property
    def tuned(self) -> Tuned:
        """The only kernel."""
        return self._table.kernels[0]

    def explain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q: Any, cache: Any, causal: bool | None = None
    ) -> Choice:
        """Says which kernel `attention_latent` runs on these arrays. Raises TypeError and ValueError as it
        does where none serves."""
        k, v = _keys_and_values(cache, self.tuned.head_dim_v)
        return super().explain(q, k, v, causal, layout="bshd")


def _keys_and_values(cache: Any, columns: int) -> tuple[Any, Any]:
    """A cache with an axis of heads, of which there may be none to tell, and its first columns."""
    keys = cache[:, :, None] if len(cache.shape) == 3 else cache
    return keys, keys[..., :columns]
