"""Flash-attn 2's functions by flashgen's kernels: `flashgen.tuner.compat.flash_attn` by a shorter name."""

from flashgen.tuner.compat.flash_attn import *  # pyright: ignore[reportMissingImports]  # noqa: F403
