"""Emitted modules of kernels with masks and changes of scores, without a GPU.

What a call says reaches the kernel, and what it may not say is told.

The driver is the stand-in of `test_module`; a launch computes in float64 what the problem asks, of the arrays
and numbers that its arguments lead to.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.scores import Scores
from flashgen.gen.scoring import Scoring
from flashgen.gen.scoring_values import draw_values
from flashgen.tuner.evaluate import reference

from tests.support.stand_in_driver import D, Driver, host
from tests.templates.scored_kernels import DTYPES, computing, load_scored, problem_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

Q, K = (2, 4, 21, D), (2, 2, 37, D)
SCORINGS = {
    "window": Scoring(window=(9, 2)),
    "window and first keys": Scoring(window=(5, 0), always=3),
    "chunk": Scoring(chunk=8),
    "prefix": Scoring(prefix=20),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=3),
    "softcap": Scoring(softcap=2.0),
    "alibi": Scoring(alibi=True),
    "bias": Scoring(bias="f32"),
    "bias of f16": Scoring(bias="f16"),
    "bias of bf16": Scoring(bias="bf16"),
    "boolean mask": Scoring(bias="u8"),
    "sinks": Scoring(sinks=True),
    "all": Scoring(window=(20, 3), lengths=True, softcap=3.0, alibi=True, bias="f32", sinks=True),
    "expressions": Scoring(
        mask="doc[b, q] == doc[b, k] or k < n",
        score="score * t + rel[h, k - q]",
        buffers=(("doc", "i16"),),
        scalars=(("n", 4), ("t", 0.5)),
    ),
}


def asked(scoring: Scoring, values: dict[str, Any]) -> dict[str, Any]:
    """What a call says to be computed with these values."""
    problem = problem_of(scoring)
    found = {}
    for each in problem.scores.buffers:
        found[each.name] = np.ascontiguousarray(values[each.name]).astype(
            bool if each.dtype == "u8" else DTYPES[each.dtype]
        )
    for name, keyword in (("slopes", "alibi_slopes"),):
        if name in found:
            found[keyword] = found.pop(name)
    if scoring.documents:
        found["documents"] = (found.pop("document_begin"), found.pop("document_end"))
    return found


def drawn(scoring: Scoring, q: Any = Q, k: Any = K) -> dict[str, Any]:
    problem = problem_of(
        scoring, batch=q[0], num_q_heads=q[1], num_kv_heads=k[1], seqlen_q=q[2], seqlen_k=k[2]
    )
    return dict(draw_values(scoring, problem.scores, problem, np.random.default_rng(3)))


def wanted(scoring: Scoring, arrays: Any, values: Any, causal: bool = False, scale: float = D**-0.5) -> Any:
    scores: Scores = problem_of(scoring, causal=causal).scores
    return reference.attention(*arrays, scale=scale, scores=scores, values=values)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCORINGS)
def test_what_is_said_reaches_the_kernel(name: str, causal: bool, driver: Driver, tmp_path: Path) -> None:
    scoring = SCORINGS[name]
    module = load_scored(tmp_path, scoring)
    arrays = [host(*shape, seed=i) for i, shape in enumerate((Q, K, K))]
    values = drawn(scoring)
    # As the kernel's type has them.
    for key, array in asked(scoring, values).items():
        if key in values and array.dtype.itemsize == 2:
            values[key] = array.astype(np.float64)
    with computing(driver, problem_of(scoring)) as card:
        o, lse = module.attention(*arrays, causal, return_lse=True, **asked(scoring, values))
    expected = wanted(scoring, arrays, values, causal)
    close(o, expected.o)
    close(lse, expected.lse)
    assert len(card.values) == 1 and driver.library.fake_num_allocated() == 0
