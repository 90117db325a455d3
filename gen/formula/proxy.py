"""What stands for numbers while a function is traced, and for the arrays that it has captured.

A `Proxy` takes part in whatever the function computes, by Python's operators, its own methods, and functions
of torch and numpy, and remembers all of it as an expression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..expression import Expression, Kind, apply, expression_of
from .captured import Captured, TraceError
from .counterparts import COUNTERPARTS
from .dtypes import kind_of

_CONDITION = (
    "while a function is traced, nothing is known of an index or a score: write torch.where(c, x, y) for "
    "`if`, `&`, `|` and `~` for `and`, `or` and `not`, torch.minimum(x, y) for `min`, and "
    "`(a <= b) & (b <= c)` for `a <= b <= c`"
)
_NUMBER = "while a function is traced, an index or a score is no number of Python's"
_IN_PLACE = "nothing is changed in place while a function is traced"
_KNOWN = (
    "arithmetic, comparisons, bits, where, minimum, maximum, clamp, abs, exp, exp2, log, log2, pow, sqrt, "
    "rsqrt, tanh, sin, cos, sigmoid, relu, floor, ceil, trunc and the like"
)
#: What functions of libraries are given beside operands, and what does not matter here.
_IGNORED = frozenset(
    {"out", "dtype", "inplace", "device", "layout", "requires_grad", "memory_format", "casting", "order"}
)


class Proxy:
    """An index, a score, or what was made of them."""

    ndim = 0
    shape = ()
    #: Where tensors of torch are then made.
    device = None

    def __init__(self, captured: Captured, expression: Expression) -> None:
        self._captured, self.expression = captured, expression

    def __repr__(self) -> str:
        return f"traced {self.expression!r}"

    __hash__ = object.__hash__

    @property
    def dtype(self) -> Kind:
        """Its kind, which `to` takes again."""
        return self.expression.kind

    # -- what a library's array has as well ----------------------------------------------------------------

    def to(self, *args: Any, dtype: Any = None, **_: Any) -> Proxy:
        """Returns it as another type; devices and layouts do not matter."""
        for each in (*args, dtype):
            wanted = each.dtype if isinstance(each, Proxy) else each
            try:
                kind = kind_of(wanted)
            except ValueError:  # a device, whether to wait
                continue
            return Proxy(self._captured, apply(str(kind), self.expression))
        return self

    type = astype = to

    def item(self) -> Proxy:
        """Returns itself: a number already."""
        return self

    def size(self, *_: Any) -> tuple[()]:
        """Returns the lengths of its axes: none."""
        return ()

    def dim(self) -> int:
        """Returns how many axes it has."""
        return 0

    def new_ones(self, *_: Any, dtype: Any = None, **__: Any) -> Proxy:
        """Returns 1 of its type, or true."""
        return self.new_tensor(1, dtype=dtype or self.dtype)

    def new_zeros(self, *_: Any, dtype: Any = None, **__: Any) -> Proxy:
        """Returns 0 of its type, or false."""
        return self.new_tensor(0, dtype=dtype or self.dtype)

    def new_full(self, _size: Any, fill_value: Any, *, dtype: Any = None, **__: Any) -> Proxy:
        """Returns a number of its type."""
        return self.new_tensor(fill_value, dtype=dtype or self.dtype)

    def new_tensor(self, data: Any, *, dtype: Any = None, **_: Any) -> Proxy:
        """Returns a number."""
        return Proxy(self._captured, _operand(data)).to(dtype)

    def where(self, condition: Any, other: Any) -> Proxy:
        """Returns itself where a condition holds, else another."""
        return _called(self._captured, "where", (condition, self, other))

    def __getattr__(self, name: str) -> Any:
        if name in _CASTS:
            return lambda: self.to(_CASTS[name])
        if name in COUNTERPARTS:
            return lambda *args, **kwargs: _called(self._captured, name, (self, *args), kwargs)
        if name.endswith("_") and name[:-1] in COUNTERPARTS:
            raise TraceError(f"{_IN_PLACE}: {name[:-1]}, not {name}")
        raise _NoAttributeError(f"an index or a score has no .{name} while a function is traced")

    # -- functions of libraries ----------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return called_by_library(func, *args, **(kwargs or {}))

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return called_by_library(func, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise TraceError(f"a formula has no {ufunc.__name__}.{method}")
        return called_by_library(ufunc, *inputs, **kwargs)

    # -- what only a number can do -------------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise TraceError(_CONDITION)

    def __index__(self) -> NoReturn:
        raise TraceError(
            f"{_NUMBER}: index arrays that the function has captured as variables, and loop over ranges that "
            "do not depend on it"
        )

    def __int__(self) -> NoReturn:
        raise TraceError(f"{_NUMBER}: write x.int() for int(x)")

    def __float__(self) -> NoReturn:
        raise TraceError(f"{_NUMBER}: write x.float() for float(x), torch.exp(x) for math.exp(x)")

    def __len__(self) -> NoReturn:
        raise TraceError(f"{_NUMBER}, and has no length")

    def __iter__(self) -> Iterator[Any]:
        raise TraceError(f"{_NUMBER}, and has nothing in it to go through")

    def __getitem__(self, index: Any) -> Proxy:
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        raise TraceError(f"{self.expression.python()} is a single number and has no indices")


class ArrayProxy:
    """An array that a traced function has captured, with none or some of its indices."""

    def __init__(
        self, captured: Captured, array: Any, hint: str, indices: tuple[Expression, ...] = ()
    ) -> None:
        self._captured, self._array, self.hint, self._indices = captured, array, hint, indices

    def __repr__(self) -> str:
        return f"captured {self.hint}"

    @property
    def whole(self) -> Any:
        """The array itself, where no index is given yet."""
        if self._indices:
            axes = self._array.ndim
            raise TraceError(
                f"{self.hint} has {axes} axes, but {len(self._indices)} indices where it is used: "
                "a formula takes elements, with an index for each axis"
            )
        return self._array

    def __getitem__(self, index: Any) -> Proxy | ArrayProxy:
        given = index if isinstance(index, tuple) else (index,)
        if any(each is None or each is Ellipsis or isinstance(each, slice) for each in given):
            raise TraceError(f"{self.hint}: a formula takes elements, with an index for each axis, no slices")
        indices, axes = (*self._indices, *map(self._index, given)), self._array.ndim
        if len(indices) > axes:
            raise TraceError(f"{self.hint} has {axes} axes, but {len(indices)} indices")
        if len(indices) < axes:
            return ArrayProxy(self._captured, self._array, self.hint, indices)
        return Proxy(self._captured, self._captured.element(self._array, self.hint, indices))

    def _index(self, value: Any) -> Expression:
        found = _operand(value)
        if found.kind is Kind.FLOAT:
            raise TraceError(f"an index of {self.hint} is a float: {found.python()}; write x.int()")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self._array.shape[len(self._indices)]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole.__array__(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return called_by_library(func, *args, **(kwargs or {}))


class _NoAttributeError(TraceError, AttributeError):
    """What a number has not, for which Python may ask."""


def is_array(value: Any) -> bool:
    """Returns whether a value is an array of some library, with a type and axes; single numbers are none."""
    if isinstance(value, type | Proxy | ArrayProxy) or not hasattr(value, "__getitem__"):
        return False
    is_number = type(value).__module__ == "numpy" and not hasattr(value, "__setitem__")
    return not is_number and all(hasattr(value, each) for each in ("shape", "dtype", "ndim", "item"))


_CASTS: Mapping[str, type] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16"), float),
    **dict.fromkeys(("int", "long", "short"), int),
    "bool": bool,
}


def _operand(value: Any) -> Expression:
    """An operand as an expression."""
    if isinstance(value, Proxy):
        return value.expression
    if isinstance(value, ArrayProxy) or (is_array(value) and value.ndim):
        name = value.hint if isinstance(value, ArrayProxy) else "an array"
        if isinstance(value, ArrayProxy):
            value = value.whole
        raise TraceError(f"{name} of {value.ndim} axes is used whole: a formula takes elements, array[b, q]")
    try:
        return expression_of(value)
    except ValueError as error:
        raise TraceError(str(error)) from None


def _proxies(values: Sequence[Any]) -> Iterator[Proxy]:
    for each in values:
        if isinstance(each, Proxy):
            yield each
        elif isinstance(each, tuple | list):
            yield from _proxies(each)


def called_by_library(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a library's function is of operands: a proxy where there are some among these."""
    found = next(_proxies([*args, *kwargs.values()]), None)
    if found is None:  # what is made of arrays alone is made at once
        return function(*_unwrapped(args), **{key: _unwrapped(value) for key, value in kwargs.items()})
    name = function.__name__
    if name == "__getitem__":
        array, index = args
        return (array if isinstance(array, ArrayProxy) else ArrayProxy(found._captured, array, "array"))[
            index
        ]
    return _called(found._captured, name, args, kwargs)


