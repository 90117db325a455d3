"""Keys and values in pages, on emulated cards: beside float64, with pages between that nobody may touch."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from flashgen.gen.arguments import (
    MAP_ROUND_BYTES,
    MAP_ROWS_END,
    MAP_STRIDE_UNIT,
    describe_maps,
    make_arguments,
)
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.pages import draw_table, gather, scatter
from flashgen.tuner.errors import CorruptedMemory, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate

from tests.gen.families.test_packed import CARDS, GROUPS, SCORINGS, is_asked
from tests.gen.families.test_packed import WAYS as PACKED_WAYS
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

H200 = PRESETS["h200"]
PAGED = Problem(
    batch=5, num_q_heads=4, num_kv_heads=2, seqlen_q=4, seqlen_k=90, head_dim=32, page_size=16, causal=True
)
#: With dense queries, blocks of a cluster share what they copy of pages, too.
CLUSTERS = {
    "wgmma, cluster of tiles": (replace(GROUPS, cluster=2), "bf16", "h200 of two"),
    "wgmma, cluster of heads": (replace(GROUPS, cluster=2, cluster_over="heads", bc=64), "f16", "h200"),
}
WAYS = {**PACKED_WAYS, **CLUSTERS}
RAGGED = "uniform:1-4/uniform:3-90"
#: Sizes of pages: of which tiles are made, which are made of tiles, and neither.
SIZES = (1, 7, 16, 24, 64, 128, 256)
MASKED = [name for name, scoring in SCORINGS.items() if replace(PAGED, scoring=scoring).scores.predicate]
INTERVALS = [name for name in SCORINGS if name not in ("plain", *MASKED)]


def takes(way: str, size: int) -> bool:
    """Whether a family takes pages of so many keys: the copy engine brings groups of eight."""
    return not way.startswith("wgmma") or size % 8 == 0


def kernel_of(way: str, **asked) -> Kernel:
    variant, dtype, card = WAYS[way]
    if variant.launch(PAGED, H200).cluster > 1:
        asked = {"seqlen_q": 150, **asked}  # several tiles
    return render(variant, replace(PAGED, dtype=dtype, **asked), CARDS[card])


def check(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False, seed: int = 1) -> float:
    device = SimDevice("emulated", CARDS[WAYS[way][2]], sanitize)
    build = device.toolchain().build(kernel)
    return validate(device.open(), build, seed=seed, depth=depth, problem=kernel.problem)


@needs_compiler
@pytest.mark.parametrize(
    ("way", "size"),
    sampled([(way, size) for size in SIZES for way in WAYS if takes(way, size)], 3, thorough=20),
)
def test_sequences_in_pages_are_right(way: str, size: int) -> None:
    kernel = kernel_of(way, page_size=size)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(PACKED_WAYS, 0, thorough=3))
def test_ragged_problems_of_all_kinds_are_right(way: str) -> None:
    sizes = [size for size in SIZES if takes(way, size)]
    for seed, (size, varlen) in enumerate((size, varlen) for size in sizes for varlen in ("", RAGGED)):
        kernel = kernel_of(
            way,
            page_size=size,
            varlen=varlen,
            causal=seed % 4 < 2,
            **dict.fromkeys(("head_dim", "head_dim_v"), 48 if "e4m3" in way else 40),
        )
        assert check(kernel, way, depth="full", seed=seed) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "size"),
    sampled([(way, size) for way in PACKED_WAYS for size in (16, 7, 64) if takes(way, size)], 2, thorough=10),
)
def test_queries_may_be_packed(way: str, size: int) -> None:
    kernel = kernel_of(way, page_size=size, varlen=RAGGED)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "name"), sampled([(way, name) for name in INTERVALS for way in WAYS], 2, thorough=20)
)
def test_masks_and_scores_are_those_of_dense_keys(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], causal=name != "score")
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "name"),
    sampled([(way, name) for name in MASKED for way in PACKED_WAYS if is_asked(way, name)], 2, thorough=10),
)
def test_masks_by_expression_are_of_packed_queries(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], varlen=RAGGED)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "size"),
    sampled(
        [
            ("mma, keys over warps", 16),
            ("wgmma", 16),
            ("simt", 7),
            ("mma, keys over blocks", 64),
            ("wgmma, cluster of tiles", 8),
            ("wgmma, f32 by tiles", 24),
            ("wgmma, e4m3", 64),
        ],
        2,
    ),
)
def test_nothing_is_read_or_written_out_of_bounds(way: str, size: int) -> None:
    kernel = kernel_of(way, page_size=size)
    assert check(kernel, way, sanitize=True) < kernel.problem.tolerance


@pytest.mark.parametrize(
    ("way", "varlen", "size"),
    sampled(
        [
            (way, varlen, size)
            for way, varlen, size in product(WAYS, ("", RAGGED), SIZES)
            if takes(way, size) and not (varlen and way in CLUSTERS)
        ],
        10,
        thorough=40,
    ),
)
def test_a_kernel_reads_well(way: str, varlen: str, size: int) -> None:
    source = kernel_of(way, page_size=size, varlen=varlen, scoring=Scoring(window=(9, 0))).source
    assert_tidy(source, way, longest=150 if "f32" in way else 135)
    assert "k_stride_batch" not in source and "k_stride_page" in source


def test_pages_come_in_pieces_of_a_tile() -> None:
    """What is copied together is of one page and of one tile, or of a block's share of it."""
    problem = replace(PAGED, dtype="bf16", head_dim=64)
    for size, cluster, piece in ((16, 1, 16), (24, 1, 8), (64, 1, 64), (256, 1, 128), (256, 2, 64)):
        variant = Wgmma(br=64, bc=128, cluster=cluster)
        kernel = render(variant, replace(problem, page_size=size, seqlen_q=200), H200)
        assert {each.rows for each in kernel.launch.tensor_maps if each.array in "kv"} == {piece}
        by_lanes = piece < variant.bc // cluster  # else one thread copies all
        assert (f"constexpr int kPiece = {piece};" in kernel.source) == by_lanes
        assert ("if (warp == 0 && elect_one()) {" in kernel.source) == (not by_lanes)
        assert f"constexpr int kPageSize = {size};" in kernel.source


