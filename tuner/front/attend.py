"""One call of attention, and the way it takes through the runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...gen.scoring.asked import PLAIN, Scoring
from ...templates.runtime.arrays import _kind
from ...templates.runtime.attention import Attention, _check_call
from ...templates.runtime.gradient_plans import _NOTHING_READ
from ...templates.runtime.gradient_tensors import _Settings
from ...templates.runtime.plans import _NOTHING_BESIDE, _Beside
from ...templates.runtime.scored_gradients import _in_order, _wanted, _WantedGradients
from ...templates.runtime.scored_kinds import _MOST_SERVED, _NUMBERS, _arrays_of, _either, _sizes_of
from ...templates.runtime.scored_values import Scored, TileLists, _Asked
from .asked import Asked, Formula, asked_of
from .bound import Bound, outline
from .card import check_card
from .host_gradients import attend_differentiably, derived_of
from .host_tensors import as_arrays, as_tensor
from .legal import check_kept, check_told, flag, numbers_of, scale_of

_S = TypeVar("_S")


class Call(NamedTuple):
    """What `flashgen.attention` was told: ``named`` are masks and changes of scores that have names, without
    those that are None."""

    q: Any
    k: Any
    v: Any
    named: Mapping[str, Any]
    mask: Formula | None
    score: Formula | None
    buffers: Mapping[str, Any]
    causal: bool = False
    scale: float | None = None
    layout: str = "bhsd"
    return_lse: bool = False
    out: Any = None
    stream: Any = None
    scales: tuple[float, float, float] | None = None
    precision: str = "auto"
    lists: TileLists | None = None
    bias_name: str = "bias"
    """What the caller calls the bias."""

    def called(self, name: str) -> str:
        """Returns what the caller calls an argument."""
        return self.bias_name if name == "bias" else name

    @property
    def asks_more(self) -> bool:
        """Whether it asks for more than a causal mask."""
        return bool(self.named or self.buffers) or self.mask is not None or self.score is not None


#: Masks and changes of scores that have names.
_NAMED = ("window", "always", "chunk", "prefix", "lengths", "documents", "dilation", "tree", "softcap")
_NAMED += ("alibi_slopes", "sinks")


def call_of(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Formula | None = None,
    score: Formula | None = None,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    scales: tuple[float, float, float] | None = None,
    precision: str = "auto",
    lists: TileLists | None = None,
    **asked: Any,
) -> Call:
    """Returns what `flashgen.attention` is told as a call; what is ``asked`` beside are masks and changes of
    scores by name, and what their texts read. Raises TypeError for a bias that is passed twice."""
    named = {name: asked.pop(name, None) for name in _NAMED}
    bias_name = "bias" if asked.get("attn_mask") is None else "attn_mask"
    named["bias"] = _either(asked.pop("bias", None), asked.pop("attn_mask", None))
    named, read = numbers_of({name: value for name, value in named.items() if value is not None}, asked)
    settings = (flag("causal", causal), scale_of(scale), layout, flag("return_lse", return_lse))
    check_kept(lists)
    given = (out, stream, scales, precision, lists, bias_name)
    return Call(q, k, v, named, mask, score, read, *settings, *given)


def attend(bound: Bound, call: Call) -> Any:
    """Computes what a call asks. Raises as `flashgen.attention` says."""
    _check_call(call.layout, call.scale)
    check_card(bound.card, call.q)
    torch = sys.modules.get("torch")
    if bound.card is not None and torch is not None and isinstance(call.q, torch.Tensor):
        return _on_host(bound, call, torch)
    if isinstance(call.q, np.ndarray):
        read = {call.called(name): x for name, x in (*call.named.items(), *call.buffers.items())}
        check_told({"q": call.q, "k": call.k, "v": call.v, **read}, call.out)
    attention, scale, beside = served_by(bound, call)
    if torch is not None and isinstance(call.q, torch.Tensor) and attention._tensors.gradients is None:
        check_underived(torch, (call.q, call.k, call.v), "fallback='torch'")
    settings = (call.causal, scale, call.out, call.stream, call.return_lse, call.layout)
    arrays = (call.q, call.k, call.v)
    try:
        if torch is not None and isinstance(call.q, torch.Tensor):
            return attention._attend_tensors(torch, *arrays, *settings, False, beside)
        if bound.card is not None and not hasattr(call.q, "__array_function__"):
            raise TypeError(
                f"q is a {_kind(call.q)}; emulated cards take arrays of the host, numpy's or torch's"
            )
        return attention._attend_others(*arrays, *settings, beside)
    except BaseException:
        if call.lists is not None:
            call.lists.forget()
        raise


def check_underived(torch: Any, tensors: tuple[Any, Any, Any], way_out: str = "") -> None:
    """Raises TypeError for q, k and v of which one needs a gradient, which no kernel takes; ``way_out`` is
    what else the caller may pass."""
    derived = next((name for name, x in zip("qkv", tensors, strict=True) if x.requires_grad), None)
    if derived is not None and torch.is_grad_enabled():
        ways = f"call it under torch.no_grad(), {'' if way_out else 'or '}pass {derived}.detach()"
        raise TypeError(
            f"{derived} requires a gradient, and no kernel takes those of such a call (of eight bits, or "
            f"beside an array that is called as a gradient is): {ways}{way_out and f', or {way_out}'}"
        )


def served_by(bound: Bound, call: Call) -> tuple[Attention, float | None, _Beside]:
    """Returns what serves a call, its scale, and what kernels read beside its arrays."""
    if not call.asks_more:
        attention = bound.attending(scaled=call.scales is not None, precision=call.precision)
        if call.scales is None:
            return attention, call.scale, _NOTHING_BESIDE
        scale, value_scale = attention._fold(call.q, call.scale, call.scales)
        return attention, scale, _Beside(value_scale)
    served, told = _served(bound, call)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(call.q, np.ndarray):
        # Functions of masks and scores have captured tensors still, where a call's were made arrays of.
        told = {name: as_arrays(torch, value) for name, value in told.items()}
    kind, numbers, scale = served.kind, served.numbers, call.scale
    if call.scales is not None:
        scale, value_scale = served.attention._fold(call.q, scale, call.scales)
        numbers = {**numbers, "value_scale": value_scale}
    arrays = _arrays_of(kind, told, call.q, served.attention._tensors.gradients is not None)
    sizes = _sizes_of(call.q, call.k, call.layout)
    beside = _Asked(kind, numbers, arrays, sizes, call.lists)
    if call.bias_name != "bias":
        beside.called = {**kind.called, "bias": call.bias_name}
    return served.attention, scale, beside


class _Served(NamedTuple):
    """What serves calls that ask the same, arrays apart."""

    attention: Attention
    kind: Scored
    numbers: Mapping[str, float]


def _served(bound: Bound, call: Call) -> tuple[_Served, Mapping[str, Any]]:
    """What serves a call, and what it says by keyword; of what functions ask it is found out each time, as
    they may have captured other arrays."""
    told = {**call.named, **call.buffers} if call.buffers else call.named
    kind = {"scaled": call.scales is not None, "precision": call.precision}
    key = key_of(told, call.mask, call.score, **kind)
    found = bound.served.get(key) if key is not None else None
    if found is None:
        asked = asked_of(call.named, call.mask, call.score, call.buffers, call.bias_name)
        told, attention = asked.told, bound.attending(asked.scoring, **kind)
        scored = outline(attention)
        assert isinstance(scored, Scored)
        found = _Served(attention, scored, _numbers(scored, call, told))
        if key is not None:
            remember_served(bound, key, found)
    return found, told


def serving(
    bound: Bound,
    kind: tuple[Any, ...],
    make: Callable[[Scoring], _S],
    named: Mapping[str, Any],
    mask: Formula | None,
    score: Formula | None,
    values: Mapping[str, Any],
    bias_name: str = "bias",
) -> tuple[_S, Asked]:
    """Returns what serves a call whose signature is another than `flashgen.attention`'s, and what it asks; of
    what functions ask it is found out each time.

    ``kind`` tells what ``make`` makes of a scoring from what else there is. What is known is found without a
    lock, which torch.compile could not trace.
    """
    told: Mapping[str, Any] = {**named, **values}
    asked_alike = key_of(told, mask, score, scaled=False)
    key = None if asked_alike is None else (*kind, *asked_alike)
    found = None if key is None else bound.served.get(key)
    if found is None:
        asked = asked_of(named, mask, score, values, bias_name)
        found, told = (make(asked.scoring), asked.scoring), asked.told
        first = getattr(found[0], "tuned", None)
        _check_read(first.keywords if isinstance(first, Scored) else (), told, values)
        if key is not None:
            remember_served(bound, key, found)
    served, scoring = found
    return served, Asked(scoring, told)


def remember_served(bound: Bound, key: tuple[Any, ...], found: Any) -> None:
    """Keeps what serves calls that ask the same."""
    if len(bound.served) >= _MOST_SERVED:
        bound.served.clear()
    bound.served[key] = found


def key_of(
    told: Mapping[str, Any],
    mask: Formula | None,
    score: Formula | None,
    *,
    scaled: bool,
    precision: str = "auto",
) -> tuple[Any, ...] | None:
    """Returns what calls have in common that ask the same, arrays apart; None where that cannot be told."""
    if callable(mask) or callable(score):
        return None
    parts: list[Any] = [mask, score, scaled, precision]
    for name, value in told.items():
        kind = type(value)
        if kind in _NUMBERS or (kind is tuple and name == "window"):
            parts.append((name, kind, value))
        elif (dtype := getattr(value, "dtype", None)) is not None:
            parts.append((name, dtype))
        else:
            return None
    return tuple(parts)


def _numbers(kind: Scored, call: Call, told: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that kernels of a kind are told. Raises TypeError and ValueError for those that they cannot
    take, for what is missing and for what nothing reads."""
    _check_read(kind.keywords, told, call.buffers)
    numbers: dict[str, float] = {}
    for keyword in kind.keywords:
        if keyword not in kind.required:
            numbers |= kind.numbers_of(keyword, told[keyword])
    return {name: numbers[name] for name in kind.scalars}


