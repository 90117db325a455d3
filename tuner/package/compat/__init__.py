"""Names people know, by flashgen's kernels: ``flashgen.compat.flash_attn`` for ``flash_attn``, and others.

What stands here are names for what is in ``flashgen.tuner.compat``.
"""

from flashgen.tuner.compat import *  # pyright: ignore[reportMissingImports]  # noqa: F403

from . import flash_attn, flash_attn_interface, flex_attention, transformers  # noqa: F401
