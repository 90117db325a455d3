"""Digests of what `flashgen.attention` computes, for environments to be held against each other.

    python tests/support/digests.py            on the card, by PyTorch's tensors
    python tests/support/digests.py sim:h200   on that card, emulated

prints JSON: the digest of each call's result, what compiled it, and whether PyCUDA was loaded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import flashgen
import numpy as np
from flashgen.tuner.build.compile import cuda_toolchain

#: Heads of queries and of keys, rows and keys of a call's arrays, and what it asks.
_SHAPE = (2, 1, 19, 33)
_CALLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "f32": ("float32", 24, {"causal": True}),
    "f16": ("float16", 64, {"window": (7, 0)}),
    "bf16": ("bfloat16", 128, {"causal": True, "softcap": 20.0}),
    "f32, gradients": ("float32", 64, {"causal": True}),
    "bf16, gradients": ("bfloat16", 64, {"causal": True}),
}
#: Calls that an emulated card computes in seconds.
_EMULATED = ("f32", "f16")


def drawn(d: int) -> list[np.ndarray]:
    """Returns q, k and v in float32, the same in every process."""
    heads, kv_heads, rows, keys = _SHAPE
    random = np.random.default_rng(d)
    shapes = (1, heads, rows, d), (1, kv_heads, keys, d), (1, kv_heads, keys, d)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def emulated(name: str, device: str) -> str:
    """Returns the digest of a call of numpy arrays on an emulated card."""
    dtype, d, asked = _CALLS[name]
    return _digest(flashgen.attention(*(x.astype(dtype) for x in drawn(d)), device=device, **asked))


def on_card(name: str) -> str:
    """Returns the digest of a call of PyTorch's tensors, and where it has them of its gradients."""
    import torch

    torch.use_deterministic_algorithms(True)
    dtype, d, asked = _CALLS[name]
    inputs = [torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in drawn(d)]
    derived = name.endswith("gradients")
    made = flashgen.attention(*(x.requires_grad_(derived) for x in inputs), **asked)
    if derived:
        made.backward(made.detach())
    found = [made.detach(), *(x.grad for x in inputs if derived)]
    return _digest(*(x.float().cpu().numpy() for x in found))


def _digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else None
    if device is None:
        digests = {name: on_card(name) for name in _CALLS}
        compiler = cuda_toolchain(90).version
    else:
        digests = {name: emulated(name, device) for name in _EMULATED}
        compiler = ""
    told = {"digests": digests, "compiler": compiler, "pycuda": "pycuda.driver" in sys.modules}
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
