"""The real PyTorch without a GPU: tensors of the host pass for those of a card.

What emitted modules launch runs on the stand-in driver (`tests.support.stand_in_driver`), which reads and
writes the host's memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.support.stand_in_driver import PRIMARY, D


def real_torch() -> Any:
    """Returns PyTorch; skips the test where it is not installed."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not hasattr(torch, "_C"):
        pytest.skip("needs PyTorch, not its stand-in")
    return torch


def fresh_driver(torch: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the stand-in driver and the compiler of PyTorch as new, on a card of compute capability 9.0."""
    library.fake_reset(D, 9, 0, 232448)
    library.fake_push(PRIMARY)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    torch._dynamo.reset()


def take_host_tensors(module: Any, library: Any) -> Any:
    """Returns the emitted module, which takes tensors of the host for those of the stand-in driver's card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda name: library)
        module._driver()
    module._TORCH_DEVICES = ("cpu", "meta")
    module._ordinal = lambda device: 0
    compiled = {causal: f"causal={int(causal)}".encode() for causal in (False, True)}
    module._compile = lambda tuned, arch, causal: compiled[causal]
    return module


def tensors(torch: Any, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    """Returns normal numbers, the same in every call; float32 unless a type is given."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype or torch.float32) for shape in shapes]


class Graphs:
    """A backend of torch.compile that keeps the graphs; they run as they are, forward and backward."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.made.append(graph)
        return aot_eager(graph, inputs)

    def targets(self) -> str:
        """Returns what the only graph calls."""
        (graph,) = self.made
        return " ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
