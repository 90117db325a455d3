"""Keys of a tile of rows split over blocks that meet in the workspace, on emulated cards."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np
import pytest
from flashgen.gen.append import Append
from flashgen.gen.arguments import struct_of
from flashgen.gen.families.latent.family import Latent
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.handover.plan import ITEM_INTS
from flashgen.gen.handover.split_keys import a_warp_for_each_row, combine_launch
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import COMBINE_ROLE, Launch
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Illegal, Variant
from flashgen.gen.work import Walk, shared_walks
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.sequences import lengths_as_values, sequence_slices
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate
from flashgen.tuner.predict import cost_model

from tests.gen.families.test_packed import FEW, PACKED, SCORINGS, SIMT
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler

DENSE = Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=3, seqlen_k=300, head_dim=24)
NARROW = replace(FEW, bc=16)
HOPPER = Wgmma(br=64, bc=16, persistent=False)
#: Of each way in which results are left and put together: variant, dtype, dtype of keys, card.
WAYS = {
    "simt": (replace(SIMT, workspace_splits=8), "f32", "", "gtx-1080"),
    "simt, two stages": (replace(SIMT, stages=2, br=16, workspace_splits=64), "f32", "", "a100"),
    "mma": (replace(NARROW, workspace_splits=4), "bf16", "", "a100"),
    "mma, alone": (replace(NARROW, workspace_splits=64, pack_heads=False, stages=3), "f16", "", "a100"),
    "mma, warps": (replace(NARROW, workspace_splits=8, key_warps=2, stages=1), "f16", "", "t4"),
    "mma, shared q": (replace(NARROW, br=32, workspace_splits=2, q_in_registers=False), "bf16", "", "h200"),
    "3xtf32": (replace(NARROW, workspace_splits=4), "f32", "", "a100"),
    "3xf16": (replace(NARROW, workspace_splits=4, parts="f16"), "f32", "", "t4"),
    "e4m3 keys": (replace(FEW, workspace_splits=4), "bf16", "e4m3", "a100"),
    "wgmma": (replace(HOPPER, workspace_splits=3), "bf16", "", "h200"),
    "wgmma, alone": (replace(HOPPER, workspace_splits=64, p_in_shared=True, section=0), "f16", "", "h200"),
    "wgmma, packed": (
        replace(HOPPER, workspace_splits=8, pack_heads=True, br=128, bc=32),
        "bf16",
        "",
        "h200",
    ),
    "wgmma, chained": (
        replace(HOPPER, workspace_splits=5, pack_heads=True, section=0, schedule="chained"),
        "f16",
        "",
        "h200",
    ),
}
WAYS["3xf16"] = (replace(WAYS["3xf16"][0], stages=1), *WAYS["3xf16"][1:])
LAYOUTS = {
    "dense": DENSE,
    "packed": PACKED,
    "paged": replace(DENSE, seqlen_k=90, page_size=16),
    "packed_paged": replace(DENSE, seqlen_k=90, page_size=16, varlen="uniform:1-3/uniform:3-90"),
}


#: What is asked of which layouts: of pages beside a batch of queries nothing makes lists of tiles.
MASKED = [
    (way, layout, name)
    for way, layout, name in product(("simt", "mma", "wgmma"), LAYOUTS, SCORINGS)
    if layout != "paged" or not replace(DENSE, scoring=SCORINGS[name]).scores.needs_lists
]


def kernel_of(way: str, layout: str = "dense", **asked) -> Kernel:
    variant, dtype, kv_dtype, card = WAYS[way]
    dims = {"head_dim": 32, "head_dim_v": 32} if kv_dtype else {}
    problem = replace(LAYOUTS[layout], dtype=dtype, kv_dtype=kv_dtype, **dims, **asked)
    return render(variant, problem, PRESETS[card])


def check(kernel: Kernel, way: str, *, depth="quick", sanitize: bool = False) -> float:
    device = SimDevice("emulated", PRESETS[WAYS[way][3]], sanitize)
    return validate(
        device.open(), device.toolchain().build(kernel), seed=1, depth=depth, problem=kernel.problem
    )


@needs_compiler
@pytest.mark.parametrize(
    ("way", "layout", "causal"), sampled(list(product(WAYS, LAYOUTS, (False, True))), 2, thorough=16)
)
def test_shares_of_keys_come_together(way: str, layout: str, causal: bool) -> None:
    kernel = kernel_of(way, layout, causal=causal)
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(("way", "layout", "name"), sampled(MASKED, 1, thorough=13))
def test_masks_and_scores_are_of_all_shares(way: str, layout: str, name: str) -> None:
    kernel = kernel_of(way, layout, causal=name != "score", scoring=SCORINGS[name])
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("way", "layout"),
    sampled(list(product(("simt", "mma", "wgmma"), ("dense", "paged", "packed_paged"))), 1, thorough=4),
)
def test_queries_that_were_rotated_meet_all_shares(way: str, layout: str) -> None:
    kernel = kernel_of(way, layout, causal=True, append=Append.parsed("halves:8"))
    assert [launch.role for launch in kernel.launches][-1] == COMBINE_ROLE
    assert check(kernel, way) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("simt", "packed"),
        ("mma", "packed_paged"),
        ("mma", "dense"),
        ("wgmma", "packed"),
    ],
)
def test_nothing_is_read_or_written_out_of_bounds(way: str, layout: str) -> None:
    kernel = kernel_of(way, layout, causal=True)
    assert check(kernel, way, sanitize=True) < kernel.problem.tolerance


@pytest.mark.parametrize(("way", "layout"), sampled(list(product(WAYS, LAYOUTS)), 6))
def test_a_kernel_reads_well(way: str, layout: str) -> None:
    kernel = kernel_of(way, layout, causal=True, scoring=Scoring(window=(9, 0)))
    assert_tidy(kernel.source, way, longest=150)
    assert f"{kernel.entry}_combine(" in kernel.source


def attend(kernel: Kernel, card: str, q_lengths, k_lengths):
    """What a kernel makes of packed sequences, and its plan."""
    device = SimDevice("emulated", PRESETS[card])
    runner, build = device.open(), device.toolchain().build(kernel)
    values = lengths_as_values(q_lengths, k_lengths)
    rng, dims = np.random.default_rng(0), kernel.problem.head_dim
    shapes = (1, 4, sum(q_lengths), dims), (1, 2, sum(k_lengths), dims)
    arrays = reference.random_inputs("normal", *shapes, scale=0.2, rng=rng, dtype=kernel.problem.dtype)
    plans = []
    launch = runner._launch

    def keep(build, arrays, buffers, arguments):
        launch(build, arrays, buffers, arguments)
        plans.append(buffers["plan"].view.reshape(-1, ITEM_INTS).copy())

    runner._launch = keep  # type: ignore[method-assign]
    o, lse = runner.attend(build, *arrays, scale=0.2, want_lse=True, values=values)
    return arrays, o, lse, plans[0]


@needs_compiler
def test_long_sequences_are_split_until_the_card_is_full() -> None:
    """All shares are about as long, whatever the sequences' lengths; the same bits come every time."""
    q_lengths, k_lengths = (1, 2, 0, 1, 3), (4000, 37, 50, 0, 900)
    kernel = kernel_of("mma", "packed")
    (q, k, v), o, lse, plan = attend(kernel, "a100", q_lengths, k_lengths)
    wanted = kernel.launch.wanted_blocks // 2
    items = plan[1 : 1 + plan[0, 0]]
    splits = {int(item[0]): int(item[6]) for item in items}
    assert [splits[s] for s in (0, 1, 3, 4)] == [4, 3, 1, 4]  # of tiles of 16 keys, four blocks at most
    assert len(items) == sum(splits.values()) <= wanted
    values = lengths_as_values(q_lengths, k_lengths)
    for rows, keys in zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True):
        exact = reference.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=0.2)
        np.testing.assert_allclose(o[:, :, rows].astype(np.float32), exact.o, atol=0.02)
        np.testing.assert_allclose(lse[:, :, rows], exact.lse, atol=1e-3)
    _, again, lse_again, _ = attend(kernel, "a100", q_lengths, k_lengths)
    assert (o.view(np.uint16) == again.view(np.uint16)).all() and (lse == lse_again).all()


