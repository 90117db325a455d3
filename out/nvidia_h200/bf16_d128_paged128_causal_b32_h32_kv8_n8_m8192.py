r"""Flash attention for NVIDIA GPUs: bf16, head dim 128, pages of 128 keys.

For NVIDIA H200 (sm_90a) at batch 32, 32 query and 8 key/value heads, 8 query and 8192 key rows, pages of 128,
with a causal mask. Serves any batch, number of heads, lengths and strides, grouped-query heads, and either
mask.

Measured on NVIDIA H200, batch 32, 32 query and 8 key/value heads, 8 query and 8192 key rows, pages of 128,
with a causal mask: 251.1 us (median), spread 0.6 %, 136.8 TFLOP/s, 128 registers per thread, occupancy 25 %.
Largest error per head against float64: 1.9e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned
by flashgen 0.2.0, seed 0.

    from bf16_d128_paged128_causal_b32_h32_kv8_n8_m8192 import attention_paged

    # q (batch, heads, seqlen_q, head_dim)
    # k_cache (pages, page_size, kv_heads, head_dim), v_cache alike; page_table int32 (batch, max_pages)
    o = attention_paged(q, k_cache, v_cache, page_table, seqused_k)
    attention_paged(..., kv_layout="HND")             # caches (pages, kv_heads, page_size, head_dim)
    flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=page_table)   # as flash-attn has it

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_paged128_causal_b32_h32_kv8_n8_m8192.py \
        --device h200 --dtype bf16 --d 128 --page-size 128 --causal --batch 32 --heads 32 --kv-heads 8 \
        --seqlen-q 8 --seqlen-k 8192 --family wgmma --set br=64 --set bc=64 --set persistent=false \
        --set q_stages=1 --set k_stages=2 --set v_stages=2 --set schedule=overlapped \
        --set q_in_registers=true --set order_of_groups=free --set rescale=lazy --set poly_exp=0 \
        --set section=16 --set min_blocks=2 --set pack_heads=true
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Launch, Tuned, TensorMap
from flashgen.templates.runtime.paged_attention import PagedAttention
from flashgen.templates.runtime.paged_program import run_paged_module

__all__ = [
    "DEVICE",
    "KERNELS",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "attention_paged",
    "explain",
    "flash_attn_with_kvcache",
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
    ("lse", "Q"),
    ("page_table", "Q"),
    ("seqused_k", "Q"),
    ("q_stride_batch", "q"),
    ("q_stride_head", "q"),
    ("q_stride_row", "q"),
    ("k_stride_page", "q"),
    ("k_stride_head", "q"),
    ("k_stride_row", "q"),
    ("v_stride_page", "q"),
    ("v_stride_head", "q"),
    ("v_stride_row", "q"),
    ("o_stride_batch", "q"),
    ("o_stride_head", "q"),
    ("o_stride_row", "q"),
    ("page_table_stride", "q"),
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("num_pages", "i"),
    ("page_size", "i"),
    ("max_pages", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")

# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Tuned(
        name="bf16_d128_paged128_causal_b32_h32_kv8_n8_m8192",
        problem={
            "dtype": "bf16",
            "batch": 32,
            "num_q_heads": 32,
            "num_kv_heads": 8,
            "seqlen_q": 8,
            "seqlen_k": 8192,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": True,
            "precision": "auto",
            "page_size": 128,
        },
        variant={
            "family": "wgmma",
            "pack_heads": True,
            "br": 64,
            "splits": 1,
            "workspace_splits": 1,
            "split": "in_place",
            "bc": 64,
            "persistent": False,
            "last_turn": "whole",
            "q_stages": 1,
            "o_apart": False,
            "p_in_shared": False,
            "weights": "f16",
            "values": "in_place",
            "powers": "rounded",
            "score_type": "f32",
            "promotion": "tiles",
            "bias_stages": 0,
            "bias_heads": 1,
            "seen_bits": False,
            "far_keys": "walked",
            "copiers": 1,
            "k_stages": 2,
            "v_stages": 2,
            "summed_columns": 0,
            "schedule": "overlapped",
            "q_in_registers": True,
            "order_of_groups": "free",
            "rescale": "lazy",
            "poly_exp": 0,
            "section": 16,
            "min_blocks": 2,
            "cluster_over": "rows",
            "cluster": 1,
            "tail": 0,
            "split_by": "rows",
            "tangent": "polynomial",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 251.13600492477417,
            "spread": 0.005925047284081623,
            "tflops": 136.75879854140308,
            "registers": 128,
            "spill_bytes": 0,
            "smem_bytes": 82944,
            "occupancy": 0.25,
            "error": 0.0019268606381322344,
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
                symbol="attention_bf16_d128_paged128_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q * (num_q_heads // num_kv_heads) + 64 - 1) // 64 * num_kv_heads * batch
                ),
                threads=256,
                smem_bytes=82944,
                rows_per_block=64,
                pack_heads=True,
                maps=(
                    TensorMap("k", 64, 64, 128, 128),
                    TensorMap("v", 64, 64, 128, 128),
                ),
            ),
        ),
        tolerance=0.01,
        only_arch=90,
        arch_suffix="a",
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = PagedAttention(KERNELS, operator="attention_bf16_d128_paged128_8476ed0c")
attention_paged, explain, use = _bound.attention_paged, _bound.explain, _bound.use
register_torch = _bound.register_torch
flash_attn_with_kvcache = _bound.flash_attn_with_kvcache

if __name__ == "__main__":
    sys.exit(run_paged_module(_bound, __doc__))
