r"""Flash attention for NVIDIA GPUs: bf16, head dim 128, pages of 128 keys.

For NVIDIA H200 (sm_90a) at batch 8, 32 query and 8 key/value heads, 64 query and 16384 key rows, pages of
128, with a causal mask. Serves any batch, number of heads, lengths and strides, grouped-query heads, and
either mask.

Measured on NVIDIA H200, batch 8, 32 query and 8 key/value heads, 64 query and 16384 key rows, pages of 128,
with a causal mask: 208.2 us (median), spread 0.7 %, 658.8 TFLOP/s, 168 registers per thread, occupancy 19 %.
Largest error per head against float64: 1.8e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned
by flashgen 0.2.0, seed 0.

    from bf16_d128_paged128_causal_b8_h32_kv8_n64_m16384 import attention_paged

    # q (batch, heads, seqlen_q, head_dim)
    # k_cache (pages, page_size, kv_heads, head_dim), v_cache alike; page_table int32 (batch, max_pages)
    o = attention_paged(q, k_cache, v_cache, page_table, seqused_k)
    attention_paged(..., kv_layout="HND")             # caches (pages, kv_heads, page_size, head_dim)
    flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=page_table)   # as flash-attn has it

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_paged128_causal_b8_h32_kv8_n64_m16384.py \
        --device h200 --dtype bf16 --d 128 --page-size 128 --causal --batch 8 --heads 32 --kv-heads 8 \
        --seqlen-q 64 --seqlen-k 16384 --family wgmma --set br=128 --set bc=128 --set persistent=false \
        --set q_stages=1 --set k_stages=3 --set v_stages=3 --set schedule=overlapped \
        --set q_in_registers=true --set order_of_groups=free --set rescale=lazy --set poly_exp=0 \
        --set section=1 --set min_blocks=1 --set pack_heads=true
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
        name="bf16_d128_paged128_causal_b8_h32_kv8_n64_m16384",
        problem={
            "dtype": "bf16",
            "batch": 8,
            "num_q_heads": 32,
            "num_kv_heads": 8,
            "seqlen_q": 64,
            "seqlen_k": 16384,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": True,
            "precision": "auto",
            "page_size": 128,
        },
        variant={
            "family": "wgmma",
            "pack_heads": True,
            "br": 128,
            "splits": 1,
            "workspace_splits": 1,
            "split": "in_place",
            "bc": 128,
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
            "k_stages": 3,
            "v_stages": 3,
            "summed_columns": 0,
            "schedule": "overlapped",
            "q_in_registers": True,
            "order_of_groups": "free",
            "rescale": "lazy",
            "poly_exp": 0,
            "section": 1,
            "min_blocks": 1,
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
            "median_us": 208.22400599718094,
            "spread": 0.007184526563213339,
            "tflops": 658.7843301884085,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 230400,
            "occupancy": 0.1875,
            "error": 0.0017783619431022077,
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
                    (seqlen_q * (num_q_heads // num_kv_heads) + 128 - 1) // 128 * num_kv_heads * batch
                ),
                threads=384,
                smem_bytes=230400,
                rows_per_block=128,
                pack_heads=True,
                maps=(
                    TensorMap("k", 128, 64, 128, 128),
                    TensorMap("v", 128, 64, 128, 128),
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

_bound = PagedAttention(KERNELS, operator="attention_bf16_d128_paged128_e1f64ec9")
attention_paged, explain, use = _bound.attention_paged, _bound.explain, _bound.use
register_torch = _bound.register_torch
flash_attn_with_kvcache = _bound.flash_attn_with_kvcache

if __name__ == "__main__":
    sys.exit(run_paged_module(_bound, __doc__))
