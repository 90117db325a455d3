"""transformers' attention by flashgen's kernels: `flashgen.tuner.compat.transformers` by a shorter name."""

from flashgen.tuner.compat.transformers import *  # pyright: ignore[reportMissingImports]  # noqa: F403
