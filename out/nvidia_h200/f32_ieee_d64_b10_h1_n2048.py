r"""Flash attention for NVIDIA GPUs: f32 (ieee), head dim 64.

For NVIDIA H200 (sm_90) at batch 10, 1 heads, 2048 rows, without a mask. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 10, 1 heads, 2048 rows, without a mask: 261.9 us (median), spread 0.2 %,
41.0 TFLOP/s, 254 registers per thread, occupancy 12 %. Largest error per head against float64: 8.8e-07. Built
by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from f32_ieee_d64_b10_h1_n2048 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit f32_ieee_d64_b10_h1_n2048.py \
        --device h200 --precision ieee --d 64 --batch 10 --heads 1 --seqlen 2048 --family simt --set br=160 \
        --set threads_per_block=256 --set lanes=16 --set bc=128 --set vec=4 --set q_in_registers=false \
        --set q_layout=padded --set k_layout=padded --set v_layout=row --set p_layout=transposed \
        --set p_passes=2 --set stages=2 --set min_blocks=1 --set block_order=by_head --set unroll=4 \
        --set sweep=columns
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Attention, Launch, Tuned, run_module

__all__ = [
    "DEVICE",
    "KERNELS",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "attention",
    "explain",
    "register_torch",
    "register_transformers",
    "sdpa",
    "use",
]

# ---- the kernel ------------------------------------------------------------------------------------------

#: The fields of a kernel's first parameter, in order: names, and formats as Python's struct has them.
ARGUMENTS = (
    ("q", "Q"),
    ("k", "Q"),
    ("v", "Q"),
    ("o", "Q"),
    ("lse", "Q"),
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
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")

# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Tuned(
        name="f32_ieee_d64_b10_h1_n2048",
        problem={
            "dtype": "f32",
            "batch": 10,
            "num_q_heads": 1,
            "num_kv_heads": 1,
            "seqlen_q": 2048,
            "seqlen_k": 2048,
            "head_dim": 64,
            "head_dim_v": 64,
            "causal": False,
            "precision": "ieee",
        },
        variant={
            "family": "simt",
            "br": 160,
            "workspace_splits": 1,
            "far_keys": "walked",
            "threads_per_block": 256,
            "lanes": 16,
            "bc": 128,
            "vec": 4,
            "q_in_registers": False,
            "q_layout": "padded",
            "k_layout": "padded",
            "v_layout": "row",
            "p_layout": "transposed",
            "p_passes": 2,
            "stages": 2,
            "min_blocks": 1,
            "block_order": "by_head",
            "unroll": 4,
            "sweep": "columns",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 261.85598969459534,
            "spread": 0.0017108201750677095,
            "tflops": 41.00505110661449,
            "registers": 254,
            "spill_bytes": 0,
            "smem_bytes": 220288,
            "occupancy": 0.125,
            "error": 8.801639695711442e-07,
            "predicted": False,
            "busy": "",
            "driver": "580.159.04 (CUDA 13.0)",
            "toolkit": "nvcc 13.0.88",
            "flashgen": "0.2.0",
            "seed": 0,
        },
        vector=4,
        launches=(
            Launch(
                symbol="attention_f32_ieee_d64_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q + 160 - 1) // 160 * num_q_heads * batch
                ),
                threads=256,
                smem_bytes=220288,
                rows_per_block=160,
            ),
        ),
        tolerance=2e-06,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = Attention(KERNELS, operator="attention_f32_ieee_d64_e9cc9dd1")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_module(_bound, __doc__))
