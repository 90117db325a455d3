"""New rows that kernels append to caches: taken out of the keys that a case has, and looked for where they
belong when a kernel has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...gen.append import HALVES, NEW_STARTS
from ...gen.problem import Problem
from ...gen.promise import LEAST
from ..cards.dtypes import numpy_dtype
from ..cards.sequences import sequence_slices
from .comparison import WrongResult
from .score_rounding import UNIT

#: Angles of neighbouring positions are this far apart, the last pair's.
SLOWEST = 1e-4
#: Half of what elements of a type are apart, of their size.
_ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class NewRows:
    """What a call appends: ``values`` tell kernels of it, ``caches`` are K and V without the new rows.

    ``cached`` are the keys of each sequence before, ``counts`` the new ones.
    """

    values: Mapping[str, Any]
    caches: tuple[np.ndarray, np.ndarray]
    cached: np.ndarray
    counts: np.ndarray


def take_new_rows(
    problem: Problem,
    k: np.ndarray,
    v: np.ndarray,
    values: Mapping[str, Any],
    counts: tuple[int, ...],
    *,
    apart: bool = False,
    turned: bool = True,
) -> NewRows:
    """Takes the last keys and values of each sequence, so many as ``counts`` say, out of ``k`` and ``v``,
    where they leave what is no number. ``values`` tell of the sequences; where they are packed, new rows have
    offsets of their own if they are ``apart``, and else those of queries. Not ``turned``: tables rotate by
    nothing."""
    assert problem.append is not None
    lengths = _lengths(problem, k, values)
    cached = np.maximum(lengths - counts, 0)
    places = _row_places(problem, values, counts, apart)
    batch, rows = (1, 1 + max(0, *(row for _, row in places.values()))) if places else (1, 0)
    if not problem.layout.is_packed:
        batch, rows = len(lengths), max(counts)
    elif not apart:
        rows = int(np.asarray(values["cu_seqlens_q"])[-1])
    told: dict[str, Any] = {}
    for name, cache in (("k_new", k), ("v_new", v)):
        new = np.full((batch, rows, cache.shape[1], cache.shape[3]), np.nan, cache.dtype).swapaxes(1, 2)
        for (sequence, nth), (b, row) in places.items():
            place, key = _place(problem, values, k.shape[2], sequence, int(cached[sequence]) + nth)
            new[b, :, row] = cache[place, :, key]
            cache[place, :, key] = np.nan
        told[name] = new
    if problem.layout.is_packed and apart:
        told[NEW_STARTS] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    told |= _tables(problem, int(max(1, *lengths)) + 1, turned=turned)
    if problem.layout.is_paged:
        told["seqused_k"] = cached.astype(np.int32)
    return NewRows({**values, **told}, (k.copy(), v.copy()), cached, np.array(counts))


def check_caches(problem: Problem, new: NewRows, k: np.ndarray, v: np.ndarray, name: str) -> None:
    """Raises `WrongResult` unless caches are what they were before, beside the new rows where these
    belong."""
    apart = new.values.get(NEW_STARTS) is not None
    places = _row_places(problem, new.values, tuple(new.counts), apart)
    for which, found, before in (("k", k, new.caches[0]), ("v", v, new.caches[1])):
        expected, slack = before.astype(np.float64), np.zeros(before.shape)
        rows = new.values[f"{which}_new"]
        for (sequence, nth), (b, row) in places.items():
            key = int(new.cached[sequence]) + nth
            place = _place(problem, new.values, k.shape[2], sequence, key)
            own = rows[b, :, row].astype(np.float64)
            if which == "k":
                position = _position(problem, new, sequence, nth, has_place=True)
                own, error = _turned(problem, new.values, own, position)
                if problem.append is not None and problem.append.rotary:
                    rounded = 1.01 * _ROUNDING[problem.dtype] * np.abs(own)
                    slack[place[0], :, place[1]] = np.where(error > 0, rounded + 2 * error + 1e-7, 0.0)
            expected[place[0], :, place[1]] = own
        wrong = ~(np.isnan(expected) & np.isnan(found.astype(np.float64)))
        wrong &= ~(np.abs(found.astype(np.float64) - expected) <= slack)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongResult(
                f"{name}: the cache of {which} has {found[first]} at {first}, not {expected[first]:.9g}, and "
                f"{int(wrong.sum())} wrong elements"
            )


def rotated_queries(problem: Problem, new: NewRows, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns queries as kernels rotate them, rounded to their type, and how far off each element of a
    kernel's may be.

    What float32 makes of an element is within `_turned`'s error of float64's. So it is rounded alike, but
    where a midpoint between neighbours of the type lies within that error: then to the other one, if to none
    of both ends of the error it is rounded like float64's.
    """
    apart = np.zeros(q.shape)
    if problem.append is None or not problem.append.rotary:
        return q, apart
    rotated, window = q.copy(), problem.scoring.window or (-1, -1)
    sides = (new.values.get("window_left", window[0]), new.values.get("window_right", window[1]))
    has_place = problem.causal or problem.scoring.tree
    has_place |= problem.scoring.window is not None and max(sides) >= 0
    for sequence, nth, b, row in _query_places(problem, new.values, q):
        position = _position(problem, new, sequence, nth, has_place=has_place)
        turned, error = _turned(problem, new.values, q[b, :, row].astype(np.float64), position)
        rotated[b, :, row] = rounded = turned.astype(q.dtype)
        for end in (turned - error, turned + error):
            distance = np.abs(end.astype(q.dtype).astype(np.float64) - rounded.astype(np.float64))
            apart[b, :, row] = np.maximum(apart[b, :, row], distance)
    return rotated, apart


