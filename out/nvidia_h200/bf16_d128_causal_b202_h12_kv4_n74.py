r"""Flash attention for NVIDIA GPUs: bf16, head dim 128.

For NVIDIA H200 (sm_90) at batch 202, 12 query and 4 key/value heads, 74 rows, with a causal mask. Serves any
batch, number of heads, lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 202, 12 query and 4 key/value heads, 74 rows, with a causal mask: 65.49 us
(median), spread 1.4 %, 51.9 TFLOP/s, 166 registers per thread, occupancy 19 %. Largest error per head against
float64: 2.4e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d128_causal_b202_h12_kv4_n74 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_causal_b202_h12_kv4_n74.py \
        --device h200 --dtype bf16 --d 128 --causal --batch 202 --heads 12 --kv-heads 4 --seqlen 74 \
        --family mma --set br=48 --set rows_per_warp=16 --set bc=16 --set layout=swizzled \
        --set d_steps=exact --set q_in_registers=true --set stages=3 --set rescale=lazy --set poly_exp=0 \
        --set heads=1 --set min_blocks=4 --set block_order=by_head
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
        name="bf16_d128_causal_b202_h12_kv4_n74",
        problem={
            "dtype": "bf16",
            "batch": 202,
            "num_q_heads": 12,
            "num_kv_heads": 4,
            "seqlen_q": 74,
            "seqlen_k": 74,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": True,
            "precision": "auto",
        },
        variant={
            "family": "mma",
            "parts": "tf32",
            "pack_heads": False,
            "br": 48,
            "rows_per_warp": 16,
            "key_warps": 1,
            "splits": 1,
            "workspace_splits": 1,
            "merge": "by_halves",
            "bc": 16,
            "layout": "swizzled",
            "d_steps": "exact",
            "q_in_registers": True,
            "q_whole": False,
            "stages": 3,
            "far_keys": "walked",
            "evict_first": False,
            "rescale": "lazy",
            "poly_exp": 0,
            "heads": 1,
            "min_blocks": 4,
            "block_order": "by_head",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 65.48799946904182,
            "spread": 0.014292718464744418,
            "tflops": 51.88887997115235,
            "registers": 166,
            "spill_bytes": 0,
            "smem_bytes": 24576,
            "occupancy": 0.1875,
            "error": 0.0023543316874950616,
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
                    (seqlen_q + 48 - 1) // 48 * num_q_heads * batch
                ),
                threads=96,
                smem_bytes=24576,
                rows_per_block=48,
            ),
        ),
        tolerance=0.01,
        oldest_arch=80,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = Attention(KERNELS, operator="attention_bf16_d128_90c6635f")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_module(_bound, __doc__))
