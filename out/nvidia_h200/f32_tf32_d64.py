r"""Flash attention for NVIDIA GPUs: f32 (tf32), head dim 64.

For NVIDIA H200 (sm_90) at batch 4, 16 heads, 4096 rows, without a mask. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and either mask. Tensor cores multiply, and round float32 to TF32's
eleven bits: errors up to 1e-03 are within its class.

Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, without a mask: 1.747 ms (median), spread 1.2 %,
157.4 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 4.4e-04.
Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from f32_tf32_d64 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit f32_tf32_d64.py \
        --device h200 --precision tf32 --d 64 --family mma --set br=128 --set rows_per_warp=32 --set bc=32 \
        --set layout=padded --set d_steps=exact --set q_in_registers=false --set stages=2 --set rescale=lazy \
        --set poly_exp=0 --set heads=1 --set min_blocks=3 --set block_order=by_head
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
        name="f32_tf32_d64",
        problem={
            "dtype": "f32",
            "batch": 4,
            "num_q_heads": 16,
            "num_kv_heads": 16,
            "seqlen_q": 4096,
            "seqlen_k": 4096,
            "head_dim": 64,
            "head_dim_v": 64,
            "causal": False,
            "precision": "tf32",
        },
        variant={
            "family": "mma",
            "parts": "tf32",
            "pack_heads": False,
            "br": 128,
            "rows_per_warp": 32,
            "key_warps": 1,
            "splits": 1,
            "workspace_splits": 1,
            "merge": "by_halves",
            "bc": 32,
            "layout": "padded",
            "d_steps": "exact",
            "q_in_registers": False,
            "q_whole": False,
            "stages": 2,
            "far_keys": "walked",
            "evict_first": False,
            "rescale": "lazy",
            "poly_exp": 0,
            "heads": 1,
            "min_blocks": 3,
            "block_order": "by_head",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 1746.8160390853882,
            "spread": 0.012090541722356416,
            "tflops": 157.35939033850568,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 69632,
            "occupancy": 0.1875,
            "error": 0.00044092917124389716,
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
                symbol="attention_f32_tf32_d64_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=69632,
                rows_per_block=128,
            ),
        ),
        tolerance=0.001,
        oldest_arch=80,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = Attention(KERNELS, operator="attention_f32_tf32_d64_80173c23")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_module(_bound, __doc__))
