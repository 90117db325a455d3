r"""Flash attention for NVIDIA GPUs: bf16, head dim 256 with window, soft cap.

For NVIDIA H200 (sm_90a) at batch 2, 8 query and 4 key/value heads, 8192 rows, with a causal mask, window of
4095 keys before and 0 after, soft cap 50. Serves any batch, number of heads, lengths and strides,
grouped-query heads, and the causal mask or none beside.

Measured on NVIDIA H200, batch 2, 8 query and 4 key/value heads, 8192 rows, with a causal mask, window of 4095
keys before and 0 after, soft cap 50: 593.4 us (median), spread 0.6 %, 694.9 TFLOP/s, 168 registers per
thread, occupancy 19 %. Largest error per head against float64: 2.9e-03. Built by nvcc 13.0.88, driver
580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d256_window4095x0_softcap50_causal_b2_h8_kv4_n8192 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    attention(q, k, v, window=(4095, 0), softcap=50)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d256_window4095x0_softcap50_causal_b2_h8_kv4_n8192.py \
        --device h200 --dtype bf16 --d 256 --causal --window 4095,0 --softcap 50 --batch 2 --heads 8 \
        --kv-heads 4 --seqlen 8192 --family wgmma --set br=128 --set bc=80 --set persistent=true \
        --set q_stages=1 --set k_stages=2 --set v_stages=2 --set schedule=overlapped \
        --set q_in_registers=false --set order_of_groups=products --set rescale=lazy --set poly_exp=0 \
        --set section=1 --set min_blocks=1 --set tangent=unit
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.templates.runtime import Launch, Tuned, TensorMap
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
    ("softcap", "f"),
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
    return at.softcap * np.tanh(score * (1.0 / at.softcap))
# fmt: on


# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Scored(
        name="bf16_d256_window4095x0_softcap50_causal_b2_h8_kv4_n8192",
        problem={
            "dtype": "bf16",
            "batch": 2,
            "num_q_heads": 8,
            "num_kv_heads": 4,
            "seqlen_q": 8192,
            "seqlen_k": 8192,
            "head_dim": 256,
            "head_dim_v": 256,
            "causal": True,
            "precision": "auto",
            "scoring": {
                "window": [4095, 0],
                "softcap": 50.0,
            },
        },
        variant={
            "family": "wgmma",
            "pack_heads": False,
            "br": 128,
            "splits": 1,
            "workspace_splits": 1,
            "split": "in_place",
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
            "k_stages": 2,
            "v_stages": 2,
            "summed_columns": 0,
            "schedule": "overlapped",
            "q_in_registers": False,
            "order_of_groups": "products",
            "rescale": "lazy",
            "poly_exp": 0,
            "section": 1,
            "min_blocks": 1,
            "cluster_over": "rows",
            "cluster": 1,
            "tail": 0,
            "split_by": "rows",
            "tangent": "unit",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 593.392014503479,
            "spread": 0.005986008088420974,
            "tflops": 694.9038827107142,
            "registers": 168,
            "spill_bytes": 0,
            "smem_bytes": 230400,
            "occupancy": 0.1875,
            "error": 0.0029431343285462354,
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
                symbol="attention_bf16_d256_window_softcap_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q + 128 - 1) // 128 * num_q_heads * batch
                ),
                threads=384,
                smem_bytes=230400,
                rows_per_block=128,
                max_blocks=132,
                maps=(
                    TensorMap("q", 64, 64, 128, 128),
                    TensorMap("k", 80, 64, 128, 128),
                    TensorMap("v", 80, 64, 128, 128),
                    TensorMap("o", 64, 64, 128, 128),
                ),
            ),
        ),
        tolerance=0.01,
        only_arch=90,
        arch_suffix="a",
        source=SOURCE,
        asked="--window 4095,0 --softcap 50",
        scalars={
            "window_left": 4095,
            "window_right": 0,
            "softcap": 50.0,
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = ScoredAttention(KERNELS, operator="attention_bf16_d256_window_softcap_915dabdb")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_scored_module(_bound, __doc__))
