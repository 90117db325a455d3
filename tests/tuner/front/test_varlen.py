"""`flashgen.attention_varlen` on emulated cards, held to float64 sequence by sequence."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import SimpleNamespace

import flashgen
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.evaluate import gradients as in_float64
from flashgen.tuner.front.bound import bound_of

from tests.support.emulated import needs_compiler
from tests.templates.test_packed import computing
from tests.tuner.front.test_attention import CARD, D, assert_near, expected

ROWS, KEYS = (5, 0, 33), (40, 7, 33)


def packed(dtype=np.float32):
    rng = np.random.default_rng(2)
    shapes = (sum(ROWS), 4, D), (sum(KEYS), 2, D), (sum(KEYS), 2, D)
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (ROWS, KEYS)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes], starts


def by_sequence(arrays, starts, **asked):
    """o and the log-sum-exp as `attention_varlen` returns them."""
    found = []
    for i in range(len(ROWS)):
        places = [slice(*starts[of_keys][i : i + 2]) for of_keys in (0, 1, 1)]
        one = [x[at].swapaxes(0, 1)[None] for x, at in zip(arrays, places, strict=True)]
        found.append(expected(*one, **asked))
    o = np.concatenate([each.o[0].swapaxes(0, 1) for each in found])
    return o, np.concatenate([each.lse[0] for each in found], axis=1)


@needs_compiler
@pytest.mark.thorough
def test_sequences_attend_to_themselves():
    arrays, starts = packed()
    told = {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS), "device": CARD}
    o, lse = flashgen.attention_varlen(*arrays, *starts, causal=True, return_lse=True, **told)
    wanted_o, wanted_lse = by_sequence(arrays, starts, causal=True)
    assert_near(o.swapaxes(0, 1)[None], wanted_o.swapaxes(0, 1)[None])
    assert np.abs(lse - wanted_lse).max() < 1e-5
    asked, values = Scoring(window=(6, 2)), {"window_left": 6, "window_right": 2}
    o = flashgen.attention_varlen(*arrays, *starts, window=(6, 2), **told)
    wanted_o, _ = by_sequence(arrays, starts, scoring=asked, values=values)
    assert_near(o.swapaxes(0, 1)[None], wanted_o.swapaxes(0, 1)[None])


def differentiated(torch, tensors, starts, sinks, dout, dlse):
    """The gradients of q, k, v and sinks by PyTorch, of sequences under a causal mask and a soft cap of 2."""
    made, of_rows = [], []
    for i in range(len(ROWS)):
        q, k, v = (
            x[slice(*(int(n) for n in starts[of_keys][i : i + 2]))].transpose(0, 1)
            for of_keys, x in zip((0, 1, 1), tensors, strict=True)
        )
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        scores = 2 * torch.tanh(q @ k.transpose(1, 2) * D**-0.5 / 2)
        visible = torch.ones(ROWS[i], KEYS[i]).tril(KEYS[i] - ROWS[i]).bool()
        scores = scores.masked_fill(~visible, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(4, ROWS[i], 1)], 2)
        made.append((scores.softmax(2)[..., :-1] @ v).transpose(0, 1))
        of_rows.append(scores.logsumexp(2))
    return torch.autograd.grad((torch.cat(made), torch.cat(of_rows, 1)), (*tensors, sinks), (dout, dlse))


@needs_compiler
@pytest.mark.thorough
def test_torchs_tensors_differentiate_on_an_emulated_card():
    torch = pytest.importorskip("torch._C", reason="needs PyTorch") and __import__("torch")
    arrays, starts = packed()
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    starts = [torch.from_numpy(x) for x in starts]
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    told = {"max_seqlen_q": max(ROWS), "max_seqlen_k": max(KEYS), "device": CARD, "causal": True}
    o, lse = flashgen.attention_varlen(*tensors, *starts, sinks=sinks, softcap=2.0, return_lse=True, **told)
    given = [torch.randn(x.shape, generator=torch.manual_seed(3)) for x in (o, lse)]
    found = torch.autograd.grad((o, lse), (*tensors, sinks), given)
    for each, exact in zip(found, differentiated(torch, tensors, starts, sinks, *given), strict=True):
        assert torch.allclose(each, exact, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        out = torch.empty_like(o)
        flashgen.attention_varlen(*tensors, *starts, sinks=sinks, softcap=2.0, out=out, **told)
        assert torch.equal(out, o)
    with pytest.raises(RuntimeError, match="no gradient is taken through out"):
        flashgen.attention_varlen(*tensors, *starts, sinks=sinks, softcap=2.0, out=out, **told)


@needs_compiler
@pytest.mark.thorough
def test_gradients_of_arrays_on_an_emulated_card():
    arrays, starts = packed()
    starts[0] = np.array([0, 5, 5, 33], np.int32)  # five rows are of no sequence
    told = {"max_seqlen_q": 33, "max_seqlen_k": 40, "seqused_k": np.array([3, 7, 33], np.int32)}
    asked, bias = Scoring(bias="f32"), np.random.default_rng(1).standard_normal((33, 40), np.float32)
    o, lse = flashgen.attention_varlen(*arrays, *starts, bias=bias, return_lse=True, device=CARD, **told)
    rng = np.random.default_rng(5)
    dout, exact = rng.standard_normal(o.shape, np.float32), [np.zeros(x.shape) for x in (*arrays, bias)]
    for i, (row, end) in enumerate(pairwise(starts[0])):
        keys = slice(starts[1][i], starts[1][i] + told["seqused_k"][i])
        places = slice(row, end), keys, keys
        one = [x[at].swapaxes(0, 1)[None] for x, at in zip(arrays, places, strict=True)]
        of = bias[: end - row, : keys.stop - keys.start]
        wanted = in_float64.gradients(
            *(*one, dout[row:end].swapaxes(0, 1)[None]),
            scale=D**-0.5,
            scores=Problem(scoring=asked).scores,
            values={"bias": of[None, None]},
        )
        for name, made, at in zip(("dq", "dk", "dv"), exact, places, strict=False):
            made[at] = wanted[name].value[0].swapaxes(0, 1)
        exact[3][: of.shape[0], : of.shape[1]] += wanted["dbias"].value.sum((0, 1))
    gradients = bound_of(CARD).packed_gradients(asked)
    given = dict(zip(("q", "k", "v", "o", "lse", "dout"), (*arrays, o, lse, dout), strict=True))
    given |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "bias": bias, **told}
    for each, wanted in zip(gradients.gradients_varlen(**given, wanted=["bias"]), exact, strict=True):
        np.testing.assert_allclose(each, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("told", "kind", "text"),
    [
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3, but the longest sequence has 33 rows"),
        ({"cu_seqlens_k": np.zeros(3, np.int32)}, ValueError, "different numbers of sequences"),
        ({"window": 3}, TypeError, "window is 3; pass"),
        ({"nothing": 3}, TypeError, "nothing= is no argument of attention"),
    ],
)
def test_what_tells_no_sequences_is_refused(told, kind, text):
    arrays, (starts_q, starts_k) = packed()
    usual = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 33, "max_seqlen_k": 40}
    with pytest.raises(kind, match=text):
        flashgen.attention_varlen(*arrays, **{**usual, "device": CARD, **told})


def test_a_card_proves_and_runs_them(driver, card):
    arrays, starts = packed()
    wide = [driver.own(np.concatenate([x] * 2, axis=2)) for x in arrays]
    with computing(driver, Problem(head_dim=2 * D, varlen="same")):
        o = flashgen.attention_varlen(*wide, *starts, max_seqlen_q=33, max_seqlen_k=40, scale=0.1)
    wanted, _ = by_sequence(wide, starts, scale=0.1)
    assert_near(o.swapaxes(0, 1)[None], wanted.swapaxes(0, 1)[None])
    assert [each.problem.layout.is_packed for each in card.made_by.built] == [True]


def test_a_card_proves_and_runs_their_gradients(driver, card):
    scoring = Scoring(sinks=True)
    made = importlib.import_module("tests.templates.test_packed_gradients")
    problem = Problem(head_dim=made.D, varlen="same", scoring=scoring, backward=True)
    kernel = SimpleNamespace(symbol=f"attention_{problem.stem}_kernel", problem=problem)
    case = made.Case(scoring)
    with made.computing(driver, kernel):
        found = (
            bound_of(None)
            .packed_gradients(scoring)
            .gradients_varlen(**case.given, **case.told, **made.SAID, causal=True, wanted=["sinks"])
        )
    case.check(found, "dsinks")
    assert len(card.made_by.built) == 1
