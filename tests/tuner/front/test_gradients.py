"""Gradients of `flashgen.attention`: of torch's tensors on an emulated card, and on a card's stand-in."""

from __future__ import annotations

import importlib

import flashgen
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.evaluate import gradients as in_float64
from flashgen.tuner.front.bound import bound_of

from tests.support.emulated import needs_compiler
from tests.tuner.front.test_attention import CARD, arrays, assert_near


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (9, 4))])
def test_torchs_tensors_on_an_emulated_card(causal, window):
    torch = pytest.importorskip("torch")
    hosts = arrays(d=16)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in hosts)
    o, lse = flashgen.attention(q, k, v, causal=causal, window=window, return_lse=True, device=CARD)
    rng = np.random.default_rng(0)
    dout, dlse = (rng.standard_normal(x.shape).astype(np.float32) for x in (o, lse))
    torch.autograd.backward((o, lse), (torch.from_numpy(dout), torch.from_numpy(dlse)))
    scores = Problem(causal=causal, scoring=Scoring(window=window)).scores
    values = dict(zip(("window_left", "window_right"), window or (), strict=False))
    wanted = in_float64.gradients(*hosts, dout, scale=0.25, dlse=dlse, scores=scores, values=values)
    for name, each in zip(("dq", "dk", "dv"), (q, k, v), strict=True):
        assert_near(each.grad.numpy(), wanted[name].value, 1e-5)


@needs_compiler
@pytest.mark.thorough
def test_what_scores_read_on_an_emulated_card_has_gradients():
    """Of what is passed by name, one entry for all heads, and of what a function has captured."""
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and importlib.import_module("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays(d=16))
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    bias = torch.randn(1, rows, 1, generator=torch.manual_seed(1)).half().requires_grad_()
    x = torch.rand(heads, generator=torch.manual_seed(2)).requires_grad_()

    def score(score, b, h, q, k):
        return score * x[h]

    o = flashgen.attention(q, k, v, bias=bias, score=score, device=CARD)
    dout = torch.randn(o.shape, generator=torch.manual_seed(3))
    found = torch.autograd.grad(o, (bias, x), dout)
    wide = [each.repeat_interleave(heads // k.shape[1], 1) for each in (k, v)]
    scores = q @ wide[0].transpose(2, 3) / 4 * x[:, None, None] + bias.float().expand(1, rows, keys)
    wanted = torch.autograd.grad(scores.softmax(3) @ wide[1], (bias, x), dout)
    assert found[0].dtype is torch.float16
    for each, exact in zip(found, wanted, strict=True):
        assert torch.allclose(each, exact, atol=1e-4, rtol=1e-3)


@needs_compiler
@pytest.mark.thorough
def test_arrays_on_an_emulated_card():
    q, k, v = arrays(d=16)
    o, lse = flashgen.attention(q, k, v, causal=True, return_lse=True, device=CARD)
    dout = np.random.default_rng(0).standard_normal(o.shape).astype(np.float32)
    found = bound_of(CARD).gradients().gradients(q, k, v, o, lse, dout, True)
    scores = Problem(causal=True).scores
    wanted = in_float64.gradients(q, k, v, dout, scale=0.25, scores=scores)
    for name, each in zip(("dq", "dk", "dv"), found, strict=True):
        assert_near(each, wanted[name].value, 1e-5)


def test_a_card_proves_and_runs_kernels_of_gradients(driver, card):
    made = importlib.import_module("tests.templates.gradient_kernels")
    q, k, v = (driver.own(x.astype(np.float16)) for x in arrays(d=64))
    problem = Problem(dtype="f16", head_dim=64, backward=True)
    computed = made.Gradients(problem)

    def launched(address, causal):
        if driver.library.fake_launched_name() == f"attention_{problem.stem}_kernel".encode():
            computed.launch(address, causal)

    driver.library.fake_on_launch(callback := made.LAUNCHED(launched))
    exact = importlib.import_module("flashgen.tuner.evaluate.reference").attention(q, k, v, scale=0.125)
    dout = np.random.default_rng(0).standard_normal(exact.o.shape).astype(np.float16)
    given = exact.o.astype(np.float16), exact.lse.astype(np.float32), dout
    found = bound_of(None).gradients().gradients(q, k, v, *given)
    wanted = in_float64.gradients(q, k, v, dout, scale=0.125)
    for name, each in zip(("dq", "dk", "dv"), found, strict=True):
        assert_near(each, wanted[name].value, 2e-3)
    assert len(card.made_by.built) == 1 and callback
