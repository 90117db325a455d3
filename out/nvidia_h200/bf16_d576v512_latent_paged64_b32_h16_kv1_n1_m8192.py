r"""Flash attention for NVIDIA GPUs: bf16, head dim 576 (latent values 512), pages of 64 keys.

For NVIDIA H200 (sm_90a) at batch 32, 16 query and 1 key/value heads, 1 query and 8192 key rows, pages of 64,
without a mask. Serves any batch, number of heads, lengths and strides, grouped-query heads, and either mask.

Measured on NVIDIA H200, batch 32, 16 query and 1 key/value heads, 1 query and 8192 key rows, pages of 64,
without a mask: 90.5 us (median), spread 2.2 %, 100.9 TFLOP/s, 168 registers per thread, occupancy 19 %.
Largest error per head against float64: 1.8e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned
by flashgen 0.2.0, seed 0.

    from bf16_d576v512_latent_paged64_b32_h16_kv1_n1_m8192 import attention_latent

    # q (batch, seqlen_q, heads, head_dim), cache (pages, page_size, head_dim); page_table int32 (batch, max_pages)
    o = attention_latent(q, cache, page_table, seqused_k)                 # (batch, seqlen_q, heads, head_dim_v): values are the cache's first columns
    o, lse = attention_latent(..., return_lse=True)
    attention_latent(..., causal=True, scale=0.1, out=o, stream=stream)

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d576v512_latent_paged64_b32_h16_kv1_n1_m8192.py \
        --device h200 --dtype bf16 --d 576 --dv 512 --latent --page-size 64 --batch 32 --seqlen-q 1 \
        --seqlen-k 8192 --family latent --set splits=1 --set boxes=1 --set workspace_splits=4
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Launch, Tuned, TensorMap
from flashgen.templates.runtime.latent_attention import LatentAttention
from flashgen.templates.runtime.paged_program import run_paged_module

__all__ = [
    "DEVICE",
    "KERNELS",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "attention_latent",
    "explain",
    "register_torch",
    "use",
]

# ---- the kernel ------------------------------------------------------------------------------------------

#: The fields of a kernel's first parameter, in order: names, and formats as Python's struct has them.
ARGUMENTS = (
    ("q", "Q"),
    ("k", "Q"),
    ("o", "Q"),
    ("lse", "Q"),
    ("page_table", "Q"),
    ("seqused_k", "Q"),
    ("workspace", "Q"),
    ("q_stride_batch", "q"),
    ("q_stride_head", "q"),
    ("q_stride_row", "q"),
    ("k_stride_page", "q"),
    ("k_stride_head", "q"),
    ("k_stride_row", "q"),
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
        name="bf16_d576v512_latent_paged64_b32_h16_kv1_n1_m8192",
        problem={
            "dtype": "bf16",
            "batch": 32,
            "num_q_heads": 16,
            "num_kv_heads": 1,
            "seqlen_q": 1,
            "seqlen_k": 8192,
            "head_dim": 576,
            "head_dim_v": 512,
            "causal": False,
            "precision": "auto",
            "page_size": 64,
            "latent": True,
        },
        variant={
            "family": "latent",
            "splits": 1,
            "workspace_splits": 4,
            "boxes": 1,
            "l2_ahead": 0,
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 90.4959999024868,
            "spread": 0.021746818492335132,
            "tflops": 100.85313730810768,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 230400,
            "occupancy": 0.1875,
            "error": 0.001788506642423994,
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
                symbol="attention_bf16_d576v512_latent_paged64_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q * (num_q_heads // num_kv_heads) + 64 - 1) // 64 * num_kv_heads * batch * 4
                ),
                threads=384,
                smem_bytes=230400,
                rows_per_block=64,
                pack_heads=True,
                workspace_splits=4,
                maps=(
                    TensorMap("k", 64, 64, 128, 128),
                ),
            ),
            Launch(
                symbol="attention_bf16_d576v512_latent_paged64_combine",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q * (num_q_heads // num_kv_heads) + 64 - 1) // 64 * num_kv_heads * batch * 4
                ),
                threads=512,
                smem_bytes=0,
                rows_per_block=64,
                pack_heads=True,
                workspace_splits=4,
                dependent=True,
            ),
        ),
        tolerance=0.01,
        oldest_arch=90,
        only_arch=90,
        arch_suffix="a",
        workspace=(
            lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                (seqlen_q * (num_q_heads // num_kv_heads) + 64 - 1) // 64 * num_kv_heads * batch * 4 * 32960
            ),
        ),
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = LatentAttention(KERNELS, operator="attention_bf16_d576v512_latent_paged64_6e3c9f0d")
attention_latent, explain, use = _bound.attention_latent, _bound.explain, _bound.use
register_torch = _bound.register_torch

if __name__ == "__main__":
    sys.exit(run_paged_module(_bound, __doc__))
