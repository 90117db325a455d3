r"""Flash attention for NVIDIA GPUs: bf16, head dim 64 with ALiBi.

For NVIDIA H200 (sm_90a) at batch 2, 32 heads, 8192 rows, with a causal mask, ALiBi. Serves any batch, number
of heads, lengths and strides, grouped-query heads, and the causal mask or none beside.

Measured on NVIDIA H200, batch 2, 32 heads, 8192 rows, with a causal mask, ALiBi: 481.7 us (median), spread
0.2 %, 1141.4 TFLOP/s, 96 registers per thread, occupancy 31 %. Largest error per head against float64:
2.4e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d64_alibi_causal_b2_h32_n8192 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    attention(q, k, v, alibi_slopes=slopes)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d64_alibi_causal_b2_h32_n8192.py \
        --device h200 --dtype bf16 --d 64 --causal --alibi --batch 2 --heads 32 --seqlen 8192 --family wgmma \
        --set br=256 --set bc=64 --set persistent=false --set q_stages=1 --set k_stages=2 --set v_stages=2 \
        --set schedule=chained --set q_in_registers=false --set order_of_groups=free --set rescale=lazy \
        --set poly_exp=0 --set section=0 --set min_blocks=1 --set far_keys=left_out
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.templates.runtime import Launch, Tuned, TensorMap
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
    ("slopes", "Q"),
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
    ("slopes_stride_0", "q"),
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
    return score - (at.slopes[b, h] * np.asarray(np.abs(((q + seqlen_k) - seqlen_q) - k)).astype(np.float64))
# fmt: on


# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Scored(
        name="bf16_d64_alibi_causal_b2_h32_n8192",
        problem={
            "dtype": "bf16",
            "batch": 2,
            "num_q_heads": 32,
            "num_kv_heads": 32,
            "seqlen_q": 8192,
            "seqlen_k": 8192,
            "head_dim": 64,
            "head_dim_v": 64,
            "causal": True,
            "precision": "auto",
            "scoring": {
                "alibi": True,
            },
        },
        variant={
            "family": "wgmma",
            "pack_heads": False,
            "br": 256,
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
            "far_keys": "left_out",
            "copiers": 1,
            "k_stages": 2,
            "v_stages": 2,
            "summed_columns": 0,
            "schedule": "chained",
            "q_in_registers": False,
            "order_of_groups": "free",
            "rescale": "lazy",
            "poly_exp": 0,
            "section": 0,
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
            "median_us": 481.6959947347641,
            "spread": 0.0021922862199987127,
            "tflops": 1141.4313773872016,
            "registers": 96,
            "spill_bytes": 0,
            "smem_bytes": 68608,
            "occupancy": 0.3125,
            "error": 0.0024120650913622543,
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
                symbol="attention_bf16_d64_alibi_key_lengths",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_k + 64 - 1) // 64 * num_kv_heads * batch
                ),
                threads=128,
                smem_bytes=0,
                rows_per_block=64,
            ),
            Launch(
                symbol="attention_bf16_d64_alibi_reach",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 256 - 1) // 256 * num_q_heads * batch
                ),
                threads=128,
                smem_bytes=0,
                rows_per_block=256,
                dependent=True,
            ),
            Launch(
                symbol="attention_bf16_d64_alibi_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                    (seqlen_q + 256 - 1) // 256 * num_q_heads * batch
                ),
                threads=640,
                smem_bytes=68608,
                rows_per_block=256,
                dependent=True,
                maps=(
                    TensorMap("q", 64, 64, 128, 128),
                    TensorMap("k", 64, 64, 128, 128),
                    TensorMap("v", 64, 64, 128, 128),
                    TensorMap("o", 64, 64, 128, 128),
                ),
            ),
        ),
        tolerance=0.01,
        oldest_arch=90,
        only_arch=90,
        arch_suffix="a",
        workspace=(
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_kv_heads * ((seqlen_k + 15) // 16)
            ),
            lambda batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k: (
                batch * num_q_heads * ((seqlen_q + 63) // 64)
            ),
        ),
        counts_keys=True,
        source=SOURCE,
        asked="--alibi",
        scalars={},
        buffers={
            "slopes": Buffer("f32", (("batch",), ("num_q_heads",))),
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = ScoredAttention(KERNELS, operator="attention_bf16_d64_alibi_0e113883")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_scored_module(_bound, __doc__))
