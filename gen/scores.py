"""What a query row sees of the keys: one value of the problem, which every other part of flashgen asks.

A row sees an interval ``[begin, end)`` of keys, whose bounds are affine in the row: each a limit that holds
always, or where a flag of the kernel is set at compile time. From it follow the tiles of keys that a block
walks, which of them are only partly visible, the cost model's count of tiles, the reference's mask and the
number of visible pairs. The causal mask is the first such bound.

Bounds never fall from one row to the next: of neighbouring rows the first has the least end, the last the
greatest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .expression import Constant, Expression, Name, maximum, minimum

#: A query row, and how many rows and keys there are.
ROW, NUM_ROWS, NUM_KEYS = (Name(each, nonnegative=True) for each in ("row", "seqlen_q", "seqlen_k"))
#: What a row's own position is ahead of it among the keys, when the last row is aligned with the last key.
DIAGONAL = Name("diagonal")


@dataclass(frozen=True)
class Bound:
    """A limit of the keys that a row sees, in `ROW`, `NUM_KEYS` and `DIAGONAL`.

    ``flag`` is the kernel's compile-time constant under which it holds (``kCausal``); empty: it always does.
    """

    key: Expression
    flag: str = ""


@dataclass(frozen=True)
class Scores:
    """Which keys each row sees: from the greatest of ``begins`` up to the least of ``ends``.

    ``flags`` are the compile-time constants that are set for this problem.
    """

    begins: tuple[Bound, ...] = ()
    ends: tuple[Bound, ...] = (Bound(NUM_KEYS),)
    flags: frozenset[str] = frozenset()

    # -- as the kernel has it: rows and keys are C++, `seqlen_k` and `diagonal` what the place calls them; a
    # diagonal of 0 says that rows are counted by their own place among the keys --------------------------

    def rows_may_be_empty(self) -> str:
        """Returns C++ that is true where some row may see no key though there are keys."""
        return _any_flag((*self.begins, *self.ends[1:]))

    def later_rows_see_more(self) -> str:
        """Returns C++ that is true where what a row sees ends later than for the row before it."""
        return _any_flag(self.ends[1:])

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

    @staticmethod
    def before(rows_end: str) -> Expression:
        """Returns the last of the rows before ``rows_end``, which is C++, as an expression."""
        return Name(rows_end) - 1

    # -- as everybody else has it --------------------------------------------------------------------------

    def interval(self, rows: Any, seqlen_q: int, seqlen_k: int) -> tuple[Any, Any]:
        """Returns the keys ``[begin, end)`` that rows see, an integer or an array of them; both are within
        the keys there are, and equal where a row sees none."""
        import numpy as np  # where arrays are: a problem alone needs none

        values = {"row": rows, "seqlen_k": seqlen_k, "diagonal": seqlen_k - seqlen_q}
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

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Counts the pairs of a query row and a key that it sees, for one head."""
        if not any(self._holding((*self.begins, *self.ends[1:]))):
            return seqlen_q * seqlen_k
        import numpy as np

        begin, end = self.interval(np.arange(seqlen_q), seqlen_q, seqlen_k)
        return int((end - begin).sum())

    @property
    def all_rows_alike(self) -> bool:
        """Whether every row sees the same keys."""
        return not any(self._holding((*self.begins, *self.ends[1:])))

    def _holding(self, bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
        return tuple(each for each in bounds if not each.flag or each.flag in self.flags)


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
