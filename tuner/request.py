"""The problems that a request means: one by its shape, or several by lists and suites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TypeVar

from ..gen.append import Append
from ..gen.lengths import most_lengths, num_listed
from ..gen.problem import ITEM_BYTES, KV_DTYPES, MAX_LATENT_DIM, MAX_SIZE, PRECISIONS, Problem
from .asked_scoring import NOTHING_ASKED, AskedScoring
from .errors import UsageError, checked, suggestion
from .suites import SUITES

T = TypeVar("T")

#: The columns of keys and of values of latent attention where none are asked for, as models have them.
LATENT_DIMS = (576, 512)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The problem's options, None where they were not given."""

    dtype: str | None = None
    kv_dtype: str | None = None
    precision: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seqlen: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    causal: bool | None = None
    latent: bool | None = None
    backward: bool | None = None
    page_size: int | None = None
    varlen: str | None = None
    append: Append | None = None
    scoring: AskedScoring = NOTHING_ASKED

    @property
    def is_given(self) -> bool:
        return self != Shape()

    @property
    def has_sizes(self) -> bool:
        """Whether batch, heads or a length was given."""
        sizes = (self.batch, self.heads, self.kv_heads, self.seqlen, self.seqlen_q, self.seqlen_k)
        return any(size is not None for size in (*sizes, self.varlen))

    def problem(self) -> Problem:
        """Returns the problem, with defaults for what was not given. Raises UsageError."""
        default = Problem()
        varlen = _or(self.varlen, default.varlen)
        longest = checked(lambda: most_lengths(varlen)) if varlen else None
        longest = longest or (default.seqlen_q, default.seqlen_k)
        listed = num_listed(varlen)
        if self.dtype is not None:
            _check_dtype(self.dtype)
        dtype = _or(self.dtype, default.dtype)
        kv_dtype = _or(self.kv_dtype, default.kv_dtype)
        _check_kv_dtype(kv_dtype, (dtype,))
        precision = _or(self.precision, default.precision)
        _check_precision(precision, (dtype,))
        # 0 stands for --d's in a Problem, but is no head dim to ask for.
        if self.head_dim_v == 0:
            raise UsageError("head_dim_v is 0; leave --dv out for values as wide as keys")
        if self.page_size is not None:
            _check_page_size(self.page_size)
        heads, latent = _or(self.heads, default.num_q_heads), _or(self.latent, default.latent)
        # Latent attention has one head of keys, and columns as models have them.
        kv_heads, dims = (1, LATENT_DIMS) if latent else (heads, (default.head_dim, 0))
        return self.scoring.made(
            lambda: Problem(
                dtype=dtype,
                kv_dtype=kv_dtype,
                precision=precision,
                batch=_or(self.batch, default.batch if listed is None else listed),
                num_q_heads=heads,
                num_kv_heads=_or(self.kv_heads, kv_heads),
                seqlen_q=_or(self.seqlen_q, _or(self.seqlen, longest[0])),
                seqlen_k=_or(self.seqlen_k, _or(self.seqlen, longest[1])),
                head_dim=_or(self.head_dim, dims[0]),
                head_dim_v=_or(self.head_dim_v, dims[1]),
                causal=_or(self.causal, default.causal),
                scoring=self.scoring.of(dtype),
                varlen=varlen,
                page_size=_or(self.page_size, default.page_size),
                append=self.append,
                latent=latent,
                backward=_or(self.backward, default.backward),
            )
        )


def with_lengths(problem: Problem, varlen: str) -> Problem:
    """Returns a problem of packed sequences with other lengths. Raises UsageError for a problem of another
    layout, and for lengths that are none."""
    if not problem.layout.is_packed:
        raise UsageError(f"{problem.name} has sequences of one length; leave --varlen and --seqlens out")
    longest = checked(lambda: most_lengths(varlen)) or (problem.seqlen_q, problem.seqlen_k)
    batch = num_listed(varlen) or problem.batch
    return checked(
        lambda: replace(problem, varlen=varlen, batch=batch, seqlen_q=longest[0], seqlen_k=longest[1])
    )


