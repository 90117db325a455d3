"""Whether a kernel is right: against float64, on fresh random inputs, at the shapes where kernels go wrong.

The suite is made around the variant's own tile sizes. It runs behind the `Runner` protocol, so that a CUDA
card and an emulated one answer the same questions.

How large an error may be. Inputs are taken as rounded to the problem's type. Per head, ‖o - ref‖ / ‖ref‖
stays within the class's bound, `Problem.tolerance`, as long as no score exceeds `plain_score`. A larger score
is itself rounded in proportion to its size, and exp turns that absolute error into a relative error of the
weight. So the bound grows for each unit of the largest score beyond `plain_score`, by

- float32, 3xTF32 and 3xf16: 2⁻²⁴ · (3/2 + √d / 9), more, the longer the dot product. That is about twice the
  worst met in models of the kernels' arithmetic (sequential FMA; tensor cores that sum four exact products
  and cut off what does not fit), exp2 good to 2 ulp, over d = 1 .. 256, all distributions and several scales,
  plus one unit for scale · log2 e, which is rounded twice before it meets every score alike.
- f16 and bf16: twice that, since tensor cores cut off rather than round; the products are exact. P and o are
  rounded once each, by up to 2⁻¹¹ or 2⁻⁸, whatever the scores: that is the class's bound.
- TF32: 2⁻¹¹ / √d, at least 2⁻¹¹ / 8. Each factor of each product is rounded, by up to 2⁻¹¹ of itself. Such
  errors add up as random ones do, with √d, where the products that make a large score add up with d. The
  worst met in a model is about half of it.

Elementwise, |o - ref| <= factor · bound · max|v| + bound · |ref|: an output is an average of v. The factor is
6 for float32, 3 for TF32 and 1 for 16-bit numbers, whose bounds hold for P's rounding element by element.

- e4m3: 2⁻¹⁴ · (3/2 + √d / 9). Tensor cores keep thirteen bits behind the largest product's first, and add
  the next products to a sum cut off like that. The worst met on an emulated card is a third of it.

The log-sum-exp of f16 and bf16 sums weights before they are rounded. Only their exponential may be rough, to
1e-4, less than the rounding then loses. So it is held to 2e-4 (e4m3: 5e-3) plus the growth above, that of
the others to factor · bound; in proportion to its size where that exceeds 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from ...gen.problem import TOLERANCES, Problem
from ...gen.variant import Variant
from ..build.protocol import Build
from ..cards.device import Runner
from ..errors import FlashgenError
from . import reference
from .reference import Reference

Depth = Literal["quick", "full"]

#: By dtype and precision; `Problem.tolerance` reads it.
ERROR_BOUNDS = TOLERANCES
#: Scores up to this leave the bound as it is; those of TF32 up to a quarter of it.
PLAIN_SCORE = 16.0
UNIT_ROUNDOFF = 2.0**-24
#: Largest relative rounding error of eleven bits: TF32's factors.
TF32_ROUNDOFF = 2.0**-11
#: How much larger than the bound, times max|v|, the error of one element may be: by dtype, or TF32.
ELEMENT_FACTORS = {"f32": 6.0, "tf32": 3.0, "f16": 1.0, "bf16": 1.0, "e4m3": 1.0}
#: Of a sum of products of e4m3, tensor cores keep thirteen bits behind the largest term's first.
E4M3_ROUNDOFF = 2.0**-14
#: Largest error of a 16-bit kernel's log-sum-exp, and of one of eight bits.
HALF_LSE_TOLERANCE, E4M3_LSE_TOLERANCE = 2e-4, 5e-3
#: Rows of each head of the real problem that are compared.
SAMPLED_ROWS = 64
#: Most bytes of q, k, v and o that the check of the real problem may take.
SAMPLE_BYTES = 2**27
LAYOUTS = ("bhnd", "bnhd", "packed", "padded")


class WrongResult(FlashgenError):
    """A result further from float64's than rounding explains; names the case, the head and both numbers."""