def _unwrapped(value: Any) -> Any:
    """Arrays themselves in the place of what stands for them."""
    if isinstance(value, ArrayProxy):
        return value.whole
    return type(value)(map(_unwrapped, value)) if type(value) in (tuple, list) else value


def _called(
    captured: Captured, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Proxy:
    """A function, by the name that libraries or Python's operators give it, of operands."""
    kwargs, plain = kwargs or {}, name.strip("_")
    build = COUNTERPARTS.get(plain)
    if build is None and plain.startswith("r") and plain[1:] in COUNTERPARTS:
        build, args = COUNTERPARTS[plain[1:]], args[::-1]
    if build is None:
        raise TraceError(f"a formula has no {plain}: it has {_KNOWN}")
    if kwargs.get("out") is not None:
        raise TraceError(f"{_IN_PLACE}: {plain} without out=")
    operands = [None if each is None else _operand(each) for each in args]
    named = {
        key: value if isinstance(value, str) else _operand(value)
        for key, value in kwargs.items()
        if value is not None and key not in _IGNORED
    }
    try:
        return Proxy(captured, build(*operands, **named)).to(kwargs.get("dtype"))
    except TraceError:
        raise
    except TypeError:
        raise TraceError(f"{plain} cannot be traced with these operands: {args!r} {kwargs or ''}") from None
    except ValueError as error:
        raise TraceError(str(error)) from None


# -- Python's operators --------------------------------------------------------------------------------------


def _method(name: str, *, swapped: bool = False) -> Callable[..., Proxy]:
    def method(self: Proxy, *others: Any) -> Proxy:
        return _called(self._captured, name, (*others, self) if swapped else (self, *others))

    return method


def _array_method(name: str, *, swapped: bool = False) -> Callable[..., Any]:
    """Of arrays as they are, of which another array comes; with a proxy nothing does."""

    def method(self: ArrayProxy, *others: Any) -> Any:
        if any(isinstance(each, Proxy) for each in others):
            return _operand(self)
        operands = _unwrapped((*others, self) if swapped else (self, *others))
        return getattr(operator, f"__{name}__")(*operands)

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _class, _make in ((Proxy, _method), (ArrayProxy, _array_method)):
    for _name in (*_BINARY, "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs"):
        setattr(_class, f"__{_name}__", _make(_name))
    for _name in _BINARY:
        setattr(_class, f"__r{_name}__", _make(_name, swapped=True))
