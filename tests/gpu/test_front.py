"""`flashgen.attention` and its companions on a real card: calls choose kernels, build and prove them."""

from __future__ import annotations

import time
from typing import Any

import flashgen
import numpy as np
import pytest

from tests.support.torch_attention import BOUNDS, assert_gradients, assert_near, attended

HEADS, KV_HEADS, ROWS, KEYS = 4, 2, 197, 333
#: Types, head dims and what a call asks; arrays by their name.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bf16, causal": ("bfloat16", 64, {"causal": True}),
    "bf16, odd head dim": ("bfloat16", 33, {"causal": True}),
    "bf16, soft cap": ("bfloat16", 128, {"softcap": 20.0, "causal": True}),
    "f16": ("float16", 40, {}),
    "f16, bias": ("float16", 64, {"bias": "float16"}),
    "f16, mask": ("float16", 64, {"bias": "bool"}),
    "f32, window": ("float32", 64, {"window": (63, 7)}),
    "f32, odd head dim": ("float32", 7, {"causal": True}),
    "f32, sinks and slopes": ("float32", 64, {"sinks": "float32", "alibi_slopes": "float32"}),
}


def drawn(torch: Any, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    random = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [x > -1 if dtype == "bool" else x.to(getattr(torch, dtype)) for x in random]


def qkv(torch: Any, dtype: str, d: int, rows: int = ROWS, keys: int = KEYS, batch: int = 2) -> list[Any]:
    return drawn(torch, dtype, (batch, HEADS, rows, d), *[(batch, KV_HEADS, keys, d)] * 2)


def with_arrays(torch: Any, asked: dict[str, Any]) -> dict[str, Any]:
    shapes = {"bias": (HEADS, ROWS, KEYS), "sinks": (HEADS,), "alibi_slopes": (HEADS,)}
    arrays = {name: drawn(torch, asked[name], shape)[0] for name, shape in shapes.items() if name in asked}
    if "alibi_slopes" in arrays:
        arrays["alibi_slopes"] = arrays["alibi_slopes"].abs() / 16
    return {**asked, **arrays}


@pytest.mark.parametrize("name", CASES)
def test_calls_of_every_kind(torch: Any, name: str) -> None:
    dtype, d, asked = CASES[name]
    q, k, v = qkv(torch, dtype, d)
    asked = with_arrays(torch, asked)
    o, lse = flashgen.attention(q, k, v, return_lse=True, **asked)
    wanted, wanted_lse = attended(torch, q, k, v, **asked)
    assert o.dtype == q.dtype and lse.dtype == torch.float32
    assert_near(o, wanted, BOUNDS[dtype][0])
    assert (lse.double() - wanted_lse).abs().max() < 2e-2


GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16, causal": ("bfloat16", {"causal": True}),
    "bf16, window": ("bfloat16", {"window": (63, 0)}),
    "f32": ("float32", {"causal": True}),
    "f32, bias and sinks": ("float32", {"bias": "float32", "sinks": "float32"}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(torch: Any, name: str) -> None:
    """Those of what masks and scores read, too."""
    dtype, asked = GRADIENTS[name]
    asked = with_arrays(torch, asked)
    read = [x for x in asked.values() if isinstance(x, torch.Tensor)]
    tensors = [x.requires_grad_() for x in (*qkv(torch, dtype, 64), *read)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    others = iter(exact[3:])
    alike = {each: next(others) if isinstance(x, torch.Tensor) else x for each, x in asked.items()}
    o = flashgen.attention(*tensors[:3], **asked)
    assert_gradients(o, attended(torch, *exact[:3], **alike)[0], tensors, exact, BOUNDS[dtype][1])


def test_packed_sequences(torch: Any) -> None:
    rows, keys = (5, 0, 197), (40, 7, 333)
    shapes = (sum(rows), HEADS, 64), *[(sum(keys), KV_HEADS, 64)] * 2
    q, k, v = drawn(torch, "bfloat16", *shapes)
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (rows, keys)]
    o, lse = flashgen.attention_varlen(
        *(q, k, v, *(torch.from_numpy(x).cuda() for x in starts)),
        max_seqlen_q=max(rows),
        max_seqlen_k=max(keys),
        causal=True,
        return_lse=True,
    )
    for i in (0, 2):
        places = [slice(*starts[of_keys][i : i + 2]) for of_keys in (0, 1, 1)]
        one = [x[at].transpose(0, 1)[None] for x, at in zip((q, k, v), places, strict=True)]
        wanted, wanted_lse = attended(torch, *one, causal=True)
        assert_near(o[places[0]].transpose(0, 1)[None], wanted, 1e-2)
        assert (lse[:, places[0]].double() - wanted_lse[0]).abs().max() < 2e-2


@pytest.mark.parametrize("of_pages", [True, False])
def test_caches(torch: Any, of_pages: bool) -> None:
    lengths, page = (333, 100), 16
    (q,) = drawn(torch, "bfloat16", (2, 1, HEADS, 64))
    slots = drawn(torch, "bfloat16", *[(2, 352, KV_HEADS, 64)] * 2)
    told: dict[str, Any] = {"seqused_k": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    caches = slots
    if of_pages:
        table = torch.randperm(44, generator=torch.Generator().manual_seed(1)).reshape(2, 22).cuda()
        caches = [torch.zeros(44, page, KV_HEADS, 64, dtype=x.dtype, device="cuda") for x in slots]
        for cache, slot in zip(caches, slots, strict=True):
            cache[table] = slot.reshape(2, 22, page, KV_HEADS, 64)
        told["page_table"] = table.to(torch.int32)
    o = flashgen.attention_with_cache(q, *caches, layout="bshd", **told)
    for i, length in enumerate(lengths):
        one = [x[i : i + 1, :n].transpose(1, 2) for x, n in ((q, 1), *((x, length) for x in slots))]
        assert_near(o[i : i + 1].transpose(1, 2), attended(torch, *one)[0], 1e-2)


def test_into_an_array_in_another_layout_and_by_other_strides(torch: Any) -> None:
    q, k, v = qkv(torch, "bfloat16", 64)
    wanted = flashgen.attention(q, k, v, causal=True)
    views = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = torch.full_like(views[0], torch.nan)
    assert flashgen.attention(*views, causal=True, out=out, layout="bshd") is out
    assert torch.equal(out.transpose(1, 2), wanted)
    assert torch.equal(flashgen.attention(*(x.transpose(1, 2) for x in views), causal=True), wanted)


def test_captured_in_a_graph_once_it_was_called(torch: Any) -> None:
    q, k, v = qkv(torch, "bfloat16", 64)
    flashgen.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashgen.attention(q, k, v, causal=True)
    q.mul_(0.5)
    graph.replay()
    assert_near(o, attended(torch, q, k, v, causal=True)[0], 1e-2)


def test_compiled_without_a_break(torch: Any) -> None:
    torch._dynamo.reset()
    q, k, v = qkv(torch, "bfloat16", 64)
    wanted = flashgen.attention(q, k, v, causal=True)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return flashgen.attention(q, k, v, causal=True) * 2

    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(found, wanted * 2)


def test_what_is_explained_is_what_runs(torch: Any) -> None:
    q, k, v = qkv(torch, "bfloat16", 64)
    flashgen.attention(q, k, v, causal=True)
    told = flashgen.explain(q, k, v, causal=True)
    assert told.built and told.predicted_us > 0 and told.problem.seqlen_k == KEYS
    text = str(told)
    assert torch.cuda.get_device_name() in text and told.kernel in text and "emulated" not in text
    assert all(f"\n  {word} " in text for word in ("kernel", "why", "time", "bound", "next", "tuning"))


def test_arrays_of_cupy_and_of_the_host(torch: Any) -> None:
    q, k, v = qkv(torch, "float16", 40)
    wanted = flashgen.attention(q, k, v)
    o, lse = flashgen.attention(*(x.cpu().numpy() for x in (q, k, v)), return_lse=True)
    assert isinstance(o, np.ndarray) and isinstance(lse, np.ndarray)
    assert (o == wanted.cpu().numpy()).all()
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    found = flashgen.attention(*(cupy.from_dlpack(x) for x in (q, k, v)))
    assert isinstance(found, cupy.ndarray) and (cupy.asnumpy(found) == o).all()


def test_a_warm_call_costs_the_host_little(torch: Any) -> None:
    """Beside others at work, too: the best of many tries counts."""
    q, k, v = qkv(torch, "bfloat16", 64, 64, 64, 1)
    flashgen.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    tries = []
    for _ in range(40):
        begun = time.perf_counter()
        for _ in range(50):
            flashgen.attention(q, k, v, causal=True)
        tries.append((time.perf_counter() - begun) / 50)
        torch.cuda.synchronize()
    assert min(tries) < 20e-6, f"{1e6 * min(tries):.1f} us"
