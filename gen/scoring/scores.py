"""What a query row sees of the keys, and what becomes of its scores: one value of the problem, which every
other part of flashgen asks.

A row sees an interval ``[begin, end)`` of keys, whose bounds rise with the row: each a limit that holds
always, or where a flag of the kernel is set at compile time. From it follow the tiles of keys that a block
walks, which of them are only partly visible, the cost model's count of tiles, the reference's mask and the
number of visible pairs. The causal mask is the first such bound. What no interval says, a predicate does.

Bounds never fall from one row to the next: of neighbouring rows the first has the least end, the last the
greatest.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..expression import (
    Apply,
    Constant,
    Expression,
    Kind,
    Name,
    distinct,
    loads_of,
    maximum,
    minimum,
    names_of,
    statements,
)
from ..formula.steepness import steepness

#: A query row, and how many rows and keys there are.
ROW, NUM_ROWS, NUM_KEYS = (Name(each, nonnegative=True) for each in ("row", "seqlen_q", "seqlen_k"))
#: What a row's own position is ahead of it among the keys, when the last row is aligned with the last key.
DIAGONAL = Name("diagonal")
#: Slopes beyond this are told apart from it no more: nothing float32 is left of a score.
STEEPEST = 1e30
#: What expressions of single pairs are in: a scaled score, batch, query head, query row, key.
SCORE = Name("score", Kind.FLOAT)
BATCH, HEAD, QUERY, KEY = (Name(each, nonnegative=True) for each in "bhqk")


@dataclass(frozen=True)
class Buffer:
    """An array that masks or changes of scores read.

    ``axes`` say for each axis which of the problem's sizes index it whole, so that it must be as long as the
    longest of them; none where an index is computed, which is kept within the axis. The last axis is
    contiguous, the others have strides.
    """

    name: str
    dtype: str
    axes: tuple[frozenset[str], ...]

    @property
    def strides(self) -> tuple[str, ...]:
        """The names of its strides among a kernel's arguments."""
        return tuple(f"{self.name}_stride_{axis}" for axis in range(len(self.axes) - 1))

    @property
    def sizes(self) -> tuple[tuple[int, str], ...]:
        """The axes whose length a kernel is told, and by which names."""
        return tuple((i, f"{self.name}_size_{i}") for i, names in enumerate(self.axes) if not names)


