"""The attention problem a kernel is generated and tuned for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from .append import Append
from .layout import DENSE, PACKED, PACKED_PAGED, PAGED, Layout
from .lengths import Lengths, draw_lengths, short_lengths
from .operation import BACKWARD, FORWARD, ITEM_BYTES, LATENT, Operation
from .scoring.asked import PLAIN, Scoring
from .scoring.meaning import asked_scores
from .scoring.scores import Scores
from .scoring.values import attended_pairs, read_bytes, unseen_bytes

MAX_HEAD_DIM = 256
#: The most columns of keys whose first columns are the values.
MAX_LATENT_DIM = 576
#: What outputs are where they are not of the inputs' type: eight bits hold factors, not averages.
OUTPUT_DTYPES = {"e4m3": "bf16"}
#: The class of e4m3 in which weights may be of eight bits.
EIGHT = "eight"
#: How accurate the result must be, the default first. ``auto``: the dtype's own accuracy, by whichever
#: arithmetic is fastest; ``ieee``: float32 multiply-adds alone; ``3xtf32`` and ``3xf16``: tensor cores with
#: all three terms of both products, as accurate, factors being sums of two TF32 or f16 numbers (rows beyond
#: their range are computed again in double precision: `flashgen.gen.families.mma.family`); ``tf32``: tensor
#: cores with inputs rounded to eleven bits; ``eight``: of e4m3, weights may be of eight bits as well.
PRECISIONS = {
    "f32": ("auto", "ieee", "3xtf32", "3xf16", "tf32"),
    "f16": ("auto",),
    "bf16": ("auto",),
    "e4m3": ("auto", EIGHT),
}
#: What keys and values may be of where they are not of the queries' type: of eight bits, with a scale for
#: each head of them, as caches are kept.
KV_DTYPES = {"f32": ("e4m3",), "f16": ("e4m3",), "bf16": ("e4m3",), "e4m3": ()}
#: Bound on a kernel's error against float64, ‖o - ref‖ / ‖ref‖ per head: by dtype, and by precision where a
#: class of its own is asked for.
TOLERANCES = {"f32": 2e-6, "f16": 2e-3, "bf16": 1e-2, "e4m3": 1e-2, "tf32": 1e-3, EIGHT: 9e-2}
#: Query rows up to which a problem decodes: reading the keys takes its time, whatever is made of them, and a
#: kernel that is fast for many rows is slow.
FEW_QUERIES = 16
#: The largest grid a CUDA device accepts along x.
MAX_GRID = 2**31 - 1
#: The largest size along one axis: kernels count rows in 32 bits.
MAX_SIZE = 2**31 - 1
#: What q, k, v and o may take together: no card has as much memory (2026: 288 GB).
MAX_BYTES = 2**39

#: What is told of a problem only where it is asked, so that others are called what they always were.
LATER_FIELDS = ("scoring", "varlen", "page_size", "latent", "append", "kv_dtype", "backward")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """softmax(scale · q kᵀ) v over tensors shaped ``(batch, heads, seqlen, head_dim)``.

    v and o have ``head_dim_v`` columns, which 0 makes ``head_dim``; o is of ``output_dtype``. ``num_q_heads``
    is a multiple of ``num_kv_heads`` (grouped-query attention). A causal mask is aligned bottom-right: query
    row i sees keys 0 .. i + seqlen_k - seqlen_q. What else is asked of masks and scores is in ``scoring``.

    ``varlen`` makes ``batch`` packed sequences of lengths of their own of it, up to ``seqlen_q`` and
    ``seqlen_k``, and says which lengths kernels are tuned and timed with: see `flashgen.gen.lengths`.

    ``page_size`` keys make a page where keys and values lie in a cache of pages, which each sequence's row of
    a table lists; 0: no pages.

    ``latent``: values are the first ``head_dim_v`` columns of the keys, and no array of their own.

    ``append``: a call writes new keys and values behind those that each sequence has in the caches, and then
    attends to them, too; kernels are timed with one for each query.

    ``kv_dtype`` is the type of keys and values where it is not that of the queries; each of their heads then
    comes with a scale, by which scores and outputs are multiplied.

    ``backward`` asks for the gradients of q, k and v.

    Raises:
        ValueError: a field is out of range; the message names the value and the range.
    """

    dtype: str = "f32"
    batch: int = 4
    num_q_heads: int = 16
    num_kv_heads: int = 16
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    head_dim: int = 64
    head_dim_v: int = 0
    causal: bool = False
    precision: str = "auto"
    scoring: Scoring = PLAIN
    varlen: str = ""
    page_size: int = 0
    latent: bool = False
    append: Append | None = None
    kv_dtype: str = ""
    backward: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not served; choose one of {', '.join(ITEM_BYTES)}")
        if self.precision not in PRECISIONS[self.dtype]:
            raise ValueError(
                f"precision {self.precision!r} is not served for {self.dtype}; "
                f"choose one of {', '.join(PRECISIONS[self.dtype])}"
            )
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", "")
        if self.kv_dtype and self.kv_dtype not in (served := KV_DTYPES[self.dtype]):
            raise ValueError(
                f"kv_dtype {self.kv_dtype!r} is not served beside {self.dtype}; "
                f"choose {' or '.join([*served, self.dtype])}"
            )
        if self.kv_dtype and self.latent:
            raise ValueError(f"latent keys are of the queries' type, {self.dtype}, not of {self.kv_dtype}")
        if self.kv_dtype and self.append is not None:
            raise ValueError(
                f"new keys are appended to caches of the queries' type, {self.dtype}, not to those of "
                f"{self.kv_dtype}; leave append or kv_dtype out"
            )
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name} is {_short(getattr(self, name))}; it must lie in 1..{MAX_SIZE}")
        most = MAX_LATENT_DIM if self.latent else MAX_HEAD_DIM
        for name in ("head_dim", "head_dim_v"):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 1..{most}")
        if self.latent and self.head_dim_v > self.head_dim:
            raise ValueError(
                f"head_dim_v is {self.head_dim_v}, of keys with {self.head_dim} columns, the first of which "
                "are latent values; it must be no more"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 0 <= self.page_size <= MAX_SIZE:
            raise ValueError(
                f"page_size is {_short(self.page_size)}; it must lie in 1..{MAX_SIZE}, or be 0 for no pages"
            )
        if self.varlen:
            self.lengths  # noqa: B018  (texts that are none are told of at once)
            for name in ("total_q", "total_k"):
                if getattr(self, name) > MAX_SIZE:
                    raise ValueError(f"{name} is {getattr(self, name)}, at most {MAX_SIZE} rows are served")
        if (whole := self.operation.min_bytes(self)) > MAX_BYTES:
            raise ValueError(
                f"q, k, v and o take {whole / 2**30:,.0f} GiB, no card holds more than "
                f"{MAX_BYTES // 2**30}; choose a smaller batch, fewer heads or shorter sequences"
            )
        if self.backward and (self.latent or self.append is not None):
            asked = "latent values" if self.latent else "keys that a call appends"
            raise ValueError(f"gradients are those of keys and values apart, not of {asked}; leave one out")
        if self.append is not None:
            wrong = self.append.why_not(self.dtype, self.head_dim, self.layout, latent=self.latent)
            if wrong is not None:
                raise ValueError(wrong)
        if not self.scoring.is_plain:
            self.scores  # noqa: B018  (expressions that are none are told of at once)

    @property
    def operation(self) -> Operation:
        """The operation that the problem asks for, which says what is computed from which arrays."""
        if self.backward:
            return BACKWARD
        return LATENT if self.latent else FORWARD

    @property
    def layout(self) -> Layout:
        """How the rows of the arrays lie in memory."""
        if self.page_size:
            return PACKED_PAGED if self.varlen else PAGED
        return PACKED if self.varlen else DENSE

    @property
    def lengths(self) -> Lengths:
        """How long the sequences are that kernels are tuned and timed with."""
        return draw_lengths(self.varlen or "same", self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def total_q(self) -> int:
        """Queries of all sequences together, of one head."""
        return sum(self.lengths.q) if self.varlen else self.batch * self.seqlen_q

    @property
    def total_k(self) -> int:
        """Keys of all sequences together, of one head."""
        return sum(self.lengths.k) if self.varlen else self.batch * self.seqlen_k

    @property
    def seqlen_new(self) -> int:
        """The new keys of each sequence that kernels are timed with: one for each query; 0 where none are
        appended."""
        return self.seqlen_q if self.append is not None else 0

    @property
    def total_new(self) -> int:
        """The new keys of all sequences together; 0 where none are appended."""
        return self.total_q if self.append is not None else 0

    @property
    def max_pages(self) -> int:
        """The most pages of a sequence; 0 where there are none."""
        return -(-self.seqlen_k // self.page_size) if self.page_size else 0

    @property
    def num_pages(self) -> int:
        """Pages of all sequences together, none of which they share; 0 where there are none."""
        return sum(-(-n // self.page_size) for n in self.lengths.k) if self.page_size else 0

    @property
    def scores(self) -> Scores:
        """What each query row sees of the keys, and what becomes of its scores."""
        return asked_scores(self.scoring, causal=self.causal)

    @property
    def key_dtype(self) -> str:
        """What k and v are made of."""
        return self.kv_dtype or self.dtype

    @property
    def output_dtype(self) -> str:
        """What o is made of: the inputs' type, bf16 for e4m3."""
        return OUTPUT_DTYPES.get(self.dtype, self.dtype)

    @property
    def has_scales(self) -> bool:
        """Whether tensors come with a scale each, as those of eight bits do."""
        return ITEM_BYTES[self.dtype] == 1

    @property
    def has_key_scales(self) -> bool:
        """Whether heads of keys and of values come with a scale each, as those of another type do."""
        return bool(self.kv_dtype)

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def has_few_queries(self) -> bool:
        """Whether it is one of decoding, or of checking a few rows."""
        return self.seqlen_q <= FEW_QUERIES

    @property
    def flops(self) -> int:
        """Floating-point operations: 2·batch·heads·Nq·Nk·(d + dv), half of it where a causal mask lies on a
        square; of visible pairs alone under others, and of packed sequences."""
        if self.varlen or not self.scoring.is_plain or (self.causal and self.seqlen_q != self.seqlen_k):
            return self.operation.flops(self, self.num_attended)
        pairs = self.batch * self.num_q_heads * self.seqlen_q * self.seqlen_k
        return self.operation.flops(self, pairs) // (2 if self.causal else 1)

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through device memory: q, k, v read once and o written once; of k and v what some row
        sees, and what masks and changes of scores read."""
        return _min_bytes(self)

    @property
    def tolerance(self) -> float:
        """The largest per-head ‖o - ref‖ / ‖ref‖ of a right kernel on inputs of ordinary size, float64 taken
        as the truth about the inputs as rounded to the dtype."""
        return TOLERANCES.get(self.precision, TOLERANCES[self.dtype])

    @property
    def num_attended(self) -> int:
        """Unmasked (query, key) pairs over all batches and heads."""
        return attended_pairs(self)

    @property
    def stem(self) -> str:
        """What a kernel is made for whatever its lengths: dtypes, precision unless automatic, head dims,
        masks and changes of scores."""
        precision = "" if self.precision == "auto" else f"_{self.precision}"
        value_dim = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        layout = self._layout_stem + (self.append.stem if self.append is not None else "")
        keys = f"_kv{self.kv_dtype}" if self.kv_dtype else ""
        operation = "_backward" if self.backward else ""
        return (
            f"{self.dtype}{precision}{keys}_d{self.head_dim}{value_dim}{operation}{layout}{self.scoring.stem}"
        )

    @property
    def _layout_stem(self) -> str:
        layout = "" if self.layout is DENSE else f"_{self.layout.name}{self.page_size or ''}"
        return f"{'_latent' if self.latent else ''}{layout}"

    @property
    def name(self) -> str:
        """An identifier: dtype, head dims and mask, then whatever of the shape differs from the default."""
        stem = self.stem.removesuffix(self.scoring.stem)
        parts = [stem + (f"_{short_lengths(self.varlen)}" if self.varlen else "") + self.scoring.values]
        if self.causal:
            parts.append("causal")
        default = {f.name: f.default for f in fields(self)}
        if self.batch != default["batch"]:
            parts.append(f"b{self.batch}")
        if (self.num_q_heads, self.num_kv_heads) != (default["num_q_heads"], default["num_kv_heads"]):
            parts.append(f"h{self.num_q_heads}")
            if self.num_kv_heads != self.num_q_heads:
                parts.append(f"kv{self.num_kv_heads}")
        if (self.seqlen_q, self.seqlen_k) != (default["seqlen_q"], default["seqlen_k"]):
            parts.append(f"n{self.seqlen_q}")
            if self.seqlen_k != self.seqlen_q:
                parts.append(f"m{self.seqlen_k}")
        return "_".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON has them; without ``scoring`` where nothing is asked, ``varlen`` where
        all sequences are as long, ``page_size`` where there are no pages, ``latent`` where it is not,
        ``append`` where nothing is appended, ``kv_dtype`` where keys are of the queries' type, and
        ``backward`` where outputs are asked for."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in LATER_FIELDS}
        if not self.scoring.is_plain:
            told["scoring"] = self.scoring.to_dict()
        if self.append is not None:
            told["append"] = self.append.to_dict()
        later = {name: getattr(self, name) for name in LATER_FIELDS if name not in ("scoring", "append")}
        return told | {name: value for name, value in later.items() if value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Problem:
        """Returns the problem ``to_dict`` wrote; unknown keys and values of other types raise TypeError."""
        data = dict(data)
        if "scoring" in data:
            if not isinstance(data["scoring"], dict):
                raise TypeError(f"scoring is {data['scoring']!r:.80}, no table of what is asked")
            data["scoring"] = Scoring.from_dict(data["scoring"])
        if "append" in data:
            if not isinstance(data["append"], dict):
                raise TypeError(f"append is {data['append']!r:.80}, no table of what is asked")
            data["append"] = Append.from_dict(data["append"])
        for field in fields(cls):
            if (
                field.name in data
                and field.name != "append"
                and type(data[field.name]) is not type(field.default)
            ):
                kind = type(field.default).__name__
                raise TypeError(f"{field.name} is {data[field.name]!r:.80}, not of type {kind}")
        return cls(**data)


def _short(number: int) -> str:
    """A number as an error tells it: beyond any size, by its magnitude."""
    return str(number) if abs(number) < 2**64 else f"about {'-' if number < 0 else ''}2^{number.bit_length()}"


@lru_cache(maxsize=4096)
def _min_bytes(problem: Problem) -> int:
    whole = problem.operation.min_bytes(problem)
    return whole if problem.scoring.is_plain else whole - unseen_bytes(problem) + read_bytes(problem)
