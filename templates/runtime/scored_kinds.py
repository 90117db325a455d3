"""Which of a module's kernels with masks and changes of scores serve just what a call asks."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .arrays import _check_kinds, _torch_of
from .facts import Tuned
from .scored_values import (
    Scored,
    _Asked,
    _AskedNumbers,
    _check_asked,
    _document_bounds,
    _is_pair,
    _serves_dtype,
)
from .table import _SIZES, _doublings, _Rank, _Table

#: What an unlimited side of a window counts as where windows are compared.
_UNLIMITED = 2.0**30


class _Serving(Protocol):
    """What serves calls by the kernels of a table."""

    _tensors: Any

    def use(self, name: str | None) -> None: ...

    def compile(self, name: str, arch: int, causal: bool) -> bytes: ...

    def carry(self, name: str, causal: bool, cubin: bytes) -> None: ...


_Group = TypeVar("_Group", bound=_Serving)

#: Of how many calls it is remembered what serves them, that name something else or other numbers.
_MOST_SERVED = 1024
#: The types of numbers that say the same whenever they are equal.
_NUMBERS = (int, float, bool)


class _ScoredTable(_Table):
    """Kernels that read and compute the same, of which the nearest serves, also by the numbers that they were
    tuned for."""

    def __init__(self, kernels: tuple[Scored, ...], numbers: tuple[float, ...]) -> None:
        super().__init__(kernels)
        self.numbers = numbers

    def rank(self, tuned: Tuned, asked: dict[str, int], strides: tuple[int, ...], causal: bool) -> _Rank:
        rank = super().rank(tuned, asked, strides, causal)
        assert isinstance(tuned, Scored)
        apart = _distance(tuple(tuned.scalars.values()), self.numbers)
        return rank._replace(inexact=rank.inexact or apart > 0, distance=rank.distance + apart)


class _Operands(_Asked):
    """What an operator was told: arrays by the kernel's own names."""

    def buffers(self, may_make: bool = True) -> dict[str, Any]:
        return dict(self.arrays)

    def array(self, name: str) -> Any:
        return self.arrays[name]


def _operands(
    tuned: Scored, names: Sequence[str], buffers: Sequence[Any], numbers: Sequence[float]
) -> _Asked:
    """What kernels read, of all that an operator was told: the arrays in their order, and the numbers of
    those names."""
    if len(buffers) != len(tuned.buffers) or len(numbers) != len(names):
        raise ValueError(
            f"the operator takes the buffers {', '.join(tuned.buffers) or '(none)'} and the numbers "
            f"{', '.join(names) or '(none)'}, not {len(buffers)} and {len(numbers)}"
        )
    told = dict(zip(names, numbers, strict=True))
    told = {name: int(number) if name in tuned.integers else number for name, number in told.items()}
    return _Operands(tuned, told, dict(zip(tuned.buffers, buffers, strict=True)), {})


class _Alike(Generic[_Group]):
    """A module's kernels that read and compute the same."""

    def __init__(
        self,
        kernels: tuple[Scored, ...],
        operator: str,
        make: Callable[[tuple[Scored, ...], tuple[float, ...], str], _Group],
    ) -> None:
        """`make` makes what serves by kernels, for numbers near those, under such a name."""
        self.kernels, self.first = kernels, kernels[0]
        for name in ("named", "keywords", "called", "required", "reads", "numbers", "integers", "exact"):
            getattr(self.first, name)  # torch.compile reads what is there, and makes none of them
        tuned_for = list(dict.fromkeys(tuple(each.scalars.values()) for each in kernels))
        self.groups = {
            numbers: make(kernels, numbers, f"{operator}_{index}" if len(tuned_for) > 1 else operator)
            for index, numbers in enumerate(tuned_for)
        }
        """What serves calls with numbers near these."""

    @property
    def words(self) -> str:
        """What a call names to be served."""
        return ", ".join(f"{each}=" for each in self.first.keywords)

    def group(self, numbers: tuple[float, ...]) -> _Group:
        """Returns what serves the nearest of the numbers that kernels were tuned for."""
        groups = list(self.groups.values())
        if len(groups) == 1:
            return groups[0]
        # torch.compile traces no min() by a key.
        apart = [_distance(each, numbers) for each in self.groups]
        return groups[apart.index(min(apart))]

    def serves(self, asked: Mapping[str, Any]) -> bool:
        """Tells whether these are the kernels for just what a call names."""
        first = self.first
        if not (set(first.named) | set(first.required)) <= set(asked) <= set(first.keywords):
            return False
        # Several kinds may read an array of one name, such as boolean masks and biases.
        arrays = [(name, asked[each]) for each in first.required for name in first.keywords[each]]
        return all(_serves_dtype(first.buffers[name], array) for name, array in arrays)

    def numbers(self, asked: Mapping[str, Any]) -> dict[str, float]:
        """Returns all numbers that kernels take, of those that a call names and the usual ones."""
        found: dict[str, float] = {}
        for keyword in self.first.keywords:
            if keyword in asked and keyword not in self.first.required:
                found |= self.first.numbers_of(keyword, asked[keyword])
            elif keyword not in self.first.required:
                found |= self._usual(keyword)
        return {name: found[name] for name in self.first.scalars}

    def _usual(self, keyword: str) -> dict[str, float]:
        """The numbers of a keyword that is left out: those that all kernels were tuned for."""
        names = self.first.keywords[keyword]
        found = {tuple(each.scalars[name] for name in names) for each in self.kernels}
        if len(found) > 1:
            told = " and ".join(sorted(f"({', '.join(f'{n:g}' for n in each)})" for each in found))
            raise TypeError(f"{keyword}= is missing, and kernels were tuned for {told}: say which is meant")
        return dict(zip(names, found.pop(), strict=True))


