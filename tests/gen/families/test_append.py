"""New keys and values in caches, with rotary embedding, by kernels of every family: on emulated cards, beside
float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.append import HALVES, INTERLEAVED, Append
from flashgen.gen.arguments import struct_of
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.appending import NewRows, rotated_queries
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.error_bounds import moved_scores
from flashgen.tuner.evaluate.validate import validate

from tests.gen.families.test_packed import CARDS, WAYS
from tests.gen.families.test_paged import RAGGED
from tests.gen.families.test_paged import WAYS as PAGED_WAYS
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

SIZES = {"batch": 3, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 4, "seqlen_k": 90, "head_dim": 32}
DENSE = Problem(**SIZES, append=Append(), causal=True)
PAGED = replace(DENSE, page_size=16)
ROTATING = {
    "": Append(),
    **{text: Append.parsed(text) for text in ("halves:16", "interleaved:32", "halves:32")},
}


def kernel_of(way: str, problem: Problem) -> Kernel:
    variant, dtype, card = WAYS[way]
    return render(variant, replace(problem, dtype=dtype), CARDS[card])


def check(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", CARDS[WAYS[way][2]], sanitize)
    build = device.toolchain().build(kernel)
    return validate(device.open(), build, seed=seed, depth=depth, problem=kernel.problem)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "text", "varlen"),
    sampled([(w, t, v) for v in ("", RAGGED) for w in PAGED_WAYS for t in ROTATING], 2, thorough=12),
)
def test_new_rows_come_behind_those_in_pages(way: str, text: str, varlen: str) -> None:
    kernel = kernel_of(way, replace(PAGED, append=ROTATING[text], varlen=varlen))
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "text"), sampled([(w, t) for w in WAYS for t in ROTATING], 2, thorough=8))
def test_new_rows_are_the_last_of_dense_keys(way: str, text: str) -> None:
    if text and WAYS[way][1] == "e4m3":
        pytest.skip("no rotary embedding of eight bits")
    kernel = kernel_of(way, replace(DENSE, append=ROTATING[text]))
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("scoring", "causal"),
    sampled(
        [
            (Scoring(tree=True), False),
            (Scoring(window=(20, 5)), False),
            (Scoring(window=(-1, -1), sinks=True), False),
            (Scoring(), False),
        ],
        1,
    ),
)
@pytest.mark.parametrize(("way", "varlen"), sampled([("mma, keys over warps", ""), ("simt", RAGGED)], 1))
def test_queries_are_rotated_by_their_places_where_a_mask_goes_by_them(
    way: str, varlen: str, scoring: Scoring, causal: bool
) -> None:
    asked = replace(PAGED, append=Append(INTERLEAVED, 8), scoring=scoring, causal=causal, varlen=varlen)
    kernel = kernel_of(way, asked)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "size"),
    sampled(
        [(w, n) for n in (1, 7, 16, 64) for w in PAGED_WAYS if n % 8 == 0 or "wgmma" not in w], 0, thorough=2
    ),
)
def test_ragged_problems_of_all_kinds_are_right(way: str, size: int) -> None:
    texts = list(ROTATING)[: {"f32": 4, "e4m3": 1}.get(WAYS[way][1], 2)]
    for seed, (text, varlen) in enumerate((t, v) for t in texts for v in ("", RAGGED)):
        asked = replace(PAGED, page_size=size, append=ROTATING[text], varlen=varlen, causal=seed % 2 == 0)
        kernel = kernel_of(way, asked)
        assert check(kernel, way, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "varlen"), sampled([("mma", ""), ("simt", RAGGED), ("mma, keys over blocks", RAGGED)], 0)
)
def test_nothing_is_read_or_written_out_of_bounds(way: str, varlen: str) -> None:
    kernel = kernel_of(way, replace(PAGED, append=Append(HALVES, 16), varlen=varlen))
    assert check(kernel, way, sanitize=True) < kernel.problem.tolerance


# -- one thing each --------------------------------------------------------------------------------------


def drawn(
    problem: Problem, rows: int, *, pages: int, seed: int = 5
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """q, a cache of so many pages, and new rows for each sequence."""
    rng, dtype = np.random.default_rng(seed), numpy_dtype(problem.dtype)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    d, heads = problem.head_dim, problem.num_kv_heads
    cache = [array(pages, heads, problem.page_size, d) for _ in range(2)]
    q = array(problem.batch, problem.num_q_heads, problem.seqlen_q, d)
    return [q, *cache], {name: array(problem.batch, heads, rows, d) for name in ("k_new", "v_new")}


def attend(kernel: Kernel, arrays: list[np.ndarray], values: dict[str, np.ndarray]) -> np.ndarray:
    device = SimDevice("emulated", PRESETS["h200"])
    build = device.toolchain().build(kernel)
    o, _ = device.open().attend(build, *arrays, scale=0.2, values=values)
    return o


@pytest.mark.parametrize(("dtype", "bits"), [("f16", 10), ("bf16", 7)])
def test_what_float32_may_round_to_another_neighbour_is_allowed_that(dtype: str, bits: int) -> None:
    """And nothing else is: 1 + 2^-bits / 2 lies between two neighbours, of which 1 + 2^-bits is one."""
    problem = replace(DENSE, dtype=dtype, append=Append(HALVES, 2), head_dim=8)
    of_type = numpy_dtype(problem.dtype)
    q = np.zeros((1, 4, 1, 8), of_type)
    q[..., 0], q[..., 1] = 1.0, 2.0**-bits
    tables = {"rotary_cos": np.full((1, 1), 1.0), "rotary_sin": np.full((1, 1), -0.5)}
    values = {name: table.astype(of_type) for name, table in tables.items()}
    new = NewRows(values, (q[:, :2], q[:, :2]), np.zeros(1, int), np.zeros(1, int))
    turned, apart = rotated_queries(problem, new, q)
    assert (apart[..., 0] == 2.0**-bits).all() and (apart[..., 1:] < 2.0**-20).all()
    assert (turned[..., 0].astype(float) == 1.0).all()
    k = np.arange(3 * 2 * 8.0).reshape(1, 2, 3, 8)
    k[0, 1, 2] = np.nan
    moved = moved_scores(apart, k, -0.5)
    expected = 0.5 * 2.0**-bits * np.array([16, 16, 32, 32])
    np.testing.assert_allclose(moved[0, :, 0], expected, rtol=1e-3)
    q[..., 1] = 2.0 ** (1 - bits)
    assert (rotated_queries(problem, new, q)[1] < 2.0**-20).all()


@needs_compiler
def test_rows_without_room_are_dropped() -> None:
    kernel = kernel_of("simt", replace(PAGED, batch=2))
    arrays, new = drawn(kernel.problem, 5, pages=5)
    table, used = np.array([[4, 2], [0, 1]], np.int32), np.array([29, 32], np.int32)
    before = [each.copy() for each in arrays]
    attend(kernel, arrays, {**new, "page_table": table, "seqused_k": used})
    for cache, old, rows in zip(arrays[1:], before[1:], new.values(), strict=True):
        expected = old.copy()
        expected[2, :, 13:] = rows[0, :, :3]
        assert (cache == expected).all()


@needs_compiler
def test_a_page_that_the_cache_has_not_is_not_written() -> None:
    kernel = kernel_of("mma", replace(PAGED, batch=2))
    arrays, new = drawn(kernel.problem, 3, pages=4)
    table, used = np.array([[0, 4], [1, -1]], np.int32), np.array([15, 16], np.int32)
    before = [each.copy() for each in arrays]
    attend(kernel, arrays, {**new, "page_table": table, "seqused_k": used})
    for cache, old, rows in zip(arrays[1:], before[1:], new.values(), strict=True):
        expected = old.copy()
        expected[0, :, 15] = rows[0, :, 0]
        assert (cache == expected).all()


@needs_compiler
def test_a_slot_for_each_sequence_is_a_page() -> None:
    """A dense cache with flash-attn's cache_batch_idx: slots in any order, some of nobody."""
    kernel = kernel_of("mma, heads packed", replace(PAGED, batch=3, page_size=48, seqlen_k=48))
    arrays, new = drawn(kernel.problem, 4, pages=6)
    slots, used = np.array([4, 1, 0], np.int32), np.array([40, 0, 11], np.int32)
    q, k, v = (each.copy() for each in arrays)
    o = attend(kernel, arrays, {**new, "page_table": slots[:, None], "seqused_k": used})
    for b, (slot, length) in enumerate(zip(slots, used, strict=True)):
        k[slot, :, length : length + 4], v[slot, :, length : length + 4] = new["k_new"][b], new["v_new"][b]
        keys, values = k[slot : slot + 1, :, : length + 4], v[slot : slot + 1, :, : length + 4]
        expected = reference.attention(q[b : b + 1], keys, values, scale=0.2, scores=kernel.problem.scores)
        assert np.abs(o[b].astype(np.float64) - expected.o[0]).max() < 2e-2
    assert (arrays[1] == k).all() and (arrays[2] == v).all()


