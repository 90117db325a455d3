"""Gradients of `flashgen.attention` under masks and scores, with the real PyTorch, where it is installed, and
without a GPU: tensors lie in host memory, on which the stand-in driver computes what launches are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flashgen
import pytest
from flashgen.compat import flash_attn
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.templates.runtime import gradient_plans, packed_values, scored_values, table, tensors
from flashgen.tuner.front.bound import bound_of

from tests.support.host_tensors import Graphs, real_torch
from tests.support.stand_in_driver import PRIMARY, D
from tests.templates import test_packed, test_packed_gradients
from tests.templates.gradient_kernels import computing

ROWS, KEYS = 9, 12


@pytest.fixture(scope="module")
def real() -> Any:
    return real_torch()


@pytest.fixture
def torch(real: Any, driver: Any, card: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch, whose tensors of the host count as those of the card."""
    monkeypatch.setitem(sys.modules, "torch", real)
    for module in (gradient_plans, packed_values, scored_values, table, tensors):
        if hasattr(module, "_TORCH_DEVICES"):
            monkeypatch.setattr(module, "_TORCH_DEVICES", ("cpu", "meta"))
        if hasattr(module, "_ordinal"):
            monkeypatch.setattr(module, "_ordinal", lambda device: 0)
    monkeypatch.setattr(real._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    driver.library.fake_push(PRIMARY)
    return real


def drawn(torch: Any, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.manual_seed(sum(shape))).requires_grad_()


def kernels_of(scoring: Scoring, varlen: str = "") -> list[Any]:
    """What names and problems of a kernel and of one of its gradients are."""
    problems = (
        Problem(head_dim=D, scoring=scoring, varlen=varlen, backward=backward) for backward in (False, True)
    )
    return [SimpleNamespace(symbol=f"attention_{each.stem}_kernel", problem=each) for each in problems]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_go_to_all_that_is_read(torch: Any, driver: Any, softcap: float | None) -> None:
    q, (k, v) = drawn(torch, 2, 4, ROWS, D), (drawn(torch, 2, 2, KEYS, D) for _ in "kv")
    bias, sinks = drawn(torch, ROWS, KEYS), drawn(torch, 4)
    scoring = Scoring(window=(5, 0), bias="f32", sinks=True, softcap=softcap or 0.0)
    with computing(driver, *kernels_of(scoring)):
        o = flashgen.attention(q, k, v, window=(5, 0), bias=bias, sinks=sinks, softcap=softcap)
        grad = torch.randn(o.shape, generator=torch.manual_seed(7))
        found = torch.autograd.grad(o, (q, k, v, bias, sinks), grad)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    scores = q @ wide[0].transpose(2, 3) * D**-0.5
    scores = (scores if softcap is None else softcap * (scores / softcap).tanh()) + bias
    places = torch.arange(KEYS)[None] - torch.arange(ROWS)[:, None] - (KEYS - ROWS)
    scores = scores.masked_fill((places < -5) | (places > 0), -torch.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, ROWS, 1)], 3)
    expected = torch.autograd.grad(scores.softmax(3)[..., :-1] @ wide[1], (q, k, v, bias, sinks), grad)
    for each, other in zip(found, expected, strict=True):
        assert torch.allclose(each, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(sinks=True, softcap=2.0)])
