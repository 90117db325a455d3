r"""Flash attention for NVIDIA GPUs: f32, head dim 64 with bias of f32.

For NVIDIA H200 (sm_90a) at batch 4, 16 heads, 4096 rows, with bias of f32. Serves any batch, number of heads,
lengths and strides, grouped-query heads, and the causal mask or none beside. Tensor cores multiply: each
float32 product is three of f16, of the factors' upper and lower parts. Rows for which that is less accurate
than float32, as beside elements 2^16 times as large, are computed again in double precision, which is slow.

Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, with bias of f32: 1.723 ms (median), spread 2.6 %,
159.5 TFLOP/s, 168 registers per thread, occupancy 19 %. Largest error per head against float64: 7.0e-07.
Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from f32_d64_biasf32 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    attention(q, k, v, bias=bias)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit f32_d64_biasf32.py \
        --device h200 --d 64 --bias f32 --family wgmma --set br=128 --set bc=80 --set persistent=true \
        --set q_stages=1 --set k_stages=3 --set v_stages=3 --set schedule=overlapped \
        --set q_in_registers=false --set order_of_groups=free --set rescale=lazy --set poly_exp=0 \
        --set section=1 --set min_blocks=1 --set split=in_front
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.templates.runtime import Launch, Tuned
from flashgen.templates.runtime.scored_attention import ScoredAttention
from flashgen.templates.runtime.scored_program import run_scored_module
from flashgen.templates.runtime.scored_values import Buffer, Scored

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
    ("bias", "Q"),
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
    ("bias_stride_0", "q"),
    ("bias_stride_1", "q"),
    ("bias_stride_2", "q"),
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


# What rows see of the keys, and what becomes of scores, in numpy: run as a program, the module checks itself by it.
# fmt: off
def _sees(at: Any, causal: bool, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return (
        (k >= 0)
        & (np.logical_not(causal) | (k < (q + (seqlen_k - seqlen_q)) + 1))
    )


def _change(at: Any, score: Any, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return score + at.bias[b, h, q, k]
# fmt: on


# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Scored(
        name="f32_d64_biasf32",
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
            "precision": "auto",
            "scoring": {
                "bias": "f32",
            },
        },
        variant={
            "family": "wgmma",
            "pack_heads": False,
            "br": 128,
            "splits": 1,
            "workspace_splits": 1,
            "split": "in_front",
            "bc": 80,
            "persistent": True,
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
            "q_in_registers": False,
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
            "median_us": 1723.2320308685303,
            "spread": 0.025570564126446385,
            "tflops": 159.51299768114114,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 201728,
            "occupancy": 0.1875,
            "error": 6.972087505708589e-07,
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
                symbol="attention_f32_d64_biasf32_query_tiles",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 64 - 1) // 64 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=16,
                rows_per_block=64,
            ),
            Launch(
                symbol="attention_f32_d64_biasf32_walked_tiles",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_k + 80 - 1) // 80 * num_kv_heads * batch
                ),
                threads=128,
                smem_bytes=16,
                rows_per_block=80,
                dependent=True,
            ),
            Launch(
                symbol="attention_f32_d64_biasf32_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=384,
                smem_bytes=201728,
                rows_per_block=128,
                max_blocks=132,
                dependent=True,
            ),
        ),
        tolerance=2e-06,
        oldest_arch=90,
        only_arch=90,
        arch_suffix="a",
        workspace=(
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 63) // 64) * 4128
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_kv_heads * ((seqlen_k + 79) // 80) * 5152
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_kv_heads * ((seqlen_k + 79) // 80) * 5152
            ),
        ),
        counts_keys=True,
        source=SOURCE,
        asked="--bias f32",
        scalars={},
        buffers={
            "bias": Buffer("f32", (("batch",), ("num_q_heads",), ("seqlen_q",), ("seqlen_k",))),
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = ScoredAttention(KERNELS, operator="attention_f32_d64_biasf32_e4563929")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_scored_module(_bound, __doc__))
