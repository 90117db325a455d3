"""Masks and changes of scores as a command line asks for them: words that become a `Scoring`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ..gen.formula.error import FormulaError
from ..gen.problem import Problem
from ..gen.scoring.asked import BIAS_DTYPES, MAX_REACH, PLAIN, TREE_ROWS, Scoring
from .errors import UsageError, checked

#: What a bias is of where no type is named: the problem's own, or float32 where none is served of that.
OWN = "own"
#: The word for a window's side that hides nothing.
ALL = "all"
_INTEGER, _NAME = re.compile(r"[+-]?\d{1,18}"), re.compile(r"[a-z]\w*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, kw_only=True)
class AskedScoring:
    """What options ask of masks and scores; what is not given is as in a plain `Scoring`.

    ``own_bias``: a bias is asked for, of the problem's own type.
    """

    scoring: Scoring = PLAIN
    own_bias: bool = False

    @property
    def is_given(self) -> bool:
        """Whether any of the options was given."""
        return self.own_bias or not self.scoring.is_plain

    def of(self, dtype: str) -> Scoring:
        """Returns what is asked of a problem of that type."""
        if not self.own_bias:
            return self.scoring
        return replace(self.scoring, bias=dtype if dtype in BIAS_DTYPES else "f32")

    def made(self, make: Callable[[], Problem]) -> Problem:
        """Returns the problem that ``make`` makes with what is asked. Raises UsageError for values out of
        range, expressions that are none, a prefix without a causal mask, and a tree of too many rows."""
        try:
            problem = make()
        except FormulaError as error:
            option = "mask" if error.text == self.scoring.mask else "score"
            raise UsageError(f"--{option}, {error}") from error
        except ValueError as error:
            raise UsageError(str(error)) from error
        if self.scoring.prefix and not problem.causal:
            raise UsageError(
                f"prefix is {self.scoring.prefix}, but it widens a causal mask, and none is asked for; add "
                "--causal, or leave --prefix out"
            )
        if self.scoring.tree and problem.seqlen_q > TREE_ROWS:
            raise UsageError(
                f"a tree's rows have words of {TREE_ROWS} bits, one for each row, but seqlen_q is "
                f"{problem.seqlen_q}; give --seqlen-q of at most {TREE_ROWS}, or a mask by --mask"
            )
        return problem

    def fits(self, problem: Problem) -> bool:
        """Tells whether a problem has what is asked for, whatever else it has."""
        wanted, has = self.of(problem.dtype), problem.scoring
        given = [each.name for each in fields(Scoring) if getattr(wanted, each.name) != each.default]
        given += ["always"] if wanted.window is not None else []
        return all(getattr(wanted, name) == getattr(has, name) for name in given)

    def words(self) -> list[str]:
        """Returns the options as they are typed in a shell, an option and its value a word."""
        from ..gen.emit.options import scoring_options  # imports what --help does without

        return [*scoring_options(self.scoring), *(["--bias"] if self.own_bias else [])]


NOTHING_ASKED = AskedScoring()


def parse_scoring(
    *,
    window: str | None = None,
    softcap: str | None = None,
    bias: str | None = None,
    buffers: list[str] | None = None,
    scalars: list[str] | None = None,
    alibi: bool = False,
    sinks: bool = False,
    lengths: bool = False,
    tree: bool = False,
    mask: str | None = None,
    score: str | None = None,
    **counts: str | None,
) -> AskedScoring:
    """Returns what the options' texts ask for. Raises UsageError for what none can mean."""
    asked: dict[str, Any] = {name: _count(name, text) for name, text in counts.items() if text is not None}
    if window is not None:
        asked["window"], asked["always"] = _window(window)
    if softcap is not None:
        asked["softcap"] = _softcap(softcap)
    for name, text in (("mask", mask), ("score", score)):
        if text is not None:
            if not text.strip():
                raise UsageError(f"--{name} is empty; give it an expression, or leave it out")
            asked[name] = text.strip()
    own = bias == OWN
    scoring = checked(
        lambda: Scoring(
            **asked,
            bias="" if own or bias is None else bias,
            alibi=alibi,
            sinks=sinks,
            lengths=lengths,
            tree=tree,
            buffers=tuple((name, text) for name, text in _pairs("buffer", "doc=i16", buffers).items()),
            scalars=tuple(
                (name, _scalar(name, text)) for name, text in _pairs("scalar", "n=4", scalars).items()
            ),
        )
    )
    return AskedScoring(scoring=scoring, own_bias=own)


def _count(name: str, text: str) -> int:
    number = _integer(text)
    if number is None or not 1 <= number <= MAX_REACH:
        least = f"--{name} {text!r} is no whole number" if number is None else f"{name} is {number}"
        raise UsageError(f"{least}; it must lie in 1..{MAX_REACH}: leave --{name} out for none")
    return number


def _window(text: str) -> tuple[tuple[int, int], int]:
    """A window's sides, and how many first keys are always seen."""
    parts = [part.strip() for part in text.split(",")]
    sides = [-1 if part == ALL else _integer(part) for part in parts]
    if len(sides) > 3 or any(side is None for side in sides) or parts[2:] == [ALL]:
        raise UsageError(
            f"--window {text!r} is not how far a row sees: left,right and, where the first keys are always "
            "seen, how many; as in --window 127,0, or --window 127 without a limit on the right"
        )
    left, right, always = [*(side or 0 for side in sides), *(-1, 0)[len(sides) - 1 :]]
    return (left, right), always


def _softcap(text: str) -> float:
    number = _float(text)
    if number is None or not 0 < number < math.inf:
        raise UsageError(
            f"--softcap {text!r} is no positive number; give one, as in --softcap 30, or leave it out"
        )
    return number


def _pairs(option: str, example: str, texts: list[str] | None) -> dict[str, str]:
    """The values of ``name=value`` texts, by name."""
    found: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value or not _NAME.fullmatch(name):
            raise UsageError(f"--{option} {text!r} is not of the form name=value, as in --{option} {example}")
        if found.get(name, value) != value:
            raise UsageError(f"--{option} {name} is {found[name]} and {value}; give it once")
        found[name] = value
    return found


def _scalar(name: str, text: str) -> float:
    integer = _integer(text)
    number = _float(text) if integer is None else integer
    if number is None or not math.isfinite(number):
        raise UsageError(f"--scalar {name} is {text!r}, no finite number; as in --scalar {name}=4, or 0.5")
    if integer is not None and not -(2**31) <= integer < 2**31:
        raise UsageError(
            f"--scalar {name} is {integer}; integers have 32 bits: it must lie in {-(2**31)}..{2**31 - 1}, "
            f"or be a float, as in {name}={integer}.0"
        )
    return number


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) and text.isascii() else None


def _float(text: str) -> float | None:
    try:
        return float(text) if text.isascii() else None
    except ValueError:
        return None
