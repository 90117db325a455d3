"""`flashgen.attention_with_cache` in compiled steps, with the real PyTorch, where it is installed.

Tensors lie in host memory, on which the stand-in driver computes what launches are told.
"""

from __future__ import annotations

from typing import Any

import flashgen
import pytest
from flashgen.gen.problem import Problem

from tests.support.host_tensors import Graphs
from tests.support.stand_in_driver import D
from tests.templates.test_paged import computing
from tests.tuner.front.test_gradients_torch import real, torch

__all__ = ["real", "torch"]

PAGE, ROOM = 16, 48


@pytest.mark.parametrize("new", [False, True], ids=["as it is", "with new rows"])
def test_a_step_is_one_graph(torch: Any, driver: Any, card: Any, new: bool) -> None:
    torch._dynamo.reset()
    seeded = torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 3, D, generator=seeded) for heads in (4, 2, 2))
    used = torch.tensor([20, 31], dtype=torch.int32)
    table = torch.tensor([[4, 0, 2], [3, 1, 5]], dtype=torch.int32)
    first = torch.randn(2, 6, PAGE, 2, D, generator=seeded)

    def attend(k_cache: Any, v_cache: Any, q: Any, k: Any, v: Any) -> Any:
        told = {"k": k, "v": v, "cache_seqlens": used} if new else {"seqused_k": used}
        return flashgen.attention_with_cache(q, k_cache, v_cache, page_table=table, causal=True, **told)

    compiled = torch.compile(attend, backend=Graphs(), fullgraph=True)
    caches = [first.clone() for _ in range(2)]
    with computing(driver, Problem(head_dim=D, page_size=PAGE)):
        made = [function(*cache, q, k, v) for function, cache in zip((attend, compiled), caches, strict=True)]
    assert torch.equal(*made) and torch.equal(*caches)
    assert torch.equal(caches[0], first) != new
    keys = [x[table].reshape(2, ROOM, 2, D).transpose(1, 2) for x in caches[0]]
    for i, count in enumerate(used + 3 * new):
        of_k, of_v = (x[i, :, :count].repeat_interleave(2, 0) for x in keys)
        seen = torch.ones(3, count).tril(count - 3).bool()
        scores = (q[i] @ of_k.transpose(1, 2) * D**-0.5).masked_fill(~seen, -torch.inf)
        assert torch.allclose(made[0][i], scores.softmax(2) @ of_v, atol=1e-5)
