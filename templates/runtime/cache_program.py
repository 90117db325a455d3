"""What a module of caches that grow does when it is run: it checks and times its kernel."""

import functools
from typing import Any

import numpy as np

from .appended_values import _TABLES, _rotary_of
from .cache_attention import CacheAttention, _Grown, _GrownSequences
from .facts import Tuned
from .packed_program import _check_and_time_sequences
from .program import _CHECKED, _reference, _self_check, _time_us, _to_host
from .scored_program import _Drawn
from .scored_values import Scored


def run_cache_module(attention: CacheAttention, doc: str | None) -> int:
    """Says what the module is, checks its kernel on device 0 and times it at the shape it was tuned for, both
    without new keys; the exit code."""
    check, time_us = (functools.partial(each, attention) for each in (_cache_check, _cache_time_us))
    return _check_and_time_sequences(attention, check, time_us, doc)


def _grown(tuned: Tuned, sizes: dict[str, Any]) -> _GrownSequences:
    """A call of such sizes that appends nothing, and rotates by nothing, with masks and changes of scores
    that are drawn."""
    pairs, columns = _rotary_of(tuned)
    shape = (max(1, sizes["seqlen_k"]), columns // 2)
    made = (np.ones(shape, np.float32), np.zeros(shape, np.float32)) if pairs else ()
    tables = {name: _to_host(x, tuned.dtype) for name, x in zip(_TABLES, made, strict=False)}
    scoring = _Drawn(tuned, sizes) if isinstance(tuned, Scored) else None
    return _GrownSequences(tuned, tables, _Grown(sizes["seqlen_k"], "bhsd"), None, scoring)


def _cache_check(attention: CacheAttention, tuned: Tuned) -> float:
    """The largest per-head error over both masks."""
    told = _grown(tuned, _CHECKED)
    reference = told.scoring.reference if isinstance(told.scoring, _Drawn) else _reference
    return _self_check(attention._group, tuned, told, reference, layout=told.layout)


def _cache_time_us(attention: CacheAttention, tuned: Tuned) -> float:
    """The median time of a call on the tuned problem's shape, by CUDA events, with a warm cache."""
    told = _grown(tuned, tuned.problem)
    return _time_us(attention._group, tuned, told, told.layout)
