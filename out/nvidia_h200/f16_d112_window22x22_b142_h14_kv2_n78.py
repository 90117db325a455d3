r"""Flash attention for NVIDIA GPUs: f16, head dim 112 with window.

For NVIDIA H200 (sm_90) at batch 142, 14 query and 2 key/value heads, 78 rows, with window of 22 keys before
and 22 after. Serves any batch, number of heads, lengths and strides, grouped-query heads, and the causal mask
or none beside.

Measured on NVIDIA H200, batch 142, 14 query and 2 key/value heads, 78 rows, with window of 22 keys before and
22 after: 50.3 us (median), spread 1.0 %, 53.2 TFLOP/s, 166 registers per thread, occupancy 19 %. Largest
error per head against float64: 4.5e-04. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by
flashgen 0.2.0, seed 0.

    from f16_d112_window22x22_b142_h14_kv2_n78 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    attention(q, k, v, window=(22, 22))
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler: nvcc, or the NVRTC that PyTorch
brings; the first call compiles the .cu beside it (and keeps the result). Make that call before capturing a
CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit f16_d112_window22x22_b142_h14_kv2_n78.py \
        --device h200 --dtype f16 --d 112 --window 22,22 --batch 142 --heads 14 --kv-heads 2 --seqlen 78 \
        --family mma --set br=96 --set rows_per_warp=16 --set bc=40 --set layout=padded --set d_steps=exact \
        --set q_in_registers=false --set stages=2 --set rescale=lazy --set poly_exp=0 --set heads=8 \
        --set min_blocks=2 --set block_order=by_head
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.templates.runtime import Launch, Tuned
from flashgen.templates.runtime.scored_attention import ScoredAttention
from flashgen.templates.runtime.scored_program import run_scored_module
from flashgen.templates.runtime.scored_values import Scored

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
    ("window_left", "i"),
    ("window_right", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


# What rows see of the keys, and what becomes of scores, in numpy: run as a program, the module checks itself by it.
# fmt: off
def _sees(at: Any, causal: bool, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return (
        (k >= 0)
        & (k >= np.where(at.window_left < 0, 0, (q + (seqlen_k - seqlen_q)) - at.window_left))
        & (np.logical_not(causal) | (k < (q + (seqlen_k - seqlen_q)) + 1))
        & (k < np.where(at.window_right < 0, seqlen_k, ((q + (seqlen_k - seqlen_q)) + at.window_right) + 1))
    )


def _change(at: Any, score: Any, b: Any, h: Any, q: Any, k: Any, seqlen_q: int, seqlen_k: int) -> Any:
    return score
# fmt: on


# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Scored(
        name="f16_d112_window22x22_b142_h14_kv2_n78",
        problem={
            "dtype": "f16",
            "batch": 142,
            "num_q_heads": 14,
            "num_kv_heads": 2,
            "seqlen_q": 78,
            "seqlen_k": 78,
            "head_dim": 112,
            "head_dim_v": 112,
            "causal": False,
            "precision": "auto",
            "scoring": {
                "window": [22, 22],
            },
        },
        variant={
            "family": "mma",
            "parts": "tf32",
            "pack_heads": False,
            "br": 96,
            "rows_per_warp": 16,
            "key_warps": 1,
            "splits": 1,
            "workspace_splits": 1,
            "merge": "by_halves",
            "bc": 40,
            "layout": "padded",
            "d_steps": "exact",
            "q_in_registers": False,
            "q_whole": False,
            "stages": 2,
            "far_keys": "walked",
            "evict_first": False,
            "rescale": "lazy",
            "poly_exp": 0,
            "heads": 8,
            "min_blocks": 2,
            "block_order": "by_head",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 50.303999334573746,
            "spread": 0.010178139142527088,
            "tflops": 53.18532385875697,
            "registers": 166,
            "spill_bytes": 0,
            "smem_bytes": 61440,
            "occupancy": 0.1875,
            "error": 0.00044534133781001025,
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
                symbol="attention_f16_d112_window_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (num_q_heads * batch + 8 - 1) // 8 * ((seqlen_q + 96 - 1) // 96)
                ),
                threads=192,
                smem_bytes=61440,
                rows_per_block=96,
                heads_per_block=8,
            ),
        ),
        tolerance=0.002,
        oldest_arch=80,
        source=SOURCE,
        asked="--window 22,22",
        scalars={
            "window_left": 22,
            "window_right": 22,
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = ScoredAttention(KERNELS, operator="attention_f16_d112_window_66857aee")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_scored_module(_bound, __doc__))
