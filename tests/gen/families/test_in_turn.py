"""Launches of one call that begin while others of it end wait for these before they touch what they leave."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from flashgen.gen.append import Append
from flashgen.gen.families.latent.family import Latent
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import COMBINE_ROLE, MAIN_ROLE, PLAN_ROLE, Launch, in_turn
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render, render_unchecked
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.variant import Variant
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.errors import FlashgenError, LaunchError
from flashgen.tuner.evaluate.validate import validate

from tests.support.emulated import assert_tidy, needs_compiler

H200 = PRESETS["h200"]
DENSE = Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=3, seqlen_k=300, head_dim=32, dtype="bf16")
PACKED = replace(DENSE, batch=8, seqlen_q=50, seqlen_k=50, varlen="uniform:5-50")
BACKWARD = replace(DENSE, seqlen_q=70, seqlen_k=90, backward=True)
LISTED = replace(DENSE, seqlen_q=70, scoring=Scoring(mask="(q + k) % 3 < 2"))
FEW = Mma(br=16, bc=16, rows_per_warp=16, pack_heads=True)
GROUPS = Wgmma(br=64, bc=32, persistent=False)
SIMT = Simt(br=16, bc=16, threads_per_block=64, min_blocks=1)
LATENT = Problem(
    batch=2,
    num_q_heads=8,
    num_kv_heads=1,
    seqlen_q=1,
    seqlen_k=300,
    head_dim=192,
    head_dim_v=128,
    latent=True,
)
#: Of each kind of launch that stands behind another, or in front of one.
KERNELS: dict[str, tuple[Variant, Problem]] = {
    "simt, split": (replace(SIMT, workspace_splits=8), replace(DENSE, dtype="f32")),
    "mma, split": (replace(FEW, workspace_splits=4), DENSE),
    "mma, split by plan": (replace(FEW, workspace_splits=4), PACKED),
    "mma, caches": (
        replace(FEW, workspace_splits=4),
        replace(DENSE, append=Append.parsed("halves:8"), causal=True),
    ),
    "mma, planned caches": (
        replace(FEW, workspace_splits=4),
        replace(
            DENSE,
            seqlen_k=90,
            page_size=16,
            varlen="uniform:1-3/uniform:3-90",
            append=Append.parsed("halves:8"),
        ),
    ),
    "mma, lists": (Mma(br=64, bc=32), LISTED),
    "mma, planned lists": (Mma(br=64, bc=32), replace(PACKED, scoring=LISTED.scoring)),
    "wgmma, split": (replace(GROUPS, workspace_splits=3), DENSE),
    "wgmma, plan": (GROUPS, PACKED),
    "wgmma, split in front": (replace(GROUPS, split="in_front"), replace(DENSE, dtype="f32")),
    "wgmma, split in front of lists": (replace(GROUPS, split="in_front"), replace(LISTED, dtype="f32")),
    "latent, split": (Latent(workspace_splits=4), replace(LATENT, dtype="bf16")),
    "simt-backward": (SimtBackward(), replace(BACKWARD, dtype="f32")),
    "simt-backward, bias": (
        SimtBackward(),
        replace(BACKWARD, dtype="f32", scoring=Scoring(bias="f32", sinks=True)),
    ),
    "mma-backward": (MmaBackward(), BACKWARD),
    "mma-backward, parts": (MmaBackward(), replace(BACKWARD, dtype="f32")),
    "wgmma-backward": (WgmmaBackward(), BACKWARD),
    "wgmma-backward, plan": (WgmmaBackward(), replace(PACKED, backward=True)),
    "wgmma-backward, cluster": (
        WgmmaBackward(dq_path="cluster", br=64, bc=64, cluster=2),
        replace(BACKWARD, head_dim=64),
    ),
    "wgmma-backward, parts": (
        WgmmaBackward(schedule="weights_first", dq_path="bulk", ds_stages=1),
        replace(BACKWARD, dtype="f32"),
    ),
}
WAIT, NEXT = "wait_for_earlier_launches();", "let_next_launch_begin();"
#: The same of a thread alone, and a kernel of whose block one thread brings what the launch in front leaves.
WAIT_ALONE = "wait_alone_for_earlier_launches();"
IN_FRONT, EIGHT_BITS = replace(GROUPS, values="in_front"), replace(DENSE, seqlen_q=70, dtype="e4m3")
#: What launches leave each other, and what tells where it is.
LEFT = (
    r"workspace|plan\b|item|tile_list|result_of|rotated|(lse|delta|sums|parts|units|queries|outputs)_of\(|"
    r"(keys|values)_of_head\(|"
    r"args\.[okv] |args\.d[qkv]"
)


def kernel_of(name: str, limits: DeviceLimits = H200) -> Kernel:
    variant, problem = KERNELS[name]
    return render_unchecked(variant, problem, limits)


def body_of(kernel: Kernel, launch: Launch) -> str:
    """What the function of a launch does, after its parameters."""
    device = kernel.source.partition("#ifndef __CUDACC_RTC__")[0]
    functions = device.split('extern "C" __global__')[1:]
    own = next(each for each in functions if f" {kernel.symbol_of(launch)}(" in each)
    return re.sub(r"//.*", "", own).partition(") {")[2].partition("\n}")[0]


@pytest.mark.parametrize("name", KERNELS)
def test_each_launch_waits_before_it_touches_what_others_leave(name: str) -> None:
    kernel = kernel_of(name)
    assert [each.dependent for each in kernel.launches] == [False] + [True] * (len(kernel.launches) - 1)
    for launch in kernel.launches:
        body = body_of(kernel, launch)
        assert body.count(WAIT) == launch.dependent, launch.role
        assert body.count(NEXT) == (launch is not kernel.launches[-1]), launch.role
        if launch.dependent:
            before = body.partition(WAIT)[0]
            assert NEXT not in before
            # But blocks that have nothing to do.
            assert "return" not in before.replace("if (split >= end_row) return;", "")
            assert not re.search(LEFT, before), before
    if kernel.problem.append is None:
        assert_tidy(kernel.source, name, longest=180)
    assert kernel.oldest_arch == 90


@pytest.mark.parametrize("name", [name for name in KERNELS if not name.startswith(("wgmma", "latent"))])
def test_older_cards_make_one_launch_after_the_other(name: str) -> None:
    kernel = kernel_of(name, PRESETS["a100"])
    assert not any(each.dependent for each in kernel.launches)
    assert "griddepcontrol" not in kernel.source and "cudaLaunchKernelEx" not in kernel.source
    assert (kernel.oldest_arch or 0) <= 80


def test_a_kernel_of_one_launch_has_none_to_wait_for() -> None:
    kernel = render(FEW, DENSE, H200)
    assert in_turn(kernel.launches, 90) == kernel.launches
    assert "griddepcontrol" not in kernel.source and kernel.oldest_arch == 80


def proves(kernel: Kernel) -> float:
    """The largest error of a kernel on the emulated card, which raises where it is wrong."""
    device = SimDevice("h200", H200)
    return validate(device.open(), device.toolchain().build(kernel), seed=1, problem=kernel.problem)


@needs_compiler
@pytest.mark.parametrize(
    "name", ["mma, caches", "mma, planned caches", "mma, planned lists", "wgmma-backward, plan"]
)
def test_launches_in_turn_compute_what_they_should(name: str) -> None:
    kernel = kernel_of(name)
    assert proves(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("mma, split", COMBINE_ROLE),
        ("wgmma, plan", MAIN_ROLE),
        ("wgmma, split in front", MAIN_ROLE),
        ("mma, planned caches", PLAN_ROLE),
    ],
)
def test_a_launch_that_does_not_wait_is_caught(name: str, role: str) -> None:
    kernel = kernel_of(name)
    launch = next(each for each in kernel.launches if each.role == role)
    start = kernel.source.index(WAIT, kernel.source.index(f" {kernel.symbol_of(launch)}("))
    wrong = kernel.source[:start] + kernel.source[start + len(WAIT) :]
    with pytest.raises(LaunchError, match=r"did not wait|before it has waited"):
        proves(replace(kernel, source=wrong))


@needs_compiler
@pytest.mark.parametrize(("precision", "weights"), [("auto", "f16"), ("eight", "e4m3")])
def test_who_brings_what_one_launch_leaves_waits_for_it_alone(precision: str, weights: str) -> None:
    problem = replace(EIGHT_BITS, precision=precision)
    kernel = render_unchecked(replace(IN_FRONT, weights=weights), problem, H200)
    assert [each.dependent for each in kernel.launches] == [False, True]
    assert WAIT not in kernel.source and kernel.source.count(WAIT_ALONE) == 1
    function = kernel.source.partition("void produce_tile(")[2].partition("\n}\n")[0]
    before, _, behind = function.partition(WAIT_ALONE)
    assert "load_keys(" in before and "load_values(" not in before and "load_values(" in behind
    proves(kernel)
    wrong = kernel.source.replace(WAIT_ALONE, "")
    with pytest.raises(LaunchError, match=r"bulk_load in line \d+ before it has waited"):
        proves(replace(kernel, source=wrong))


def test_all_wait_where_other_launches_are_in_front_too() -> None:
    kernel = render_unchecked(IN_FRONT, replace(EIGHT_BITS, scoring=LISTED.scoring), H200)
    assert len(kernel.launches) == 3 and WAIT_ALONE not in kernel.source
    assert all(body_of(kernel, each).count(WAIT) == each.dependent for each in kernel.launches)


@needs_compiler
def test_a_first_launch_that_would_not_wait_for_other_kernels_is_caught() -> None:
    kernel = kernel_of("mma, split")
    wrong = kernel.source.replace("bool begun = false;", "bool begun = true;")
    assert wrong != kernel.source
    with pytest.raises(LaunchError, match="before it has waited"):
        proves(replace(kernel, source=wrong))


@needs_compiler
def test_the_next_launch_begins_only_behind_the_wait() -> None:
    kernel = kernel_of("wgmma-backward")
    wrong = kernel.source.replace(f"  {WAIT}\n  {NEXT}", f"  {NEXT}\n  {WAIT}")
    assert wrong != kernel.source
    with pytest.raises(LaunchError, match="before it has waited"):
        proves(replace(kernel, source=wrong))


@pytest.mark.nvcc
@pytest.mark.parametrize("name", KERNELS)
def test_compilers_take_them(name: str) -> None:
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as error:
        pytest.skip(str(error))
    assert toolchain.build(kernel_of(name)).spill_bytes >= 0
