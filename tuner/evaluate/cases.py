"""The suite of small problems at which kernels go wrong, made around a variant's own tile sizes.

Where something is asked of masks and scores, the problems of plain attention come with numbers that suit
their lengths, since a window of 1023 keys hides nothing of 200, and others are added at which masks go wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...gen.layout import DENSE
from ...gen.lengths import Lengths, listed_lengths
from ...gen.problem import Problem
from ...gen.scoring.asked import PLAIN, Scoring
from ...gen.scoring.words import scoring_words
from ...gen.variant import Variant
from . import reference
from .asked_numbers import numbers_for
from .error_bounds import PLAIN_SCORE, plain_score

Depth = Literal["quick", "full"]
LAYOUTS = ("bhnd", "bnhd", "packed", "padded")
#: What arrays that masks and changes read hold: as they are drawn; for each batch and head others, with gaps
#: between rows; what is at the ends of their ranges; what hides all keys of some rows.
VALUES = ("drawn", "various", "extreme", "hiding")


@dataclass(frozen=True)
class Case:
    """One attention problem to try a kernel on. ``scale`` multiplies 1/√d.

    Packed sequences, and those whose keys lie in pages of ``page_size``, have room for ``lengths``, of which
    ``used`` count, all unless it is given; the other lengths are the longest.

    ``new`` are the last keys of each sequence that a call appends; of packed sequences, they have offsets of
    their own if they are ``apart``.

    ``scoring`` has the numbers of what is asked of masks and scores, and ``values`` says what the arrays hold
    that those read.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    inputs: str = "uniform"
    layout: str = "bhnd"
    scale: float = 1.0
    want_lse: bool = False
    scoring: Scoring = PLAIN
    values: str = VALUES[0]
    lengths: Lengths | None = None
    used: Lengths | None = None
    page_size: int = 0
    new: tuple[int, ...] = ()
    apart: bool = False

    @property
    def cached(self) -> tuple[int, ...] | None:
        """The keys of each sequence before any are appended."""
        if self.counted is None:
            return None
        return tuple(n - new for n, new in zip(self.counted.k, self.new or (0,) * self.batch, strict=True))

    @property
    def counted(self) -> Lengths | None:
        """The lengths that count."""
        return self.used or self.lengths

    def sized(self, problem: Problem) -> Problem:
        """Returns the problem at this case's lengths and heads."""
        sizes = {name: getattr(self, name) for name in DENSE.sizes}
        if self.lengths is not None and problem.layout.is_packed:
            sizes["varlen"] = listed_lengths(self.lengths.q, self.lengths.k)
        return replace(problem, **sizes, page_size=self.page_size)

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}"
        if self.num_kv_heads != self.num_q_heads:
            heads += f"/{self.num_kv_heads}"
        asked = "" if self.scoring.is_plain else f", {scoring_words(self.scoring)}, {self.values} values"
        shape = f"batch {self.batch}, heads {heads}, {self.seqlen_q} queries, {self.seqlen_k} keys"
        if self.lengths is not None:
            gaps = "" if self.used is None else " with gaps"
            shape = f"{self.batch} sequences{gaps} of up to {self.seqlen_q} queries and {self.seqlen_k} keys"
            shape += f", heads {heads}" + (f", pages of {self.page_size} keys" if self.page_size else "")
        if self.new:
            shape += f", up to {max(self.new)} of them new"
        return f"{self.inputs} inputs, {shape}, {self.layout} layout, scale {self.scale:g}/√d{asked}"


def cases(variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator) -> Iterator[Case]:
    """Returns small problems that no tile divides, around the variant's tiles of ``br`` rows and ``bc``
    keys."""
    if problem.layout is not DENSE:
        make = _packed_cases if problem.layout.is_packed else _few_queries_cases
        ragged = make(variant, problem, depth, rng)
        if problem.append is not None:
            ragged = _appended_to(ragged, problem, rng)
        if problem.layout.is_paged:
            ragged = _in_pages(ragged, variant, problem)
        return ragged if problem.scoring.is_plain else _scored_cases(tuple(ragged), variant, problem, rng)
    plain = _plain_cases(variant, problem, depth, rng)
    if problem.append is not None:
        plain = _appended_to(plain, problem, rng)
    if problem.scoring.is_plain:
        return plain
    return _scored_cases((*plain, *_masked_shapes(variant, depth, rng)), variant, problem, rng)


