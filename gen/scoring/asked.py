"""What is asked of scores and of what rows see, beside scale and causal mask: named, or as expressions.

The numbers here, such as a window's, are those that a kernel is tuned for. It takes them as arguments, so
that others compile nothing; which features there are, and expressions, are what a kernel is made of.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from ..formula.identifiers import TAKEN, is_identifier

#: The largest window, chunk or dilation: positions beside them still fit into 32 bits.
MAX_REACH = 2**30
#: The types of buffers that hold floats.
FLOAT_DTYPES = ("f32", "f16", "bf16")
#: The types that an additive bias may have, and what says that it is a boolean mask.
BIAS_DTYPES, BOOLEAN = FLOAT_DTYPES, "u8"
#: The types of buffers that expressions name, and the bytes of an element.
BUFFER_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i16": 2, "i32": 4, "i64": 8, "u8": 1}
BUFFER_DTYPES = tuple(BUFFER_BYTES)
#: The longest text of an expression.
MAX_TEXT = 20_000
#: The rows that a mask of a tree tells of: the bits of a word.
TREE_ROWS = 64
#: What no expression has: comments, lines of their own, what is not printed.
_UNREAD = re.compile(r"[^ -~]|[#\\]")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Masks and changes of scores, all of which hold together; the default is none.

    A row's own place among the keys is i + seqlen_k - seqlen_q, the last row being aligned with the last key.

    - ``window`` (left, right): a row sees so many keys before its place and after it, inclusive; negative:
      all. The first ``always`` keys are seen whatever the left side is.
    - ``chunk``: rows see keys of their own chunk of so many positions.
    - ``prefix``: under a causal mask, the first keys of each batch that all rows see; tuned with up to it.
    - ``lengths``: each batch has a number of keys of its own.
    - ``documents``: rows see keys of their own document, one behind the other; tuned with so many.
    - ``tree``: the last keys are those of the rows, nodes of a tree; a row has a word of 64 bits that says
      which of them it sees, bit j of the j-th, and sees all keys before them. For up to 64 rows.
    - ``dilation``: of the others, rows see keys at distances that are multiples of this.
    - ``softcap``: scaled scores s become softcap · tanh(s / softcap).
    - ``alibi``: slopes[b, h] times the distance is subtracted.
    - ``bias``: the type of a tensor (batch, heads, seqlen_q, seqlen_k) that is added; u8: that hides where it
      is 0.
    - ``score``: an expression in ``score``, ``b``, ``h``, ``q``, ``k`` that takes the score's place then.
    - ``sinks``: each query head has a logit beside its scores, in the denominator alone.
    - ``mask``: an expression in ``b``, ``h``, ``q``, ``k`` that is true where row q sees key k.

    ``buffers`` are types of the arrays that expressions name where they are not float32 in a score and int32
    in a mask; ``scalars`` the numbers that they name.

    Raises:
        ValueError: a field is out of range; the message names the value and the range.
    """

    window: tuple[int, int] | None = None
    always: int = 0
    chunk: int = 0
    prefix: int = 0
    lengths: bool = False
    documents: int = 0
    dilation: int = 0
    tree: bool = False
    softcap: float = 0.0
    alibi: bool = False
    bias: str = ""
    sinks: bool = False
    mask: str = ""
    score: str = ""
    buffers: tuple[tuple[str, str], ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for side in self.window or ():
            if not -1 <= side <= MAX_REACH:
                raise ValueError(f"window is {self.window}; each side must lie in -1 (all keys)..{MAX_REACH}")
        for name in ("always", "chunk", "prefix", "dilation", "documents"):
            if not 0 <= getattr(self, name) <= MAX_REACH:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0 (none)..{MAX_REACH}")
        if self.always and (self.window is None or self.window[0] < 0):
            raise ValueError(f"always is {self.always}, but no window hides the first keys; give one, or 0")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap is {self.softcap:g}; it must be positive, or 0 for none")
        if self.bias not in ("", *BIAS_DTYPES, BOOLEAN):
            kinds = ", ".join((*BIAS_DTYPES, BOOLEAN))
            raise ValueError(f"a bias of {self.bias!r} is not served; choose one of {kinds}")
        for name, value in self.scalars:
            _check_name(name)
            if not isfinite(value) or (isinstance(value, int) and abs(value) > MAX_REACH):
                raise ValueError(
                    f"scalar {name} is {value}; it must be finite, an integer within ±{MAX_REACH}"
                )
        for name, dtype in self.buffers:
            _check_name(name)
            if dtype not in BUFFER_DTYPES:
                kinds = ", ".join(BUFFER_DTYPES)
                raise ValueError(f"buffer {name} is {dtype!r}, which is not served; choose one of {kinds}")
        for name in ("mask", "score"):
            text = getattr(self, name)
            if len(text) > MAX_TEXT:
                raise ValueError(f"{name} has {len(text)} characters, at most {MAX_TEXT} are read")
            # It becomes part of comments in what is written.
            if wrong := _UNREAD.search(text):
                raise ValueError(
                    f"{name} has a {wrong[0]!r} in column {wrong.start() + 1}, which is not read"
                )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked."""
        return self == PLAIN

    @property
    def stem(self) -> str:
        """What a kernel is made for, as part of an identifier that begins with ``_``: ``_window_softcap``."""
        return "".join(f"_{name}{detail}" for name, detail in self._structure())

    @property
    def values(self) -> str:
        """The numbers that it is tuned for, as part of an identifier: ``_window127x0``."""
        numbers = {
            "window": "x".join("all" if side < 0 else f"{side}" for side in self.window or ()),
            "softcap": _identifier(self.softcap),
        }
        if self.always:
            numbers["window"] += f"x{self.always}"
        named = "".join(
            f"_{name}{numbers.get(name, detail or _number(getattr(self, name, '')))}"
            for name, detail in self._structure()
        )
        return named + "".join(f"_{name}{_identifier(value)}" for name, value in self.scalars)

    def _structure(self) -> Iterator[tuple[str, str]]:
        """What is asked, and of which kind it is."""
        if self.window is not None:
            yield ("window", "always" if self.always else "")
        for name in ("chunk", "prefix", "lengths", "documents", "dilation", "tree", "softcap", "alibi"):
            if getattr(self, name):
                yield (name, "")
        if self.bias:
            yield ("bias", self.bias)
        if self.sinks:
            yield ("sinks", "")
        for name in ("mask", "score"):
            if getattr(self, name):
                yield (name, _digest(getattr(self, name), self.buffers, tuple(n for n, _ in self.scalars)))

    def to_dict(self) -> dict[str, Any]:
        """Returns what is asked as JSON has it, without what is not."""
        told = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                told[each.name] = _listed(value)
        return told

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scoring:
        """Returns what ``to_dict`` wrote; unknown keys and values of other types raise TypeError."""
        known = {each.name: each.default for each in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name not in known:
                raise TypeError(f"scoring has no {name!r:.80}")
            values[name] = _read(name, value, known[name])
        return cls(**values)


def _check_name(name: str) -> None:
    if not is_identifier(name):
        raise ValueError(f"{name!r:.80} is no name; up to 40 letters, digits and _ make one, but no keyword")
    if name in TAKEN:
        raise ValueError(f"{name!r} has a meaning of its own in kernels; choose another name")


def _identifier(number: float) -> str:
    """A number in letters that identifiers may have: ``1e-05`` is ``1em05``."""
    short = f"{number:g}"
    text = short if float(short) == number else repr(number)
    return text.replace(".", "p").replace("+", "").replace("-", "m")


def _number(value: object) -> str:
    return "" if isinstance(value, bool) else f"{value}"


def _digest(*of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:6]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _read(name: str, value: Any, default: Any) -> Any:
    wrong = TypeError(f"scoring's {name} is {value!r:.80}")
    if name == "window":
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(x) is int for x in value)):
            raise wrong
        return tuple(value)
    if name in ("buffers", "scalars"):
        kinds = (str,) if name == "buffers" else (int, float)
        if not isinstance(value, list | tuple):
            raise wrong
        for pair in value:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise wrong
            if type(pair[1]) not in kinds:
                raise wrong
        return tuple((pair[0], pair[1]) for pair in value)
    if type(value) is int and type(default) is float:
        return float(value)
    if type(value) is not type(default):
        raise wrong
    return value


#: Nothing is asked.
PLAIN = Scoring()
