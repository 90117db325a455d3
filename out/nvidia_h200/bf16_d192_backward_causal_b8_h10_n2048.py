r"""Flash attention for NVIDIA GPUs: gradients, bf16, head dim 192.

For NVIDIA H200 (sm_90a) at batch 8, 10 heads, 2048 rows, with a causal mask. Serves any batch, number of
heads, lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 8, 10 heads, 2048 rows, with a causal mask: 770.7 us (median), spread 1.6 %,
418.0 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 1.3e-03.
Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d192_backward_causal_b8_h10_n2048 import gradients

    # q (batch, heads, seqlen_q, head_dim), o and lse as attention(..., return_lse=True) has them, dout like o
    dq, dk, dv = gradients(q, k, v, o, lse, dout)
    gradients(..., causal=True, scale=0.1, dlse=dlse, deterministic=True, stream=stream)

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d192_backward_causal_b8_h10_n2048.py \
        --device h200 --dtype bf16 --d 192 --backward --causal --batch 8 --heads 10 --seqlen 2048 \
        --family wgmma-backward --set bc=64 --set apart=true --set br=64 --set schedule=ahead --set parts=1 \
        --set kept=shared --set q_stages=2 --set dout_stages=2 --set dq_path=launch --set ds_stages=2 \
        --set rows=128 --set keys=64 --set k_stages=2 --set v_stages=1 --set order=by_head --set turns=free \
        --set second=beside
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Launch, TensorMap, Tuned
from flashgen.templates.runtime.gradient_program import run_gradients_module
from flashgen.templates.runtime.gradients import Gradients

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
    ("workspace", "Q"),
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
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")

# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
GRADIENTS: tuple[Tuned, ...] = (
    Tuned(
        name="bf16_d192_backward_causal_b8_h10_n2048",
        problem={
            "dtype": "bf16",
            "batch": 8,
            "num_q_heads": 10,
            "num_kv_heads": 10,
            "seqlen_q": 2048,
            "seqlen_k": 2048,
            "head_dim": 192,
            "head_dim_v": 192,
            "causal": True,
            "precision": "auto",
            "backward": True,
        },
        variant={
            "family": "wgmma-backward",
            "bc": 64,
            "apart": True,
            "br": 64,
            "schedule": "ahead",
            "parts": 1,
            "kept": "shared",
            "q_stages": 2,
            "dout_stages": 2,
            "dq_path": "launch",
            "cluster": 1,
            "sum_stages": 2,
            "heads": 1,
            "ds_stages": 2,
            "rows": 128,
            "keys": 64,
            "k_stages": 2,
            "v_stages": 1,
            "order": "by_head",
            "meeting": "at_once",
            "ranges": "of_rows",
            "min_blocks": 1,
            "turns": "free",
            "sums": "any_order",
            "walk": "down",
            "far_keys": "walked",
            "last_turn": "whole",
            "second": "beside",
            "sections": "held",
            "finisher": "consumers",
            "writer": "producer",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 770.687997341156,
            "spread": 0.01628677620160682,
            "tflops": 417.96751514401467,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 165888,
            "occupancy": 0.1875,
            "error": 0.0012673773325797787,
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
                symbol="attention_bf16_d192_backward_statistics",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 64 - 1) // 64 * num_q_heads * batch
                ),
                threads=256,
                smem_bytes=0,
                rows_per_block=64,
            ),
            Launch(
                symbol="attention_bf16_d192_backward_queries",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=384,
                smem_bytes=173056,
                rows_per_block=128,
                dependent=True,
                maps=(
                    TensorMap("q", 64, 64, 128, 128),
                    TensorMap("dout", 64, 64, 128, 128),
                    TensorMap("k", 64, 64, 128, 128),
                    TensorMap("v", 64, 64, 128, 128),
                    TensorMap("dq", 16, 64, 128, 128),
                    TensorMap("dk", 16, 64, 128, 128),
                    TensorMap("dv", 16, 64, 128, 128),
                ),
            ),
            Launch(
                symbol="attention_bf16_d192_backward_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_k + 64 - 1) // 64 * num_kv_heads * batch
                ),
                threads=384,
                smem_bytes=165888,
                rows_per_block=64,
                max_blocks=132,
                dependent=True,
                maps=(
                    TensorMap("q", 64, 64, 128, 128),
                    TensorMap("dout", 64, 64, 128, 128),
                    TensorMap("k", 64, 64, 128, 128),
                    TensorMap("v", 64, 64, 128, 128),
                    TensorMap("dq", 16, 64, 128, 128),
                    TensorMap("dk", 16, 64, 128, 128),
                    TensorMap("dv", 16, 64, 128, 128),
                ),
            ),
        ),
        tolerance=0.01,
        oldest_arch=90,
        only_arch=90,
        arch_suffix="a",
        workspace=(
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 63) // 64 * 64)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 63) // 64 * 64)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: 1,
        ),
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = GRADIENTS[0].problem, GRADIENTS[0].variant, GRADIENTS[0].device
MEASUREMENT = GRADIENTS[0].measurement

_bound = Gradients(GRADIENTS, operator="attention_bf16_d192_backward_e0945a33")
gradients, explain, use, register_torch = _bound.gradients, _bound.explain, _bound.use, _bound.register_torch

if __name__ == "__main__":
    sys.exit(run_gradients_module(_bound, __doc__))
