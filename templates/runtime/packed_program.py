"""What a module of packed sequences does when it is run: it checks and times its kernel."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .facts import Tuned
from .packed_attention import PackedAttention, _SequenceAttention
from .packed_values import SequencePlan, _Packed, _Sequences
from .plans import _Beside
from .program import _check_and_time, _from_host, _median_time_us, _reference, _to_host, _visible_share
from .scored_program import _Drawn
from .scored_values import Scored
from .table import _SIZES

#: The rows and keys of the sequences that a kernel is checked by, and its heads: no tile divides the lengths.
_CHECKED_ROWS, _CHECKED_KEYS, _CHECKED_HEADS = (197, 0, 1, 64), (333, 70, 1, 0), (4, 2)


def run_packed_module(attention: PackedAttention, doc: str | None) -> int:
    """Says what the module is, checks its kernel on device 0 and times it on sequences that are as long as
    the longest it was tuned for; the exit code."""
    check, time_us = (functools.partial(each, attention) for each in (_packed_check, _packed_time_us))
    return _check_and_time_sequences(attention, check, time_us, doc)


def _check_and_time_sequences(
    attention: _SequenceAttention,
    check: Callable[[Tuned], float],
    time_us: Callable[[Tuned], float],
    doc: str | None,
) -> int:
    """Says of a kernel of sequences how large its error is, and how fast it is; the exit code."""

    def visible_share(tuned: Tuned) -> float:
        if not isinstance(tuned, Scored):
            return _visible_share(tuned)
        return _Drawn(tuned, tuned.problem).visible_share(bool(tuned.problem["causal"]))

    return _check_and_time(attention.kernels, attention.use, check, time_us, visible_share, doc)


def _sequences(tuned: Tuned, sizes: Mapping[str, Any], rows: tuple[int, ...], keys: tuple[int, ...]) -> Any:
    """Sequences of those lengths, with masks and changes of scores that are drawn."""
    starts = {
        f"cu_seqlens_{x}": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        for x, lengths in (("q", rows), ("k", keys))
    }
    scoring = _Drawn(tuned, sizes) if isinstance(tuned, Scored) else None
    return _Sequences(tuned, starts, _Packed(len(rows), max(rows), max(keys)), None, scoring)


def _packed_check(attention: PackedAttention, tuned: Tuned) -> float:
    """The largest error of a head of a sequence over both masks."""
    random = np.random.default_rng(0)
    (heads, kv_heads), rows, keys = _CHECKED_HEADS, _CHECKED_ROWS, _CHECKED_KEYS
    shapes = _packed_shapes(tuned, sum(rows), sum(keys), heads, kv_heads)[:3]
    drawn = (random.uniform(-3, 3, shape).astype(np.float32) for shape in shapes)
    hosts = list(map(_to_host, drawn, tuned.input_dtypes))
    wide = list(map(_from_host, hosts, tuned.input_dtypes))
    made = _to_host(np.zeros((sum(rows), heads, tuned.head_dim_v), np.float32), tuned.output_dtype)
    sizes: dict[str, Any] = dict(zip(_SIZES, (len(rows), heads, kv_heads, max(rows), max(keys)), strict=True))
    told = _sequences(tuned, sizes, rows, keys)
    worst = 0.0
    for causal in (False, True):
        attention._group._through_buffers(
            hosts[0], hosts[1], hosts[2], causal, None, made, 0, False, told.layout, tuned.dtype, told
        )
        found = _from_host(made, tuned.output_dtype).astype(np.float64)
        parts, of_keys = _parts(rows), _parts(keys)
        sequences = [
            (wide[0][part], wide[1][keys_of], wide[2][keys_of], found[part])
            for part, keys_of in zip(parts, of_keys, strict=True)
        ]
        worst = float(np.maximum(worst, _error_of(tuned, told.scoring, causal, sequences)))
    return worst


def _parts(lengths: tuple[int, ...]) -> list[slice]:
    """Where sequences of such lengths are that stand one behind the other."""
    return [slice(end - count, end) for end, count in zip(np.cumsum(lengths), lengths, strict=True)]


def _error_of(
    tuned: Tuned, drawn: _Drawn | None, causal: bool, sequences: Iterable[tuple[NDArray[Any], ...]]
) -> float:
    """The largest error of a head of a sequence, each of which is its q, k, v and what was found, (rows,
    heads, head_dim)."""
    worst = 0.0
    for number, (*views, found) in enumerate(sequences):
        if not len(found):
            continue
        q, k, v = (x.swapaxes(0, 1)[None] for x in views)
        wanted = _reference_of(tuned, drawn, number, q, k, v, causal)[0].swapaxes(0, 1)
        norms = np.maximum(np.linalg.norm(wanted, axis=(0, 2)), 1e-30)
        apart = np.linalg.norm(found - wanted, axis=(0, 2))
        # NaN is an error too, which max() would pass over.
        worst = float(np.maximum(worst, np.where(apart == 0, 0.0, apart / norms).max()))
    return worst


def _reference_of(
    tuned: Tuned,
    drawn: _Drawn | None,
    number: int,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    causal: bool,
) -> NDArray[Any]:
    """float64 attention of one sequence, whose number it is."""
    if not k.shape[2]:
        return np.zeros((*q.shape[:3], v.shape[3]))
    if drawn is None:
        return _reference(q, k, v, causal)
    return drawn.reference(q, k, v, causal, number)


def _packed_shapes(
    tuned: Tuned, rows: int, keys: int, heads: int, kv_heads: int
) -> list[tuple[int, int, int]]:
    """The shapes of q, k, v and o of so many rows and keys."""
    of_q, of_k = (
        [(rows, heads, dim) for dim in (tuned.head_dim, tuned.head_dim_v)],
        [(keys, kv_heads, dim) for dim in (tuned.head_dim, tuned.head_dim_v)],
    )
    return [of_q[0], *of_k, of_q[1]]


def _packed_time_us(attention: PackedAttention, tuned: Tuned, repeats: int = 20) -> float:
    """The median time of a call whose plan is made, by CUDA events, with a warm cache."""
    problem = tuned.problem
    rows, keys = ((problem[each],) * problem["batch"] for each in ("seqlen_q", "seqlen_k"))
    heads, kv_heads = problem["num_q_heads"], problem["num_kv_heads"]
    shapes = _packed_shapes(tuned, sum(rows), sum(keys), heads, kv_heads)

    def place(put: Callable[..., _Buffer]) -> tuple[Any, _Beside]:
        told = _sequences(tuned, problem, rows, keys).on_device(put)
        told.plan = SequencePlan()
        return told.layout, told

    return _median_time_us(attention._group, tuned, shapes, place, repeats)
