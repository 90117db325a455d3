"""Generates and tunes flash-attention kernels for one GPU and one kind of problem.

This folder is the package ``flashgen`` itself; its parts (``flashgen.gen``, ``flashgen.tuner``, ...) are
other folders, which pyproject.toml names. It is imported with every one of them, and imports nothing.
"""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Looking through installed packages takes longer than all else here, and few ask.
    from flashgen.tuner.version import flashgen_version  # pyright: ignore[reportMissingImports]

    return flashgen_version()