def test_maps_name_rows_of_pages_by_where_their_sequence_ends() -> None:
    problem = replace(PAGED, dtype="bf16", head_dim=64, head_dim_v=64)
    kernel, arrays = render(GROUPS, problem, H200), "qkvo"
    sizes = {name: getattr(problem, name) for name in problem.layout.sizes} | {"num_pages": 9}
    # Of k pages have heads of 16 rows, of v rows of two heads.
    strides = {"q": (640, 160, 40), "k": (2048, 1024, 64), "v": (2048, 64, 128), "o": (640, 160, 40)}
    addresses = dict.fromkeys(arrays, 1 << 20)

    def found(**changed: int):
        arguments = make_arguments(problem, addresses, strides, scale=1.0, sizes={**sizes, **changed})
        return {each.array: each for each in describe_maps(kernel.launch, problem, arguments)}

    described = found()
    assert described["q"].sizes == (64, 4, 4, 5) and described["q"].strides == (80, 320, 1280)
    # Heads are numbered through all pages: those of k lie side by side, v's pages are 32 times as far apart.
    assert described["k"].sizes == (64, MAP_ROWS_END, 2 * 8 + 2, 17, MAP_ROWS_END + 1)
    assert described["v"].sizes == (64, MAP_ROWS_END, 32 * 8 + 2, 17, MAP_ROWS_END + 1)
    assert described["k"].strides == (128, 2048, 128, MAP_ROUND_BYTES - 128)
    assert described["v"].strides == (256, 128, 256, MAP_ROUND_BYTES - 256)
    assert "(way round, rows, heads, rows, columns)" in str(described["v"])
    for name, heads_of_page in (("k", 2), ("v", 32)):
        each = described[name]
        assert each.address == 1 << 20  # which is memory, whatever is before
        for end in (0, 5, 16):  # of a page's rows that count
            before = MAP_ROWS_END - end
            steps = zip((before, 8 * heads_of_page + 1, end, MAP_ROWS_END), each.strides, strict=True)
            address = each.address + sum(step * stride for step, stride in steps)
            assert address % 2**64 == (1 << 20) + 8 * 4096 + each.strides[1]
            assert before + end == each.sizes[1]  # the first that does not is outside
    # Pages of one head are numbered themselves, however far heads are apart.
    assert found(num_kv_heads=1)["k"].strides[1] == 4096 and found(num_kv_heads=1)["k"].sizes[2] == 9
    # Of no keys nothing is read.
    nothing = found(seqlen_k=0, num_pages=0)["k"]
    assert nothing.sizes == (64, 1, 1, 1, 1) and nothing.strides == (MAP_STRIDE_UNIT,) * 4
    assert nothing.address == 1 << 20
    strides["v"] = (2048, 96, 128)
    with pytest.raises(ValueError, match="v: pages are 2048 elements apart, heads 96"):
        found()


