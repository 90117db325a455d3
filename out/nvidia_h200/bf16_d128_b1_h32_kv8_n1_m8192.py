r"""Flash attention for NVIDIA GPUs: bf16, head dim 128.

For NVIDIA H200 (sm_90) at batch 1, 32 query and 8 key/value heads, 1 query and 8192 key rows, without a mask.
Serves any batch, number of heads, lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 1, 32 query and 8 key/value heads, 1 query and 8192 key rows, without a mask:
16.13 us (median), spread 2.0 %, 8.3 TFLOP/s, 145 registers per thread, occupancy 12 %. Largest error per head
against float64: 2.2e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed
0.

    from bf16_d128_b1_h32_kv8_n1_m8192 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_b1_h32_kv8_n1_m8192.py \
        --device h200 --dtype bf16 --d 128 --batch 1 --heads 32 --kv-heads 8 --seqlen-q 1 --seqlen-k 8192 \
        --family mma --set br=16 --set rows_per_warp=16 --set bc=16 --set layout=swizzled \
        --set d_steps=exact --set q_in_registers=false --set stages=3 --set rescale=lazy --set poly_exp=0 \
        --set heads=1 --set min_blocks=1 --set block_order=by_head --set pack_heads=true --set key_warps=8 \
        --set splits=8 --set merge=at_once --set evict_first=true
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
        name="bf16_d128_b1_h32_kv8_n1_m8192",
        problem={
            "dtype": "bf16",
            "batch": 1,
            "num_q_heads": 32,
            "num_kv_heads": 8,
            "seqlen_q": 1,
            "seqlen_k": 8192,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": False,
            "precision": "auto",
        },
        variant={
            "family": "mma",
            "parts": "tf32",
            "pack_heads": True,
            "br": 16,
            "rows_per_warp": 16,
            "key_warps": 8,
            "splits": 8,
            "workspace_splits": 1,
            "merge": "at_once",
            "bc": 16,
            "layout": "swizzled",
            "d_steps": "exact",
            "q_in_registers": False,
            "q_whole": False,
            "stages": 3,
            "far_keys": "walked",
            "evict_first": True,
            "rescale": "lazy",
            "poly_exp": 0,
            "heads": 1,
            "min_blocks": 1,
            "block_order": "by_head",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 16.127999871969223,
            "spread": 0.020337254497061554,
            "tflops": 8.322031812095497,
            "registers": 145,
            "spill_bytes": 0,
            "smem_bytes": 209920,
            "occupancy": 0.125,
            "error": 0.0022400306187004546,
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
                symbol="attention_bf16_d128_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q * (num_q_heads // num_kv_heads) + 16 - 1) // 16 * num_kv_heads * batch * 8
                ),
                threads=256,
                smem_bytes=209920,
                rows_per_block=16,
                pack_heads=True,
                splits=8,
            ),
        ),
        tolerance=0.01,
        oldest_arch=90,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = Attention(KERNELS, operator="attention_bf16_d128_98dff07a")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_module(_bound, __doc__))