@needs_compiler
def test_warpgroups_leave_what_a_plan_says() -> None:
    """A sequence of one share is written at once, others come together; the same bits every time."""
    q_lengths, k_lengths = (1, 2, 0, 1, 70), (400, 12, 50, 0, 90)
    kernel = kernel_of("wgmma, chained", "packed")
    (q, k, v), o, lse, plan = attend(kernel, "h200", q_lengths, k_lengths)
    splits = {int(item[0]): int(item[6]) for item in plan[1 : 1 + plan[0, 0]]}
    assert splits == {0: 5, 1: 1, 3: 1, 4: 5}
    values = lengths_as_values(q_lengths, k_lengths)
    for rows, keys in zip(sequence_slices(values, "q"), sequence_slices(values, "k"), strict=True):
        exact = reference.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=0.2)
        np.testing.assert_allclose(o[:, :, rows].astype(np.float32), exact.o, atol=0.02)
        np.testing.assert_allclose(lse[:, :, rows], exact.lse, atol=1e-3)
    _, again, lse_again, _ = attend(kernel, "h200", q_lengths, k_lengths)
    assert (o.view(np.uint16) == again.view(np.uint16)).all() and (lse == lse_again).all()


@needs_compiler
def test_a_plan_fills_a_card_and_no_more() -> None:
    small = replace(PRESETS["a100"], num_sms=10)
    kernel = render(replace(NARROW, workspace_splits=64), replace(PACKED, dtype="bf16"), small)
    wanted = 10 * kernel.variant.to_dict()["min_blocks"] // 2
    rng = np.random.default_rng(3)
    for lengths in ((1000,) * 3, tuple(rng.integers(0, 3000, 6)), (5000, *[16] * 4)):
        *_, plan = attend(kernel, "a100", (1,) * len(lengths), tuple(map(int, lengths)))
        items = plan[1 : 1 + plan[0, 0]]
        shares = {int(item[0]): (int(item[5]), int(item[6])) for item in items}
        assert len(items) == sum(split for _, split in shares.values()) <= max(wanted, len(lengths))
        tiles_of = {sequence: ceil(keys / 16) for sequence, (keys, _) in shares.items()}
        longest = max(ceil(tiles_of[s] / split) for s, (_, split) in shares.items())
        # With a tile less for each there would have been too many blocks.
        more = sum(min(64, max(1, ceil(tiles / (longest - 1)))) for tiles in tiles_of.values())
        assert more > max(wanted, len(lengths)) or max(split for _, split in shares.values()) == 64


