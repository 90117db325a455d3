"""Calls drawn at random, all of them legal, and what they must return: in numpy's float64, by the words of
docs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flashgen
import ml_dtypes
import numpy as np

#: The types of arrays and how far a head of a result may be off, of norms; beside these what a cap or rounded
#: weights lose of small results.
BOUNDS = {np.float32: 1e-5, np.float16: 5e-3, ml_dtypes.bfloat16: 3e-2}
#: Cards by what their kernels are made of, and the types that these serve.
CARDS = {
    "sim:gtx-1080": (np.float32,),
    "sim:t4": (np.float32, np.float16),
    "sim:a100": (np.float32, np.float16, ml_dtypes.bfloat16),
    "sim:h200": (np.float32, np.float16, ml_dtypes.bfloat16),
}
#: Numbers as callers may have them.
INTEGERS: tuple[Callable[[int], Any], ...] = (int, np.int64, np.int32, np.array)
FLOATS: tuple[Callable[[float], Any], ...] = (float, np.float64, np.float32, np.array)
TRUTHS: tuple[Callable[[bool], Any], ...] = (bool, np.bool_)


@dataclass
class Seen:
    """What a call of dense arrays asks, as the reference is told it: no key beside these."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    always: int = 0
    chunk: int = 0
    dilation: int = 0
    prefix: np.ndarray | None = None
    lengths: np.ndarray | None = None
    documents: np.ndarray | None = None
    softcap: float = 0.0
    slopes: np.ndarray | None = None
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    scale: float | None = None

    def of(self, batch: int) -> Seen:
        """What it is of one batch alone."""
        own = {name: getattr(self, name) for name in ("prefix", "lengths", "documents")}
        own = {name: None if x is None else x[batch : batch + 1] for name, x in own.items()}
        slopes = self.slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[batch : batch + 1]
        return Seen(**{**self.__dict__, **own, "slopes": slopes})


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """o and the log-sum-exp of arrays with heads before rows, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    k, v = (x.repeat(q.shape[1] // max(1, x.shape[1]), 1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if seen.scale is None else seen.scale
    s = scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    place = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None]
    if seen.softcap:
        s = seen.softcap * np.tanh(s / seen.softcap)
    if seen.slopes is not None:
        s = s - np.atleast_2d(seen.slopes.astype(np.float64))[..., None, None] * np.abs(place - key)
    shown = np.ones(s.shape, bool)
    if seen.causal:
        below = np.broadcast_to(key <= place, s.shape)
        if seen.prefix is not None:
            below = below | (key < seen.prefix[:, None, None, None])
        shown &= below
    left, right = seen.window
    if left >= 0:
        shown &= (key >= place - left) | (key < seen.always)
    if right >= 0:
        shown &= key <= place + right
    if seen.chunk:
        shown &= key // seen.chunk == place // seen.chunk
    if seen.dilation:
        shown &= (place - key) % seen.dilation == 0
    if seen.lengths is not None:
        shown &= key < seen.lengths[:, None, None, None]
    if seen.documents is not None and keys:
        of_rows = seen.documents[:, np.clip(place[:, 0], 0, None)]
        shown &= (of_rows[:, :, None] == seen.documents[:, None])[:, None]
    if seen.bias is not None:
        if seen.bias.dtype == bool:
            shown &= seen.bias
        else:
            s = s + seen.bias.astype(np.float64)
    s = np.where(shown, s, -np.inf)
    highest = s.max(3, initial=-np.inf, keepdims=True)
    if seen.sinks is not None:
        highest = np.maximum(highest, seen.sinks.astype(np.float64)[:, None, None])
    finite = np.where(np.isfinite(highest), highest, 0)
    weights = np.exp(s - finite)
    total = weights.sum(3, keepdims=True)
    if seen.sinks is not None:
        total = total + np.exp(seen.sinks.astype(np.float64)[:, None, None] - finite)
    with np.errstate(divide="ignore"):
        lse = (finite + np.log(total))[..., 0]
    return weights / np.where(total == 0, 1, total) @ v, lse


def check(found: Any, wanted: np.ndarray, of_values: np.ndarray, bound: float, what: str) -> None:
    """Raises AssertionError where a result is off by more than the bound of what its values make."""
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    off = np.abs(found.astype(np.float64) - wanted).max(initial=0)
    assert off <= bound * max(1.0, np.abs(of_values.astype(np.float64)).max(initial=0)), (
        f"{what} is off by {off}"
    )


def check_lse(found: np.ndarray, wanted: np.ndarray, bound: float) -> None:
    assert found.shape == wanted.shape and found.dtype == np.float32
    assert (np.isneginf(found) == np.isneginf(wanted)).all(), "other rows see nothing"
    finite = np.isfinite(wanted)
    off = np.abs(found[finite] - wanted[finite]).max(initial=0)
    assert off <= 2 * bound * max(1.0, np.abs(wanted[finite]).max(initial=0)), f"lse is off by {off}"


@dataclass
class Kind:
    """What calls have in common that one kernel serves: other sizes and numbers are drawn for each."""

    card: str
    dtype: Any
    d: int
    dv: int
    features: tuple[str, ...]
    rng: np.random.Generator
    bias_dtype: Any = None
    said: dict[str, Any] = field(default_factory=dict)
    """What the last call was told, as a failure shows it."""

    @property
    def bound(self) -> float:
        return BOUNDS[self.dtype]

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def integer(self, low: int, high: int) -> Any:
        """An integer of either end's range, as a caller may have it."""
        return self.one_of(*INTEGERS)(int(self.rng.integers(low, high + 1)))

    def normal(self, *shape: int, dtype: Any = None) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype if dtype is None else dtype)

    def laid_out(self, x: np.ndarray) -> np.ndarray:
        """The same array as it may lie: with gaps, axes in another order, backwards, read-only, repeated."""
        how = self.one_of("dense", "dense", "gaps", "turned", "backwards", "columns", "read-only")
        if how == "gaps":
            wide = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
            wide[..., : x.shape[-1]] = x
            return wide[..., : x.shape[-1]]
        if how == "turned":
            order = self.rng.permutation(x.ndim)
            return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
        if how == "backwards":
            axis = int(self.rng.integers(x.ndim))
            return np.flip(np.ascontiguousarray(np.flip(x, axis)), axis)
        if how == "columns":
            return np.repeat(x, 2, -1)[..., ::2]
        if how == "read-only":
            x = x.copy()
            x.setflags(write=False)
        return x

    # ---- what calls are told

    def masks(self, seen: Seen, told: dict[str, Any], heads: int, longest: int) -> None:
        """Draws what calls of every signature take."""
        has = self.features
        if "causal" in has:
            seen.causal = bool(self.rng.integers(2))
            told["causal"] = self.one_of(*TRUTHS)(seen.causal)
        if "window" in has:
            sides = [self.one_of(-1, 0, 1, int(self.rng.integers(0, longest + 2))) for _ in range(2)]
            if "always" in has:  # of keys that a left side hides
                sides[0] = abs(sides[0])
            seen.window = (sides[0], sides[1])
            sides = [self.one_of(*INTEGERS)(x) for x in sides]
            told["window"] = self.one_of(tuple, list)(
                None if x == -1 and self.rng.integers(2) else x for x in sides
            )
            if "always" in has:
                told["always"] = self.integer(0, 6)
                seen.always = int(told["always"])
        if "chunk" in has:
            told["chunk"] = self.integer(1, longest + 1)
            seen.chunk = int(told["chunk"])
        if "dilation" in has:
            told["dilation"] = self.integer(1, 5)
            seen.dilation = int(told["dilation"])
        if "softcap" in has:
            told["softcap"] = self.one_of(*FLOATS)(self.one_of(0.5, 1.0, 4.0, 30.0))
            seen.softcap = float(told["softcap"])
        if "sinks" in has:
            seen.sinks = self.normal(heads, dtype=np.float32)
            told["sinks"] = self.laid_out(seen.sinks)
        if self.rng.integers(3) == 0:
            told["scale"] = self.one_of(*FLOATS)(self.one_of(0.25, 1.0, 0.0, -0.125))
            seen.scale = float(told["scale"])

    def slopes(self, seen: Seen, told: dict[str, Any], batch: int, heads: int) -> None:
        if "alibi" in self.features:
            shape = self.one_of((heads,), (batch, heads))
            seen.slopes = np.abs(self.normal(*shape, dtype=np.float32)) / 4
            told["alibi_slopes"] = self.laid_out(seen.slopes)

    def attention(self) -> None:
        """Draws a call of dense arrays and holds it to float64."""
        rng, has = self.rng, self.features
        kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        batch, heads = int(rng.integers(1, 4)), kv_heads * group
        rows, keys = (int(self.one_of(1, 2, *rng.integers(3, 40, 4))) for _ in "qk")
        if rng.integers(12) == 0:
            batch, rows, keys = self.one_of((0, rows, keys), (batch, 0, keys), (batch, rows, 0))
        q, k = self.normal(batch, heads, rows, self.d), self.normal(batch, kv_heads, keys, self.d)
        v = self.normal(batch, kv_heads, keys, self.dv)
        seen, told = Seen(), {}
        self.masks(seen, told, heads, max(rows, keys))
        self.slopes(seen, told, batch, heads)
        if "lengths" in has:
            seen.lengths = rng.integers(0, keys + 2, batch).astype(np.int32)
            told["lengths"] = self.laid_out(seen.lengths)
        if "prefix" in has:
            seen.prefix = rng.integers(0, keys + 1, batch).astype(np.int32)
            told["prefix"] = self.laid_out(seen.prefix)
        if "documents" in has:
            ids = np.sort(rng.integers(0, 4, (batch, keys))).astype(self.one_of(np.int32, np.int64))
            seen.documents, told["documents"] = ids, self.laid_out(ids)
        if "bias" in has:
            whole = (batch, heads, rows, keys)
            kept = [1 if n and rng.integers(3) == 0 else n for n in whole]
            kept = kept[next((i for i, n in enumerate(kept) if n != 1), 3) :] if rng.integers(2) else kept
            x = rng.standard_normal(kept)
            seen.bias = x > -0.3 if self.bias_dtype is bool else x.astype(self.bias_dtype)
            told[self.one_of("bias", "attn_mask")] = self.laid_out(seen.bias)
        wanted, of_rows = attended(q, k, v, seen)
        given = [self.laid_out(x) for x in (q, k, v)]
        if rng.integers(3) == 0:
            told["layout"] = "bshd"
            given = [self.laid_out(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
            wanted = wanted.swapaxes(1, 2)
        self.ask(lambda **told: flashgen.attention(*given, **told), told, wanted, of_rows, v)

    def ask(
        self,
        call: Callable[..., Any],
        told: dict[str, Any],
        wanted: np.ndarray,
        lse: np.ndarray,
        v: np.ndarray,
    ) -> None:
        """Makes a call, maybe into an array of its own, and checks what it returns."""
        with_lse, out = bool(self.rng.integers(2)), None
        if self.rng.integers(3) == 0:
            out = told["out"] = np.full((*wanted.shape[:-1], self.dv + 2), np.nan, self.dtype)[..., : self.dv]
        self.said = told
        found = call(return_lse=self.one_of(*TRUTHS)(with_lse), device=self.card, **told)
        o, of_rows = found if with_lse else (found, None)
        assert o.dtype == self.dtype and (out is None or o is out)
        check(o, wanted, v, self.bound, "o")
        if of_rows is not None:
            check_lse(of_rows, lse, self.bound)

    def attention_varlen(self) -> None:
        """Draws a call of packed sequences and holds each to float64 by itself."""
        rng = self.rng
        kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        batch, heads = int(rng.integers(1, 4)), kv_heads * group
        slots = {x: rng.integers(0, 30, batch) * (rng.integers(0, 5, batch) > 0) for x in "qk"}
        starts = {x: np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for x, n in slots.items()}
        used = dict(slots)
        told: dict[str, Any] = {}
        for x in "qk":
            if rng.integers(3) == 0:
                used[x] = rng.integers(0, slots[x] + 1)
                told[f"seqused_{x}"] = self.laid_out(used[x].astype(np.int32))
            told[f"max_seqlen_{x}"] = self.one_of(int, np.int64)(max(1, *slots[x]) + rng.integers(0, 3))
        seen = Seen()
        self.masks(seen, told, heads, 30)
        self.slopes(seen, told, batch, heads)
        q, k = self.normal(starts["q"][-1], heads, self.d), self.normal(starts["k"][-1], kv_heads, self.d)
        v = self.normal(starts["k"][-1], kv_heads, self.dv)
        wanted = np.zeros((len(q), heads, self.dv))
        lse = np.full((heads, len(q)), -np.inf)
        rows_of = np.zeros(len(q), bool)
        for i in range(batch):
            rows = slice(starts["q"][i], starts["q"][i] + used["q"][i])
            keys = slice(starts["k"][i], starts["k"][i] + used["k"][i])
            one = [x[part].swapaxes(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
            o, of_rows = attended(*one, seen.of(i))
            wanted[rows], lse[:, rows], rows_of[rows] = o[0].swapaxes(0, 1), of_rows[0], True
        given = [self.laid_out(x) for x in (q, k, v)]

        def call(**told: Any) -> Any:
            found = flashgen.attention_varlen(*given, starts["q"], starts["k"], **told)
            o, of_rows = found if told["return_lse"] else (found, None)
            o[~rows_of] = 0  # which are of no sequence, and not written
            if of_rows is not None:
                of_rows[:, ~rows_of] = -np.inf
            return found

        self.ask(call, told, wanted, lse, v)

    def attention_with_cache(self) -> None:
        """Draws a call beside a cache, maybe with new rows, and holds each sequence to float64."""
        rng, paged = self.rng, "paged" in self.features
        kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        batch, heads = int(rng.integers(1, 4)), kv_heads * group
        rows, room, page = int(self.one_of(1, 1, 3, 7)), 48, 16
        keys, values = (self.normal(batch, room, kv_heads, columns) for columns in (self.d, self.dv))
        new = bool(rng.integers(2))
        lengths = rng.integers(0, room - rows + 1, batch).astype(np.int32)
        if rng.integers(4) == 0:
            lengths[:] = lengths[0]
        told: dict[str, Any] = {}
        seen = Seen()
        self.masks(seen, told, heads, room)
        self.slopes(seen, told, batch, heads)
        q = self.normal(batch, heads, rows, self.d)
        if paged:
            table = rng.permutation(batch * 3 + 2)[: batch * 3].reshape(batch, 3).astype(np.int32)
            caches = [self.normal(batch * 3 + 2, page, kv_heads, x.shape[3]) for x in (keys, values)]
            for cache, whole in zip(caches, (keys, values), strict=True):
                cache[table] = whole.reshape(batch, 3, page, kv_heads, -1)
            told["page_table"] = self.laid_out(table)
            if rng.integers(2):
                caches, told["kv_layout"] = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in caches], "HND"
        else:
            slots = rng.permutation(batch + 1)[:batch]
            caches = [self.normal(batch + 1, room, kv_heads, x.shape[3]) for x in (keys, values)]
            for cache, whole in zip(caches, (keys, values), strict=True):
                cache[slots] = whole
            told["cache_batch_idx"] = slots.astype(self.one_of(np.int32, np.int64))
        counted = lengths
        if (lengths == lengths[0]).all() and rng.integers(2):
            counted = self.one_of(int, np.int32)(lengths[0])
        if new:
            added = [self.normal(batch, kv_heads, rows, x.shape[3]) for x in (keys, values)]
            for whole, more in zip((keys, values), added, strict=True):
                for i, n in enumerate(lengths):
                    whole[i, n : n + rows] = more[i].swapaxes(0, 1)
            told |= {"k": self.laid_out(added[0]), "v": self.laid_out(added[1]), "cache_seqlens": counted}
            lengths = lengths + rows
        else:
            told["seqused_k"] = counted
        found = []
        for i, n in enumerate(lengths):
            one = [x[i : i + 1, :n].swapaxes(1, 2) for x in (keys, values)]
            found.append(attended(q[i : i + 1], *one, seen.of(i)))
        wanted, lse = (np.concatenate(x) for x in zip(*found, strict=True))
        given = self.laid_out(q)
        if rng.integers(3) == 0:
            told["layout"] = "bshd"
            given, wanted = self.laid_out(np.ascontiguousarray(q.swapaxes(1, 2))), wanted.swapaxes(1, 2)
            for name in ("k", "v"):
                if name in told:
                    told[name] = self.laid_out(np.ascontiguousarray(told[name].swapaxes(1, 2)))
        self.ask(
            lambda **told: flashgen.attention_with_cache(given, *caches, **told), told, wanted, lse, values
        )


#: What is asked together, of dense arrays: of some only one makes sense of another.
DENSE = (
    (),
    ("causal",),
    ("causal", "window"),
    ("window", "always"),
    ("causal", "softcap", "sinks"),
    ("chunk",),
    ("dilation", "window"),
    ("causal", "prefix"),
    ("lengths", "alibi"),
    ("documents", "causal"),
    ("bias",),
    ("bias", "causal", "sinks"),
    ("alibi", "window", "softcap"),
    ("sinks", "lengths"),
)
#: What is asked together of packed sequences and of caches.
OTHERS = ((), ("causal",), ("causal", "window", "sinks"), ("softcap",), ("alibi", "causal"))


def draw(seed: int) -> tuple[Kind, str]:
    """Returns a kind of calls, and the function of `flashgen` that they are of."""
    rng = np.random.default_rng(seed)
    card = list(CARDS)[int(rng.integers(len(CARDS)))]
    dtype = CARDS[card][int(rng.integers(len(CARDS[card])))]
    function = ("attention", "attention", "attention_varlen", "attention_with_cache")[int(rng.integers(4))]
    combinations = DENSE if function == "attention" else OTHERS
    features = combinations[int(rng.integers(len(combinations)))]
    if function == "attention_with_cache" and rng.integers(2):
        features = (*features, "paged")
    d = int(rng.choice([1, 3, 8, 16, 16, 24, 32, 33, 64, 64, 80, 128, 200, 256]))
    dv = d if rng.integers(3) else int(rng.choice([1, 8, 16, 40, 64]))
    dv = d if card == "sim:gtx-1080" else dv  # whose only family has values as wide as keys
    bias = (np.float32, np.float16, bool, ml_dtypes.bfloat16)[int(rng.integers(4))]
    return Kind(card, dtype, d, dv, features, rng, bias), function


def hold(seed: int, calls: int) -> None:
    """Draws a kind of calls and holds so many of it to float64; a failure says which call it was."""
    kind, function = draw(seed)
    for nth in range(calls):
        try:
            getattr(kind, function)()
        except Exception as error:
            told = {
                name: x if np.ndim(x) < 2 else (x.shape, x.dtype, x.strides) for name, x in kind.said.items()
            }
            what = (
                f"{function} on {kind.card} of {np.dtype(kind.dtype)}, d {kind.d}/{kind.dv}, {kind.features}"
            )
            raise AssertionError(f"seed {seed}, call {nth}: {what}, told {told}: {error!r}") from error