def test_packed_sequences_differentiate(torch: Any, driver: Any, card: Any, scoring: Scoring) -> None:
    """At once, in a compiled step, by flash-attn's name, and by the operators' own checks."""
    torch._dynamo.reset()
    inputs = [torch.from_numpy(x).requires_grad_() for x in test_packed.arrays()]
    inputs += [drawn(torch, 4)] * scoring.sinks
    starts = [torch.from_numpy(x) for x in test_packed.lengths()]
    told = {**test_packed.SAID, "causal": True}
    told |= {"softcap": scoring.softcap} if scoring.softcap else {}

    def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return flashgen.attention_varlen(q, k, v, *starts, sinks=sinks, **told)

    def grads(o: Any) -> Any:
        return torch.autograd.grad(o, inputs, torch.randn(o.shape, generator=torch.manual_seed(7)))

    exact = grads(one_by_one(torch, scoring.softcap, *inputs))
    with test_packed_gradients.computing(driver, *kernels_of(scoring, "same")):
        by_flash = flash_attn.flash_attn_varlen_func
        made = [attend(*inputs), torch.compile(attend, backend=Graphs(), fullgraph=True)(*inputs)]
        made += [] if scoring.sinks else [by_flash(*inputs, *starts, *test_packed.SAID.values(), causal=True)]
        for o in made:
            for each, wanted in zip(grads(o), exact, strict=True):
                assert torch.allclose(each, wanted, atol=1e-4, rtol=1e-4)
        serving = bound_of(None).packed(scoring if not scoring.softcap else Scoring(sinks=True, softcap=30.0))
        name, operators = serving.register_torch(), torch.ops.flashgen
        settings = (True, None, [21, 37], *starts, None, None, inputs[3:], [2.0] * scoring.sinks)
        torch.library.opcheck(getattr(operators, f"{name}_lse").default, (*inputs[:3], *settings))
        q, k, v, *more = (x.detach() for x in inputs)
        settings = (*settings[:-2], more, settings[-1])
        o, lse = (x.detach() for x in getattr(operators, f"{name}_lse")(q, k, v, *settings))
        given = (q, k, v, o, lse, torch.ones_like(o), None, *settings[:3], True, *settings[3:])
        torch.library.opcheck(getattr(operators, f"{name}_gradients").default, (*given, [True] * len(more)))
    assert {each.problem.backward for each in card.made_by.built} == {False, True}


def one_by_one(torch: Any, softcap: float, q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
    """Attention of the sequences of `test_packed` under a causal mask, by PyTorch."""
    made, starts = [], test_packed.lengths()
    for i, keys in enumerate(test_packed.K_LENGTHS):
        of_q, of_k = (slice(int(each[i]), int(each[i + 1])) for each in starts)
        query, key, value = (x[at].transpose(0, 1) for x, at in ((q, of_q), (k, of_k), (v, of_k)))
        rows = query.shape[1]
        scores = query @ key.repeat_interleave(2, 0).transpose(1, 2) * D**-0.5
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        scores = scores.masked_fill(~torch.ones(rows, keys).tril(keys - rows).bool(), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(4, rows, 1)], 2)
        weights = torch.nan_to_num(scores.softmax(2)) if keys else torch.zeros(4, rows, 0)
        made.append((weights[..., :keys] @ value.repeat_interleave(2, 0)).transpose(0, 1))
    return torch.cat(made)


def test_packed_sequences_of_eight_bits_have_no_gradients(torch: Any) -> None:
    q, k, v = (torch.zeros(4, 2, D, dtype=torch.float8_e4m3fn) for _ in "qkv")
    starts, scales = torch.tensor([0, 4], dtype=torch.int32), (1.0, 1.0, 1.0)
    with pytest.raises(
        TypeError, match=r"v requires a gradient, .* torch\.no_grad\(\), or pass v\.detach\(\)$"
    ):
        flashgen.attention_varlen(
            *(q, k, v.requires_grad_(), starts, starts), max_seqlen_q=4, max_seqlen_k=4, scales=scales
        )


def test_an_array_that_is_called_as_a_gradient_is_has_none(torch: Any, driver: Any) -> None:
    q, k, v = (drawn(torch, 1, 2, KEYS, D) for _ in "qkv")
    x, dx = (torch.ones(2) for _ in range(2))
    formula: Callable[..., str] | str = "score * x[h] + dx[h]"
    with pytest.raises(TypeError, match=r"q requires a gradient, and no kernel takes those of such a call"):
        flashgen.attention(q, k, v, score=formula, x=x, dx=dx)