def with_pages(problem: Problem, page_size: int, *, knows_page_size: bool) -> Problem:
    """Returns a problem of keys in pages with pages of another size, for a kernel that ``knows_page_size``,
    and so takes pages of its own alone, or does not. Raises UsageError for pages that it does not take, and
    for a problem without."""
    if not problem.layout.is_paged:
        raise UsageError(f"{problem.name} has keys that lie in no pages; leave --page-size out")
    _check_page_size(page_size)
    if page_size != problem.page_size and knows_page_size:
        raise UsageError(
            f"the kernel is made for pages of {problem.page_size} keys, not of {page_size}; leave "
            f"--page-size out, or emit one with --page-size {page_size}"
        )
    return replace(problem, page_size=page_size)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The problem's options where each may be a list, and suites of problems. Empty: not given."""

    suites: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    kv_dtype: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    head_dim: tuple[int, ...] = ()
    head_dim_v: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    seqlen: tuple[int, ...] = ()
    seqlen_q: tuple[int, ...] = ()
    seqlen_k: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()
    page_size: tuple[int, ...] = ()
    varlen: str | None = None
    append: Append | None = None
    latent: bool = False
    backward: bool = False
    scoring: AskedScoring = NOTHING_ASKED

    def __post_init__(self) -> None:
        """Raises UsageError for a value that no problem can have."""
        for name in self.suites:
            _suite(name)
        for dtype in self.dtype:
            _check_dtype(dtype)
        for kv_dtype in self.kv_dtype:
            _check_kv_dtype(kv_dtype, self.dtype or tuple(PRECISIONS))
        for precision in self.precision:
            _check_precision(precision, self.dtype or tuple(PRECISIONS))
        for name in ("head_dim", "head_dim_v", "batch", "seqlen_q", "seqlen_k", "page_size"):
            for value in getattr(self, name):
                # Values that are none are told of, not what they would be the first of.
                of_keys = {"head_dim": MAX_LATENT_DIM, "head_dim_v": 1} if self.latent else {}
                Shape(**{**of_keys, name: value}, latent=self.latent).problem()
        for length in self.seqlen:
            Shape(seqlen=length).problem()
        for heads in self.heads:
            Shape(heads=heads).problem()
        for heads in self.kv_heads:
            # As many query heads, unless that is what would be told of.
            Shape(heads=heads if 1 <= heads <= MAX_SIZE else 1, kv_heads=heads).problem()
        # Whatever is asked can be asked under the causal mask, and of one row.
        Shape(causal=True, seqlen_q=1, scoring=self.scoring).problem()

    @property
    def is_given(self) -> bool:
        """Whether any option was given."""
        return self != Shapes()

    @property
    def has_sizes(self) -> bool:
        """Whether batch, heads or a length was given."""
        sizes = (self.batch, self.heads, self.kv_heads, self.seqlen, self.seqlen_q, self.seqlen_k)
        return any(sizes) or self.varlen is not None

    def of_one(self, problem: Problem) -> Shape:
        """Returns the options for the only problem they mean; of a suite's all is given."""
        if self.suites:
            p = problem
            return Shape(
                dtype=p.dtype,
                kv_dtype=p.kv_dtype or None,
                precision=p.precision,
                head_dim=p.head_dim,
                head_dim_v=p.head_dim_v,
                batch=p.batch,
                heads=p.num_q_heads,
                kv_heads=p.num_kv_heads,
                seqlen_q=p.seqlen_q,
                seqlen_k=p.seqlen_k,
                causal=p.causal,
                page_size=p.page_size or None,
                varlen=p.varlen or None,
                append=p.append,
                latent=p.latent or None,
                backward=p.backward or None,
                scoring=AskedScoring(scoring=p.scoring),
            )
        return next(self._each())

    def problems(self) -> list[Problem]:
        """Returns every combination of the lists or, of suites, the problems that the other options fit, each
        once.

        Raises:
            UsageError: an option is out of range, there is no such suite, or nothing of it fits.
        """
        if not self.suites:
            return list(dict.fromkeys(shape.problem() for shape in self._each()))
        found = dict.fromkeys(problem for suite in self.suites for problem in self._of_suite(suite))
        return list(found)

    def fits(self, problem: Problem) -> bool:
        """Tells whether a problem agrees with what was given. Raises UsageError where there is no such
        suite."""
        if self.suites and not any(problem in _suite(name) for name in self.suites):
            return False
        given = {
            "dtype": self.dtype,
            "key_dtype": self.kv_dtype,
            "precision": self.precision,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "batch": self.batch,
            "num_q_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "seqlen_q": self.seqlen_q or self.seqlen,
            "seqlen_k": self.seqlen_k or self.seqlen,
            "causal": self.causal,
            "page_size": self.page_size,
        }
        listed = all(getattr(problem, name) in values for name, values in given.items() if values)
        listed &= self.varlen is None or problem.varlen == self.varlen
        listed &= self.append is None or problem.append == self.append
        listed &= problem.latent or not self.latent
        listed &= problem.backward or not self.backward
        return listed and self.scoring.fits(problem)

    def words(self) -> list[str]:
        """Returns the options as they are typed, an option and its value a word."""
        names = {
            "suites": "suite",
            "kv_dtype": "kv-dtype",
            "head_dim": "d",
            "head_dim_v": "dv",
            "kv_heads": "kv-heads",
            "seqlen_q": "seqlen-q",
            "seqlen_k": "seqlen-k",
            "page_size": "page-size",
        }
        words = []
        for name in self._lists():
            values = getattr(self, name)
            if name == "causal":
                words += (
                    ["--causal both"]
                    if len(values) > 1
                    else [f"--{'' if v else 'no-'}causal" for v in values]
                )
            elif values:
                words.append(f"--{names.get(name, name)} {','.join(map(str, values))}")
        words += [] if self.varlen is None else [f"--varlen {self.varlen}"]
        words += [] if self.append is None else self.append.options
        words += ["--latent"] if self.latent else []
        words += ["--backward"] if self.backward else []
        return [*words, *self.scoring.words()]

    def _each(self) -> Iterator[Shape]:
        """The lists' combinations, the last named option changing fastest."""
        names = [name for name in self._lists() if name != "suites"]
        for values in product(*(getattr(self, name) or (None,) for name in names)):
            given = dict(zip(names, values, strict=True))
            yield Shape(
                **given,
                varlen=self.varlen,
                append=self.append,
                latent=self.latent or None,
                backward=self.backward or None,
                scoring=self.scoring,
            )

    def _lists(self) -> list[str]:
        """The names of the options that may be lists."""
        alone = ("varlen", "append", "latent", "backward", "scoring")
        return [field.name for field in fields(self) if field.name not in alone]

    def _of_suite(self, name: str) -> list[Problem]:
        problems = _suite(name)
        fitting = [problem for problem in problems if self.fits(problem)]
        if not fitting:
            raise UsageError(
                f"none of the {len(problems)} problems of suite {name!r} fits the other options; leave some "
                "of them out"
            )
        return fitting


