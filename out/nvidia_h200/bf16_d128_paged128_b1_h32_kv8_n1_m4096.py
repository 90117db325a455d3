r"""Flash attention for NVIDIA GPUs: bf16, head dim 128, pages of 128 keys.

For NVIDIA H200 (sm_90) at batch 1, 32 query and 8 key/value heads, 1 query and 4096 key rows, pages of 128,
without a mask. Serves any batch, number of heads, lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 1, 32 query and 8 key/value heads, 1 query and 4096 key rows, pages of 128,
without a mask: 11.9 us (median), spread 3.1 %, 5.6 TFLOP/s, 150 registers per thread, occupancy 12 %. Largest
error per head against float64: 1.9e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by
flashgen 0.2.0, seed 0.

    from bf16_d128_paged128_b1_h32_kv8_n1_m4096 import attention_paged

    # q (batch, heads, seqlen_q, head_dim)
    # k_cache (pages, page_size, kv_heads, head_dim), v_cache alike; page_table int32 (batch, max_pages)
    o = attention_paged(q, k_cache, v_cache, page_table, seqused_k)
    attention_paged(..., kv_layout="HND")             # caches (pages, kv_heads, page_size, head_dim)
    flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=page_table)   # as flash-attn has it

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_paged128_b1_h32_kv8_n1_m4096.py \
        --device h200 --dtype bf16 --d 128 --page-size 128 --batch 1 --heads 32 --kv-heads 8 --seqlen-q 1 \
        --family mma --set br=16 --set rows_per_warp=16 --set bc=16 --set layout=swizzled \
        --set d_steps=exact --set q_in_registers=false --set stages=3 --set rescale=lazy --set poly_exp=0 \
        --set heads=1 --set min_blocks=1 --set block_order=by_head --set pack_heads=true --set key_warps=8 \
        --set splits=8 --set merge=at_once --set evict_first=true
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Launch, Tuned
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
        name="bf16_d128_paged128_b1_h32_kv8_n1_m4096",
        problem={
            "dtype": "bf16",
            "batch": 1,
            "num_q_heads": 32,
            "num_kv_heads": 8,
            "seqlen_q": 1,
            "seqlen_k": 4096,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": False,
            "precision": "auto",
            "page_size": 128,
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
            "median_us": 11.903999838978052,
            "spread": 0.030913979598762225,
            "tflops": 5.637505452600983,
            "registers": 150,
            "spill_bytes": 0,
            "smem_bytes": 209920,
            "occupancy": 0.125,
            "error": 0.001871453296418109,
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

_bound = PagedAttention(KERNELS, operator="attention_bf16_d128_paged128_c23512b6")
attention_paged, explain, use = _bound.attention_paged, _bound.explain, _bound.use
register_torch = _bound.register_torch
flash_attn_with_kvcache = _bound.flash_attn_with_kvcache

if __name__ == "__main__":
    sys.exit(run_paged_module(_bound, __doc__))
