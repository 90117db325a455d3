from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import typical_values
from flashgen.tuner.bench.ladder_result import CASES
from flashgen.tuner.suites import SUITES, row_named, workload_named, workloads


def test_names_are_unique_over_all_suites_and_problems_in_each() -> None:
    every = workloads(list(SUITES))
    assert len({w.name for w in every}) == len(every)
    for suite in SUITES.values():
        assert len(set(suite.problems.values())) == len(suite.workloads)


def test_llm_is_every_head_dim_length_and_mask_at_one_number_of_tokens() -> None:
    problems = SUITES["llm"].problems
    assert len(problems) == 36
    assert {p.batch * p.seqlen_q for p in problems.values()} == {16384}
    assert {p.num_q_heads * p.head_dim for p in problems.values()} == {2048}


def test_eight_bits_are_asked_for_of_the_longer_shapes_of_llm() -> None:
    problems = SUITES["eight"].problems
    assert len(problems) == 24 and {p.seqlen_q for p in problems.values()} == {2048, 4096, 8192, 16384}
    for name, problem in problems.items():
        assert (problem.dtype, problem.precision) == ("e4m3", "eight")
        sixteen = SUITES["llm"].problems[name.replace("e4m3", "bf16")]
        assert replace(problem, dtype="bf16", precision="auto") == sixteen
        assert workload_named(problem.name).problem == problem


def test_decode_is_one_row_against_a_long_cache() -> None:
    for problem in SUITES["decode"].problems.values():
        assert problem.seqlen_q == 1
        assert problem.seqlen_k >= 2048
        assert problem.num_kv_heads < problem.num_q_heads or problem.dtype == "f32"


def test_masks_are_the_rows_that_rivals_were_timed_on() -> None:
    """Their floating-point operations by visible pairs, where those do not hang on what is drawn."""
    problems = SUITES["masks"].problems
    known = {
        "window128-d64-16384c": 17.113284608,
        "window128-d128-16384c": 17.113284608,
        "window1024-d128-16384c": 133.14818048,
        "window4096-d128-8192c": 206.175207424,
        "window1024-d256-8192c": 64.428703744,
        "sink-d64-8192c-gqa4-windowNone": 549.822922752,
        "sink-d64-8192c-gqa4-window128": 17.046700032,
    }
    assert {name: problems[name].flops / 1e9 for name in known} == known
    whole, windowed = problems["dec-4k-b1"], problems["dec-window4096-128k-b1"]
    assert (whole.flops, whole.min_bytes) == (windowed.flops, windowed.min_bytes)


def test_packed_sequences_are_those_that_rivals_were_timed_on() -> None:
    """Their floating-point operations, of causal ones within the half that a diagonal is counted as."""
    problems = SUITES["varlen"].problems
    known = {
        "16x..4096-d128-h32-8c": 1061.975711744,
        "128x..512-d64-h16-16": 49.258655744,
        "4x..16384-d128-h16-16c": 1047.943438336,
    }
    assert {name: problem.flops / 1e9 for name, problem in problems.items()} == pytest.approx(known, rel=1e-3)
    assert problems["128x..512-d64-h16-16"].flops / 1e9 == known["128x..512-d64-h16-16"]


def test_few_queries_are_in_pages_too() -> None:
    few, paged = SUITES["few"].problems, SUITES["paged"].problems
    assert few["b32-q4-k8192-h32/8-d128"].causal and not few["b32-q1-k8192-h32/8-d128"].causal
    for name, problem in few.items():
        for size in (16, 128):
            assert paged[f"{name}-page{size}"] == replace(problem, page_size=size)
    kinds = {(p.head_dim, p.head_dim_v, p.latent) for p in SUITES["mla"].problems.values()}
    assert kinds == {(192, 128, False), (576, 512, True)}


def test_a_problem_is_found_again_by_its_name() -> None:
    for problem in SUITES["masks"].problems.values():
        if problem.scoring.mask or problem.scoring.score:
            with pytest.raises(ValueError, match="is not of the form"):
                workload_named(problem.name)
        else:
            assert workload_named(problem.name).problem == problem
    for asked in (
        Scoring(window=(-1, 7), softcap=0.5, sinks=True),
        Scoring(window=(9, -1), always=4, chunk=7, prefix=3, lengths=True, documents=2, dilation=5),
        Scoring(softcap=1e-05, alibi=True, bias="u8"),
        Scoring(softcap=2.5e20, bias="bf16"),
        Scoring(softcap=30.000001),
    ):
        problem = Problem(dtype="f32", precision="tf32", causal=True, scoring=asked)
        assert workload_named(problem.name).problem == problem
    for name in ("f32_d64_window1", "f32_d64_window1x", "f32_d64_chunk", "f32_d64_alibi2", "f32_d64_biasu9"):
        with pytest.raises(ValueError, match="is not of the form"):
            workload_named(name)


def test_rows_are_found_by_their_names() -> None:
    for each in workloads(list(SUITES)):
        assert row_named(each.name) == each
    with pytest.raises(ValueError, match="no suite has a row 'x'; rows are named as in 'bf16-d64-2048c'"):
        row_named("x")


def test_the_ladders_cases_are_the_reports() -> None:
    assert list(CASES) == ["t10", "t11", "t22", "t29", "t30"]
    assert CASES["t11"] == Problem(
        batch=13600, num_q_heads=1, num_kv_heads=1, seqlen_q=128, seqlen_k=128, head_dim=32
    )


def test_an_unknown_suite_is_an_error() -> None:
    with pytest.raises(KeyError):
        workloads(["bert"])


def test_gradients_are_those_that_rivals_were_timed_on() -> None:
    """Five products of each pair, where outputs are two."""
    problems = SUITES["backward"].problems
    known = {
        "backward-bf16-d64-512": 171.79869184,
        "backward-bf16-d64-512c": 85.89934592,
        "backward-bf16-d64-2048": 687.19476736,
    }
    assert {name: problems[name].flops / 1e9 for name in known} == pytest.approx(known)
    plain = [p for p in problems.values() if p.dtype == "bf16" and p.scoring.is_plain]
    dims = [p.head_dim for p in plain]
    assert [dims.count(head_dim) for head_dim in (64, 128, 256, 72, 192)] == [6, 6, 6, 1, 1]
    for problem in problems.values():
        assert problem.backward and problem.flops == replace(problem, backward=False).flops * 5 // 2
        if problem.scoring.is_plain:
            assert workload_named(problem.name).problem == problem


def test_gradients_of_changed_scores_and_documents_are_of_what_outputs_are_timed_on() -> None:
    of_outputs, of_gradients = SUITES["masks"].problems, SUITES["backward"].problems
    biased = replace(of_outputs["relbias-d128-8192c"], batch=8, seqlen_q=2048, seqlen_k=2048)
    narrow = replace(biased, num_q_heads=32, num_kv_heads=32, head_dim=64, head_dim_v=64)
    for name, problem in (
        ("document16-bf16-d128-16384c", of_outputs["document16-d128-16384c"]),
        ("alibi-bf16-d64-8192c", of_outputs["alibi-d64-8192c"]),
        ("relbias-bf16-d64-2048c", narrow),
        ("relbias-bf16-d128-2048c", biased),
    ):
        assert of_gradients[f"backward-{name}"] == replace(problem, backward=True)
        drawn, expected = (typical_values(p) for p in (of_gradients[f"backward-{name}"], problem))
        assert drawn.keys() == expected.keys()
        assert all(np.array_equal(drawn[each], expected[each]) for each in expected)
