"""Functions of PyTorch's tensors, traced: only where PyTorch is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashgen.gen.formula.trace import trace_mask, trace_score

torch = pytest.importorskip("torch", exc_type=ImportError)
if not hasattr(torch, "nn"):
    pytest.skip("this torch stands in for PyTorch", allow_module_level=True)
flex = pytest.importorskip("torch.nn.attention.flex_attention")

DOC = torch.tensor([0, 0, 1, 1, 2])
BIAS = torch.randn(2, 4, 5, 5, dtype=torch.bfloat16)
CAP = torch.tensor(20.0)
FLAGS = torch.tensor([True, False, True, True, True])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOC[q_idx] == DOC[kv_idx]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 9))
        self.register_buffer("cap", torch.tensor(3.0))

    def forward(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.cap * torch.tanh((score + self.table[h, k - q]) / self.cap)


LAYER = Layer()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (flex.and_masks(causal, document), "q >= k and DOC[q] == DOC[k]"),
        (flex.or_masks(causal, document), "q >= k or DOC[q] == DOC[k]"),
        (flex.noop_mask, "True"),
        (lambda b, h, q, k: FLAGS[q] | ~FLAGS[k], "FLAGS[q] != 0 or not FLAGS[k] != 0"),
        (
            lambda b, h, q, k: (torch.abs(q - k) <= 2) & ((q - k) % 2 == 0),
            "abs(q - k) <= 2 and (q - k) % 2 == 0",
        ),
        (
            lambda b, h, q, k: torch.where(q < 2, k < torch.tensor(3), torch.eq(k, 1)),
            "where(q < 2, k < 3, k == 1)",
        ),
        (lambda b, h, q, k: torch.logical_and(q > k, DOC.max() > k), "q > k and 2 > k"),
    ],
)
def test_masks(function: Any, text: str) -> None:
    assert trace_mask(function).expression.python() == text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (LAYER, "cap * tanh((score + table[h, k - q]) / cap)"),
        (LAYER.forward, "cap * tanh((score + table[h, k - q]) / cap)"),
        (lambda s, b, h, q, k: s + LAYER.table[h, k - q], "score + table[h, k - q]"),
        (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), "CAP * tanh(score / CAP)"),
        (lambda s, b, h, q, k: 2 * CAP - s, "2.0 * CAP - score"),
        (lambda s, b, h, q, k: s + BIAS[b][h][q, k], "score + BIAS[b, h, q, k]"),
        (
            lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(-float("inf"), device=s.device)),
            "where(q >= k, score, -inf)",
        ),
        (
            lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / 4)) * (k - q),
            "score + exp2(-(float(h + 1) * 8.0 / 4.0)) * float(k - q)",
        ),
        (
            lambda s, b, h, q, k: torch.clamp(torch.nn.functional.relu(s), max=9).to(torch.float16),
            "min(max(score, 0.0), 9.0)",
        ),
        (lambda s, b, h, q, k: torch.where(q > k, s, torch.full_like(s, -9.0)), "where(q > k, score, -9.0)"),
    ],
)
def test_changes(function: Any, text: str) -> None:
    assert trace_score(function).expression.python() == text


def test_tensors_are_buffers_and_numbers() -> None:
    traced = trace_score(lambda s, b, h, q, k: torch.where(FLAGS[q], CAP * BIAS[b, h, q, k], s))
    assert traced.buffers["BIAS"] is BIAS and traced.buffers["FLAGS"] is FLAGS
    assert traced.dtypes == {"BIAS": "bf16", "FLAGS": "u8"} and traced.scalars == {"CAP": 20.0}
    values = {name: tensor.float().numpy() for name, tensor in traced.buffers.items()} | traced.scalars
    found = traced.expression.value(values | {"score": 1.0, "b": 1, "h": 2, "q": np.arange(5), "k": 3})
    expected = torch.where(FLAGS, CAP * BIAS[1, 2, :, 3].float(), torch.tensor(1.0))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
