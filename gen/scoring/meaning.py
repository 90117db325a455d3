"""Scores as they are asked for: named masks and changes and expressions as bounds, predicate and change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..expression import Constant, Expression, Kind, Load, Name, apply, loads_of, maximum, minimum
from ..formula.intervals import split_mask
from ..formula.parse import parse
from .asked import BOOLEAN, TREE_ROWS, Scoring
from .scores import (
    BATCH,
    CAUSAL_BOUND,
    DIAGONAL,
    HEAD,
    KEY,
    NUM_KEYS,
    NUM_ROWS,
    QUERY,
    ROW,
    SCORE,
    Bound,
    Buffer,
    Scalar,
    Scores,
    scores_of,
)

#: Where a row stands among the keys.
PLACE = ROW + DIAGONAL
#: A pair's distance, of elementwise expressions: how far the key is before the row's place.
DISTANCE = QUERY + NUM_KEYS - NUM_ROWS - KEY
#: The names of elementwise expressions.
NAMES: Mapping[str, Kind] = {each.name: each.kind for each in (BATCH, HEAD, QUERY, KEY, NUM_ROWS, NUM_KEYS)}
#: Which size of a problem each name runs along.
AXES = {"b": "batch", "h": "num_q_heads", "q": "seqlen_q", "k": "seqlen_k", "row": "seqlen_q"}


@lru_cache(maxsize=1024)
def asked_scores(scoring: Scoring, *, causal: bool) -> Scores:
    """Returns the scores that are asked for. Raises ValueError for an expression that is none."""
    plain = scores_of(causal=causal)
    if scoring.is_plain:
        return plain
    begins, ends = list(_begins(scoring)), [*plain.ends, *_ends(scoring)]
    if scoring.prefix:
        prefix = Load("prefix", (BATCH,), Kind.INT)
        ends[1] = Bound(maximum(CAUSAL_BOUND.key, prefix), CAUSAL_BOUND.flag)
    predicates = list(_predicates(scoring))
    predicate_from = DIAGONAL if scoring.tree else None
    if scoring.mask:
        split = split_mask(_parsed(scoring, scoring.mask, NAMES, Kind.BOOL))
        begins += [Bound(_by_row(each)) for each in split.begins]
        ends += [Bound(_by_row(each)) for each in split.ends]
        predicates += [split.rest] if split.rest is not None else []
    if len(predicates) > 1:
        predicate_from = None
    predicate = None
    for each in predicates:
        predicate = each if predicate is None else apply("and", predicate, each)
    change = _change(scoring)
    trees = [each.key for each in (*begins, *ends)] + [
        each for each in (predicate, change) if each is not None
    ]
    if scoring.sinks:
        trees.append(Load("sinks", (HEAD,), Kind.FLOAT))
    buffers, scalars = _buffers(trees, scoring), _scalars(trees, scoring)
    named = {each.name for each in (*buffers, *scalars)}
    for kind, given in (("buffer", scoring.buffers), ("scalar", scoring.scalars)):
        for name, _ in given:
            if name not in named:
                raise ValueError(f"no expression reads {kind} {name}; leave it out, or name it in one")
    return Scores(
        begins=tuple(begins),
        ends=tuple(ends),
        flags=plain.flags,
        predicate=predicate,
        predicate_from=predicate_from,
        change=change,
        sinks=scoring.sinks,
        buffers=buffers,
        scalars=scalars,
    )


def _by_row(key: Expression) -> Expression:
    """A bound's key in the names of bounds."""
    return key.with_names({QUERY.name: ROW})


def _begins(scoring: Scoring) -> Iterator[Bound]:
    if scoring.window is not None and not scoring.always:
        left = Name("window_left")
        yield Bound(apply("where", apply("lt", left, Constant(0)), Constant(0), PLACE - left))
    if scoring.chunk:
        yield Bound(_chunk() * Name("chunk", nonnegative=True))
    if scoring.documents:
        yield Bound(Load("document_begin", (BATCH, ROW), Kind.INT))


def _ends(scoring: Scoring) -> Iterator[Bound]:
    if scoring.window is not None:
        right = Name("window_right")
        yield Bound(apply("where", apply("lt", right, Constant(0)), NUM_KEYS, PLACE + right + 1))
    if scoring.chunk:
        yield Bound((_chunk() + 1) * Name("chunk", nonnegative=True))
    if scoring.lengths:
        yield Bound(Load("lengths", (BATCH,), Kind.INT))
    if scoring.documents:
        yield Bound(Load("document_end", (BATCH, ROW), Kind.INT))


def _chunk() -> Expression:
    """Which chunk a row's place is in."""
    return apply("floor_div", PLACE, Name("chunk", nonnegative=True))


def _predicates(scoring: Scoring) -> Iterator[Expression]:
    if scoring.always:
        left = Name("window_left")
        in_window = apply("or", apply("lt", left, Constant(0)), apply("le", DISTANCE, left))
        yield apply("or", apply("lt", KEY, Name("always_keys", nonnegative=True)), in_window)
    if scoring.dilation:
        # Of a row and of a key each, so that none is divided once more for every pair.
        steps = Name("dilation", positive=True)
        place = QUERY + NUM_KEYS - NUM_ROWS
        yield apply("eq", apply("floor_mod", place, steps), apply("floor_mod", KEY, steps))
    if scoring.tree:
        yield _is_above()
    if scoring.bias == BOOLEAN:
        yield apply("ne", Load("bias", (BATCH, HEAD, QUERY, KEY), Kind.INT), Constant(0))