@pytest.mark.parametrize(
    ("rows", "splits", "packed", "warps"),
    [(192, 2, False, 16), (64, 8, False, 8), (64, 12, False, 8), (16, 16, False, 4), (192, 2, True, 4)],
)
def test_results_are_put_together_by_a_warp_for_each_row_as_far_as_that_is_known(
    rows: int, splits: int, packed: bool, warps: int
) -> None:
    main = Launch(384, 1024, rows, workspace_splits=splits, packed=packed)
    combine = combine_launch(main, a_warp_for_each_row(main))
    assert combine.threads == 32 * warps and (combine.role, combine.smem_bytes) == (COMBINE_ROLE, 0)


def test_a_launch_more_puts_results_together() -> None:
    kernel = kernel_of("mma")
    main, behind = kernel.launches
    assert (behind.role, behind.threads, behind.smem_bytes) == (COMBINE_ROLE, 128, 0)
    sizes = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 3}
    assert main.grid_of(sizes) == behind.grid_of(sizes) == 2 * 2 * 1 * 4
    floats = 16 * kernel.variant.partial_floats(kernel.problem)
    assert kernel.workspace_bytes(sizes) == 4 * floats and floats % 64 == 0
    names = [field.name for field in kernel.arguments.fields]
    assert "workspace" in names and "workspace" not in [f.name for f in struct_of(kernel.problem).fields]


