"""Operators of kernels that append to caches in PyTorch, without a GPU: they say that they write to these."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashgen.gen.append import Append

from tests.support.stand_in_driver import Driver, host
from tests.templates.test_appended import (
    CACHED,
    NEW,
    ROTATING,
    TABLE,
    appending,
    computing,
    expected,
    new_rows,
    tables,
)
from tests.templates.test_packed_torch import for_tensors
from tests.templates.test_paged import MAX_PAGES, PAGE_SIZE, caches, close, queries

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("append", [Append(), ROTATING])
def test_graphs_hold_what_writes_to_pages(
    append: Append, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = appending(append=append)
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    q, table, used, *new = map(torch.from_numpy, (queries(), TABLE, CACHED, *new_rows()))
    angles = list(map(torch.from_numpy, tables())) if append.rotary else [None, None]
    attend = module.attention_paged

    def call(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any) -> Any:
        given = {"k": k, "v": v, "rotary_cos": angles[0], "rotary_sin": angles[1]}
        o = attend(q, k_cache, v_cache, table, used, causal=True, **given)
        return o, k_cache + 0

    wanted, filled = expected(True, rotary=bool(append.rotary))
    with computing(Driver(library), kernel.problem):
        for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            written = list(map(torch.from_numpy, caches()))
            o, keys = function(q, *written, *new)
            close(o.numpy(), wanted)
            for found, cache in zip((*written, keys), (*filled, filled[0]), strict=True):
                close(found.numpy(), cache)
        operator = module.register_torch()
        longest = [0, MAX_PAGES * PAGE_SIZE]
        settings = (True, None, "bhsd NHD", longest, table, used, None, None, [], [], *new, *angles, None)
        for name in (operator, f"{operator}_lse"):
            arrays = (q, *map(torch.from_numpy, caches()))
            torch.library.opcheck(getattr(torch.ops.flashgen, name), (*arrays, *settings))
    with pytest.raises(RuntimeError, match="k requires a gradient, but this kernel is forward only"):
        call(q, *written, new[0].clone().requires_grad_(), new[1])


def test_slots_of_tensors_are_pages(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows are written into slots that a call names, as flash-attn has it without a block_table."""
    kernel = appending(append=Append())
    torch, module = for_tensors(kernel, library, tmp_path, monkeypatch)
    chosen = [4, 1, 0, 3]
    q, *new = (torch.from_numpy(x).transpose(1, 2) for x in (queries(), *new_rows()))
    kept = [torch.from_numpy(host(6, 3 * PAGE_SIZE, *x.shape[2:], seed=9)) for x in caches()]
    before = [x.clone() for x in kept]
    attend = module.flash_attn_with_kvcache
    told = {"cache_seqlens": torch.from_numpy(CACHED), "cache_batch_idx": torch.tensor(chosen)}
    monkeypatch.setattr("tests.templates.test_appended.TABLE", np.array(chosen)[:, None] * 3 + np.arange(3))
    with computing(Driver(library), kernel.problem):
        attend(q, *kept, *new, **told)
    for slot, length, b in zip(chosen, CACHED, range(len(CACHED)), strict=True):
        for cache, rows in zip(before, new, strict=True):
            cache[slot, length : length + NEW] = rows[b]
    for found, cache in zip(kept, before, strict=True):
        close(found.numpy(), cache.numpy())
    with pytest.raises(ValueError, match="k_cache has gaps between its slots"):
        attend(q, *(x[:, PAGE_SIZE:] for x in kept), **told)
