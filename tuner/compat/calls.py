"""The calls of flashgen in which every function of other libraries' names ends."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .contiguous import with_contiguous_rows

#: Where each call is defined.
_ROOMS = {"attention": "call", "attention_varlen": "varlen", "attention_with_cache": "cached"}
_SETTINGS: ContextVar[Mapping[str, Any]] = ContextVar("flashgen.compat settings", default={})  # noqa: B039


@contextlib.contextmanager
def using(
    *, device: str | None = None, wait: bool | None = None, fallback: str | None = None
) -> Iterator[None]:
    """Has functions of other libraries' names pass ``device``, ``wait`` and ``fallback`` to
    `flashgen.attention`, for which their own signatures have no place, within a ``with`` block.

    What is None is as it was outside. It holds for this thread, and tasks that it starts. Packed sequences
    and caches have no ``fallback``: what no kernel serves of them is refused.
    """
    told = {"device": device, "wait": wait, "fallback": fallback}
    before = _SETTINGS.get()
    token = _SETTINGS.set({**before, **{name: value for name, value in told.items() if value is not None}})
    try:
        yield
    finally:
        _SETTINGS.reset(token)


def attention(q: Any, k: Any, v: Any, **asked: Any) -> Any:
    """Computes attention as `flashgen.attention` does, of arrays of any strides."""
    return _front("attention")(*_readable(q, k, v), **asked, **_SETTINGS.get())


def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **asked: Any) -> Any:
    """Computes attention of packed sequences as `flashgen.attention_varlen` does, of any strides."""
    arrays = _readable(q, k, v)
    return _front("attention_varlen")(*arrays, cu_seqlens_q, cu_seqlens_k, **asked, **_alone())


def attention_with_cache(q: Any, k_cache: Any, v_cache: Any, **asked: Any) -> Any:
    """Computes attention beside a cache as `flashgen.attention_with_cache` does, of queries of any strides.
    Caches are never copied."""
    q = with_contiguous_rows("q", q)
    return _front("attention_with_cache")(q, k_cache, v_cache, **asked, **_alone())


def _readable(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    return with_contiguous_rows("q", q), with_contiguous_rows("k", k), with_contiguous_rows("v", v)


def _alone() -> dict[str, Any]:
    """The settings where nothing else serves."""
    return {name: value for name, value in _SETTINGS.get().items() if name != "fallback"}


@functools.cache
def _front(name: str) -> Any:
    # Whoever looks at signatures alone need not wait for all that chooses kernels.
    return getattr(importlib.import_module(f"..front.{_ROOMS[name]}", __package__), name)