@needs_compiler
@pytest.mark.parametrize(
    ("way", "layout", "right", "wrong"),
    sampled(
        [
            ("mma", "dense", "num_tiles * (split + 1) / kSplits", "num_tiles * (split + 1) / kSplits - 1"),
            ("mma", "dense", "exp2f(weights[i] - base)", "exp2f(weights[i])"),
            ("mma", "packed", "int(blockIdx.x) - split", "int(blockIdx.x)"),
            (
                "simt",
                "dense",
                "partial.row_max[row - first_row] = row_max[i]",
                "partial.row_max[row - first_row] = 0",
            ),
            ("simt", "packed", "const bool alone = num_splits == 1", "const bool alone = num_splits <= 2"),
            ("wgmma", "dense", "first_tile += num_tiles * split / kSplits;", ""),
            ("wgmma", "packed", "if (tile.num_splits > 1)", "if (tile.num_splits > 0)"),
            (
                "wgmma, packed",
                "paged",
                "softmax, o, 64 * consumer + 16 * warp, ",
                "softmax, o, 64 * consumer, ",
            ),
        ],
        1,
    ),
)
def test_the_suite_finds_mistakes(way: str, layout: str, right: str, wrong: str) -> None:
    kernel = kernel_of(way, layout)
    assert right in kernel.source
    kernel = replace(kernel, source=kernel.source.replace(right, wrong))
    with pytest.raises((WrongResult, CorruptedMemory, LaunchError)):
        check(kernel, way)


def test_rules_leave_out_splits_of_no_use() -> None:
    h200, a100 = PRESETS["h200"], PRESETS["a100"]
    with pytest.raises(Illegal, match="workspace_splits=2: the 4 blocks of a cluster share keys already"):
        render(replace(NARROW, splits=4, workspace_splits=2), replace(DENSE, dtype="bf16"), h200)
    with pytest.raises(Illegal, match="workspace_splits=2"):
        render(
            Mma(br=64, bc=32, heads=2, q_in_registers=False, workspace_splits=2),
            replace(DENSE, dtype="bf16"),
            a100,
        )
    halves = replace(DENSE, dtype="bf16")
    for wrong, why in (
        (replace(HOPPER, splits=2, workspace_splits=2), "the 2 blocks of a cluster share keys already"),
        (replace(HOPPER, persistent=True, workspace_splits=2), "each block leaves one result"),
        (replace(HOPPER, cluster=2, workspace_splits=2), "blocks have keys of their own each"),
    ):
        with pytest.raises(Illegal, match=why):
            render(wrong, halves, h200)
    with pytest.raises(Illegal, match="workspace_splits=2: not made for f32"):
        render(replace(HOPPER, workspace_splits=2), DENSE, h200)
    few = replace(DENSE, dtype="bf16", batch=1, num_q_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=4096)

    def advice(splits: int, problem: Problem, limits=a100) -> str:
        return replace(NARROW, workspace_splits=splits).advice(problem, limits) or ""

    assert "workspace_splits" not in advice(16, few)
    assert "as many blocks of a cluster meet without" in advice(8, few, h200)
    assert "cluster" not in advice(32, few, h200)
    assert "800 blocks occupy 108 multiprocessors without" in advice(16, replace(few, batch=100))
    assert "makes 2560 blocks of 80, 864 are enough" in advice(32, replace(few, batch=10))
    many = Problem(dtype="f16", causal=True, batch=4, num_q_heads=16, seqlen_q=512, seqlen_k=512)

    def advice_of_rows(br: int, problem: Problem) -> str:
        return replace(HOPPER, br=br, bc=64, workspace_splits=2).advice(problem, h200) or ""

    assert "256 blocks fill 132 multiprocessors without" in advice_of_rows(128, many)
    # The second wave of 192 blocks fills less than half of the card; packed sequences are not alike.
    assert not advice_of_rows(192, many)
    assert "fill" not in advice_of_rows(128, replace(many, varlen="list:512,16,16,16"))
    packed = replace(few, batch=4, varlen="uniform:1-1/uniform:512-4096")
    assert "32 allow for more" in advice(16, packed)
    assert "allow for more" not in advice(64, packed)
    # One long sequence beside many.
    ragged = replace(packed, batch=200, varlen=f"list:1x4096,{','.join(['1x16'] * 199)}")
    assert "occupy" not in advice(64, ragged)