def _is_above() -> Expression:
    """Whether a key is before those of a tree, or one that the row's word names. Nothing is computed on a
    condition, so that a row's word is read once."""
    place = KEY + NUM_ROWS - NUM_KEYS  # among the keys of the rows
    word = Load("tree", (BATCH, QUERY), Kind.INT)
    within = minimum(maximum(place, Constant(0)), Constant(TREE_ROWS - 1))
    named = apply("bit_and", apply("shift_right", word, within), Constant(1))
    before = apply("int", apply("lt", place, Constant(0)))
    seen = apply("ne", apply("bit_or", named, before), Constant(0))
    return apply("and", seen, apply("lt", place, Constant(TREE_ROWS)))


def _change(scoring: Scoring) -> Expression | None:
    score: Expression = SCORE
    if scoring.softcap:
        cap = Name("softcap", Kind.FLOAT)
        score = apply("mul", cap, apply("tanh", apply("mul", score, apply("div", Constant(1.0), cap))))
    if scoring.alibi:
        slope = Load("slopes", (BATCH, HEAD), Kind.FLOAT)
        score = apply("sub", score, apply("mul", slope, apply("float", apply("abs", DISTANCE))))
    if scoring.bias and scoring.bias != BOOLEAN:
        score = apply("add", score, Load("bias", (BATCH, HEAD, QUERY, KEY), Kind.FLOAT))
    if scoring.score:
        changed = _parsed(scoring, scoring.score, {**NAMES, SCORE.name: SCORE.kind}, Kind.FLOAT)
        score = changed.with_names({SCORE.name: score})
    return None if score is SCORE else score


def _named_buffers(scoring: Scoring) -> dict[str, str]:
    """The arrays of named features that are asked for, and the type of each."""
    features = {
        "prefix": (scoring.prefix, "i32"),
        "lengths": (scoring.lengths, "i32"),
        "document_begin": (scoring.documents, "i32"),
        "document_end": (scoring.documents, "i32"),
        "tree": (scoring.tree, "i64"),
        "slopes": (scoring.alibi, "f32"),
        "bias": (scoring.bias, scoring.bias),
        "sinks": (scoring.sinks, "f32"),
    }
    return {name: dtype for name, (asked, dtype) in features.items() if asked}


def _parsed(scoring: Scoring, text: str, names: Mapping[str, Kind], wanted: Kind) -> Expression:
    """An expression of one's own, whose arrays are none of a named feature."""
    found = parse(
        text, names=names, wanted=wanted, buffers=dict(scoring.buffers), scalars=dict(scoring.scalars)
    )
    for load in loads_of(found):
        if load.buffer in _named_buffers(scoring):
            raise ValueError(
                f"{load.buffer} is what the named feature reads that is asked for beside {text!r:.80}; "
                "give the expression's array another name"
            )
    return found


def _buffers(trees: list[Expression], scoring: Scoring) -> tuple[Buffer, ...]:
    """The arrays that trees read, in the order in which they first do."""
    dtypes = {**_named_buffers(scoring), **dict(scoring.buffers)}
    axes: dict[str, list[frozenset[str] | None]] = {}
    kinds: dict[str, Kind] = {}
    for tree in trees:
        for load in loads_of(tree):
            sizes = [_size_along(index) for index in load.indices]
            known = axes.setdefault(load.buffer, [frozenset()] * len(sizes))
            if len(known) != len(sizes):
                raise ValueError(
                    f"{load.buffer} has {len(sizes)} indices in one place and {len(known)} in another"
                )
            for i, size in enumerate(sizes):
                before = known[i]
                known[i] = None if size is None or before is None else before | {size}
            if kinds.setdefault(load.buffer, load.kind) is not load.kind:
                raise ValueError(
                    f"{load.buffer} is read as integers in the mask and as floats in the score; say which it "
                    f"is, as in buffers=(({load.buffer!r}, 'f32'),)"
                )
    usual = {Kind.FLOAT: "f32", Kind.INT: "i32", Kind.BOOL: "u8"}
    return tuple(
        Buffer(name, dtypes.get(name) or usual[kinds[name]], tuple(each or frozenset() for each in found))
        for name, found in axes.items()
    )


def _size_along(index: Expression) -> str | None:
    return AXES.get(index.name) if isinstance(index, Name) else None


def _scalars(trees: list[Expression], scoring: Scoring) -> tuple[Scalar, ...]:
    """The numbers that trees name, in a fixed order: integers first."""
    asked = {
        **dict.fromkeys(("window_left", "window_right", "always_keys", "chunk", "dilation"), Kind.INT),
        "softcap": Kind.FLOAT,
        **{name: Kind.INT if isinstance(value, int) else Kind.FLOAT for name, value in scoring.scalars},
    }
    named = frozenset().union(*(tree.names() for tree in trees))
    found = [Scalar(name, kind) for name, kind in asked.items() if name in named]
    return tuple(sorted(found, key=lambda each: each.kind))