@dataclass(frozen=True)
class Case:
    """One attention problem to try a kernel on. ``scale`` multiplies 1/√d."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    inputs: str = "uniform"
    layout: str = "bhnd"
    scale: float = 1.0
    want_lse: bool = False

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}"
        if self.num_kv_heads != self.num_q_heads:
            heads += f"/{self.num_kv_heads}"
        return (
            f"{self.inputs} inputs, batch {self.batch}, heads {heads}, {self.seqlen_q} queries, "
            f"{self.seqlen_k} keys, {self.layout} layout, scale {self.scale:g}/√d"
        )


def validate(
    runner: Runner,
    build: Build,
    *,
    seed: int,
    depth: Depth = "quick",
    problem: Problem | None = None,
    max_sample_flops: float = math.inf,
) -> float:
    """The largest per-head error met on inputs whose scores stay within `plain_score`.

    Runs the suite of that depth on inputs drawn from ``seed``, then a sample of ``problem``, shrunk to
    ``max_sample_flops`` (an emulated card is slow) and to `SAMPLE_BYTES`.

    Raises:
        WrongResult, CorruptedMemory, LaunchError: what is wrong with the kernel.
    """
    kernel = build.kernel
    worst = 0.0
    rng = np.random.default_rng([seed, int(kernel.digest, 16)])
    for case in cases(kernel.variant, kernel.problem, depth, rng):
        worst = max(worst, _check_case(runner, build, case, rng))
    if problem is not None:
        sample = sample_problem(problem, depth, max_sample_flops)
        if sample is not None:
            worst = max(worst, _check_sample(runner, build, sample, seed % SAMPLE_SEEDS))
    return worst


# -- the suite ------------------------------------------------------------------------------------------


def cases(variant: Variant, problem: Problem, depth: Depth, rng: np.random.Generator) -> Iterator[Case]:
    """Small problems that no tile divides, around the variant's tiles of ``br`` rows and ``bc`` keys."""
    br, bc = int(getattr(variant, "br", 64)), int(getattr(variant, "bc", 64))
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


