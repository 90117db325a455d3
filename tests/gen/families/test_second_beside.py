"""Blocks of keys that begin beside the last ones of query rows need none of these, and end behind them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import MAIN_ROLE, QUERIES_ROLE, STATISTICS_ROLE
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.compile import cuda_toolchain
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.cases import Case
from flashgen.tuner.evaluate.validate import check_case, validate

from tests.gen.families.test_in_turn import NEXT, WAIT, body_of
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler
from tests.support.given_gradients import given_of

H200 = PRESETS["h200"]
PROBLEM = Problem(backward=True, dtype="bf16", num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=64)
SMALL = WgmmaBackward(bc=64, br=32, rows=64, keys=32, second="beside")
BIASED, DOCUMENTS = "bias, sinks", "documents, by sections"
WAYS: dict[str, tuple[WgmmaBackward, Problem]] = {
    "lone consumers": (SMALL, PROBLEM),
    "apart": (replace(SMALL, apart=True), replace(PROBLEM, head_dim=72, head_dim_v=40)),
    "tiles ahead": (replace(SMALL, bc=128, rows=128, schedule="ahead"), PROBLEM),
    "weights first, values in registers": (
        replace(SMALL, schedule="weights_first", kept="values", order="heaviest_first"),
        replace(PROBLEM, dtype="f16"),
    ),
    DOCUMENTS: (
        replace(SMALL, order="by_section"),
        replace(PROBLEM, scoring=Scoring(documents=3)),
    ),
    BIASED: (SMALL, replace(PROBLEM, scoring=Scoring(bias="f16", sinks=True))),
}
END = "end_behind_earlier_launches();"
#: Where a block of keys would wait.
BEGINS = "  // Begins beside the last blocks that keep query rows"
#: How the host launches what makes gradients.
CALL = "  if (const int status = launch_{role}(args, stream, begun)) return status;\n"


def kernel_of(way: str, **asked: object) -> Kernel:
    variant, problem = WAYS[way]
    return render(variant, replace(problem, **asked), H200)  # type: ignore[arg-type]


def check(kernel: Kernel, *, depth="quick") -> float:
    device = SimDevice("emulated", H200)
    return validate(device.open(), device.toolchain().build(kernel), seed=1, depth=depth)


def changed(kernel: Kernel, right: str, wrong: str) -> Kernel:
    """The kernel with something else in one place."""
    assert kernel.source.count(right) == 1, right
    return replace(kernel, source=kernel.source.replace(right, wrong))


def bodies_of(kernel: Kernel) -> dict[str, str]:
    return {each.role: body_of(kernel, each) for each in kernel.launches}


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_keys_wait_for_nothing_but_their_launch_s_end(way: str) -> None:
    kernel = kernel_of(way)
    assert [each.role for each in kernel.launches[:3]] == [STATISTICS_ROLE, QUERIES_ROLE, MAIN_ROLE]
    # The first of a call waits for whatever was launched before, and nobody after it is the second of others.
    assert [each.dependent for each in kernel.launches] == [False] + [True] * (len(kernel.launches) - 1)
    bodies = bodies_of(kernel)
    rows, keys = bodies[QUERIES_ROLE], bodies[MAIN_ROLE]
    # Statistics are there before a block of keys begins.
    assert rows.count(WAIT) == rows.count(NEXT) == 1 and rows.index(WAIT) < rows.index(NEXT)
    assert WAIT not in keys and keys.count(END) == 1
    before, _, behind = keys.partition(END)
    assert before.rstrip().endswith("if (warp == 1 && blockIdx.x == gridDim.x - 1) {")
    # One behind them begins once both have ended, so that three are never under way.
    assert NEXT not in before and behind.count(NEXT) == (len(kernel.launches) > 3)
    assert_tidy(kernel.source, way, longest=180)


@pytest.mark.parametrize("way", WAYS)
def test_what_an_earlier_launch_leaves_is_read_past_l1(way: str) -> None:
    keys = bodies_of(kernel_of(way))[MAIN_ROLE]
    reads = re.findall(r".*(?:(?:lse|delta)_of\(|workspace|plan\b|args\.(?:o|dq|lse|dlse)\b).*", keys)
    assert len(reads) == 2
    assert all(line.strip().startswith("bulk_load(smem.") for line in reads), reads


@pytest.mark.parametrize("way", WAYS)
def test_nothing_else_changes(way: str) -> None:
    variant, problem = WAYS[way]
    beside, behind = kernel_of(way), render(replace(variant, second="behind"), problem, H200)
    assert END not in behind.source and "second = " not in behind.source
    assert bodies_of(behind)[MAIN_ROLE].count(WAIT) == 1
    others = [
        {role: body for role, body in bodies_of(each).items() if role != MAIN_ROLE}
        for each in (beside, behind)
    ]
    assert others[0] == others[1]
    assert beside.launches == behind.launches


@needs_compiler
@pytest.mark.parametrize(
    ("way", "causal"), sampled([(way, causal) for way in WAYS for causal in (True, False)], 3, thorough=5)
)
def test_gradients_are_those_of_float64(way: str, causal: bool) -> None:
    kernel = kernel_of(way, causal=causal)
    assert 0.0 < check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(["apart", BIASED], 0))
def test_gradients_are_right_at_all_lengths(way: str) -> None:
    kernel = kernel_of(way, causal=True)
    assert check(kernel, depth="full") < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("rows", [1, 30])
def test_blocks_whose_keys_no_row_sees_are_right(rows: int) -> None:
    kernel = kernel_of("apart", causal=True, scoring=Scoring(window=(20, 0)))
    device, rng = SimDevice("emulated", H200), np.random.default_rng(3)
    case = Case(2, 4, 2, rows, 200, "uniform", "bnhd", want_lse=True)
    assert check_case(device.open(), device.toolchain().build(kernel), case, rng) < kernel.problem.tolerance


def differentiated(kernel: Kernel) -> dict[str, bytes]:
    problem, rng = kernel.problem, np.random.default_rng(0)
    shapes = ((2, 4, 150, problem.head_dim), (2, 2, 130, problem.head_dim))
    q, k, v = reference.random_inputs("normal", *shapes, scale=0.1, rng=rng, dtype=problem.dtype)
    v = np.ascontiguousarray(v[..., : problem.head_dim_v])
    given = given_of(q, k, v, rng, scale=0.1, scores=problem.scores)
    build = SimDevice("emulated", H200).toolchain().build(kernel)
    found = SimRunner(H200, seed=1).differentiate(build, given, scale=0.1)
    return {name: found[name].tobytes() for name in ("dq", "dk", "dv")}


def in_other_order(kernel: Kernel) -> Kernel:
    """The kernel whose keys come before query rows are begun with, and wait for statistics themselves."""
    rows, keys = (CALL.format(role=role) for role in (QUERIES_ROLE, MAIN_ROLE))
    return changed(changed(kernel, rows + keys, keys + rows), BEGINS, f"  {WAIT}\n{BEGINS}")


#: What makes the launch of query rows leave something that the one of keys reads.
LEAVES = ("delta[h] = delta_of(args, batch, head)[row];", "delta[h] = delta_of(args, batch, head)[row]++;")


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["apart", "tiles ahead"])
def test_neither_launch_needs_the_other(way: str, causal: bool) -> None:
    """The bits are the same whichever ends first: as far as they are from what keys must not read."""
    kernel = kernel_of(way, causal=causal)
    assert differentiated(kernel) == differentiated(in_other_order(kernel))
    if causal:
        leaving = changed(kernel, *LEAVES)
        first, other = differentiated(leaving), differentiated(in_other_order(leaving))
        assert first["dk"] != other["dk"]


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        pytest.param(
            f"{END}\n      {NEXT}",
            "",
            r"bulk_load in line \d+ before it has waited",
            id="ends at any time",
        ),
        pytest.param(
            f"{END}\n      {NEXT}",
            f"{NEXT}\n      {END}",
            "three would be under way",
            id="lets three be under way",
        ),
        # Nobody has waited for statistics then.
        pytest.param(
            CALL.format(role=QUERIES_ROLE),
            "",
            r"bulk_load in line \d+ before it has waited",
            id="has none in front",
        ),
    ],
)
def test_mistakes_are_found(right: str, wrong: str, told: str) -> None:
    kernel = changed(kernel_of(BIASED), right, wrong)
    with pytest.raises(LaunchError, match=told):
        check(kernel)


@pytest.mark.nvcc
@pytest.mark.parametrize("way", ["apart", "tiles ahead"])
def test_compilers_take_them_without_spills(way: str) -> None:
    try:
        toolchain = cuda_toolchain(90)
    except FlashgenError as error:
        pytest.skip(str(error))
    assert toolchain.build(kernel_of(way)).spill_bytes == 0


def test_what_cannot_begin_beside_others_is_told() -> None:
    wide = replace(PROBLEM, head_dim=128, head_dim_v=128)
    for path in ("bulk", "atomics"):
        with pytest.raises(Illegal) as error:
            render(WgmmaBackward(dq_path=path, second="beside"), wide, H200)
        told = f"second=beside: with dq_path={path} no launch keeps query rows; dq_path=launch has one"
        assert str(error.value) == f"combination: {told}"
    with pytest.raises(Illegal) as error:
        render(SMALL, replace(PROBLEM, varlen="uniform:64-512"), H200)
    told = "second=beside: blocks of packed sequences wait for a plan, as second=behind has them do"
    assert str(error.value) == f"combination: {told}"


def test_statistics_are_in_front_of_query_rows_wherever_there_are_any() -> None:
    """Else what blocks of keys read would be left by the launch in front of theirs."""
    statistics, queries, _ = kernel_of("apart").launches
    for rows in (0, 1, 700):
        sizes = {"batch": 2, "num_q_heads": 4, "seqlen_q": rows}
        assert (statistics.grid_of(sizes) > 0) == (queries.grid_of(sizes) > 0) == (rows > 0)


def test_blocks_begin_beside_others_that_leave_some_idle_in_all_searches() -> None:
    held = {"bc": 64, "br": 64, "rows": 128, "keys": 64, "schedule": "together", "parts": 1}
    legal = enumerate_space(WgmmaBackward, replace(PROBLEM, causal=True), H200, held).legal
    ways = {(each.dq_path == "launch", each.second) for each in legal}
    assert ways == {(True, "beside"), (False, "behind")}


def test_none_is_searched_beside_blocks_that_leave_hardly_any_idle() -> None:
    def advice(second: str, **asked: object) -> str | None:
        variant = WgmmaBackward(bc=64, br=64, second=second)
        return variant.advice(replace(PROBLEM, **asked), H200)  # type: ignore[arg-type]

    none, half = {"batch": 2, "num_q_heads": 32, "seqlen_q": 8448}, {"batch": 2, "num_q_heads": 8}
    told = "4224 blocks that keep rows leave 132 multiprocessors idle for 0.0% of their time"
    assert advice("beside", **none) == f"combination: second=beside: {told}"
    assert advice("behind", **none) is None
    told = "1024 blocks that keep rows leave 132 multiprocessors idle for 3.0% of their time"
    assert advice("beside", **half, seqlen_q=8192) is None
    assert advice("behind", **half, seqlen_q=8192) == f"combination: second=behind: {told}"
    # Under a mask half a turn, of 32 or 63.
    assert advice("beside", **none, causal=True) is None
    many = advice("beside", batch=2, num_q_heads=64, seqlen_q=8192, causal=True)
    assert many is not None and "8192 blocks" in many and "idle for 0.8% of their time" in many