def _distance(numbers: tuple[float, ...], others: tuple[float, ...]) -> float:
    """Doublings between what is tuned for and what is asked for."""
    wide = [[_UNLIMITED if each < 0 else each + 1 for each in side] for side in (numbers, others)]
    return sum(_doublings(one, other) for one, other in zip(*wide, strict=True))


class _Served(NamedTuple, Generic[_Group]):
    """What serves calls that name the same arrays, and the same numbers."""

    kind: Scored
    """What all kernels for them read alike."""
    group: _Group
    numbers: Mapping[str, float]
    """What kernels are told."""
    beside: _Asked | None
    """All that kernels read beside q, k and v where that is numbers; None where arrays are, or scales."""


class _ByKind(Generic[_Group]):
    """A module's kernels, those apart that compute something else."""

    def __init__(self, kernels: Sequence[Tuned], operator: str) -> None:
        """`operator` names the kernels among torch's operators."""
        self.kernels = tuple(kernels)
        scored: dict[tuple[object, ...], list[Scored]] = {}
        plain = []
        for each in kernels:
            if isinstance(each, Scored):
                scored.setdefault(each.kind, []).append(each)
            else:
                plain.append(each)
        self._plain = self._serving_plain(plain, operator) if plain else None
        several = len(scored) + len(plain) > 1
        self._kinds = [
            _Alike(tuple(alike), f"{operator}_{index}" if several else operator, self._serving)
            for index, alike in enumerate(scored.values())
        ]
        self._served: dict[tuple[Any, ...], _Served[_Group]] = {}

    def _serving_plain(self, kernels: Sequence[Tuned], operator: str) -> _Group:
        """Returns what serves by kernels without masks and changes of scores."""
        raise NotImplementedError

    def _serving(self, kernels: tuple[Scored, ...], numbers: tuple[float, ...], operator: str) -> _Group:
        """Returns what serves by those that compute the same, for numbers near these."""
        raise NotImplementedError

    def _alike(self, asked: Mapping[str, Any]) -> _Alike[_Group] | None:
        """The kernels for just what a call names; None: those without masks and changes of scores."""
        if self._plain is None and len(self._kinds) == 1:
            alike = self._kinds[0]
            _check_asked(alike.first, asked)
            return alike
        if not asked and self._plain is not None:
            return None
        serving = [each for each in self._kinds if each.serves(asked)]
        if len(serving) != 1:
            plain = ["nothing"] if self._plain is not None else []
            told = "; ".join([*plain, *(each.words for each in self._kinds)])
            asked_for = ", ".join(f"{each}=" for each in asked) or "nothing"
            raise TypeError(
                f"no kernel here serves {asked_for} in these types; there are kernels for: {told}"
            )
        return serving[0]

    def _group(self, alike: _Alike[_Group], asked: Mapping[str, Any]) -> tuple[_Group, dict[str, float]]:
        """What serves numbers near those of a call, and these."""
        numbers = alike.numbers(asked)
        return alike.group(tuple(numbers.values())), numbers

    def _served_by(self, asked: Mapping[str, Any]) -> _Served[_Group] | None:
        """What serves a call that names this; None: kernels without masks and changes of scores."""
        torch = sys.modules.get("torch")
        # A graph would be traced anew for whatever is remembered behind it.
        key = None if torch is not None and torch.compiler.is_compiling() else _key_of(asked)
        found = None if key is None else self._served.get(key)
        if found is not None:
            return found
        alike = self._alike(asked)
        if alike is None:
            return None
        kind, (group, numbers) = alike.first, self._group(alike, asked)
        alone = _AskedNumbers(kind, numbers) if numbers.keys() >= {*kind.reads} else None
        found = _Served(kind, group, numbers, alone)
        # A number that is read of an array may be another next time.
        if key is not None and not any(_is_array(asked[each]) for each in asked.keys() - {*kind.required}):
            if len(self._served) >= _MOST_SERVED:
                self._served.clear()
            self._served[key] = found
        return found

    def use(self, name: str | None) -> None:
        """Makes the kernel of that name serve whatever it can compute from now on, however far its shapes:
        for measuring and checking. None lets the nearest serve again. Raises ValueError for an unknown
        name."""
        for group in self._groups():
            group.use(None)
        for group in self._groups_of(name) if name is not None else ():
            group.use(name)

    def _groups(self) -> list[_Group]:
        plain = [] if self._plain is None else [self._plain]
        return [*plain, *(group for alike in self._kinds for group in alike.groups.values())]

    def _groups_of(self, name: str) -> list[_Group]:
        """What may choose the kernel of that name."""
        found = [
            each
            for each in self._groups()
            if any(name == tuned.name for tuned in each._tensors.table.kernels)
        ]
        if not found:
            names = ", ".join(tuned.name for tuned in self.kernels)
            raise ValueError(f"there is no kernel {name!r}; there are {names}")
        return found

    def compile(self, name: str, arch: int, causal: bool) -> bytes:
        """Compiles the kernel of that name for one compute capability, times ten, and mask; returns the
        cubin."""
        return self._groups_of(name)[0].compile(name, arch, causal)

    def carry(self, name: str, causal: bool, cubin: bytes) -> None:
        """Makes that cubin serve for the kernel of that name on the cards it was tuned for."""
        self._groups_of(name)[0].carry(name, causal, cubin)

    @staticmethod
    def document_bounds(ids: Any, seqlen_q: int | None = None) -> tuple[Any, Any]:
        """Returns where each row's document begins and ends, int32 (batch, seqlen_q), for `documents`.

        ``ids`` are those of the keys, sorted, (batch, seqlen_k): torch, CuPy or numpy arrays, on whose device
        they are searched. There are ``seqlen_q`` rows, by default one for each key. Raises TypeError and
        ValueError for other arrays.
        """
        keys = int(ids.shape[-1]) if len(ids.shape) else 0
        return _document_bounds(ids, keys if seqlen_q is None else seqlen_q, keys)