def test_a_page_is_looked_up_once_for_its_rows() -> None:
    variant = Mma(br=16, bc=64, rows_per_warp=16, pack_heads=True, key_warps=2)
    for size, looks in (
        (16, "pages[4]"),
        (32, "pages[2]"),
        (64, "All of the tile"),
        (256, "All of the tile"),
    ):
        source = render(variant, replace(PAGED, dtype="bf16", head_dim=64, page_size=size), H200).source
        assert looks in source and f"constexpr int kPageSize = {size};" in source
    general = render(variant, replace(PAGED, dtype="bf16", head_dim=64, page_size=24), H200).source
    assert "kPageSize" not in general and "args->page_size < 1" in general


def attend(kernel: Kernel, *, sanitize: bool = False, lengths=(33, 5), **changed):
    """What a kernel makes of a few sequences with keys in pages, and what it should."""
    device = SimDevice("emulated", H200, sanitize)
    runner, build = device.open(), device.toolchain().build(kernel)
    problem, pages = kernel.problem, draw_table(lengths, kernel.problem.page_size)
    rng = np.random.default_rng(0)
    shapes = ((len(lengths), 4, 4, 32), (1, 2, sum(lengths), 32))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.2, rng=rng, dtype=problem.dtype)
    cache_k, cache_v = (scatter(x, lengths, pages) for x in (k, v))
    cache_v[np.isnan(cache_v.astype(np.float32))] = 0
    cache_k[np.isnan(cache_k.astype(np.float32))] = 0
    values = {"page_table": pages.table, "seqused_k": np.array(lengths, np.int32), **changed}
    o, _ = runner.attend(build, q, cache_k, cache_v, scale=0.2, values=values)
    starts = np.cumsum([0, *lengths])
    expected = [
        reference.attention(
            q[i : i + 1], k[:, :, a:b], v[:, :, a:b], scale=0.2, scores=problem.scores, values={}
        ).o
        for i, (a, b) in enumerate(pairwise(starts))
    ]
    return o, np.concatenate(expected)


@needs_compiler
@pytest.mark.parametrize("sanitize", sampled([False, True], 1))
@pytest.mark.parametrize("way", ["mma, keys over warps", "wgmma"])
def test_pages_that_the_cache_has_not_are_read_from_those_it_has(way: str, sanitize: bool, capfd) -> None:
    """Whatever the table says, no address is made of it that is none of the cache's."""
    kernel = kernel_of(way)
    table = draw_table((33, 5), 16).table.copy()
    table[0, 1], table[1, 0] = -3, 2**31 - 1
    debug = replace(kernel, source="#define FLASHGEN_DEBUG\n#include <cstdio>\n" + kernel.source)
    for each in (kernel, debug):
        o, expected = attend(each, sanitize=sanitize, page_table=table)
        assert np.isfinite(o.astype(np.float32)).all()
        assert np.abs(o.astype(np.float64) - expected).max() > 0.05
    if not sanitize:
        ctypes.CDLL(None).fflush(None)
        told = capfd.readouterr().out
        assert "flashgen: the page table has page -3, the cache has 4 pages" in told
        assert told.count("page 2147483647,") == told.count("\n") - told.count("page -3,")


@needs_compiler
def test_a_kernel_that_knows_no_size_takes_any() -> None:
    kernel = kernel_of("simt", page_size=7)
    for size in (1, 3, 16, 100):
        # The source is that of any size that no tile is made of.
        o, expected = attend(replace(kernel, problem=replace(kernel.problem, page_size=size)))
        assert np.abs(o - expected).max() < 1e-6


@needs_compiler
def test_a_launcher_refuses_caches_that_do_not_suit() -> None:
    for way in ("mma", "wgmma"):
        known = kernel_of(way)
        with pytest.raises(LaunchError, match="error 1"):
            attend(replace(known, problem=replace(known.problem, page_size=8)))


@needs_compiler
def test_all_sequences_are_as_long_where_nothing_else_is_told() -> None:
    o, expected = attend(kernel_of("simt"), lengths=(48, 48), seqused_k=None)
    assert np.abs(o - expected).max() < 1e-6


