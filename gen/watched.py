"""Variants that note which of their parameters are read, so that one verdict of a rule serves all alike; and
variants whose parameters are asked for as they are read, as those of many at once are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .variant import Value, Variant

#: What a watched variant holds beside the parameters that were read: all its values, and the names noted.
_VALUES, _READ = "_values", "_read"
#: What an asking variant holds beside them: whom it asks.
_ASKED = "_asked"


class _Watch:
    """Stands for a parameter until it is read; then the value itself is there, in the instance."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, variant: Any, owner: type) -> Value:
        held, name = variant.__dict__, self._name
        held[_READ].add(name)
        value = held[name] = held[_VALUES][name]
        return value


@cache
def _watched_family(family: type[Variant]) -> type[Variant]:
    return type(family.__name__, (family,), {p.name: _Watch(p.name) for p in family.parameters()})


def watched(family: type[Variant], values: Mapping[str, Value], read: set[str]) -> Variant:
    """Returns the variant with these values, one of every parameter, that adds to ``read`` the name of each
    parameter that is asked for."""
    made = object.__new__(_watched_family(family))
    made.__dict__[_VALUES], made.__dict__[_READ] = values, read
    return made


class _Asked:
    """Stands for a parameter until it is read; then what was told of it is there, in the instance."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, variant: Any, owner: type) -> Any:
        held = variant.__dict__
        value = held[self._name] = held[_ASKED](self._name)
        return value


@cache
def _asking_family(family: type[Variant]) -> type[Variant]:
    return type(family.__name__, (family,), {p.name: _Asked(p.name) for p in family.parameters()})


def asking(family: type[Variant], tell: Callable[[str], Any]) -> Variant:
    """Returns a variant whose parameters are what ``tell`` returns for their names, a column of numbers
    maybe."""
    made = object.__new__(_asking_family(family))
    made.__dict__[_ASKED] = tell
    return made