def _key_of(asked: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What calls have in common that name the same numbers, and arrays of the same types; None where that
    cannot be told."""
    parts: list[Any] = []
    for name, value in asked.items():
        parts += name, type(value)
        for each in value if type(value) is tuple else (value,):
            if each is None or type(each) in _NUMBERS:
                parts += type(each), each
            elif (dtype := getattr(each, "dtype", None)) is not None:
                parts.append(dtype)
            else:
                return None
    return tuple(parts)


def _is_array(value: Any) -> bool:
    """Whether what is told is an array, or a pair of them, not numbers."""
    return any(hasattr(each, "dtype") for each in (value if type(value) is tuple else (value,)))


def _named(**asked: Any) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


def _told(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a call names, each by one name."""
    told = _named(**asked)
    if "attn_mask" in told:
        told["bias"] = _either(told.get("bias"), told.pop("attn_mask"))
    return told


def _either(bias: Any, attn_mask: Any) -> Any:
    if bias is not None and attn_mask is not None:
        raise TypeError("bias= and attn_mask= are two names of one argument; pass one of them")
    return attn_mask if bias is None else bias


def _arrays_of(
    tuned: Scored, asked: Mapping[str, Any], q: Any, differentiable: bool = False
) -> dict[str, Any]:
    """The arrays of a call by their keywords; raises TypeError for those of another library than q, and
    RuntimeError for those that need a gradient unless kernels take it."""
    torch = _torch_of(q)
    arrays = {each: asked[each] for each in tuned.required}
    for name, array in arrays.items():
        for each in array if _is_pair(array) else (array,):
            _check_kinds(q, ((name, each),))
            if torch is None or differentiable:
                continue
            if torch.is_grad_enabled() and each.requires_grad:
                raise RuntimeError(
                    f"{name} requires a gradient, but this kernel is forward only: call it under "
                    f"torch.no_grad(), or pass {name}.detach()"
                )
    return arrays


def _sizes_of(q: Any, k: Any, layout: str) -> dict[str, int]:
    """The sizes of arrays that are as they should be; whether they are, is found out later."""
    of_q, of_k = _shape_of(q), _shape_of(k)
    if len(of_q) != 4 or len(of_k) != 4:
        return {}
    heads, rows = (1, 2) if layout == "bhsd" else (2, 1)
    return dict(zip(_SIZES, (of_q[0], of_q[heads], of_k[heads], of_q[rows], of_k[rows]), strict=True))


def _shape_of(array: Any) -> tuple[int, ...]:
    if hasattr(array, "shape"):
        return tuple(array.shape)
    return tuple(getattr(array, "__cuda_array_interface__", {"shape": ()})["shape"])
