"""What masks and changes of scores read, such that a picture of them is typical: documents of different
lengths, a table that falls with the distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...gen.problem import Problem
from ...gen.scoring.asked import FLOAT_DTYPES, TREE_ROWS
from ...gen.scoring.scores import Buffer
from ...gen.scoring.values import scalar_values, shape_of

#: Lengths of documents beside each other, to be repeated.
LENGTHS = (5, 3, 8, 2, 6)
#: Where there are documents by an array of the reader's own, how many.
DOCUMENTS = 4
#: Of flags of rows or keys, each so-manieth is set.
FLAGGED = 7
#: Of a mask of pairs, the share that it shows.
SHOWN = 0.75
#: Of what is as a reader likes, such as prefixes and lengths: the share of the keys.
PREFIX, LENGTH = 5 / 16, 3 / 4
_SEED = 17


def picture_values(problem: Problem) -> Mapping[str, Any]:
    """Returns what a problem's masks and changes read, the same each time: scalars as asked for, arrays of
    the type and axes that they have."""
    scores = problem.scores
    values: dict[str, Any] = {each.name: scalar_values(problem.scoring)[each.name] for each in scores.scalars}
    for each in scores.buffers:
        values[each.name] = _array(each, problem)
    return values


def _array(buffer: Buffer, problem: Problem) -> np.ndarray:
    shape, scoring, keys = shape_of(buffer, problem), problem.scoring, problem.seqlen_k
    match buffer.name:
        case "prefix" if scoring.prefix:
            return np.full(shape, scoring.prefix)
        case "lengths" if scoring.lengths:
            return np.full(shape, round(LENGTH * keys))
        case "document_begin" | "document_end" if scoring.documents:
            cuts = _cuts(scoring.documents, keys)
            places = np.arange(problem.seqlen_q) + keys - problem.seqlen_q
            of_row = np.searchsorted(cuts[1:-1], places, side="right")
            return _along(cuts[of_row + (buffer.name == "document_end")], shape)
        case "tree" if scoring.tree:
            return _along(_words(shape[-1]), shape)
        case "slopes" if scoring.alibi:
            return _along(2.0 ** (-8.0 * np.arange(1, shape[1] + 1) / shape[1]), shape)
        case "sinks" if scoring.sinks:
            return np.ones(shape)
    return (
        _along(_of_unknown_meaning(buffer, shape[-1], keys), shape)
        if _is_line(buffer)
        else _drawn(buffer, shape)
    )


def _words(count: int) -> np.ndarray:
    """The words of a tree of so many nodes, two of which hang from each."""
    words: list[int] = []
    for node in range(count):
        words.append((1 << node if node < TREE_ROWS else 0) | (words[(node - 1) // 2] if node else 0))
    return np.array(words, np.uint64).view(np.int64)


def _is_line(buffer: Buffer) -> bool:
    """Whether an array runs along rows, keys or what is computed in its last axis alone."""
    return not any(axis & {"seqlen_q", "seqlen_k"} or not axis for axis in buffer.axes[:-1])


def _of_unknown_meaning(buffer: Buffer, length: int, keys: int) -> np.ndarray:
    places, axis = np.arange(length), buffer.axes[-1]
    if buffer.dtype == "u8":
        return places % FLAGGED == 0
    if buffer.dtype in FLOAT_DTYPES:
        # By distance, negative ones counting from the end, falling in waves; or of each key its own.
        distance = np.minimum(places, length - places)
        waves = np.cos(distance * 12 / length) - 4 * distance / length
        return np.random.default_rng(_SEED).standard_normal(length) if axis else waves
    if not axis:  # of each document, where it begins
        begins = _cuts(DOCUMENTS, keys)[:-1]
        return begins[np.minimum(places, len(begins) - 1)]
    if not axis & {"seqlen_q", "seqlen_k"}:  # of each batch or head, how many
        return np.full(length, round(PREFIX * keys))
    return np.searchsorted(_cuts(DOCUMENTS, length)[1:-1], places, side="right")


def _drawn(buffer: Buffer, shape: tuple[int, ...]) -> np.ndarray:
    """Of each pair its own, the same for all batches and heads."""
    one = tuple(
        length if axis & {"seqlen_q", "seqlen_k"} or not axis else 1
        for axis, length in zip(buffer.axes, shape, strict=True)
    )
    rng = np.random.default_rng(_SEED)
    if buffer.dtype == "u8":
        drawn = rng.random(one) < SHOWN
    elif buffer.dtype in FLOAT_DTYPES:
        drawn = rng.uniform(-2, 2, one)
    else:
        drawn = rng.integers(0, DOCUMENTS, one)
    return np.broadcast_to(drawn, shape)


def _along(line: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(line, shape)


def _cuts(count: int, length: int) -> np.ndarray:
    """Where so many documents begin, and the last ends."""
    parts = np.resize(LENGTHS, count)
    return np.rint(np.concatenate([[0], np.cumsum(parts)]) / parts.sum() * length).astype(np.int64)
