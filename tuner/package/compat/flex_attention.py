"""FlexAttention by flashgen's kernels: `flashgen.tuner.compat.flex_attention` by a shorter name."""

from flashgen.tuner.compat.flex_attention import *  # pyright: ignore[reportMissingImports]  # noqa: F403
