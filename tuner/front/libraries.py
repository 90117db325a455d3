"""Arithmetic on arrays of the library that a caller's are of."""

from __future__ import annotations

import importlib
from typing import Any

from ...templates.runtime.arrays import _kind, _torch_of

#: The modules with functions of arrays, by the packages that these are from.
_MODULES = {"numpy": "numpy", "cupy": "cupy", "jax": "jax.numpy", "jaxlib": "jax.numpy"}


def library_of(name: str, array: Any) -> Any:
    """Returns the module that computes with an array: torch, numpy, cupy or jax.numpy.

    Raises TypeError for arrays of others; ``name`` is what the caller's argument is called.
    """
    torch = _torch_of(array)
    if torch is not None:
        return torch
    package = type(array).__module__.partition(".")[0]
    if package not in _MODULES:
        raise TypeError(f"{name} is a {_kind(array)}; pass torch tensors, or CuPy, JAX or numpy arrays")
    return importlib.import_module(_MODULES[package])


def pytorchs_attention(functional: Any) -> Any:
    """Returns PyTorch's attention out of torch.nn.functional, also where flashgen's has its name there."""
    found = functional.scaled_dot_product_attention
    return getattr(found, "theirs", found)


def count(array: Any, number: int) -> Any:
    """Returns 0 .. number - 1 as integers, where the array is."""
    library = library_of("an array", array)
    where = {"device": array.device} if _torch_of(array) is not None else {}
    return library.arange(number, **where)


def empty_like(array: Any) -> Any:
    """Returns an array of the type of another, (0,), where that is."""
    library = library_of("an array", array)
    where = {"device": array.device} if _torch_of(array) is not None else {}
    return library.empty((0,), dtype=array.dtype, **where)


def number_of_run(ends: Any, places: Any) -> Any:
    """Returns of each place the number of the run that it is in, where runs end at sorted ``ends``."""
    library = library_of("an array", places)
    if _torch_of(places) is not None:
        found = library.searchsorted(ends.contiguous(), places.to(ends.dtype), right=True)
        return found.clamp(max=len(ends) - 1)
    return library.minimum(library.searchsorted(ends, places, side="right"), len(ends) - 1)


def shape_of(name: str, array: Any, axes: str) -> tuple[int, ...]:
    """Returns the shape of an array that must have these axes: ``"batch, seqlen, heads, head_dim"``.

    Raises TypeError for what has no shape, ValueError for one of other rank.
    """
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is a {_kind(array)}; pass an array ({axes})")
    if len(shape) != axes.count(",") + 1:
        raise ValueError(f"{name} has the shape {tuple(shape)}; it must be ({axes})")
    return tuple(map(int, shape))
