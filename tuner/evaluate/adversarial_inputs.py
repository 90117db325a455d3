"""Inputs on which a kernel's arithmetic goes wrong first: magnitudes, outliers, what is not finite.

Each case is a change of plain inputs, q, k and v drawn from N(0, 1) or uniform in ±1. It is drawn anew, the
same every time, for any type, head dim, mask and shape. What a type cannot hold is left out of its cases.

Kernels with masks and changes of scores are tried on fewer magnitudes, and on keys that no row sees. Where a
score goes through an expression, none is tried: what that makes of a score of 1e36 nobody can promise.
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...gen.problem import Problem
from ..cards.dtypes import largest, numpy_dtype, smallest, smallest_normal

#: How many of the cases are wanted: all, or of each kind those at a few magnitudes.
Breadth = Literal["few", "all"]
#: Magnitudes above and below one by type; a type's largest number is tried beside them. What is near the
#: smallest number has cases of its own.
LARGE: dict[str, tuple[float, ...]] = {
    "f32": (1e4, 1e7, 1e11, 1e20, 1e30, 1e37),
    "bf16": (1e4, 1e7, 1e11, 1e20, 1e30, 1e37),
    "f16": (1e2, 1e3, 1e4),
    "e4m3": (1e1, 1e2),
}
SMALL: dict[str, tuple[float, ...]] = {
    "f32": (1e-4, 1e-7, 1e-11, 1e-20, 1e-30, 1e-35, 1e-37, 1e-38),
    "bf16": (1e-4, 1e-7, 1e-11, 1e-20, 1e-30, 1e-35, 1e-37, 1e-38),
    "f16": (1e-2, 1e-3, 1e-4),
    "e4m3": (1e-1,),
}
#: Sizes of scores; 6.5e12 is 2^42 over a little more than log2 e.
SCORES = (1e2, 1e4, 1e6, 1e9, 6.5e12, 1e15, 1e20, 1e30, 1e36)
#: Those of them that few cases have.
FEW_LARGE: dict[str, tuple[float, ...]] = {
    "f32": (1e7, 1e37),
    "bf16": (1e7, 1e37),
    "f16": (1e3,),
    "e4m3": (1e2,),
}
FEW_SMALL: dict[str, tuple[float, ...]] = {
    "f32": (1e-7, 1e-37),
    "bf16": (1e-7, 1e-37),
    "f16": (1e-3,),
    "e4m3": (1e-1,),
}
FEW_SCORES = (1e4, 6.5e12, 1e36)
#: A scale is a float32 number, and a normal one.
LEAST_SCALE, LARGEST_SCALE = 1.2e-38, 3.4e38
#: How far below the others a score must be for its key to weigh nothing, however large its value.
FAR_BELOW = 40.0
#: The head dim that outliers are put into, the last where there are fewer.
COLUMN = 2


@dataclass
class Draw:
    """Inputs in float64 while a case makes them, shaped (batch, heads, seqlen, head_dim), and their scale.

    The last head of q is where cases put what is odd, so that the first shows what becomes of others.
    """

    dtype: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    rng: np.random.Generator
    unseen: np.ndarray | None = None
    """Which keys no row sees."""

    @property
    def largest(self) -> float:
        return largest(self.dtype)

    @property
    def row(self) -> int:
        """A query row with others before and behind it."""
        return self.q.shape[2] // 3

    @property
    def key(self) -> int:
        """A key that under a causal mask some rows see."""
        return max(0, self.k.shape[2] - 1 - self.q.shape[2] // 2)

    @property
    def column(self) -> int:
        return min(COLUMN, self.q.shape[3] - 1)

    @property
    def value_column(self) -> int:
        return min(COLUMN, self.v.shape[3] - 1)

    def make_uniform(self) -> None:
        """Draws anew, uniform in ±1: nothing exceeds a magnitude that it is multiplied by."""
        for x in (self.q, self.k, self.v):
            x[...] = self.rng.uniform(-1, 1, x.shape)

    def make_values_alike(self) -> None:
        """Draws v from 1 to 2, so that no mean of values is near zero."""
        self.v[...] = self.rng.uniform(1, 2, self.v.shape)

    def set_scores_of_key(self, score: float) -> None:
        """Gives one key that score in all rows, the others' scores being of ordinary size."""
        x = self.column
        self.q[..., x] = 2.0
        self.k[..., x] = 0.0
        self.k[:, :, self.key] = 0.0
        self.k[:, :, self.key, x] = score / (2.0 * self.scale)


