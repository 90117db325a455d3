r"""Flash attention for NVIDIA GPUs: f32 (ieee), head dim 32.

For NVIDIA H200 (sm_90) at batch 13600, 1 heads, 128 rows, without a mask. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 13600, 1 heads, 128 rows, without a mask: 809 us (median), spread 0.1 %,
35.3 TFLOP/s, 127 registers per thread, occupancy 25 %. Largest error per head against float64: 9.3e-07. Built
by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from f32_ieee_d32_b13600_h1_n128 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit f32_ieee_d32_b13600_h1_n128.py \
        --device h200 --precision ieee --d 32 --batch 13600 --heads 1 --seqlen 128 --family simt \
        --set br=128 --set threads_per_block=128 --set lanes=4 --set bc=32 --set vec=4 \
        --set q_in_registers=false --set q_layout=transposed --set k_layout=transposed --set v_layout=row \
        --set p_layout=transposed --set p_passes=1 --set stages=2 --set min_blocks=4 \
        --set block_order=by_head --set unroll=4 --set sweep=columns
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
        name="f32_ieee_d32_b13600_h1_n128",
        problem={
            "dtype": "f32",
            "batch": 13600,
            "num_q_heads": 1,
            "num_kv_heads": 1,
            "seqlen_q": 128,
            "seqlen_k": 128,
            "head_dim": 32,
            "head_dim_v": 32,
            "causal": False,
            "precision": "ieee",
        },
        variant={
            "family": "simt",
            "br": 128,
            "workspace_splits": 1,
            "far_keys": "walked",
            "threads_per_block": 128,
            "lanes": 4,
            "bc": 32,
            "vec": 4,
            "q_in_registers": False,
            "q_layout": "transposed",
            "k_layout": "transposed",
            "v_layout": "row",
            "p_layout": "transposed",
            "p_passes": 1,
            "stages": 2,
            "min_blocks": 4,
            "block_order": "by_head",
            "unroll": 4,
            "sweep": "columns",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 808.9920282363892,
            "spread": 0.0011075226813012124,
            "tflops": 35.25531303710946,
            "registers": 127,
            "spill_bytes": 0,
            "smem_bytes": 52736,
            "occupancy": 0.25,
            "error": 9.268003112752999e-07,
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
                symbol="attention_f32_ieee_d32_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=52736,
                rows_per_block=128,
            ),
        ),
        tolerance=2e-06,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = Attention(KERNELS, operator="attention_f32_ieee_d32_77651152")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_module(_bound, __doc__))
