"""Operators of kernels of keys in pages in PyTorch, without a GPU: graphs hold them, fakes tell shapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.scoring.asked import Scoring

from tests.support.stand_in_driver import Driver
from tests.templates.test_packed_torch import for_tensors
from tests.templates.test_paged import (
    MAX_PAGES,
    PAGE_SIZE,
    TABLE,
    caches,
    close,
    computing,
    kernel_of,
    queries,
    said,
    used,
    wanted,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("varlen", ["", "same"])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(softcap=2.0)])
def test_graphs_hold_the_operator(
    scoring: Scoring, varlen: str, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(varlen, scoring=scoring)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    q = queries(varlen)
    given = [torch.from_numpy(np.ascontiguousarray(x)) for x in (q, *caches(), TABLE, used())]
    told = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in said(varlen).items()}
    expected = wanted(kernel.problem, q, True)
    attend = module.attention_paged

    def call(*tensors: Any) -> Any:
        return attend(*tensors, **told, causal=True, return_lse=True)

    with computing(Driver(library), kernel.problem):
        for function in (call, torch.compile(call, backend="eager", fullgraph=True)):
            o, lse = function(*given)
            close(o.numpy(), expected[0])
            close(lse.numpy(), expected[1])
        operator = module.register_torch()
        numbers = [] if scoring.is_plain else [2.0]
        layout = "thd NHD" if varlen else "bhsd NHD"
        longest = [21 if varlen else 0, MAX_PAGES * PAGE_SIZE]
        settings = (True, None, layout, longest, *given[3:], told.get("cu_seqlens_q"), None, [], numbers)
        for name in (operator, f"{operator}_lse"):
            torch.library.opcheck(getattr(torch.ops.flashgen, name), (*given[:3], *settings))
