from __future__ import annotations

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.bench.ladder_result import CASES
from flashgen.tuner.suites import SUITES, workloads


def test_names_and_problems_are_unique_over_all_suites() -> None:
    every = workloads(list(SUITES))
    assert len({w.name for w in every}) == len(every)
    assert len({w.problem for w in every}) == len(every)


def test_llm_is_every_head_dim_length_and_mask_at_one_number_of_tokens() -> None:
    problems = SUITES["llm"].problems
    assert len(problems) == 36
    assert {p.batch * p.seqlen_q for p in problems.values()} == {16384}
    assert {p.num_q_heads * p.head_dim for p in problems.values()} == {2048}


def test_decode_is_one_row_against_grouped_heads() -> None:
    for problem in SUITES["decode"].problems.values():
        assert problem.seqlen_q == 1
        assert problem.seqlen_k >= 2048
        assert problem.num_kv_heads < problem.num_q_heads


def test_the_ladders_cases_are_the_reports() -> None:
    assert list(CASES) == ["t10", "t11", "t22", "t29", "t30"]
    assert CASES["t11"] == Problem(
        batch=13600, num_q_heads=1, num_kv_heads=1, seqlen_q=128, seqlen_k=128, head_dim=32
    )


def test_an_unknown_suite_is_an_error() -> None:
    with pytest.raises(KeyError):
        workloads(["bert"])