def _scored_cases(
    shapes: tuple[Case, ...], variant: Variant, problem: Problem, rng: np.random.Generator
) -> Iterator[Case]:
    """The cases with numbers for their lengths, and values of each kind in turn."""
    asked, bc = problem.scoring, _tiles(variant)[1]
    for turn, case in enumerate(shapes):
        if asked.score and case.inputs in reference.LARGE_DISTRIBUTIONS:
            # What becomes of a score of 150 in an expression that nobody knows may be anything.
            case = replace(case, inputs="normal")
        # Numbers and values change places as the turns go round.
        values = VALUES[(turn + turn // len(VALUES)) % len(VALUES)]
        yield replace(case, scoring=numbers_for(asked, case.seqlen_k, bc, turn, rng), values=values)


def _packed_cases(
    variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator
) -> Iterator[Case]:
    """The problems of packed sequences: ragged, empty of queries or of keys, of one token, and with gaps of
    what nobody wrote between them."""
    br, bc = _tiles(variant)
    ragged_q, ragged_k = br + _ragged(br, rng), 2 * bc + _ragged(bc, rng)
    plain = 0.7 * plain_score(problem) / PLAIN_SCORE
    edges = [(ragged_q, ragged_k), (0, bc), (1, 1), (_ragged(br, rng), 0), (1, ragged_k), (br, bc), (0, 0)]
    yield _packed(edges, rng, inputs="uniform", scale=plain, want_lse=True)
    # Gaps, and queries beyond the keys: under a causal mask the first rows see nothing.
    some = [(br + 3, _ragged(bc, rng)), (7, ragged_k), (1, bc + 1), (ragged_q, 2)]
    yield _packed(some, rng, gaps=True, inputs="negative", layout="padded", want_lse=True)
    yield _packed([(n, n) for n in (5, ragged_k, 1, bc)], rng, inputs="rising", layout="packed", scale=-1.0)
    shares = variant.key_shares()
    if shares > 1:
        many = (2 * shares + 1) * bc + _ragged(bc, rng)
        yield _packed([(3, many), (1, 1), (2, bc + 1)], rng, gaps=True, inputs="normal", want_lse=True)
    if variant.packs_heads():
        thirds = [(ragged_q // 3 + 1, bc + 1), (1, bc), (br // 3 + 2, ragged_k)]
        yield _packed(thirds, rng, heads=(6, 2), inputs="normal", want_lse=True)
    if depth == "quick":
        return
    for distribution in reference.DISTRIBUTIONS:
        drawn = [
            (int(rng.integers(0, 2 * br)), int(rng.integers(0, 3 * bc)))
            for _ in range(int(rng.integers(2, 7)))
        ]
        yield _packed(drawn, rng, gaps=True, inputs=distribution, layout="padded", want_lse=True)
        same = [(n, n) for n, _ in drawn]
        yield _packed([*same, (1, 1)], rng, heads=(3, 1), inputs=distribution, layout="packed", want_lse=True)
    # More sequences than a block plans for, most of them as long as others.
    short = [(int(rng.integers(0, 3)), int(rng.integers(0, 4))) for _ in range(150)]
    yield _packed([*short, (1, bc)], rng, heads=(1, 1), inputs="uniform", want_lse=True)
    yield _packed([(ragged_q, 1)], rng, inputs="uniform", want_lse=True)


def _few_queries_cases(
    variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator
) -> Iterator[Case]:
    """The problems of as many queries in each sequence, and keys of any number: none, one, whole pages and
    tiles, one more or less."""
    br, bc = _tiles(variant)
    size = problem.page_size
    plain = 0.7 * plain_score(problem) / PLAIN_SCORE
    ends = [0, 1, size, size + 1, 2 * bc + _ragged(bc, rng), bc, max(1, 2 * size - 1), bc + 1]
    yield _packed([(1, n) for n in ends], rng, inputs="uniform", scale=plain, want_lse=True)
    some = [_ragged(bc, rng), 3 * bc + _ragged(bc, rng), 5 * size + 3]
    yield _packed([(4, n) for n in some], rng, heads=(6, 2), inputs="rising", layout="padded", scale=-1.0)
    yield _packed([(17, n) for n in (2, *some)], rng, inputs="normal", layout="packed", want_lse=True)
    yield _packed([(br + 3, n) for n in some[:2]], rng, inputs="uniform", layout="padded", want_lse=True)
    shares = variant.key_shares()
    if shares > 1:
        many = (2 * shares + 1) * bc + _ragged(bc, rng)
        yield _packed([(3, many), (3, 1)], rng, inputs="negative", layout="bhnd", want_lse=True)
    if depth == "quick":
        return
    for distribution in reference.DISTRIBUTIONS:
        rows = int(rng.integers(1, 2 * br))
        drawn = [(rows, int(rng.integers(0, 4 * bc))) for _ in range(int(rng.integers(2, 7)))]
        layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
        yield _packed(drawn, rng, heads=(3, 1), inputs=distribution, layout=layout, want_lse=True)


def _appended_to(made: Iterator[Case], problem: Problem, rng: np.random.Generator) -> Iterator[Case]:
    """The same with new rows among the keys: as many as queries, one, more, or none; of packed sequences, as
    many as queries or any number."""
    for turn, case in enumerate(made):
        if problem.layout.is_packed:
            assert case.counted is not None
            apart = turn % 2 == 1
            new = tuple(int(n) for n in rng.integers(0, 7, case.batch)) if apart else case.counted.q
        else:
            apart, count = False, (case.seqlen_q, 1, case.seqlen_q + 3, 0)[turn % 4]
            new = (min(count, case.seqlen_k) if case.lengths is None else count,) * case.batch
        yield replace(_with_room(case, new), new=new, apart=apart)


def _with_room(case: Case, new: tuple[int, ...]) -> Case:
    """The case with no fewer keys in each sequence than are new."""
    if case.lengths is None:
        return case
    room, used = (
        each and Lengths(each.q, tuple(max(pair) for pair in zip(each.k, new, strict=True)))
        for each in (case.lengths, case.used)
    )
    assert room is not None
    return replace(case, lengths=room, used=used, seqlen_k=max(1, *room.k))


def _in_pages(made: Iterator[Case], variant: Variant, problem: Problem) -> Iterator[Case]:
    """The same with keys in pages: of the size that a kernel knows, or of several that it does not."""
    size, bc = problem.page_size, _tiles(variant)[1]
    others = () if variant.knows_page_size(problem) else (1, 5, 2 * bc)
    for turn, case in enumerate(made):
        yield replace(case, page_size=(size, *others)[turn % (1 + len(others))])


def _packed(
    pairs: list[tuple[int, int]],
    rng: np.random.Generator,
    *,
    heads: tuple[int, int] = (4, 2),
    gaps: bool = False,
    inputs: str,
    layout: str = "bnhd",
    scale: float = 1.0,
    want_lse: bool = False,
) -> Case:
    """Sequences of so many queries and keys that count, in rooms that are larger with ``gaps``."""
    used = Lengths(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))
    room = used
    if gaps:
        room = Lengths(*(tuple(n + int(rng.integers(0, 9)) for n in each) for each in (used.q, used.k)))
    return Case(
        len(pairs),
        *heads,
        max(1, *room.q),
        max(1, *room.k),
        inputs,
        layout,
        scale,
        want_lse,
        lengths=room,
        used=used if gaps else None,
    )


def _masked_shapes(variant: Variant, depth: Depth, rng: np.random.Generator) -> Iterator[Case]:
    """Shapes at which masks go wrong."""
    br, bc = _tiles(variant)
    # Tiles before what a row sees and behind it, for few rows and for more than a tile.
    for _ in range(2 if depth == "quick" else 6):
        yield Case(1, 2, 1, br + _ragged(br, rng), 4 * bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
        yield Case(1, 4, 2, 1 + int(rng.integers(0, 3)), 5 * bc + _ragged(bc, rng), "uniform", want_lse=True)
    # Batches and heads that see others' keys if they are mistaken.
    yield Case(3, 4, 2, br // 2 + _ragged(br, rng), bc + _ragged(bc, rng), "normal", "padded", want_lse=True)
    if depth == "full":
        yield Case(3, 6, 3, 2 * br + 1, 2 * bc - 1, "uniform", "bnhd", want_lse=True)
        yield Case(4, 2, 2, 1, 3 * bc + 1, "normal", "bnhd", want_lse=True)


def _tiles(variant: Variant) -> tuple[int, int]:
    """Rows and keys of a variant's tiles."""
    return int(getattr(variant, "br", 64)), int(getattr(variant, "bc", 64))


def _plain_cases(
    variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator
) -> Iterator[Case]:
    """The problems of plain attention."""
    br, bc = _tiles(variant)
    # Several tiles, the last one ragged: three key tiles go once around a two-stage pipeline.
    ragged_q = br + _ragged(br, rng)
    ragged_k = 2 * bc + _ragged(bc, rng)
    # Scores small enough for every class to be held to its bound alone, and so for an error to report.
    plain = 0.7 * plain_score(problem) / PLAIN_SCORE
    yield Case(1, 4, 2, ragged_q, ragged_k, "uniform", "bnhd", scale=plain, want_lse=True)
    yield Case(2, 1, 1, 1, _ragged(bc, rng), "normal", "padded", want_lse=True)
    # Queries beyond the keys: under a causal mask the first rows see nothing.
    yield Case(1, 1, 1, br + _ragged(br, rng), _ragged(bc, rng), "negative", "bhnd", want_lse=True)
    yield Case(1, 2, 2, ragged_k, ragged_k, "rising", "packed", scale=-1.0)
    # Fewer keys than any instruction takes at once.
    yield Case(2, 3, 3, 7, 5, "uniform", "bnhd", want_lse=True)
    together = variant.heads_per_block()
    if together > 1:
        # A last block with heads missing, and blocks whose heads lie in two batches.
        yield Case(together + 1, 1, 1, _ragged(br, rng), _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    shares = variant.key_shares()
    if shares > 1:
        # Some tiles of keys for each of those that share them, and more for some.
        yield Case(1, 2, 1, 3, (2 * shares + 1) * bc + _ragged(bc, rng), "rising", "bnhd", want_lse=True)
    if variant.packs_heads():
        # Three heads to a position, which rows' tiles cut through.
        yield Case(2, 6, 2, ragged_q // 3 + 1, bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    heads = variant.heads_per_cluster()
    if heads > 1:
        # A cluster with all its heads, and one with a single head.
        yield Case(2, 2 * (heads + 1), 2, ragged_q, bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    neighbours = variant.heads_together()
    if neighbours > 1:
        # The same, whoever's keys they have.
        yield Case(2, neighbours + 1, 1, ragged_q, bc + _ragged(bc, rng), "normal", "bnhd", want_lse=True)
    if depth == "quick":
        return
    if together > 1:
        yield Case(1, 2 * together + 1, 1, ragged_q, ragged_k, "uniform", "padded", want_lse=True)
        yield Case(together + 1, together - 1, together - 1, 49, 49, "rising", "packed")
    for keys in range(2, 9):
        yield Case(1, 2, 1, int(rng.integers(1, 12)), keys, "normal", want_lse=True)
    yield Case(1, 1, 1, 1, 1, "uniform", want_lse=True)
    yield Case(2, 2, 1, 1, 3 * bc + 1, "spiked", "bnhd", want_lse=True)
    yield Case(3, 2, 2, ragged_q, 1, "uniform", "packed" if ragged_q == 1 else "bhnd", want_lse=True)
    for distribution in reference.DISTRIBUTIONS:
        for layout in LAYOUTS:
            length = ragged_k + int(rng.integers(0, 3))
            yield Case(2, 2, 2, length, length, distribution, layout, want_lse=layout != "bhnd")
        yield Case(1, 3, 1, ragged_q, 3 * bc + _ragged(bc, rng), distribution, "bnhd", 1.3, True)
    # Exactly whole tiles, and one more or less of each.
    for off_q, off_k in ((0, 0), (-1, 1), (1, -1)):
        rows, keys = 2 * br + off_q, 3 * bc + off_k
        yield Case(1, 2, 1, rows, keys, "normal", "bnhd", want_lse=True)
        yield Case(1, 2, 2, keys, rows, "falling", "padded", want_lse=True)
    yield Case(1, 8, 2, 2 * br + 3, 4 * bc + 5, "uniform", "bhnd", scale=0.0, want_lse=True)
    yield Case(1, 6, 3, 3 * br - 1, 2 * bc + 7, "falling", "bnhd", scale=-0.5)
    yield Case(5, 6, 6, 49, 49, "normal", "packed")
    # Long enough for kernels that sum long rows in runs to close two of them, and rows enough to show the
    # error of such sums where signs are mixed.
    yield Case(1, 2, 1, 15, 2 * 2048 + 2 * bc + 1, "normal", "bnhd", want_lse=True)
    yield Case(2, 3, 3, 197, 197, "uniform", "packed", want_lse=True)


def _ragged(tile: int, rng: np.random.Generator) -> int:
    """An odd length below a tile."""
    return 1 + 2 * int(rng.integers(0, max(1, tile // 2)))
