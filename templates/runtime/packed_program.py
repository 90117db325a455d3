"""What a module of packed sequences does when it is run: it checks and times its kernel."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import _Buffer
from .facts import Tuned
from .packed_attention import PackedAttention
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

    def check(tuned: Tuned) -> float:
        return _packed_check(attention, tuned)

    def time_us(tuned: Tuned) -> float:
        return _packed_time_us(attention, tuned)

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
    totals = (sum(rows), sum(keys))
    shapes = (
        (totals[0], heads, tuned.head_dim),
        (totals[1], kv_heads, tuned.head_dim),
        (totals[1], kv_heads, tuned.head_dim_v),
    )
    hosts = [_to_host(random.uniform(-3, 3, shape).astype(np.float32), tuned.dtype) for shape in shapes]
    wide = [_from_host(host, tuned.dtype) for host in hosts]
    made = _to_host(np.zeros((totals[0], heads, tuned.head_dim_v), np.float32), tuned.output_dtype)
    sizes: dict[str, Any] = dict(zip(_SIZES, (len(rows), heads, kv_heads, max(rows), max(keys)), strict=True))
    told = _sequences(tuned, sizes, rows, keys)
    worst = 0.0
    for causal in (False, True):
        attention._group._through_buffers(
            hosts[0], hosts[1], hosts[2], causal, None, made, 0, False, told.layout, tuned.dtype, told
        )
        found = _from_host(made, tuned.output_dtype).astype(np.float64)
        for number, (first, count, first_key, num_keys) in enumerate(
            zip(np.cumsum(rows) - rows, rows, np.cumsum(keys) - keys, keys, strict=True)
        ):
            if not count:
                continue
            part = slice(first, first + count)
            of_keys = slice(first_key, first_key + num_keys)
            views = [wide[0][part], wide[1][of_keys], wide[2][of_keys]]
            q, k, v = (x.swapaxes(0, 1)[None] for x in views)
            wanted = _reference_of(tuned, told.scoring, number, q, k, v, causal)[0].swapaxes(0, 1)
            norms = np.maximum(np.linalg.norm(wanted, axis=(0, 2)), 1e-30)
            apart = np.linalg.norm(found[part] - wanted, axis=(0, 2))
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


def _packed_time_us(attention: PackedAttention, tuned: Tuned, repeats: int = 20) -> float:
    """The median time of a call whose plan is made, by CUDA events, with a warm cache."""
    problem = tuned.problem
    rows, keys = ((problem[each],) * problem["batch"] for each in ("seqlen_q", "seqlen_k"))
    heads, kv_heads = problem["num_q_heads"], problem["num_kv_heads"]
    shapes = [
        (sum(rows), heads, tuned.head_dim),
        (sum(keys), kv_heads, tuned.head_dim),
        (sum(keys), kv_heads, tuned.head_dim_v),
        (sum(rows), heads, tuned.head_dim_v),
    ]

    def place(put: Callable[..., _Buffer]) -> tuple[Any, _Beside]:
        told = _sequences(tuned, problem, rows, keys).on_device(put)
        told.plan = SequencePlan()
        return told.layout, told

    return _median_time_us(attention._group, tuned, shapes, place, repeats)
