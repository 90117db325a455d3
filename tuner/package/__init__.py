"""Attention by the fastest kernel for one GPU and one kind of problem: generated, tuned and called.

`flashgen.attention` computes; this folder is the package ``flashgen`` itself, whose parts (``flashgen.gen``,
``flashgen.tuner``, ...) are other folders, which pyproject.toml names. It is imported with every one of them,
and imports nothing before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__: str

#: Where what the package offers is defined.
_OFFERED = {
    "attention": "flashgen.tuner.front.call",
    "attention_varlen": "flashgen.tuner.front.varlen",
    "attention_with_cache": "flashgen.tuner.front.cached",
    "explain": "flashgen.tuner.front.explain",
    "tune": "flashgen.tuner.front.tuning",
    "autotune": "flashgen.tuner.front.tuning",
    "load": "flashgen.tuner.front.sharing",
    "pack": "flashgen.tuner.front.sharing",
    "quantize": "flashgen.tuner.front.quantize",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Looking through installed packages takes longer than all else here, and few ask.
        return import_module("flashgen.tuner.version").flashgen_version()
    if name == "compat":
        return import_module("flashgen.compat")
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # What searches takes packages of an extra.
    with import_module("flashgen.tuner.extras").needing(f"flashgen.{name}"):
        value = globals()[name] = getattr(import_module(_OFFERED[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED, "__version__", "compat"})