def _suite(name: str) -> list[Problem]:
    if name not in SUITES:
        raise UsageError(f"unknown suite {name!r}; {suggestion(name, list(SUITES))}")
    return list(SUITES[name].problems.values())


def _check_dtype(dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        hint = suggestion(dtype, list(ITEM_BYTES))
        raise UsageError(f"unknown dtype {dtype!r}; {hint} (there are {', '.join(ITEM_BYTES)})")


def _check_kv_dtype(kv_dtype: str, dtypes: Sequence[str]) -> None:
    """Raises UsageError for a type of keys that is none, or stands beside queries of none of the dtypes."""
    if not kv_dtype:
        return
    _check_dtype(kv_dtype)
    if not any(kv_dtype in (dtype, *KV_DTYPES[dtype]) for dtype in dtypes):
        beside = ", ".join(dtype for dtype, served in KV_DTYPES.items() if kv_dtype in (dtype, *served))
        raise UsageError(
            f"keys of {kv_dtype} are not served beside queries of {' or '.join(dtypes)}; give --dtype one of "
            f"{beside}, or leave --kv-dtype out"
        )


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise UsageError(
            f"page_size is {page_size}, and a page has 1 key or more; leave --page-size out for keys that "
            "lie in no pages"
        )


def _check_precision(precision: str, dtypes: Sequence[str]) -> None:
    """Raises UsageError for a precision that is none, or none of any of the dtypes."""
    known = list(dict.fromkeys(name for names in PRECISIONS.values() for name in names))
    if precision not in known:
        raise UsageError(f"unknown precision {precision!r}; {suggestion(precision, known)}")
    if not any(precision in PRECISIONS[dtype] for dtype in dtypes):
        of = [each for each, names in PRECISIONS.items() if precision in names]
        raise UsageError(
            f"precision {precision} is one of {', '.join(of)}, not of {', '.join(dtypes)}; leave --precision "
            f"out, or choose --dtype {of[0]}"
        )


def _or(given: T | None, default: T) -> T:
    return default if given is None else given