@needs_compiler
def test_positions_behind_the_tables_take_the_last() -> None:
    kernel = kernel_of("simt", replace(PAGED, batch=1, append=Append(HALVES, 32)))
    arrays, new = drawn(kernel.problem, 2, pages=2)
    angles = np.linspace(0, 3, 5 * 16, dtype=np.float32).reshape(5, 16)
    told = {"page_table": np.array([[1, 0]], np.int32), "seqused_k": np.array([20], np.int32)}
    attend(kernel, arrays, {**new, **told, "rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)})
    first, second = new["k_new"][0, :, 1, :16], new["k_new"][0, :, 1, 16:]
    cos, sin = np.cos(angles[-1]), np.sin(angles[-1])
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    np.testing.assert_allclose(arrays[1][0, :, 5], expected, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    sampled(
        [
            (
                "const long long key = 1LL * cached + row;",
                "const long long key = 1LL * cached + row + (cached > 20);",
            ),
            ("is_first ? -crossed : crossed", "crossed"),
            ("rotated.q = args->rotated_q;", ""),
            ("has_place ? row : 0", "0"),
        ],
        1,
    ),
)
def test_mistakes_are_caught(right: str, wrong: str) -> None:
    kernel = kernel_of("simt", replace(PAGED, append=Append(HALVES, 16)))
    assert right in kernel.source
    with pytest.raises(WrongResult):
        check(replace(kernel, source=kernel.source.replace(right, wrong)), "simt")


@needs_compiler
def test_more_new_rows_than_dense_keys_are_refused() -> None:
    kernel = kernel_of("simt", DENSE)
    arrays, new = drawn(replace(kernel.problem, page_size=3), 4, pages=3)
    with pytest.raises(LaunchError, match="CUDA error 1"):
        attend(kernel, arrays, new)


@pytest.mark.parametrize("varlen", ["", RAGGED])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(tree=True), Scoring(window=(9, 0))])
def test_sources_read_well(varlen: str, scoring: Scoring) -> None:
    for way, text in zip(("simt", "mma", "mma, heads packed"), ROTATING, strict=False):
        kernel = kernel_of(way, replace(PAGED, append=ROTATING[text], varlen=varlen, scoring=scoring))
        assert_tidy(kernel.source.replace(kernel.entry, "attention"), f"{way}, {text}", longest=175)
        assert [each.role for each in kernel.launches if each.role in ("append", "kernel")] == [
            "append",
            "kernel",
        ]


