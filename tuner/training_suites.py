"""Workloads of training: gradients, as rivals' were timed."""

from __future__ import annotations

from typing import Any

from .workload import RELATIVE_BIAS, Suite, Workload, workload

#: Tokens of a batch, and columns of all heads, of most of them.
_TOKENS, _WIDTH = 16384, 2048
#: Head dims that libraries serve less well, and the queries of each.
_ODD = ((40, 4096), (72, 2048), (80, 1024), (96, 2048), (112, 2048), (192, 2048))
#: A row's own key and those before it that it sees, as libraries count a window.
_WINDOW = 128
#: Documents of packed training, as outputs are timed under in suite `masks`.
_DOCUMENTS = 16


def _gradients(
    dtype: str, head_dim: int, seqlen: int, causal: bool, prefix: str = "", **asked: Any
) -> Workload:
    name = f"backward-{prefix}{dtype}-d{head_dim}-{seqlen}{'c' if causal else ''}"
    batch, heads = max(1, _TOKENS // seqlen), max(1, _WIDTH // head_dim)
    if dtype == "f32":
        batch, heads = 4, 16
    return workload(name, dtype, batch, heads, seqlen, head_dim, causal, backward=True, **asked)


def _backward() -> tuple[Workload, ...]:
    masks = (False, True)
    return (
        *(
            _gradients("bf16", head_dim, seqlen, causal)
            for head_dim in (64, 128, 256)
            for seqlen in (512, 2048, 8192)
            for causal in masks
        ),
        *(_gradients("bf16", head_dim, seqlen, True) for head_dim, seqlen in _ODD),
        *(_gradients("f32", head_dim, 4096, causal) for head_dim in (64, 128) for causal in masks),
        *(
            _gradients("bf16", head_dim, 16384, True, f"window{_WINDOW}-", window=(_WINDOW - 1, 0))
            for head_dim in (64, 128)
        ),
        _gradients("bf16", 128, 16384, True, f"document{_DOCUMENTS}-", documents=_DOCUMENTS),
        _gradients("bf16", 64, 8192, True, "alibi-", alibi=True),
        *(
            _gradients("bf16", head_dim, 2048, True, "relbias-", score=RELATIVE_BIAS)
            for head_dim in (64, 128)
        ),
    )


TRAINING_SUITES = (Suite("backward", "gradients, 16384 tokens, 2048 columns of heads", _backward()),)
