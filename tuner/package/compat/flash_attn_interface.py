"""FlashAttention-3's functions by flashgen's kernels: `flashgen.tuner.compat.flash_attn_interface`."""

from flashgen.tuner.compat.flash_attn_interface import *  # pyright: ignore[reportMissingImports]  # noqa: F403
