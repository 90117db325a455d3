"""PyTorch's own name for attention, served by kernels within a block: for libraries that call it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from ..front.libraries import pytorchs_attention
from .sdpa import scaled_dot_product_attention

_NAME = "scaled_dot_product_attention"


@contextlib.contextmanager
def replacing_sdpa() -> Iterator[None]:
    """Has ``torch.nn.functional.scaled_dot_product_attention`` be flashgen's within a ``with`` block.

    It is for models that call it by that name, as diffusers' do; what was imported from there before, and
    what torch.compile has traced outside, stays PyTorch's. It holds for all threads. What no kernel serves
    PyTorch computes, and stderr says so once.

    Raises ImportError without PyTorch.
    """
    functional = importlib.import_module("torch.nn.functional")
    theirs = getattr(functional, _NAME)

    @functools.wraps(scaled_dot_product_attention)
    def ours(*given: Any, **told: Any) -> Any:
        return scaled_dot_product_attention(*given, **told)

    ours.theirs = pytorchs_attention(functional)  # type: ignore[attr-defined]
    setattr(functional, _NAME, ours)
    try:
        yield
    finally:
        setattr(functional, _NAME, theirs)
