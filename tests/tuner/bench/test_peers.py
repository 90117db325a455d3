"""PyTorch as a yardstick, by a stand-in: the backends asked, their tensors, and what refusals say."""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.bench.peers import PeerTime

from tests.support.peers import served

PROBLEM = Problem(batch=1, num_q_heads=4, num_kv_heads=4, seqlen_q=8, seqlen_k=8)


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cuda"

    def to(self, dtype: str) -> Tensor:
        return replace(self, dtype=dtype)

    def zero_(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    synchronize = record

    def elapsed_time(self, end: Event) -> float:
        return 2.5


@dataclass
class Torch:
    """What the stand-in was asked, and what it refuses."""

    calls: list[dict[str, Any]]
    refuses: dict[str, Any]

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(call["backend"] for call in self.calls))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    state, using = Torch([], {}), []
    matmul = SimpleNamespace(allow_tf32=None)

    @contextlib.contextmanager
    def sdpa_kernel(backend: str) -> Any:
        using.append(backend)
        yield
        using.pop()

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        backend = using[-1]
        if backend in state.refuses:
            state.refuses[backend]()
        state.calls.append({"backend": backend, "tensors": (q, k, v), "tf32": matmul.allow_tf32, **options})

    module, nn = ModuleType("torch"), ModuleType("torch.nn")
    module.__dict__.update(
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=matmul)),
        cuda=SimpleNamespace(
            device=lambda ordinal: contextlib.nullcontext(),
            empty_cache=lambda: None,
            Event=Event,
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=64),
        ),
        float16="float16",
        bfloat16="bfloat16",
        int8="int8",
        empty=lambda *shape, dtype, device: Tensor(shape, dtype),
        randn=lambda *shape, device: Tensor(shape),
        no_grad=contextlib.nullcontext,
    )
    functions = ModuleType("torch.nn.functional")
    functions.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    backends = ModuleType("torch.nn.attention")
    names = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "MATH": "math"}
    backends.SDPBackend = SimpleNamespace(**names, CUDNN_ATTENTION="cudnn")  # type: ignore[attr-defined]
    backends.sdpa_kernel = sdpa_kernel  # type: ignore[attr-defined]
    for each in (module, nn, functions, backends):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return state


def times(*problems: Problem) -> list[PeerTime]:
    return served(problems, budget_ms=10)


@pytest.mark.parametrize(("dtype", "name"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_sixteen_bits_are_asked_of_every_backend(torch: Torch, dtype: str, name: str) -> None:
    found = times(replace(PROBLEM, dtype=dtype, head_dim=192, head_dim_v=128))
    backends = [(entry.backend, entry.fused, entry.median_us) for entry in found]
    assert backends == [
        ("flash", True, 2500),
        ("memory-efficient", True, 2500),
        ("cudnn", True, 2500),
        ("math", False, 2500),
    ]
    assert torch.backends == ["flash", "efficient", "cudnn", "math"]
    q, k, v = torch.calls[0]["tensors"]
    assert q.dtype == k.dtype == v.dtype == name
    assert (q.shape, k.shape, v.shape) == ((1, 4, 8, 192), (1, 4, 8, 192), (1, 4, 8, 128))
    assert "enable_gqa" not in torch.calls[0]


def test_float32_is_multiplied_as_its_class_says(torch: Torch) -> None:
    found = times(PROBLEM, replace(PROBLEM, precision="tf32"))
    assert [(e.problem, e.backend) for e in found] == [
        (index, name) for index in (0, 1) for name in ("memory-efficient", "cudnn", "math")
    ]
    allowed = [call["tf32"] for call in torch.calls]
    assert allowed == sorted(allowed) and set(allowed) == {False, True}
    assert all(x.dtype == "float32" for call in torch.calls for x in call["tensors"])


def test_grouped_heads_are_left_to_the_backend(torch: Torch) -> None:
    def refuse() -> None:
        warnings.warn(
            "Memory efficient kernel not used because: (Triggered internally at a.cpp)", stacklevel=1
        )
        cause = "For dense input, both fused kernels require query, key and value to have the same num_heads."
        warnings.warn(f"{cause} (Triggered internally at b.cpp)", stacklevel=1)
        warnings.warn("Flash attention has been runtime disabled. (Triggered at c.cpp)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    torch.refuses["efficient"] = refuse
    found = times(replace(PROBLEM, dtype="f16", num_kv_heads=2))
    reasons = {entry.backend: entry.reason for entry in found if entry.median_us is None}
    assert list(reasons) == ["memory-efficient"]
    assert reasons["memory-efficient"].startswith("For dense input, both fused kernels require")
    assert reasons["memory-efficient"].endswith("the same num_heads.")
    assert torch.calls[0]["enable_gqa"] is True and torch.calls[0]["tensors"][1].shape[1] == 2


def test_a_refusal_without_a_cause_is_told_as_it_is(torch: Torch) -> None:
    def refuse() -> None:
        raise TypeError("unexpected keyword argument 'enable_gqa'\nmore")

    torch.refuses["math"] = refuse
    assert times(PROBLEM)[-1].reason == "unexpected keyword argument 'enable_gqa'"


def test_another_causal_mask_is_not_timed(torch: Torch) -> None:
    found = times(replace(PROBLEM, causal=True, seqlen_q=4), replace(PROBLEM, causal=True))
    assert {e.reason for e in found if e.problem == 0} == {
        "PyTorch aligns the causal mask top-left, which differs for 4 queries and 8 keys"
    }
    assert all(e.median_us is not None for e in found if e.problem == 1)
    assert all(call["is_causal"] for call in torch.calls)
