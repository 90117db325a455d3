r"""Flash attention for NVIDIA GPUs: gradients, bf16, head dim 64 with ALiBi.

For NVIDIA H200 (sm_90a) at batch 2, 32 heads, 8192 rows, with a causal mask, ALiBi. Serves any batch, number
of heads, lengths and strides, grouped-query heads, and the causal mask or none beside.

Measured on NVIDIA H200, batch 2, 32 heads, 8192 rows, with a causal mask, ALiBi: 1.659 ms (median), spread
0.1 %, 828.5 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64:
1.4e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d64_backward_alibi_causal_b2_h32_n8192 import gradients

    # q (batch, heads, seqlen_q, head_dim), o and lse as attention(..., return_lse=True) has them, dout like o
    dq, dk, dv = gradients(q, k, v, o, lse, dout)
    gradients(..., causal=True, scale=0.1, dlse=dlse, deterministic=True, stream=stream)
    gradients(q, k, v, o, lse, dout, alibi_slopes=slopes)
    dq, dk, dv, *more = gradients(..., wanted=["alibi_slopes"])    # of what scores read, too

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d64_backward_alibi_causal_b2_h32_n8192.py \
        --device h200 --dtype bf16 --d 64 --backward --causal --alibi --batch 2 --heads 32 --seqlen 8192 \
        --family wgmma-backward --set bc=128 --set apart=false --set br=128 --set schedule=ahead \
        --set parts=2 --set kept=registers --set q_stages=2 --set dout_stages=2 --set dq_path=bulk \
        --set ds_stages=2 --set rows=128 --set keys=64 --set k_stages=2 --set v_stages=2 \
        --set order=heaviest_first --set meeting=late --set ranges=of_keys --set turns=free \
        --set far_keys=left_out
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.templates.runtime import Launch, Tuned, TensorMap
from flashgen.templates.runtime.scored_gradients import ScoredGradients
from flashgen.templates.runtime.scored_gradient_program import run_scored_gradients_module
from flashgen.templates.runtime.scored_values import Buffer, Scored

__all__ = [
    "DEVICE",
    "GRADIENTS",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "explain",
    "gradients",
    "register_torch",
    "use",
]

# ---- the kernel ------------------------------------------------------------------------------------------

#: The fields of a kernel's first parameter, in order: names, and formats as Python's struct has them.
ARGUMENTS = (
    ("q", "Q"),
    ("k", "Q"),
    ("v", "Q"),
    ("o", "Q"),
    ("dout", "Q"),
    ("lse", "Q"),
    ("dlse", "Q"),
    ("dq", "Q"),
    ("dk", "Q"),
    ("dv", "Q"),
    ("slopes", "Q"),
    ("workspace", "Q"),
    ("dslopes", "Q"),
    ("q_stride_batch", "q"),
    ("q_stride_head", "q"),
    ("q_stride_row", "q"),
    ("k_stride_batch", "q"),
    ("k_stride_head", "q"),
    ("k_stride_row", "q"),
    ("v_stride_batch", "q"),
    ("v_stride_head", "q"),
    ("v_stride_row", "q"),
    ("o_stride_batch", "q"),
    ("o_stride_head", "q"),
    ("o_stride_row", "q"),
    ("dout_stride_batch", "q"),
    ("dout_stride_head", "q"),
    ("dout_stride_row", "q"),
    ("dq_stride_batch", "q"),
    ("dq_stride_head", "q"),
    ("dq_stride_row", "q"),
    ("dk_stride_batch", "q"),
    ("dk_stride_head", "q"),
    ("dk_stride_row", "q"),
    ("dv_stride_batch", "q"),
    ("dv_stride_head", "q"),
    ("dv_stride_row", "q"),
    ("slopes_stride_0", "q"),
    ("dslopes_stride_0", "q"),
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


# What rows see of the keys, and what becomes of scores, in numpy: run as a program, the module checks itself by it.
# fmt: off
def _sees(at: Any, causal: bool, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return (
        (k >= 0)
        & (np.logical_not(causal) | (k < (q + (seqlen_k - seqlen_q)) + 1))
    )


def _change(at: Any, score: Any, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return score - (at.slopes[b, h] * np.asarray(np.abs(((q + seqlen_k) - seqlen_q) - k)).astype(np.float64))
# fmt: on


# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
GRADIENTS: tuple[Tuned, ...] = (
    Scored(
        name="bf16_d64_backward_alibi_causal_b2_h32_n8192",
        problem={
            "dtype": "bf16",
            "batch": 2,
            "num_q_heads": 32,
            "num_kv_heads": 32,
            "seqlen_q": 8192,
            "seqlen_k": 8192,
            "head_dim": 64,
            "head_dim_v": 64,
            "causal": True,
            "precision": "auto",
            "scoring": {
                "alibi": True,
            },
            "backward": True,
        },
        variant={
            "family": "wgmma-backward",
            "bc": 128,
            "apart": False,
            "br": 128,
            "schedule": "ahead",
            "parts": 2,
            "kept": "registers",
            "q_stages": 2,
            "dout_stages": 2,
            "dq_path": "bulk",
            "cluster": 1,
            "sum_stages": 2,
            "heads": 1,
            "ds_stages": 2,
            "rows": 128,
            "keys": 64,
            "k_stages": 2,
            "v_stages": 2,
            "order": "heaviest_first",
            "meeting": "late",
            "ranges": "of_keys",
            "min_blocks": 1,
            "turns": "free",
            "sums": "any_order",
            "walk": "down",
            "far_keys": "left_out",
            "last_turn": "whole",
            "second": "behind",
            "sections": "held",
            "finisher": "consumers",
            "writer": "producer",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 1659.1200232505798,
            "spread": 0.0011668768006512567,
            "tflops": 828.4857560738377,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 199680,
            "occupancy": 0.1875,
            "error": 0.0014496765253934642,
            "predicted": False,
            "busy": "",
            "driver": "580.159.04 (CUDA 13.0)",
            "toolkit": "nvcc 13.0.88",
            "flashgen": "0.2.0",
            "seed": 0,
        },
        vector=8,
        launches=(
            Launch(
                symbol="attention_bf16_d64_backward_alibi_key_lengths",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_k + 64 - 1) // 64 * num_kv_heads * batch
                ),
                threads=128,
                smem_bytes=0,
                rows_per_block=64,
            ),
            Launch(
                symbol="attention_bf16_d64_backward_alibi_reach",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 256 - 1) // 256 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=0,
                rows_per_block=256,
                dependent=True,
            ),
            Launch(
                symbol="attention_bf16_d64_backward_alibi_statistics",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=256,
                smem_bytes=0,
                rows_per_block=128,
                dependent=True,
            ),
            Launch(
                symbol="attention_bf16_d64_backward_alibi_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_k + 128 - 1) // 128 * num_kv_heads * batch
                ),
                threads=384,
                smem_bytes=199680,
                rows_per_block=128,
                max_blocks=132,
                dependent=True,
                maps=(
                    TensorMap("q", 128, 64, 128, 128),
                    TensorMap("dout", 128, 64, 128, 128),
                    TensorMap("k", 128, 64, 128, 128),
                    TensorMap("v", 128, 64, 128, 128),
                    TensorMap("dk", 16, 64, 128, 128),
                    TensorMap("dv", 16, 64, 128, 128),
                ),
            ),
            Launch(
                symbol="attention_bf16_d64_backward_alibi_postprocess",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 64 - 1) // 64 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=0,
                rows_per_block=64,
                dependent=True,
            ),
            Launch(
                symbol="attention_bf16_d64_backward_alibi_gradient_of_slopes",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 64 - 1) // 64 * num_q_heads * ((seqlen_k + 64 - 1) // 64) * batch
                ),
                threads=256,
                smem_bytes=16640,
                rows_per_block=64,
                makes="dslopes",
                dependent=True,
            ),
        ),
        tolerance=0.01,
        oldest_arch=90,
        only_arch=90,
        arch_suffix="a",
        workspace=(
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 127) // 128 * 128)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 127) // 128 * 128)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 15) // 16 * 16) * 64
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: 1,
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_kv_heads * ((seqlen_k + 15) // 16)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: batch * num_kv_heads,
        ),
        deterministic=False,
        source=SOURCE,
        asked="--alibi",
        scalars={},
        buffers={
            "slopes": Buffer("f32", (("batch",), ("num_q_heads",))),
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = GRADIENTS[0].problem, GRADIENTS[0].variant, GRADIENTS[0].device
MEASUREMENT = GRADIENTS[0].measurement

_bound = ScoredGradients(GRADIENTS, operator="attention_bf16_d64_backward_alibi_173866f7")
gradients, explain, use, register_torch = _bound.gradients, _bound.explain, _bound.use, _bound.register_torch

if __name__ == "__main__":
    sys.exit(run_scored_gradients_module(_bound, __doc__))