@dataclass(frozen=True)
class Scalar:
    """A number that masks or changes of scores name, and that a kernel takes as an argument."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Bound:
    """A limit of the keys that a row sees, in `ROW`, `NUM_KEYS` and `DIAGONAL`.

    ``flag`` is the kernel's compile-time constant under which it holds (``kCausal``); empty: it always does.
    """

    key: Expression
    flag: str = ""


@dataclass(frozen=True)
class Scores:
    """Which keys each row sees: from the greatest of ``begins`` up to the least of ``ends``, and of these the
    keys for which the ``predicate`` is true; and what becomes of a score. Of keys before ``predicate_from``,
    the same for all rows, the predicate is known to be true.

    ``flags`` are the compile-time constants that are set for this problem. ``change`` takes the place of a
    scaled score. With ``sinks`` each query head has a logit beside its scores, which counts in the
    denominator alone.
    """

    begins: tuple[Bound, ...] = ()
    ends: tuple[Bound, ...] = (Bound(NUM_KEYS),)
    flags: frozenset[str] = frozenset()
    predicate: Expression | None = None
    predicate_from: Expression | None = None
    change: Expression | None = None
    sinks: bool = False
    buffers: tuple[Buffer, ...] = ()
    scalars: tuple[Scalar, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing but flagged bounds limits rows, and nothing changes scores."""
        others = self.buffers or self.scalars or self.change or self.sinks
        return not others and self.only_flags_limit_rows

    @property
    def only_flags_limit_rows(self) -> bool:
        """Whether rows see all keys before bounds that flags set and that read nothing, as that of a causal
        mask."""
        if self.begins or self.predicate or any(not each.flag for each in self.ends[1:]):
            return False
        if not (self.buffers or self.scalars):  # asked for often: then there is nothing to read
            return True
        keys = [each.key for each in self.ends[1:]]
        named = {name for key in keys for name in key.names()}
        return not (loads_of(*keys) or named & {each.name for each in self.scalars})

    @property
    def needs_lists(self) -> bool:
        """Whether only lists of tiles tell which keys rows see: no interval and no key from which on a
        predicate is asked."""
        return self.predicate is not None and self.predicate_from is None

    @property
    def steepness(self) -> float:
        """By how much the error of a score may grow as scores change; one where nobody knows."""
        slope = 1.0 if self.change is None else steepness(self.change, SCORE)
        return min(max(1.0, slope), STEEPEST) if slope < math.inf else 1.0

    @property
    def vary_by_batch(self) -> bool:
        """Whether the interval that a row sees is another in each batch."""
        return any(BATCH.name in each.key.names() for each in (*self.begins, *self.ends))

    @property
    def pairs_vary_by_batch(self) -> bool:
        """Whether the keys that a row sees are others in each batch."""
        by_predicate = self.predicate is not None and BATCH.name in self.predicate.names()
        return self.vary_by_batch or by_predicate

    @property
    def bounds_read_rows(self) -> bool:
        """Whether bounds are read from arrays, an element a row."""
        keys = [each.key for each in (*self.begins, *self.ends)]
        return any(ROW in load.indices for load in loads_of(*keys))

    @property
    def along_keys(self) -> frozenset[str]:
        """The arrays, by name, whose neighbouring elements are of neighbouring keys wherever they are met."""
        return frozenset(each.name for each in self.buffers if "seqlen_k" in each.axes[-1])

    @property
    def vary_by_head(self) -> bool:
        """Whether the keys that a row sees are others for each query head."""
        return self.predicate is not None and HEAD.name in self.predicate.names()

    # -- as the kernel has it: rows and keys are C++, `seqlen_k` and `diagonal` what the place calls them; a
    # diagonal of 0 says that rows are counted by their own place among the keys --------------------------

    def rows_may_be_empty(self) -> str:
        """Returns C++ that is true where some row may see no key though there are keys."""
        if self.predicate is not None or self.change is not None:  # which may make scores -infinity
            return "true"
        return _any_flag((*self.begins, *self.ends[1:]))

    def later_rows_see_more(self) -> str:
        """Returns C++ that is true where rows see more keys than the rows before them, or as many where what
        they see begins later and later."""
        if self.begins:
            return "true" if self._slides else "false"
        return _any_flag(tuple(each for each in self.ends[1:] if each.flag))

    @property
    def first_rows_see_less(self) -> bool:
        """Whether rows see more keys than the rows before them, at least the first of them, with the flags
        that are set."""
        return self._slides or (not self.begins and any(each.flag in self.flags for each in self.ends[1:]))

    @property
    def _slides(self) -> bool:
        """Whether what a row sees begins where the row is, but for a constant, as in a window."""
        return any(_moves_with_rows(each.key) for each in self.begins)

    def end(self, row: str | Expression, **names: str) -> str:
        """Returns C++ for the key at which what ``row`` sees ends; negative or zero where it sees none."""
        always, *others = self.ends
        text = always.key.c(_names(names))
        for each in others:
            limit = f"min({text}, {_at(each, row, names)})"
            text = f"{each.flag} ? {limit} : {text}" if each.flag else limit
        return text

    def limits_beside(self, row: str | Expression, **names: str | int) -> list[tuple[str, str]]:
        """Returns what limits ``row`` beside the end of the keys, in C++: pairs of a flag and of the key
        under it."""
        return [(each.flag or "true", _at(each, row, names)) for each in self.ends[1:]]

    def crosses_end(self, key: str, row: str | Expression, **names: str) -> str:
        """Returns C++ that is true where ``row`` does not see all keys before ``key``."""
        always, *others = self.ends
        tests = [f"{key} > {always.key.c(_names(names))}"]
        for each in others:
            test = f"{key} - 1 > {_last_key(each, row, names)}"
            tests.append(f"({each.flag} && {test})" if each.flag else test)
        return " || ".join(tests)

    def sees_key(self, key: str, row: str | Expression, **names: str) -> str:
        """Returns C++ that is true where ``row`` sees ``key``, one that there is, or some key before it."""
        tests = []
        for each in self.ends[1:]:
            test = f"{key} <= {_last_key(each, row, names)}"
            tests.append(f"(!{each.flag} || {test})" if each.flag else test)
        return " && ".join(tests) or "true"

    def bounds_of(self, bounds: str, row: str = "row", batch: str = "batch") -> list[tuple[str, str]]:
        """Returns the ``begins`` or the ``ends`` of a row beside 0 and the keys there are, in C++: pairs of a
        flag, empty where it always holds, and of the key."""
        found = self.begins if bounds == "begins" else self.ends[1:]
        names = {**self.places(row=row, batch=batch), ROW.name: row}
        return [(each.flag, each.key.c(names)) for each in found]

    def ends_of_batches(self, batch: str = "tile.batch") -> list[str]:
        """Returns the keys at which those of a batch end whatever the row, in C++."""
        names = self.places(batch=batch)
        alike = [each.key for each in self.ends[1:] if ROW.name not in each.key.names()]
        return [key.c(names) for key in alike if loads_of(key)]

    def places(
        self, *, row: str = "row", batch: str = "batch", head: str = "head", key: str = "key"
    ) -> dict[str, str]:
        """Returns what names of expressions are called in a kernel's functions."""
        return {
            BATCH.name: batch,
            HEAD.name: head,
            QUERY.name: row,
            KEY.name: key,
            NUM_ROWS.name: "args.seqlen_q",
            NUM_KEYS.name: "args.seqlen_k",
            DIAGONAL.name: "args.seqlen_k - args.seqlen_q",
            **{each.name: f"args.{each.name}" for each in self.scalars},
        }

    @property
    def text(self) -> str:
        """All of it in C++: what tells which helpers a kernel needs."""
        trees = [each.key for each in (*self.begins, *self.ends)]
        trees += [each for each in (self.predicate, self.change) if each is not None]
        computed = map(self.statements, trees)
        return "\n".join(line for lines, value in computed for line in (*lines, value))

    @property
    def compares_wide(self) -> bool:
        """Whether the lesser or greater is taken of a place and of an array's integers of eight bytes, as for
        bounds, for which CUDA has no functions."""
        wide = [f"{each.name}_at(" for each in self.buffers if each.dtype == "i64"]
        bounds = [each.key.c(self.places()) for each in (*self.begins, *self.ends)]
        compared = [line for line in self.text.splitlines() if "min(" in line or "max(" in line]
        return any(name in text for name in wide for text in (*bounds, *compared))

    def statements(
        self, expression: Expression, temporary: str = "t", **renamed: str
    ) -> tuple[list[str], str]:
        """Returns the lines of C++ that compute an expression of pairs, and what then is its value.

        A kernel's own variables, whose names begin with a line no scalar's does, lose that.
        """
        own = {name.name: name.name[1:] for name in names_of(expression) if name.name.startswith("_")}
        places = {**self.places(), **{name: renamed.get(word, word) for name, word in own.items()}}
        return statements(expression, {**places, **renamed}, temporary=temporary)

    def definitions(self, values: Sequence[tuple[Name, Expression]], **renamed: str) -> list[str]:
        """Returns the lines of C++ that define a kernel's own variables, each in terms of those before it."""
        lines = []
        for name, expression in values:
            word = name.name[1:]
            computed, value = self.statements(expression, temporary=f"{word}_", **renamed)
            lines += [*computed, f"const {name.kind.c_type} {word} = {value};"]
        return lines

    @staticmethod
    def before(rows_end: str) -> Expression:
        """Returns the last of the rows before ``rows_end``, which is C++, as an expression."""
        return Name(rows_end) - 1

    # -- as everybody else has it --------------------------------------------------------------------------

    def interval(
        self, rows: Any, seqlen_q: int, seqlen_k: int, values: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Returns the keys ``[begin, end)`` that rows see, an integer or an array of them; both are within
        the keys there are, and equal where a row sees none. ``values`` are what bounds read: buffers and
        scalars by name, and the batch ``b``."""
        import numpy as np  # where arrays are: a problem alone needs none

        known = {
            "row": rows,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "diagonal": seqlen_k - seqlen_q,
        }
        values = laid_over(values or {}, known)
        begin, end = Constant(0), Constant(2**62)
        for each in self._holding(self.begins):
            begin = maximum(begin, each.key)
        for each in self._holding(self.ends):
            end = minimum(end, each.key)
        first = np.clip(begin.value(values), 0, seqlen_k)
        last = np.maximum(np.clip(end.value(values), 0, seqlen_k), first)
        if isinstance(rows, np.ndarray):
            return np.broadcast_to(first, rows.shape), np.broadcast_to(last, rows.shape)
        return int(first), int(last)

    def visible(
        self, values: Mapping[str, Any], b: int, h: int, rows: Any, keys: Any, seqlen_q: int, seqlen_k: int
    ) -> Any:
        """Returns which of ``keys`` each of ``rows`` sees, both arrays, of a batch and a query head: bool,
        ``(rows, keys)``."""
        import numpy as np

        begin, end = self.interval(rows, seqlen_q, seqlen_k, laid_over(values, {BATCH.name: b}))
        seen = (keys >= begin[:, None]) & (keys < end[:, None])
        if self.predicate is not None:
            pairs = _pairs(values, b, h, rows, keys, seqlen_q, seqlen_k)
            seen &= np.broadcast_to(self.predicate.value(pairs), seen.shape)
        return seen

    def changed(
        self,
        values: Mapping[str, Any],
        scores: Any,
        b: int,
        h: int,
        rows: Any,
        keys: Any,
        seqlen_q: int,
        seqlen_k: int,
    ) -> Any:
        """Returns what becomes of scaled ``scores``, float64 ``(rows, keys)``, of a batch and a head."""
        import numpy as np

        if self.change is None:
            return scores
        pairs = laid_over(_pairs(values, b, h, rows, keys, seqlen_q, seqlen_k), {SCORE.name: scores})
        return np.broadcast_to(self.change.value(pairs), scores.shape)

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Counts the pairs of a query row and a key that it sees, for one head."""
        if self.all_rows_alike:
            return seqlen_q * seqlen_k
        import numpy as np

        begin, end = self.interval(np.arange(seqlen_q), seqlen_q, seqlen_k)
        return int((end - begin).sum())

    @property
    def all_rows_alike(self) -> bool:
        """Whether every row sees all keys."""
        return self.predicate is None and not any(self._holding((*self.begins, *self.ends[1:])))

    @property
    def held_ends(self) -> tuple[Bound, ...]:
        """The ends of what rows see with the flags that are set, which then always hold."""
        return tuple(replace(each, flag="") for each in self._holding(self.ends))

    def _holding(self, bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
        return tuple(each for each in bounds if not each.flag or each.flag in self.flags)


def laid_over(values: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``values`` with ``more`` in front, without asking for any of them: some are only then drawn."""
    return ChainMap(dict(more), cast("dict[str, Any]", values))


def _pairs(
    values: Mapping[str, Any], b: int, h: int, rows: Any, keys: Any, seqlen_q: int, seqlen_k: int
) -> Mapping[str, Any]:
    """The values of elementwise expressions, for rows and keys as the two axes of a matrix."""
    pairs = {BATCH.name: b, HEAD.name: h, QUERY.name: rows[:, None], KEY.name: keys[None, :]}
    return laid_over(values, {**pairs, NUM_ROWS.name: seqlen_q, NUM_KEYS.name: seqlen_k})


def _moves_with_rows(key: Expression) -> bool:
    """Tells whether a bound is the row's number but for what all rows share, as that of a window."""
    parts = distinct(key)
    functions = {each.function for each in parts if isinstance(each, Apply)}
    return ROW in parts and not loads_of(key) and functions <= {"add", "sub", "max", "min", "where", "lt"}


def _names(names: Mapping[str, str]) -> Mapping[str, str]:
    return {NUM_KEYS.name: "args.seqlen_k", **names}


def _at(bound: Bound, row: str | Expression, names: Mapping[str, str | int]) -> str:
    numbers = {name: Constant(value) for name, value in names.items() if isinstance(value, int)}
    words = {name: value for name, value in names.items() if isinstance(value, str)}
    row = Name(row) if isinstance(row, str) else row
    return bound.key.with_names({**numbers, ROW.name: row}).c(_names(words))


def _last_key(bound: Bound, row: str | Expression, names: Mapping[str, str]) -> str:
    return _at(Bound(bound.key - 1), row, names)


def _any_flag(bounds: tuple[Bound, ...]) -> str:
    return " || ".join(dict.fromkeys(each.flag or "true" for each in bounds)) or "false"


#: A row sees the keys up to its own position, the last row being aligned with the last key.
CAUSAL_BOUND = Bound(ROW + DIAGONAL + 1, flag="kCausal")


#: Every row sees every key.
FULL = Scores()


def scores_of(*, causal: bool) -> Scores:
    """Returns the scores of plain attention: every kernel has the causal bound, under a flag that its build
    may turn."""
    return Scores(
        ends=(Bound(NUM_KEYS), CAUSAL_BOUND),
        flags=frozenset({CAUSAL_BOUND.flag} if causal else ()),
    )