def attended_values(problem: Problem, new: NewRows) -> dict[str, Any]:
    """Returns what tells of the sequences as they are when new rows are among their keys."""
    values = dict(new.values)
    if problem.layout.is_paged:
        values["seqused_k"] = (new.cached + new.counts).astype(np.int32)
    return values


def _lengths(problem: Problem, k: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    if problem.layout.is_paged:
        return np.asarray(values["seqused_k"]).astype(np.int64)
    return np.full(k.shape[0], k.shape[2], np.int64)


def _place(
    problem: Problem, values: Mapping[str, Any], page_size: int, sequence: int, key: int
) -> tuple[int, int]:
    """The first and third index of a key in a cache."""
    if not problem.layout.is_paged:
        return sequence, key
    return int(values["page_table"][sequence][key // page_size]), key % page_size


def _row_places(
    problem: Problem, values: Mapping[str, Any], counts: tuple[int, ...], apart: bool
) -> dict[tuple[int, int], tuple[int, int]]:
    """Where new rows are, as a batch and a row: by their sequence and their number there."""
    starts = np.zeros(len(counts), np.int64)
    if problem.layout.is_packed:
        starts = np.cumsum([0, *counts[:-1]]) if apart else np.asarray(values["cu_seqlens_q"])[:-1]
    batches = range(len(counts)) if not problem.layout.is_packed else [0] * len(counts)
    return {
        (sequence, nth): (b, int(start) + nth)
        for sequence, (b, start, count) in enumerate(zip(batches, starts, counts, strict=True))
        for nth in range(count)
    }


def _query_places(
    problem: Problem, values: Mapping[str, Any], q: np.ndarray
) -> Iterator[tuple[int, int, int, int]]:
    """Each query's sequence, its number there, and where it is, as a batch and a row."""
    if not problem.layout.is_packed:
        for b in range(q.shape[0]):
            yield from ((b, row, b, row) for row in range(q.shape[2]))
        return
    for sequence, rows in enumerate(sequence_slices(values, "q")):
        yield from ((sequence, nth, 0, row) for nth, row in enumerate(range(rows.start, rows.stop)))


def _position(problem: Problem, new: NewRows, sequence: int, nth: int, *, has_place: bool) -> int:
    """By which row of the tables a row is rotated."""
    if problem.scoring.tree:
        words = np.asarray(new.values["tree"])[sequence]
        word = int(words[min(nth, _most_rows(problem, new) - 1)]) & 2**64 - 1
        nth = max(word.bit_count() - 1, 0)  # a node stands as deep as there are others above it
    position = int(new.cached[sequence]) + (nth if has_place else 0)
    return min(position, len(new.values["rotary_cos"]) - 1) if "rotary_cos" in new.values else position


def _most_rows(problem: Problem, new: NewRows) -> int:
    """The most queries of a sequence."""
    if not problem.layout.is_packed:
        return np.asarray(new.values["tree"]).shape[1]
    return int(np.diff(np.asarray(new.values["cu_seqlens_q"])).max())


def _turned(
    problem: Problem, values: Mapping[str, Any], rows: np.ndarray, position: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows rotated in float64, and how far off float32 may be before it is rounded to their type; 0 where
    nothing is rotated.

    Of own · cos ± other · sin the second product is rounded, by at most u = 2⁻²⁴ of it, and so is its sum
    with the first, which is exact (fmaf): together by less than 2 u (|own · cos| + |other · sin|).
    """
    append = problem.append
    assert append is not None
    turned, error = rows.copy(), np.zeros_like(rows)
    if not append.rotary:
        return turned, error
    cos, sin = (values[name][position].astype(np.float64) for name in append.tables)
    r = append.rotary_dim
    if append.rotary == HALVES:
        first, second = np.s_[..., : r // 2], np.s_[..., r // 2 : r]
    else:
        first, second = np.s_[..., 0:r:2], np.s_[..., 1:r:2]
    for part, other, sign in ((first, second, -1.0), (second, first, 1.0)):
        own, crossed = rows[part] * cos, rows[other] * sin
        turned[part] = own + sign * crossed
        error[part] = 2 * UNIT * (np.abs(own) + np.abs(crossed)) + LEAST
    return turned, error


def _tables(problem: Problem, positions: int, *, turned: bool) -> dict[str, np.ndarray]:
    """Cosines and sines of each position's angles, in the problem's type."""
    append = problem.append
    if append is None or not append.rotary:
        return {}
    pairs = append.rotary_dim // 2
    angles = np.arange(positions)[:, None] * SLOWEST ** (np.arange(pairs) / pairs) * turned
    dtype = numpy_dtype(problem.dtype)
    return {"rotary_cos": np.cos(angles).astype(dtype), "rotary_sin": np.sin(angles).astype(dtype)}