def make_inputs(
    case: Case, problem: Problem, rng: np.random.Generator, *, access_width: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """q, k, v in the case's layout, as views shaped (batch, heads, seqlen, head_dim), and the scale.

    Of ``problem`` only the type and the head dims count. All strides are multiples of ``access_width``
    elements, as long as the head dims are.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    scale = float(np.float32(case.scale / math.sqrt(d)))
    q_shape = (case.batch, case.num_q_heads, case.seqlen_q, d)
    kv_shape = (case.batch, case.num_kv_heads, case.seqlen_k, d)
    q, k, v = reference.random_inputs(
        case.inputs, q_shape, kv_shape, scale=scale, rng=rng, dtype=problem.dtype, head_dim_v=dv
    )
    if case.layout == "packed":
        q, k, v = _packed_where_alike(q, k, v)
    elif case.layout == "bnhd":
        q, k, v = (_packed(x)[0] for x in (q, k, v))
    elif case.layout == "padded":
        q, k, v = (_padded(x, access_width) for x in (q, k, v))
    return q, k, v, scale


def _packed(*tensors: np.ndarray) -> tuple[np.ndarray, ...]:
    """The tensors side by side in one array (batch, seqlen, tensor, heads, head_dim)."""
    whole = np.ascontiguousarray(np.stack([x.transpose(0, 2, 1, 3) for x in tensors], axis=2))
    return tuple(whole[:, :, i].transpose(0, 2, 1, 3) for i in range(len(tensors)))


def _packed_where_alike(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Those of one shape side by side in one array, the others each in its own."""
    if q.shape == k.shape == v.shape:
        return _packed(q, k, v)
    if k.shape == v.shape:
        return *_packed(q), *_packed(k, v)
    if q.shape == k.shape:
        return *_packed(q, k), *_packed(v)
    return *_packed(q), *_packed(k), *_packed(v)


def _padded(x: np.ndarray, access_width: int) -> np.ndarray:
    """The same values with a gap of NaN after each row, to the next stride that suits the accesses."""
    head_dim = x.shape[-1]
    gap = access_width - head_dim % access_width
    wide = np.full((*x.shape[:-1], head_dim + gap), np.nan, x.dtype)
    wide[..., :head_dim] = x
    return wide[..., :head_dim]


def _check_case(runner: Runner, build: Build, case: Case, rng: np.random.Generator) -> float:
    problem = build.kernel.problem
    width = build.kernel.variant.access_width(problem)
    q, k, v, scale = make_inputs(case, problem, rng, access_width=width)
    o, lse = runner.attend(build, q, k, v, scale=scale, want_lse=case.want_lse)
    expected = reference.attention(q, k, v, scale=scale, causal=problem.causal)
    return compare(o, lse if case.want_lse else None, expected, v, problem, case.name)


# -- comparing ------------------------------------------------------------------------------------------


def error_bound(problem: Problem, max_score: float) -> float:
    """The largest per-head ‖o - ref‖ / ‖ref‖ that rounding explains; see the module's docstring."""
    return problem.tolerance + _growth(problem, max_score)


def lse_bound(problem: Problem, max_score: float) -> float:
    """The largest error of the log-sum-exp that rounding explains, over max(1, its size)."""
    if problem.dtype != "f32":
        tolerance = E4M3_LSE_TOLERANCE if problem.dtype == "e4m3" else HALF_LSE_TOLERANCE
        return tolerance + _growth(problem, max_score)
    return _element_factor(problem) * error_bound(problem, max_score)


def plain_score(problem: Problem) -> float:
    """The largest score that leaves the class's bound as it is."""
    return PLAIN_SCORE / 4 if problem.precision == "tf32" else PLAIN_SCORE


def _growth(problem: Problem, max_score: float) -> float:
    """What the rounding of large scores adds to a bound."""
    beyond, root = max(0.0, max_score - plain_score(problem)), math.sqrt(problem.head_dim)
    if problem.precision == "tf32":
        return beyond * TF32_ROUNDOFF * max(1 / root, 1 / 8)
    unit = {"f32": UNIT_ROUNDOFF, "e4m3": E4M3_ROUNDOFF}.get(problem.dtype, 2 * UNIT_ROUNDOFF)
    return beyond * unit * (1.5 + root / 9)


def _element_factor(problem: Problem) -> float:
    return ELEMENT_FACTORS.get(problem.precision, ELEMENT_FACTORS[problem.dtype])


def compare(
    o: np.ndarray, lse: np.ndarray | None, expected: Reference, v: np.ndarray, problem: Problem, name: str
) -> float:
    """The largest per-head error, 0 where scores exceed `plain_score`.

    ``o`` and ``lse`` have the reference's shapes; of ``problem`` type, precision and head dim set the bounds.
    Raises `WrongResult` for anything beyond them, NaN and infinity included.
    """
    bound = error_bound(problem, expected.max_score)
    difference = np.asarray(o, np.float64) - expected.o
    axes = (2, 3)
    norms = np.sqrt(np.square(expected.o).sum(axis=axes))
    distances = np.sqrt(np.square(difference).sum(axis=axes))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Heads whose rows see no key have a norm of 0 and must be exactly 0.
        errors = np.where((norms == 0) & (distances == 0), 0.0, distances / norms)
    if not (errors <= bound).all():
        b, h = _worst(errors)
        raise WrongResult(
            f"wrong result: {name}: head {h} of batch {b}: ‖o - ref‖ / ‖ref‖ is {errors[b, h]:.2e}, "
            f"at most {bound:.1e} allowed"
        )
    atol = _element_factor(problem) * bound * float(np.abs(v).max())
    allowed = atol + bound * np.abs(expected.o)
    excess = np.abs(difference) / allowed
    if not (excess <= 1).all():
        b, h, row, x = _worst(excess)
        raise WrongResult(
            f"wrong result: {name}: head {h} of batch {b}, row {row}, column {x}: "
            f"o is {float(o[b, h, row, x]):.7g}, float64 gives {expected.o[b, h, row, x]:.7g}"
        )
    if lse is not None:
        _compare_lse(lse, expected, lse_bound(problem, expected.max_score), name)
    return float(errors.max()) if expected.max_score <= plain_score(problem) else 0.0


def _compare_lse(lse: np.ndarray, expected: Reference, bound: float, name: str) -> None:
    """The log-sum-exp: -inf exactly where no key is seen, else within the rounding of its size."""
    unseen = np.isneginf(expected.lse)
    finite = np.where(unseen, 0.0, expected.lse)
    with np.errstate(invalid="ignore"):
        distance = np.where(
            unseen,
            np.where(np.isneginf(lse), 0.0, np.inf),
            np.abs(lse - finite) / np.maximum(1, np.abs(finite)),
        )
    if not (distance <= bound).all():
        b, h, row = _worst(distance)
        raise WrongResult(
            f"wrong log-sum-exp: {name}: head {h} of batch {b}, row {row}: it is {lse[b, h, row]:.7g}, "
            f"float64 gives {expected.lse[b, h, row]:.7g}"
        )


def _worst(values: np.ndarray) -> tuple[int, ...]:
    """The index of the largest value; NaN counts as the largest."""
    ranked = np.where(np.isnan(values), np.inf, values)
    return tuple(int(i) for i in np.unravel_index(int(ranked.argmax()), values.shape))


# -- the real problem -----------------------------------------------------------------------------------

#: Inputs of the real problem are shared by this many seeds: drawing them again for each candidate, and their
#: reference, would cost more than the check.
SAMPLE_SEEDS = 4


def sample_problem(problem: Problem, depth: Depth, max_flops: float = math.inf) -> Problem | None:
    """``problem`` with as few batches and heads as the check needs: all that fit in `SAMPLE_BYTES` in full
    depth, one or two that share a K and V in quick depth. None when they have more than ``max_flops``."""
    group = problem.num_q_heads // problem.num_kv_heads
    one = replace(problem, batch=1, num_q_heads=min(group, 2), num_kv_heads=1)
    sample = one
    if depth == "full":
        per_batch = replace(problem, batch=1)
        largest = SAMPLE_BYTES // per_batch.min_bytes
        if largest >= 1:
            sample = replace(problem, batch=min(problem.batch, largest))
        else:
            whole_group = replace(one, num_q_heads=group)
            groups = max(1, SAMPLE_BYTES // whole_group.min_bytes)
            sample = replace(one, num_q_heads=groups * group, num_kv_heads=groups)
    if sample.flops > max_flops:
        sample = one
    return sample if sample.flops <= max_flops else None


@dataclass(frozen=True)
class Sample:
    """Inputs of the real problem's shape, and the reference of some rows of some heads."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    picks: tuple[tuple[int, int], ...]
    rows: np.ndarray
    expected: tuple[Reference, ...]


@lru_cache(maxsize=SAMPLE_SEEDS)
def _draw_sample(problem: Problem, seed: int) -> Sample:
    rng = np.random.default_rng([seed, 1])
    q_shape = (problem.batch, problem.num_q_heads, problem.seqlen_q, problem.head_dim)
    kv_shape = (problem.batch, problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
    scale = float(np.float32(1 / math.sqrt(problem.head_dim)))
    q, k, v = reference.random_inputs(
        "normal",
        q_shape,
        kv_shape,
        scale=scale,
        rng=rng,
        dtype=problem.dtype,
        head_dim_v=problem.head_dim_v,
    )
    # The first and the last head find wrong strides and 32-bit offsets, the first and last rows wrong edges.
    last = (problem.batch - 1, problem.num_q_heads - 1)
    drawn = (int(rng.integers(problem.batch)), int(rng.integers(problem.num_q_heads)))
    picks = tuple(dict.fromkeys(((0, 0), drawn, last)))
    rows = np.unique(
        np.concatenate([[0, problem.seqlen_q - 1], rng.integers(problem.seqlen_q, size=SAMPLED_ROWS)])
    )
    group = problem.num_q_heads // problem.num_kv_heads
    expected = tuple(
        reference.attention(
            q[b : b + 1, h : h + 1],
            k[b : b + 1, h // group : h // group + 1],
            v[b : b + 1, h // group : h // group + 1],
            scale=scale,
            causal=problem.causal,
            rows=rows,
        )
        for b, h in picks
    )
    return Sample(q, k, v, scale, picks, rows, expected)


def _check_sample(runner: Runner, build: Build, problem: Problem, seed: int) -> float:
    sample = _draw_sample(problem, seed)
    o, _ = runner.attend(build, sample.q, sample.k, sample.v, scale=sample.scale)
    worst = 0.0
    for (b, h), expected in zip(sample.picks, sample.expected, strict=True):
        rows = o[b : b + 1, h : h + 1, sample.rows]
        name = f"{problem.name} at its real lengths, head {h} of batch {b}"
        worst = max(worst, compare(rows, None, expected, sample.v, problem, name))
    return worst
