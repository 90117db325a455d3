"""Functions with what they have captured replaced: arrays by what remembers how they are indexed.

No library's arrays can be indexed by what stands for an index. So the function is copied, with other values
in its closure, globals and defaults, and so are functions, partial functions and objects that it captured.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from typing import Any

from .captured import Captured
from .counterparts import COUNTERPARTS
from .proxy import ArrayProxy, Proxy, called_by_library, is_array

#: How far functions that call functions are followed, and how long lists are looked through.
_DEEPEST, _LONGEST = 12, 256
#: Libraries whose functions hold no arrays of a user, but for those that compose masks.
_LIBRARIES = frozenset({"torch", "numpy", "cupy", "jax", "jaxlib", "flashgen"}) | sys.stdlib_module_names
_COMPOSERS = ("torch.nn.attention", "flashgen.tuner.compat")
#: Modules whose functions do not ask their operands what they want to make of them.
_DEAF = frozenset({"math", "jax.numpy", "jax.nn", "jax.lax", "cupy"})


class Replaced:
    """Values with arrays in them replaced by what stands for these in ``captured``."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        #: What became of functions and objects, by their ids, which may hold each other.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._is_in_object = False

    def value(self, value: Any, name: str, depth: int = 0) -> Any:
        """Returns a value, itself where no array is in it; ``name`` is what it is called."""
        if is_array(value):
            if value.ndim:
                return ArrayProxy(self._captured, value, name)
            return Proxy(self._captured, self._captured.number(value, name))
        if isinstance(value, types.ModuleType):
            is_known = value.__name__.partition(".")[0] in _LIBRARIES and value.__name__ not in _DEAF
            return value if is_known else _ModuleProxy(self, value)
        if depth > _DEEPEST or isinstance(value, type):
            return value
        if getattr(value, "__module__", None) in _DEAF:
            return _listening(value)
        if id(value) in self._done:
            return self._done[id(value)][1]
        match value:
            case types.FunctionType():
                return self._function(value, depth + 1)
            case types.MethodType():
                function = self.value(value.__func__, name, depth + 1)
                return types.MethodType(function, self.value(value.__self__, name, depth + 1))
            case functools.partial():
                return self._partial(value, name, depth + 1)
            case tuple() | list() if type(value) in (tuple, list) and len(value) <= _LONGEST:
                names = (f"{name}_{number}" for number in count())
                return type(value)(self._items(value, names, depth))
            case dict() if type(value) is dict and len(value) <= _LONGEST:
                return self._entries(value, depth)
        return self._object(value, depth + 1)

    def _items(self, values: Iterable[Any], names: Iterable[str], depth: int) -> Iterator[Any]:
        # The values come first: names may have no end.
        return (self.value(each, name, depth + 1) for each, name in zip(values, names, strict=False))

    def _entries(self, values: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        return {key: self.value(each, str(key), depth + 1) for key, each in values.items()}

    def _partial(self, value: functools.partial[Any], name: str, depth: int) -> Callable[..., Any]:
        code = getattr(value.func, "__code__", None)
        known = code.co_varnames[: code.co_argcount] if code else ()
        names = chain(known, (f"{name}_{number}" for number in count()))
        args, keywords = self._items(value.args, names, depth), self._entries(value.keywords, depth)
        return functools.partial(self.value(value.func, name, depth), *args, **keywords)

    def _function(self, function: types.FunctionType, depth: int) -> Callable[..., Any]:
        """A copy of a function with other cells, globals and defaults; itself where it is a library's."""
        if _is_of_library(function) and not (function.__module__ or "").startswith(_COMPOSERS):
            return function
        code, closure = function.__code__, function.__closure__ or ()
        cells = tuple(types.CellType() for _ in closure)
        names = sorted(name for name in _global_names(code) if name in function.__globals__)
        scope = dict(function.__globals__)
        copy = types.FunctionType(code, scope, function.__name__, None, cells or None)
        self._done[id(function)] = (function, copy)
        for cell, old, name in zip(cells, closure, code.co_freevars, strict=True):
            if _is_filled(old):
                cell.cell_contents = self.value(old.cell_contents, name, depth)
        scope.update({name: self.value(function.__globals__[name], name, depth) for name in names})
        defaults = function.__defaults__ or ()
        with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        copy.__defaults__ = tuple(self._items(defaults, with_default, depth)) or None
        copy.__kwdefaults__ = self._entries(function.__kwdefaults__ or {}, depth) or None
        copy.__dict__.update(function.__dict__)
        return copy

    def _object(self, value: Any, depth: int) -> Any:
        """A copy of an object with other attributes, but for objects among these, which stay as they are."""
        if self._is_in_object or _is_of_library(type(value)) or not _is_plain(value):
            return value
        copy = object.__new__(type(value))
        self._done[id(value)] = (value, copy)
        self._is_in_object = True
        vars(copy).update(self._entries(vars(value), depth))
        self._is_in_object = False
        return copy


class _ModuleProxy:
    """A module whose arrays are replaced, and whose functions can be traced, where they are asked for."""

    def __init__(self, replaced: Replaced, module: types.ModuleType) -> None:
        self._replaced, self._module = replaced, module

    def __getattr__(self, name: str) -> Any:
        return self._replaced.value(getattr(self._module, name), name)


def _listening(function: Any) -> Any:
    """A function that leaves its work to operands which are traced; what is no known function as it is."""
    name = getattr(function, "__name__", "")
    return functools.partial(called_by_library, function) if name in COUNTERPARTS else function


def _is_of_library(what: Any) -> bool:
    return (what.__module__ or "").partition(".")[0] in _LIBRARIES


def _is_plain(value: Any) -> bool:
    """Whether an object is made of its attributes alone."""
    kind = type(value)
    has_slots = any("__slots__" in vars(each) for each in kind.__mro__[:-1])
    return hasattr(value, "__dict__") and kind.__new__ is object.__new__ and not has_slots


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _global_names(code: types.CodeType) -> set[str]:
    """The names that a function's code, and that of functions in it, may look up among globals."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _global_names(each)
    return found