def test_the_cost_model_counts_shares_and_the_launch_more() -> None:
    few = replace(DENSE, dtype="bf16", batch=1, num_q_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=32768)
    many = replace(few, batch=128, seqlen_k=512)
    a100 = PRESETS["a100"]

    def us(splits: int, problem: Problem) -> float:
        return cost_model.predict(replace(NARROW, workspace_splits=splits), problem, a100).median_us

    assert us(16, few) < us(4, few) < us(1, few)
    assert us(16, many) > us(1, many)
    simt = replace(few, dtype="f32")
    work = Simt(br=16, workspace_splits=8, threads_per_block=32).work(simt, a100)
    assert work.left_bytes and work.blocks == 8 * Simt(br=16, threads_per_block=32).work(simt, a100).blocks


def test_the_cost_model_knows_what_fills_hopper() -> None:
    """Of 32 tiles of rows four blocks each fill 132 multiprocessors, clusters of four do not; many rows need
    no shares, and of packed sequences a plan makes them."""
    h200 = PRESETS["h200"]
    mla = Problem(
        dtype="bf16",
        batch=32,
        num_q_heads=16,
        num_kv_heads=1,
        seqlen_q=1,
        seqlen_k=8192,
        head_dim=576,
        head_dim_v=512,
        latent=True,
    )

    def us(variant: Variant, problem: Problem) -> float:
        return cost_model.predict(variant, problem, h200).median_us

    assert us(Latent(workspace_splits=4), mla) < us(Latent(splits=3), mla) < us(Latent(splits=4), mla)
    assert us(Latent(workspace_splits=4), mla) < us(Latent(workspace_splits=3), mla)
    few = replace(DENSE, dtype="bf16", batch=20, num_q_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128)
    few = replace(few, seqlen_q=1, seqlen_k=8192, batch=4)
    wide = replace(HOPPER, bc=64, pack_heads=True, workspace_splits=4)
    assert us(wide, few) < us(replace(wide, workspace_splits=1), few)
    many = replace(few, batch=64)
    assert us(wide, many) > us(replace(wide, workspace_splits=1), many)
    assert wide.advice(many, h200) is not None and Latent(workspace_splits=4).advice(mla, h200) is None
    ragged = replace(few, batch=5, varlen="list:1x8192,1x64,1x64,1x64,1x64")
    shared = replace(wide, workspace_splits=64)
    assert us(shared, ragged) < 0.5 * us(replace(shared, workspace_splits=1), ragged)


def test_walks_of_packed_sequences_are_shared_as_plans_share_them() -> None:
    walks = (Walk(1, 100, 100, 100), Walk(3, 10, 10, 10))
    shared = shared_walks(walks, 64, wanted=16)
    assert [(walk.blocks, walk.tiles) for walk in shared] == [(10, 10), (3, 10)]
    assert shared_walks(walks, 64, wanted=2) == walks
    assert shared_walks(walks, 4)[0] == Walk(4, 25, 25, 25)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "layout"),
    [("simt", "dense"), ("mma", "packed"), ("e4m3 keys", "paged"), ("wgmma, packed", "packed")],
)
def test_nvcc_compiles_without_spilling(way: str, layout: str) -> None:
    kernel = kernel_of(way, layout)
    try:
        toolchain = cuda_toolchain(kernel.arch)
    except FlashgenError:
        pytest.skip("needs nvcc or NVRTC")
    assert toolchain.build(kernel).spill_bytes == 0
