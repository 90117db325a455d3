"""The example that generates text, by its emitted module, without a GPU: the driver is the stand-in."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.stand_in_driver import Driver
from tests.templates import test_paged
from tests.templates.test_paged import computing, kernel_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_a_module_writes_what_whole_keys_do(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    example = importlib.import_module("generate_text")
    monkeypatch.setattr(test_paged, "D", example.HEAD_DIM)
    problem = example.PROBLEM
    names = (
        "head_dim",
        "batch",
        "seqlen_q",
        "seqlen_k",
        "page_size",
        "causal",
        "num_q_heads",
        "num_kv_heads",
    )
    kernel = kernel_of(problem.varlen, **{name: getattr(problem, name) for name in names})
    assert kernel.problem == problem
    card = SimpleNamespace(predicted=False, limits=SimpleNamespace(name="H200"))
    model = example.Model.drawn(np.random.default_rng(7))
    with computing(driver, problem):
        run = example.run_on(card, kernel, tmp_path)
        paged = example.generate(model, example.PagedAttention(example.Cache.of(example.PROMPTS), run))
    # PyTorch cannot be loaded, for which the example looks, where the driver is the stand-in.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    whole = example.generate(model, example.WholeAttention(len(example.PROMPTS)))
    assert paged.tokens == whole.tokens
    np.testing.assert_allclose(paged.logits, whole.logits, atol=1e-4)