def test_an_append_is_told_where_it_is_asked() -> None:
    assert "append" not in Problem().to_dict() and "append" not in Problem().name
    asked = replace(PAGED, append=Append(HALVES, 16))
    assert asked.name.startswith("f32_d32_paged16_append_halves16_causal")
    assert asked.to_dict()["append"] == {"rotary": "halves", "rotary_dim": 16}
    for problem in (asked, PAGED):
        assert Problem.from_dict(problem.to_dict()) == problem
    fields = {each.name for each in struct_of(asked).fields}
    assert {"k_new", "rotary_cos", "rotated_q", "seqlen_new", "rotary_rows"} <= fields
    assert not {"rotary_cos", "rotated_q"} & {each.name for each in struct_of(PAGED).fields}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"append": Append(HALVES, 64)}, "rotary_dim is 64, but head_dim 32"),
        ({"append": Append(HALVES, 16), "dtype": "e4m3"}, "rotary embedding of e4m3 is not served"),
        ({"page_size": 0, "varlen": "same"}, "give a page_size"),
    ],
)
def test_what_cannot_be_appended_is_refused(asked: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(PAGED, **asked)


@pytest.mark.parametrize("text", ["halves", "quarters:8", "halves:-4", "halves:7", "interleaved:0"])
def test_texts_of_rotary_embedding_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="rotary"):
        Append.parsed(text)


def test_json_of_an_append_that_is_none() -> None:
    for wrong in ({"rotary": 3}, {"angle": 1}, []):
        with pytest.raises(TypeError, match="append"):
            Problem.from_dict({**PAGED.to_dict(), "append": wrong})