@needs_compiler
def test_more_keys_than_there_is_room_for_are_none() -> None:
    """A table of two pages holds no 33 keys, whatever is told of their number; less than none is none."""
    kernel = kernel_of("simt", causal=False)
    table = draw_table((33, 5), 16).table[:, :2]
    with pytest.raises(LaunchError, match="error 1"):
        attend(kernel, page_table=table)
    o, _ = attend(kernel, seqused_k=np.array([-5, 5], np.int32))
    assert (o[0] == 0).all() and (o[1] != 0).any()


@needs_compiler
@pytest.mark.parametrize(
    ("way", "size", "right", "wrong"),
    sampled(
        [
            ("simt", 16, "args.seqlen_k = count_keys(args, batch);", ""),
            ("simt", 7, "(key - nth * rows.page_size)", "(key - nth)"),
            ("simt", 16, "batch * args.page_table_stride", "batch * args.max_pages"),
            ("mma", 16, " + i * 16, rows.last_key)", ", rows.last_key)"),
            ("mma, keys over warps", 64, "first % kPageSize", "0"),
            ("mma", 16, "first + row < end", "true"),
            ("wgmma", 16, "min(max(source.rows.last_key + 1 - (key - row), 0), kPageSize)", "kPageSize"),
            ("wgmma", 64, "kRowsEnd - end + row", "kRowsEnd - end"),
            ("wgmma", 64, "kRowsEnd - end + row", "kRowsEnd - kPageSize + row"),
            ("wgmma", 24, "page_before = find_page(n - 2)", "page_before = find_page(n - 1)"),
            ("wgmma, one tile a block", 8, "smem.k[k_pipe.stage], maps", "smem.k[0], maps"),
        ],
        5,
    ),
)
def test_the_suite_finds_mistakes(way: str, size: int, right: str, wrong: str) -> None:
    kernel = kernel_of(way, page_size=size)
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(kernel, way)


def test_pages_are_part_of_a_problem() -> None:
    assert PAGED.name == "f32_d32_paged16_causal_b5_h4_kv2_n4_m90"
    packed = replace(PAGED, varlen=RAGGED)
    assert packed.stem == "f32_d32_packed_paged16"
    for each in (PAGED, packed):
        assert Problem.from_dict(each.to_dict()) == each and each.to_dict()["page_size"] == 16
    assert "page_size" not in Problem().to_dict()
    dense = replace(PAGED, page_size=0)
    assert (PAGED.flops, PAGED.min_bytes) == (dense.flops, dense.min_bytes)
    assert (PAGED.max_pages, PAGED.num_pages) == (6, 30)
    k = PAGED.operation.array("k")
    assert k.stored_shape(PAGED) == (30, 2, 16, 32) and k.shape(PAGED) == (5, 2, 90, 32)
    assert k.stored_bytes(PAGED) == 4 * 30 * 2 * 16 * 32
    with pytest.raises(ValueError, match="page_size is -1"):
        replace(PAGED, page_size=-1)


def test_what_pages_do_not_go_with_is_told() -> None:
    with pytest.raises(Illegal, match="tiles of keys of their own"):
        render(Mma(heads=2, q_in_registers=False), replace(PAGED, dtype="bf16"), H200)
    with pytest.raises(Illegal, match="beside pages they need packed queries"):
        kernel_of("simt", scoring=SCORINGS["mask"])
    with pytest.raises(Illegal, match="pages of 7 keys are no whole groups of 8 rows"):
        render(Wgmma(), replace(PAGED, dtype="bf16", head_dim=64, page_size=7), H200)


def test_hostile_tables_share_pages_and_leave_some_to_nobody() -> None:
    lengths = (90, 0, 40, 1, 33)
    pages = draw_table(lengths, 8, hostile=True, share=True)
    used = [set(row[: -(-n // 8)]) for row, n in zip(pages.table, lengths, strict=True)]
    assert used[0] & used[2] and len(set.union(*used)) < pages.num_pages - 2
    assert not {0, pages.num_pages - 1} & set.union(*used)
    array = np.arange(164 * 6, dtype=np.float32).reshape(1, 2, 164, 3)
    alone = draw_table(lengths, 8, hostile=True)
    assert (gather(scatter(array, lengths, alone), lengths, alone.table) == array).all()
