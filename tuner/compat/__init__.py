"""Names people know: functions of flash-attn, FlexAttention, PyTorch and transformers by flashgen's kernels.

Each module has the signatures, defaults and return values of its original; docs/migrating.md says of every
argument what becomes of it. ``flashgen.compat`` is another name for this room.
"""

from .calls import using
from .replacing import replacing_sdpa
from .sdpa import scaled_dot_product_attention

__all__ = ["replacing_sdpa", "scaled_dot_product_attention", "using"]
