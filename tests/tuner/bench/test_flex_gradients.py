"""FlexAttention's gradients as the benchmark asks for them: only where PyTorch is, and without a card."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import typical_values
from flashgen.tuner.bench.differentiated import differentiated
from flashgen.tuner.bench.inputs import Inputs
from flashgen.tuner.bench.torch_attention import flex
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.evaluate.gradients import gradients

pytestmark = pytest.mark.thorough
torch = pytest.importorskip("torch", exc_type=ImportError)
if not hasattr(torch, "nn"):
    pytest.skip("this torch stands in for PyTorch", allow_module_level=True)
library = pytest.importorskip("torch.nn.attention.flex_attention")

#: Rows are more than a block of FlexAttention's masks has.
SMALL = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 150, "seqlen_k": 150, "head_dim": 16}


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own operations, traced as for compilers, in place of compiled kernels, which make no gradients
    there."""
    monkeypatch.setattr(library, "create_block_mask", _mask_on_the_host(library.create_block_mask))
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None, raising=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def _mask_on_the_host(create: Any) -> Any:
    def created(*args: Any, device: str) -> Any:
        assert device == "cuda"
        return create(*args, device="cpu")

    return created


def inputs_of(problem: Problem) -> Inputs:
    """Drawn, with the arrays that a card would have."""
    drawn = torch.Generator().manual_seed(0)
    arrays = {
        each.name: torch.randn(each.stored_shape(problem), generator=drawn)
        for each in problem.operation.strided
        if each.name in ("q", "k", "v")
    }
    return Inputs(torch, problem, **arrays, values=values_as_read(problem, typical_values(problem)))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize(
    "asked", [Scoring(documents=3), Scoring(alibi=True), Scoring(window=(20, 0)), Scoring(softcap=2.0)]
)
def test_they_are_those_of_float64_each_time_that_they_are_taken(
    asked: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(**SMALL, causal=True, scoring=asked, backward=True)
    inputs = inputs_of(problem)
    given = torch.randn(inputs.q.shape, generator=torch.Generator().manual_seed(1))
    read = {each.name: torch.from_numpy(inputs.values[each.name].copy()) for each in problem.scores.buffers}
    monkeypatch.setattr(Inputs, "arrays", read)
    monkeypatch.setattr(Inputs, "passed", {"dout": given})
    call = differentiated(flex, inputs, rows_first=False)
    wanted = gradients(
        *(x.numpy() for x in (inputs.q, inputs.k, inputs.v, given)),
        scale=problem.head_dim**-0.5,
        scores=problem.scores,
        values=inputs.values,
    )
    for _ in range(2):
        for name, found in zip(("dq", "dk", "dv"), call(), strict=True):
            expected = wanted[name].value
            assert np.linalg.norm(found.numpy() - expected) < 1e-5 * np.linalg.norm(expected), name
