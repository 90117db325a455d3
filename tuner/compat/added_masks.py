"""Masks that are added to scores, as kernels can add them."""

from __future__ import annotations

import weakref
from typing import Any

from ...templates.runtime.arrays import _torch_of
from ..front.libraries import library_of

#: Kernels multiply by log2 e what they add, those of 16 bits divide it by the scale, which makes infinity of
#: the least numbers of float32 and bfloat16. A row that sees nothing else must be the mean of its values, so
#: these become this: far from there, and far below what a score could be told from.
LEAST = -1e30
_MAY_BE_LESS = ("float32", "bfloat16")

#: The last mask that was made so of a tensor, which all layers of a model share: of which, in which state.
_LAST: list[tuple[weakref.ref[Any], int, Any]] = []


def within_reach(mask: Any) -> Any:
    """Returns a mask with finite numbers that no kernel overflows by; itself where it is of truths or has no
    such numbers by its type. What is -inf stays so."""
    if str(mask.dtype).removeprefix("torch.") not in _MAY_BE_LESS:
        return mask
    torch = _torch_of(mask)
    if torch is None or torch.compiler.is_compiling() or mask.requires_grad or mask.is_inference():
        return _raised(mask)  # what was made under torch.inference_mode does not tell when it is changed
    for source, version, made in _LAST:
        if source() is mask and version == mask._version:
            return made
    _LAST[:] = [(weakref.ref(mask), mask._version, _raised(mask))]
    return _LAST[0][2]


def _raised(mask: Any) -> Any:
    library = library_of("attn_mask", mask)
    too_low = (mask < LEAST) & (mask != -library.inf)
    if _torch_of(mask) is not None:
        return mask.masked_fill(too_low, LEAST)
    return library.where(too_low, library.asarray(LEAST, mask.dtype), mask)
