"""Gradients at a problem's real lengths: what is right passes, and each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.device import Build, Runner
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.gradients import gradients
from flashgen.tuner.evaluate.sampled_gradients import check_gradient_sample, draw_gradient_sample

from tests.support.fakes import fake_build

PROBLEMS = (
    Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=300, seqlen_k=260, head_dim=16, backward=True),
    Problem(
        dtype="bf16", batch=1, num_q_heads=2, seqlen_q=200, seqlen_k=333, head_dim=8, causal=True,
        num_kv_heads=1, scoring=Scoring(window=(60, 0)), backward=True,
    ),
    Problem(
        batch=1, num_q_heads=2, seqlen_q=64, seqlen_k=64, head_dim=16, num_kv_heads=2,
        scoring=Scoring(bias="f32"), backward=True,
    ),
)  # fmt: skip


class Exact:
    """A runner whose gradients are those of the whole arrays, with something done to one of them."""

    def __init__(self, problem: Problem, spoilt: str = "", where: Any = ()) -> None:
        self.problem, self.spoilt, self.where = problem, spoilt, where

    def differentiate(
        self, build: Build, inputs: Mapping[str, np.ndarray], *, scale: float, values: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        taken = (inputs[name] for name in ("q", "k", "v", "dout"))
        found = gradients(*taken, scale=scale, scores=self.problem.scores, values=values)
        dtypes = {f"d{name}": array.dtype for name, array in inputs.items()}
        made = {name: each.value.astype(dtypes.get(name, np.float32)) for name, each in found.items()}
        if self.spoilt:
            made[self.spoilt][self.where] *= np.asarray(1.25, made[self.spoilt].dtype)
        return made


def check(problem: Problem, spoilt: str = "", where: Any = ()) -> float:
    build = fake_build(problem=problem)
    return check_gradient_sample(cast(Runner, Exact(problem, spoilt, where)), build, problem, 1)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_right_gradients_pass_and_wrong_ones_of_any_key_do_not(problem: Problem) -> None:
    assert check(problem) < problem.tolerance
    for name in ("dq", "dk", "dv", *(["dbias"] if problem.scoring.bias else [])):
        with pytest.raises(WrongResult, match=f"{name}, {problem.name} at its real lengths"):
            check(problem, name)
    # Any key that a sampled row sees is compared, of a head whose rows are sampled.
    with pytest.raises(WrongResult):
        check(problem, "dv", (0, 0, slice(problem.seqlen_k - 40, None)))


def test_rows_that_are_given_nothing_add_nothing() -> None:
    problem = PROBLEMS[0]
    sample = draw_gradient_sample(problem, 0)
    given = sample.arrays["dout"].any(axis=-1)
    assert 0 < given.sum() < 0.2 * given.size
    assert not sample.expected["dq"].value[~given].any()
    dense = sample.arrays["dout"] + np.float32(0)
    dense[~given] = np.float32(1e-30)  # nothing, but not skipped
    taken = (sample.arrays[name] for name in "qkv")
    other = gradients(*taken, dense, scale=sample.scale, scores=problem.scores, values=sample.values)
    for name, each in sample.expected.items():
        assert np.allclose(each.value, other[name].value, rtol=1e-9, atol=1e-20)
