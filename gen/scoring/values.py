"""What masks and changes of scores read: the numbers that a kernel is tuned for, and arrays drawn for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ..lengths import Lengths
from ..operation import ITEM_BYTES, Sizes
from .asked import BOOLEAN, BUFFER_BYTES, FLOAT_DTYPES, TREE_ROWS, Scoring
from .scores import BATCH, Buffer, Scores, laid_over

if TYPE_CHECKING:
    import numpy as np


class Scored(Sizes, Protocol):
    """A problem's lengths and what is asked of its scores, as `flashgen.gen.problem.Problem` has them."""

    @property
    def scoring(self) -> Scoring: ...
    @property
    def scores(self) -> Scores: ...
    @property
    def lengths(self) -> Lengths: ...
    @property
    def total_q(self) -> int: ...


#: Rows of a head of which visible keys are counted one by one, where no interval tells.
COUNTED_ROWS = 64
#: Of a boolean mask, the share of pairs that it shows.
SHOWN = 0.9
#: Of integers of no known meaning, how many there are: sorted, as segments' are.
SEGMENTS = 16
#: A tree's nodes hang from one of so many before them.
TREE_BRANCHES = 4
#: Rows are alike that see on average so much of what the one sees that sees most.
ALIKE = 0.9


def scalar_values(scoring: Scoring) -> dict[str, float]:
    """Returns the numbers that kernels take, by the names of their arguments, as they are asked for."""
    left, right = scoring.window or (-1, -1)
    named = {
        "window_left": left,
        "window_right": right,
        "always_keys": scoring.always,
        "chunk": scoring.chunk,
        "dilation": scoring.dilation,
        "softcap": scoring.softcap,
    }
    return {**named, **dict(scoring.scalars)}


