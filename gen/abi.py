"""The one argument every kernel takes, as C declares it and as Python packs it.

Strides are in elements; the head dim is contiguous. ``lse`` may be null; else it is contiguous
``(batch, num_q_heads, seqlen_q)`` and receives the natural logarithm of each row's softmax denominator.
The C declaration stands in ``templates/_kernel.cu.jinja``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

#: q, k, v, o, lse; (batch, head, row) strides of q, k, v, o; batch, num_q_heads, num_kv_heads, seqlen_q,
#: seqlen_k; scale. Pointers first, so that no padding arises.
ARGS_FORMAT = "<5Q12q5if"
ARGS_BYTES = struct.calcsize(ARGS_FORMAT)


def pack_args(pointers: Sequence[int], strides: Sequence[int], sizes: Sequence[int], scale: float) -> bytes:
    """``AttentionArgs`` as bytes: five addresses, twelve strides, five sizes and the softmax scale."""
    return struct.pack(ARGS_FORMAT, *pointers, *strides, *sizes, scale)
