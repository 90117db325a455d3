"""What the user typed, turned into problems, families and settings; wrong input gets a UsageError."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..gen.families import family_named
from ..gen.problem import ITEM_BYTES, Problem
from ..gen.variant import Value, Variant
from .device import FlashgenError

T = TypeVar("T")


class UsageError(FlashgenError):
    """The command was given something that does not exist or is out of range; it exits 2."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The problem's options, None where they were not given."""

    dtype: str | None = None
    head_dim: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seqlen: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    causal: bool | None = None

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in vars(self).values())

    @property
    def has_sizes(self) -> bool:
        """Whether batch, heads or a length was given."""
        sizes = (self.batch, self.heads, self.kv_heads, self.seqlen, self.seqlen_q, self.seqlen_k)
        return any(size is not None for size in sizes)

    def problem(self) -> Problem:
        """The problem, with defaults for what was not given. Raises UsageError."""
        default = Problem()
        if self.dtype is not None and self.dtype not in ITEM_BYTES:
            raise UsageError(
                f"unknown dtype {self.dtype!r}; {suggestion(self.dtype, list(ITEM_BYTES))}, as in --dtype f32"
            )
        heads = _or(self.heads, default.num_q_heads)
        return checked(
            lambda: Problem(
                dtype=_or(self.dtype, default.dtype),
                batch=_or(self.batch, default.batch),
                num_q_heads=heads,
                num_kv_heads=_or(self.kv_heads, heads),
                seqlen_q=_or(self.seqlen_q, _or(self.seqlen, default.seqlen_q)),
                seqlen_k=_or(self.seqlen_k, _or(self.seqlen, default.seqlen_k)),
                head_dim=_or(self.head_dim, default.head_dim),
                causal=_or(self.causal, default.causal),
            )
        )


def parse_families(names: Sequence[str]) -> tuple[type[Variant], ...]:
    """The families called ``names``, each once. Raises UsageError."""
    return tuple(dict.fromkeys(checked(lambda name=name: family_named(name)) for name in names))


def parse_settings(family: type[Variant], settings: Sequence[str]) -> dict[str, Value]:
    """The typed values of ``name=value`` texts. Raises UsageError for a name or value that is none."""
    texts: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise UsageError(f"--set {setting!r} is not of the form name=value, as in --set bc=64")
        texts[name.strip()] = text.strip()
    return checked(lambda: family.parse(texts))


def checked(make: Callable[[], T]) -> T:
    """What ``make`` returns; the ValueError of a value out of range becomes a UsageError."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def suggestion(name: str, known: Sequence[str]) -> str:
    """``did you mean ...?`` where something is near, else all there is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"


def _or(given: T | None, default: T) -> T:
    return default if given is None else given