Change = Callable[[Draw], None]


@dataclass(frozen=True)
class AdversarialCase:
    """A named change of plain inputs, and the group of cases it is told with.

    ``exact``: rounding moves no weight, since scores are equal by construction or very far apart.
    """

    name: str
    group: str
    change: Change = field(repr=False)
    exact: bool = False

    def draw(
        self,
        problem: Problem,
        *,
        rows: int,
        keys: int,
        heads: int = 2,
        kv_heads: int = 1,
        seed: int = 0,
        unseen: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Makes q, k, v of the problem's type and head dims, shaped (1, heads, length, head_dim), and the
        scale; v the first columns of k where the problem is latent. ``unseen`` are keys that no row sees."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        d, dv = problem.head_dim, problem.head_dim_v
        shapes = ((1, heads, rows, d), (1, kv_heads, keys, d), (1, kv_heads, keys, dv))
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        draw = Draw(problem.dtype, q, k, v, 1 / math.sqrt(d), rng, unseen)
        with np.errstate(over="ignore", invalid="ignore"):
            self.change(draw)
            if problem.latent:  # values are what has become of the keys
                draw.v = draw.k[..., :dv]
            scale = float(np.float32(draw.scale))
            q = _rounded(draw.q, problem.dtype)
            k, v = (_rounded(x, problem.key_dtype) for x in (draw.k, draw.v))
        return q, k, k[..., :dv] if problem.latent else v, scale


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in a type that may not reach so far: finite ones stay finite."""
    finite = np.isfinite(x)
    x = np.where(finite, np.clip(x, -largest(dtype), largest(dtype)), x)
    return x.astype(numpy_dtype(dtype))


@dataclass(frozen=True)
class Sizes:
    """The magnitudes that cases of a type are made for, with the texts that name them."""

    dtype: str
    large: tuple[tuple[str, float], ...]
    small: tuple[tuple[str, float], ...]
    scores: tuple[tuple[str, float], ...]

    def has_inverse(self, size: float) -> bool:
        """Whether the type has a number 1 / ``size`` with all its bits, and some below."""
        return 1 / size >= smallest(self.dtype) * 2**11


def _sizes(dtype: str, breadth: Breadth) -> Sizes:
    few = breadth == "few"
    large, small = (FEW_LARGE, FEW_SMALL) if few else (LARGE, SMALL)
    return Sizes(
        dtype,
        (*((_text(size), size) for size in large[dtype]), ("max", largest(dtype))),
        tuple((_text(size), size) for size in small[dtype]),
        tuple((_text(size), size) for size in (FEW_SCORES if few else SCORES)),
    )


def _text(size: float) -> str:
    """A magnitude in few characters: 1e7, 6.5e12, 1e-4."""
    mantissa, exponent = f"{size:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def cases_for(problem: Problem, breadth: Breadth) -> tuple[AdversarialCase, ...]:
    """Returns the cases that kernels of a problem are tried on: those of gradients on none, whose errors are
    bounded by what their terms are and not by what becomes of single ones."""
    if problem.backward:
        return ()
    if problem.scoring.is_plain:
        return adversarial_cases(problem.dtype, breadth)
    if problem.scoring.score:
        return ()
    return (*adversarial_cases(problem.dtype, "few"), *HIDDEN_CASES)


def adversarial_cases(dtype: str, breadth: Breadth = "all") -> tuple[AdversarialCase, ...]:
    """Returns the cases of a type, those of a group together."""
    makers = (
        _magnitudes,
        _outlying_rows,
        _outlying_columns,
        _outlying_elements,
        _outlying_values,
        _large_scores,
        _equal_scores,
        _not_finite,
        _subnormal,
    )
    sizes = _sizes(dtype, breadth)
    return tuple(case for make in makers for case in make(sizes))


def case_named(name: str, dtype: str) -> AdversarialCase:
    """Returns the case of that name; raises ValueError with the nearest name."""
    known = {case.name: case for case in (*adversarial_cases(dtype), *HIDDEN_CASES)}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0)
        raise ValueError(f"no adversarial case of {dtype} is called {name!r}; did you mean {close[0]!r}?")
    return known[name]


def _magnitudes(sizes: Sizes) -> Iterator[AdversarialCase]:
    def times(names: str, size: float, scale_by: float = 1.0) -> Change:
        def change(draw: Draw) -> None:
            draw.make_uniform()
            for name in names:
                getattr(draw, name)[...] *= size
            draw.scale *= scale_by

        return change

    for text, size in (*sizes.small, *sizes.large):
        yield AdversarialCase(f"v x {text}", "magnitudes", times("v", size))
        for name in "qk":
            if LEAST_SCALE * 100 < 1 / size < LARGEST_SCALE:
                yield AdversarialCase(
                    f"{name} x {text}, scale / {text}", "magnitudes", times(name, size, 1 / size)
                )
        if LEAST_SCALE * 100 < 1 / size**2 < LARGEST_SCALE:
            yield AdversarialCase(
                f"q and k x {text}, scale / {text}^2", "magnitudes", times("qk", size, 1 / size**2)
            )
    for text, size in sizes.small:
        yield AdversarialCase(f"q, k and v x {text}", "magnitudes", times("qkv", size))
    for text, size in sizes.large:
        if sizes.has_inverse(size):

            def opposed(draw: Draw, size: float = size) -> None:
                draw.make_uniform()
                draw.q *= size
                draw.k /= size

            yield AdversarialCase(f"q x {text}, k / {text}", "magnitudes", opposed)


def _outlying_rows(sizes: Sizes) -> Iterator[AdversarialCase]:
    for text, size in (*sizes.small, *sizes.large):

        def q_row(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.q[:, -1, draw.row] *= size

        def key(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.k[:, :, draw.key] *= size

        def value(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.v[:, :, draw.key] *= size

        yield AdversarialCase(f"a row of q x {text}", "rows", q_row)
        yield AdversarialCase(f"a key x {text}", "rows", key)
        yield AdversarialCase(f"a value x {text}", "rows", value)


def _outlying_columns(sizes: Sizes) -> Iterator[AdversarialCase]:
    for text, size in sizes.large:

        def q_column(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.q[..., draw.column] *= size
            draw.k[..., draw.column] = 0

        def k_column(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.k[..., draw.column] *= size
            draw.q[..., draw.column] = 0

        def v_column(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.v[..., draw.value_column] *= size

        def opposed(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.q[..., draw.column] *= size
            draw.k[..., draw.column] /= size

        def opposed_keys(draw: Draw, size: float = size) -> None:
            draw.make_uniform()
            draw.k[..., draw.column] *= size
            draw.q[..., draw.column] /= size

        yield AdversarialCase(f"a column of q x {text}, facing zeros", "columns", q_column)
        yield AdversarialCase(f"a column of k x {text}, facing zeros", "columns", k_column)
        yield AdversarialCase(f"a column of v x {text}", "columns", v_column)
        if sizes.has_inverse(size):
            yield AdversarialCase(f"a column of q x {text}, of k / {text}", "columns", opposed)
            yield AdversarialCase(f"a column of k x {text}, of q / {text}", "columns", opposed_keys)


def _outlying_elements(sizes: Sizes) -> Iterator[AdversarialCase]:
    for text, size in sizes.large:

        def q_element(draw: Draw, size: float = size) -> None:
            draw.q[:, -1, draw.row, draw.column] = size

        def q_facing_zeros(draw: Draw, size: float = size) -> None:
            draw.k[..., draw.column] = 0
            draw.q[:, -1, draw.row, draw.column] = size

        def k_facing_zeros(draw: Draw, size: float = size) -> None:
            draw.q[..., draw.column] = 0
            draw.k[:, :, draw.key, draw.column] = size

        def heaviest_key(draw: Draw, size: float = size) -> None:
            draw.q[..., draw.column] = 2.0
            draw.k[:, :, draw.key, draw.column] = size

        def lightest_key(draw: Draw, size: float = size) -> None:
            draw.q[..., draw.column] = 2.0
            draw.k[:, :, draw.key, draw.column] = -size

        yield AdversarialCase(f"an element of q {text}", "elements", q_element)
        yield AdversarialCase(f"an element of q {text}, facing zeros", "elements", q_facing_zeros)
        yield AdversarialCase(f"an element of k {text}, facing zeros", "elements", k_facing_zeros)
        yield AdversarialCase(f"an element of k {text}, of all weight", "elements", heaviest_key)
        yield AdversarialCase(f"an element of k {text}, of no weight", "elements", lightest_key)


def _outlying_values(sizes: Sizes) -> Iterator[AdversarialCase]:
    for text, size in sizes.large:

        def element(draw: Draw, size: float = size) -> None:
            draw.v[:, :, draw.key, draw.value_column] = size

        def of_little_weight(draw: Draw, size: float = size) -> None:
            draw.set_scores_of_key(-math.log(size))
            draw.v[:, :, draw.key] *= size

        def of_no_weight(draw: Draw, size: float = size) -> None:
            draw.set_scores_of_key(-math.log(size) - FAR_BELOW)
            draw.v[:, :, draw.key] *= size

        def one_of_no_weight(draw: Draw, size: float = size) -> None:
            draw.set_scores_of_key(-math.log(size) - FAR_BELOW)
            draw.v[:, :, draw.key, draw.value_column] = size

        yield AdversarialCase(f"an element of v {text}", "values", element)
        yield AdversarialCase(f"a value x {text}, of weight 1 / {text}", "values", of_little_weight)
        yield AdversarialCase(f"a value x {text}, of no weight", "values", of_no_weight)
        yield AdversarialCase(f"an element of v {text}, of no weight", "values", one_of_no_weight)


def _large_scores(sizes: Sizes) -> Iterator[AdversarialCase]:
    most = largest(sizes.dtype) / 8  # of N(0, 1)
    for text, size in sizes.scores:

        def by_factors(draw: Draw, size: float = size) -> None:
            draw.make_values_alike()
            factor = min(math.sqrt(size), most)
            draw.q *= factor
            draw.k *= factor
            draw.scale *= size / factor**2

        def by_scale(draw: Draw, size: float = size) -> None:
            draw.make_values_alike()
            draw.scale *= -size

        def negative(draw: Draw, size: float = size) -> None:
            draw.make_values_alike()
            factor = min(math.sqrt(size), most)
            draw.q[...] = np.abs(draw.q) * factor
            draw.k[...] = -np.abs(draw.k) * factor
            draw.scale *= size / factor**2

        yield AdversarialCase(f"scores of {text}", "scores", by_factors)
        yield AdversarialCase(f"scores of {text} by a negative scale", "scores", by_scale)
        yield AdversarialCase(f"scores of -{text}", "scores", negative)


def _equal_scores(sizes: Sizes) -> Iterator[AdversarialCase]:
    def constant(sign: float, size: float) -> Change:
        def change(draw: Draw) -> None:
            draw.make_values_alike()
            draw.q[...] = size
            draw.k[...] = sign * size

        return change

    def one_key_again(sign: float, size: float) -> Change:
        def change(draw: Draw) -> None:
            # All rows and keys along one direction: two keys out of three are alike, the others far below.
            draw.make_values_alike()
            direction = np.abs(draw.rng.standard_normal(draw.q.shape[-1])) + 0.5
            draw.q[...] = direction * size / 8
            draw.k[...] = direction * size / 8 * sign
            draw.k[:, :, ::3] *= 0.5 if sign > 0 else 2

        return change

    for text, size in sizes.large:
        # Of float32's larger magnitudes squares are beyond its range: nothing could be asked for.
        if size**2 * 256 < 3e38:
            yield AdversarialCase(f"q = {text}, k = {text}", "ties", constant(1, size), exact=True)
            yield AdversarialCase(f"q = {text}, k = -{text}", "ties", constant(-1, size), exact=True)
            yield AdversarialCase(
                f"two of three keys alike at {text}", "ties", one_key_again(1, size), exact=True
            )
            yield AdversarialCase(
                f"two of three keys alike at -{text}", "ties", one_key_again(-1, size), exact=True
            )
        else:
            yield AdversarialCase(f"q = {text}, k = -{text}", "beyond", constant(-1, size), exact=True)


def _not_finite(sizes: Sizes) -> Iterator[AdversarialCase]:
    def put(name: str, value: float, *, facing: str = "") -> Change:
        def change(draw: Draw) -> None:
            if facing:
                getattr(draw, facing)[..., draw.column] = 0
            if name == "q":
                draw.q[:, -1, draw.row, draw.column] = value
            elif name == "k":
                draw.k[:, :, draw.key, draw.column] = value
            else:
                draw.v[:, :, draw.key, draw.value_column] = value

        return change

    def last(name: str, value: float) -> Change:
        def change(draw: Draw) -> None:
            if name == "q":
                draw.q[:, -1, -1] = value
            else:
                getattr(draw, name)[:, :, -1] = value

        return change

    def negative_everywhere(draw: Draw) -> None:
        # Every row's score of the key is -inf: its weight is zero.
        draw.q[..., draw.column] = 1.0
        draw.k[:, :, draw.key, draw.column] = -np.inf

    what = {"q": "q", "k": "a key", "v": "a value"}
    for name, words in what.items():
        group = "NaN"
        yield AdversarialCase(f"an element of {words} NaN", group, put(name, np.nan))
        yield AdversarialCase(
            f"the last {'row of q' if name == 'q' else 'key' if name == 'k' else 'value'} NaN",
            group,
            last(name, np.nan),
        )
    if sizes.dtype == "e4m3":  # has no infinity
        return
    for name, words in what.items():
        for sign, value in (("", np.inf), ("-", -np.inf)):
            yield AdversarialCase(f"an element of {words} {sign}inf", "infinite", put(name, value))
    yield AdversarialCase("an element of q inf, facing zeros", "infinite", put("q", np.inf, facing="k"))
    yield AdversarialCase("an element of a key inf, facing zeros", "infinite", put("k", np.inf, facing="q"))
    yield AdversarialCase("a key of score -inf", "infinite", negative_everywhere)
    yield AdversarialCase("the last row of q inf", "infinite", last("q", np.inf))
    yield AdversarialCase("the last key inf", "infinite", last("k", np.inf))
    yield AdversarialCase("the last value inf", "infinite", last("v", np.inf))


def _subnormal(sizes: Sizes) -> Iterator[AdversarialCase]:
    normal = smallest_normal(sizes.dtype)

    def times(names: str, scale: float = 1.0) -> Change:
        def change(draw: Draw) -> None:
            draw.make_uniform()
            for name in names:
                getattr(draw, name)[...] *= normal
            draw.scale *= scale

        return change

    def against_large(draw: Draw) -> None:
        draw.make_uniform()
        draw.q *= normal
        draw.k *= min(draw.largest, 1 / normal)

    def one_row(draw: Draw) -> None:
        draw.make_uniform()
        draw.q[:, -1, draw.row] *= normal

    yield AdversarialCase("q subnormal", "subnormal", times("q"))
    yield AdversarialCase("k subnormal", "subnormal", times("k"))
    yield AdversarialCase("v subnormal", "subnormal", times("v"))
    yield AdversarialCase("q, k and v subnormal", "subnormal", times("qkv"))
    yield AdversarialCase("q subnormal, k large", "subnormal", against_large)
    yield AdversarialCase("a row of q subnormal", "subnormal", one_row)
    yield AdversarialCase("q subnormal, scale large", "subnormal", times("q", min(1 / normal, 1e37)))


def _hidden(names: str, value: float) -> Change:
    def change(draw: Draw) -> None:
        for name in names if draw.unseen is not None else "":
            getattr(draw, name)[:, :, draw.unseen] = value

    return change


#: What keys hold that no row sees, where masks hide any.
HIDDEN_CASES = (
    AdversarialCase("keys that no row sees NaN", "hidden", _hidden("k", math.nan)),
    AdversarialCase("keys that no row sees 1e4", "hidden", _hidden("k", 1e4)),
    AdversarialCase("values that no row sees NaN", "hidden", _hidden("v", math.nan)),
)