def draw_values(scoring: Scoring, scores: Scores, sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Returns what a kernel of ``scores`` reads on arrays of those sizes: numbers as asked for, arrays drawn.

    Arrays are float32 or int64, bool for boolean masks, and have the axes of their buffers; those of one type
    for all of an axis are repeated along it without copies.
    """
    numbers = scalar_values(scoring)
    values: dict[str, Any] = {each.name: numbers[each.name] for each in scores.scalars}
    if scoring.documents:
        begins, ends = _documents(scoring.documents, sizes, rng)
        values |= {"document_begin": begins, "document_end": ends}
    for each in scores.buffers:
        if each.name not in values:
            values[each.name] = _drawn(each, scoring, sizes, rng)
    return values


def _drawn(buffer: Buffer, scoring: Scoring, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    import numpy as np

    shape = shape_of(buffer, sizes)
    match buffer.name:
        case "prefix" if scoring.prefix:
            return rng.integers(0, scoring.prefix + 1, shape)
        case "lengths" if scoring.lengths:
            return rng.integers(max(1, sizes.seqlen_k // 2), sizes.seqlen_k + 1, shape)
        case "tree" if scoring.tree:
            return _tree(shape, rng)
        case "slopes" if scoring.alibi:
            slopes = 2.0 ** (-8.0 * np.arange(1, shape[1] + 1) / shape[1])
            return np.broadcast_to(slopes.astype(np.float32), shape)
        case "bias" if scoring.bias:
            one = _own_lengths(buffer, scoring, sizes)
            if scoring.bias == BOOLEAN:
                return np.broadcast_to(_shown(one, rng), shape)
            return np.broadcast_to(rng.standard_normal(one, np.float32), shape)
        case _ if buffer.dtype == "u8":
            return _shown(shape, rng)
        case _ if buffer.dtype in FLOAT_DTYPES:
            return rng.standard_normal(shape, np.float32)
        case _:
            return np.sort(rng.integers(0, SEGMENTS, shape), axis=-1)


def _shown(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Truths, by bytes: a mask of all pairs of a long sequence is large."""
    return rng.integers(0, 256, shape, "uint8") < round(256 * SHOWN)


def _tree(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Words of trees whose nodes hang from those before them, one or several: of each node the bits of
    itself and of all above it. Rows that no word has a bit for see what their parents do."""
    import numpy as np

    words = np.zeros(shape, np.uint64)
    for row in range(shape[1]):
        parents = (
            rng.integers(max(0, row - TREE_BRANCHES) - 1, row, shape[0]) if row else np.full(shape[0], -1)
        )
        above = words[np.arange(shape[0]), parents]  # the last is still empty: no parent
        words[:, row] = above | np.uint64(1 << row if row < TREE_ROWS else 0)
    return words.view(np.int64)


def _documents(count: int, sizes: Sizes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Where the document of each row's place begins and ends, for each batch."""
    import numpy as np

    cuts = np.sort(rng.integers(0, sizes.seqlen_k + 1, (sizes.batch, count - 1)), axis=-1)
    whole = np.zeros((sizes.batch, 1), cuts.dtype)
    begins = np.concatenate([whole, cuts], axis=-1)
    ends = np.concatenate([cuts, whole + sizes.seqlen_k], axis=-1)
    places = np.clip(np.arange(sizes.seqlen_q) + sizes.seqlen_k - sizes.seqlen_q, 0, sizes.seqlen_k - 1)
    of_row = np.stack([np.searchsorted(row, places, side="right") for row in cuts])
    return np.take_along_axis(begins, of_row, -1), np.take_along_axis(ends, of_row, -1)


def shape_of(buffer: Buffer, sizes: Sizes) -> tuple[int, ...]:
    """Returns the least lengths that an array may have, and for axes of computed indices usual ones."""
    return tuple(
        max(getattr(sizes, name) for name in names) if names else sizes.seqlen_q + sizes.seqlen_k
        for names in buffer.axes
    )


def _own_lengths(buffer: Buffer, scoring: Scoring, sizes: Sizes) -> tuple[int, ...]:
    """The same of arrays as they are drawn, without what is repeated along an axis."""
    shape = shape_of(buffer, sizes)
    match buffer.name:
        case "slopes" if scoring.alibi:
            return (1, *shape[1:])
        case "bias" if scoring.bias:
            return (1, 1, *shape[2:])
        case _:
            return shape


class TypicalValues(Mapping[str, Any]):
    """What a problem's kernels are timed with: the same each time, and drawn when it is first asked for.

    A bias may be large, and bounds need none."""

    def __init__(self, problem: Scored) -> None:
        self._problem = problem
        self._drawn: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        import numpy as np

        if name not in self._drawn:
            scores = self._problem.scores
            asked = replace(
                scores,
                buffers=tuple(each for each in scores.buffers if each.name == name),
                scalars=tuple(each for each in scores.scalars if each.name == name),
            )
            rng = np.random.default_rng(17)
            found = draw_values(self._problem.scoring, asked, self._problem, rng)
            self._drawn[name] = found[name]
        return self._drawn[name]

    def __iter__(self) -> Iterator[str]:
        scores = self._problem.scores
        return iter([*(each.name for each in scores.scalars), *(each.name for each in scores.buffers)])

    def __len__(self) -> int:
        return len(list(iter(self)))


@lru_cache(maxsize=32)
def typical_values(problem: Scored) -> Mapping[str, Any]:
    """Returns what the problem's kernels are timed with. Lay others over them by `laid_over`: a copy draws
    all there is."""
    return TypicalValues(problem)


@dataclass(frozen=True)
class Alike:
    """``count`` sequences that see alike, of as many rows and keys: the first of them is number ``b``."""

    count: int
    b: int
    rows: int
    keys: int


def _sequences(problem: Scored, *, vary: bool) -> tuple[Alike, ...]:
    """The problem's sequences, those of one length together unless they ``vary`` beyond that."""
    if not problem.layout.is_packed:
        batches = range(problem.batch) if vary else range(1)
        alike = problem.batch // len(batches)
        return tuple(Alike(alike, b, problem.seqlen_q, problem.seqlen_k) for b in batches)
    pairs = problem.lengths.pairs
    if vary:
        return tuple(Alike(1, b, *pair) for b, pair in enumerate(pairs))
    counts = Counter(pairs)
    return tuple(Alike(counts[pair], pairs.index(pair), *pair) for pair in counts)


def _intervals(problem: Scored) -> Iterator[tuple[Alike, np.ndarray, np.ndarray]]:
    """Yields sequences that are alike, and where the keys begin and end that each of their rows sees."""
    import numpy as np

    values = typical_values(problem)
    for each in _sequences(problem, vary=problem.scores.vary_by_batch):
        seen = laid_over(values, {BATCH.name: each.b})
        yield each, *problem.scores.interval(np.arange(each.rows), each.rows, each.keys, seen)


@lru_cache(maxsize=4096)
def attended_pairs(problem: Scored) -> int:
    """Counts the pairs of a query row and a key that it sees, over all batches and heads; where no interval
    tells, from a sample of rows."""
    import numpy as np

    scores = problem.scores
    if scores.is_plain:
        alike = _sequences(problem, vary=False)
        pairs = sum(each.count * scores.visible_pairs(each.rows, each.keys) for each in alike)
        return problem.num_q_heads * pairs
    if scores.predicate is None:
        pairs = sum(alike.count * int((ends - begins).sum()) for alike, begins, ends in _intervals(problem))
        return pairs * problem.num_q_heads
    values = typical_values(problem)
    heads = range(problem.num_q_heads) if scores.vary_by_head else range(1)
    pairs = 0
    for each in _sequences(problem, vary=scores.pairs_vary_by_batch):
        rows, keys = np.arange(each.rows), np.arange(each.keys)
        sampled = rows[:: max(1, len(rows) // COUNTED_ROWS)]
        if not len(sampled):
            continue
        share = each.count * len(rows) / len(sampled) * problem.num_q_heads / len(heads)
        for h in heads:
            seen = scores.visible(values, each.b, h, sampled, keys, each.rows, each.keys)
            pairs += round(int(seen.sum()) * share)
    return pairs


@lru_cache(maxsize=4096)
def keys_in_reach(problem: Scored) -> int:
    """Returns the length of the longest interval of keys that a row sees; all keys where nothing but a causal
    mask is asked for."""
    if problem.scores.is_plain:
        return problem.seqlen_k
    return max(1, *(int((ends - begins).max(initial=0)) for _, begins, ends in _intervals(problem)))


@lru_cache(maxsize=4096)
def first_rows_see_less(problem: Scored) -> bool:
    """Tells whether the first rows see so many fewer keys than the last that it matters which start first."""
    if not problem.scores.first_rows_see_less:
        return False
    rows = problem.num_q_heads * problem.total_q
    return not problem.scores.begins or attended_pairs(problem) < ALIKE * rows * keys_in_reach(problem)


@lru_cache(maxsize=4096)
def unseen_bytes(problem: Scored) -> int:
    """Returns the bytes of keys and values that no row sees, as far as intervals tell."""
    unseen = 0
    for alike, begins, ends in _intervals(problem):
        seen = begins < ends
        count = int(ends[seen].max() - begins[seen].min()) if seen.any() else 0
        unseen += alike.count * (alike.keys - count)
    columns = problem.head_dim + problem.head_dim_v
    return unseen * problem.num_kv_heads * columns * ITEM_BYTES[problem.key_dtype]


@lru_cache(maxsize=4096)
def read_bytes(problem: Scored) -> int:
    """Returns the bytes of the arrays that masks and changes read, without what is repeated along an axis."""
    return sum(
        prod(_own_lengths(each, problem.scoring, problem)) * BUFFER_BYTES[each.dtype]
        for each in problem.scores.buffers
    )