def _check_read(keywords: Iterable[str], told: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises TypeError unless kernels that read these keywords are told all of them, and nothing in vain
    among what texts read."""
    if missing := [name for name in keywords if name not in told]:
        raise TypeError(f"{missing[0]}= is missing: the text of mask= or score= reads it")
    if unread := [name for name in values if name not in keywords]:
        raise TypeError(f"{unread[0]}= is read by no text of mask= or score=; leave it out")


def _on_host(bound: Bound, call: Call, torch: Any) -> Any:
    """Computes a call of torch's tensors on the host, on an emulated card."""
    tensors = (call.q, call.k, call.v)
    told = (
        asked_of(call.named, call.mask, call.score, call.buffers, call.bias_name).told
        if call.asks_more
        else {}
    )
    more = derived_of(torch, tensors, told)
    if more is None:
        return _of_tensors(bound, call, torch)
    if call.out is not None:
        raise RuntimeError("no gradient is taken through out: leave it out, or call under torch.no_grad()")
    o, lse = attend_differentiably(
        torch,
        tensors,
        tuple(more.values()),
        lambda *x: _of_tensors(bound, _with(call, x, return_lse=True), torch),
        lambda *x: _gradients_of_tensors(bound, call, torch, x, tuple(more)),
    )
    return (o, lse) if call.return_lse else o


def _with(call: Call, tensors: tuple[Any, ...], **others: Any) -> Call:
    return call._replace(q=tensors[0], k=tensors[1], v=tensors[2], **others)


def _of_tensors(bound: Bound, call: Call, torch: Any) -> Any:
    found = attend(bound, _as_arrays(call, torch))
    made = tuple(as_tensor(torch, x) for x in (found if call.return_lse else (found,)))
    made = made if call.out is None else (call.out, *made[1:])
    return made if call.return_lse else made[0]


def _gradients_of_tensors(
    bound: Bound, call: Call, torch: Any, given: tuple[Any, ...], wanted: tuple[str, ...]
) -> tuple[Any, ...]:
    q, k, v, o, lse, dout, dlse = (as_arrays(torch, x) for x in given)
    repeats = bool(torch.are_deterministic_algorithms_enabled())
    call = _with(_as_arrays(call, torch), (q, k, v))
    found = differentiate(bound, call, o, lse, dout, dlse, deterministic=repeats, wanted=wanted)
    return tuple(as_tensor(torch, x) for x in found)


def _as_arrays(call: Call, torch: Any) -> Call:
    """A call of tensors as one of numpy's arrays."""
    arrays = {name: as_arrays(torch, getattr(call, name)) for name in ("q", "k", "v", "out")}
    named, buffers = (
        {name: as_arrays(torch, value) for name, value in told.items()} for told in (call.named, call.buffers)
    )
    return call._replace(**arrays, named=named, buffers=buffers)


def differentiate(
    bound: Bound,
    call: Call,
    o: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    *,
    deterministic: bool | None = None,
    wanted: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Returns the gradients of a call's q, k and v, and of what is ``wanted`` by keyword of what kernels read
    beside them, given what the call made and the gradients of that."""
    asks_more = call.asks_more
    scoring = (
        asked_of(call.named, call.mask, call.score, call.buffers, call.bias_name).scoring
        if asks_more
        else PLAIN
    )
    gradients = bound.gradients(scoring)
    arrays = (call.q, call.k, call.v, o, dout)
    settings = _Settings(call.causal, call.scale, call.stream, call.layout, deterministic, _NOTHING_READ)
    if not asks_more:
        of_plain: tuple[Any, ...] = gradients._gradients(arrays, lse, dlse, settings)
        return of_plain
    _, _, beside = served_by(bound, call)
    assert isinstance(beside, _Asked)
    kind = gradients._tensors.table.kernels[0]
    names = _wanted(kind, wanted)
    read = _WantedGradients(kind, beside, _in_order(kind, names))
    found = gradients._gradients(arrays, lse, dlse, settings._replace(read=read))
    return (*found[:3], *(found[3 + read.wanted.index(name)] for name in names))
