r"""Flash attention for NVIDIA GPUs: bf16, head dim 128 with bias of bf16.

For NVIDIA H200 (sm_90a) at batch 4, 16 heads, 4096 rows, with bias of bf16. Serves any batch, number of
heads, lengths and strides, grouped-query heads, and the causal mask or none beside.

Measured on NVIDIA H200, batch 4, 16 heads, 4096 rows, with bias of bf16: 986.7 us (median), spread 1.7 %,
557.2 TFLOP/s, 128 registers per thread, occupancy 25 %. Largest error per head against float64: 2.7e-03.
Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned by flashgen 0.2.0, seed 0.

    from bf16_d128_biasbf16 import attention

    o = attention(q, k, v)                           # softmax(q k^T / sqrt(head_dim)) v
    o, lse = attention(q, k, v, return_lse=True)     # and the log-sum-exp of each row of scores
    attention(q, k, v, causal=True, scale=0.1, out=o, stream=stream)
    attention(q, k, v, bias=bias)
    sdpa(q, k, v, is_causal=True)                    # torch's scaled_dot_product_attention, by this kernel where it serves
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's models

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_biasbf16.py \
        --device h200 --dtype bf16 --d 128 --bias bf16 --family wgmma --set br=192 --set bc=80 \
        --set persistent=true --set q_stages=1 --set k_stages=2 --set v_stages=2 --set schedule=chained \
        --set q_in_registers=false --set order_of_groups=products --set rescale=lazy --set poly_exp=0 \
        --set section=1 --set min_blocks=1 --set bias_stages=2
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
    ("bias", "Q"),
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
        name="bf16_d128_biasbf16",
        problem={
            "dtype": "bf16",
            "batch": 4,
            "num_q_heads": 16,
            "num_kv_heads": 16,
            "seqlen_q": 4096,
            "seqlen_k": 4096,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": False,
            "precision": "auto",
            "scoring": {
                "bias": "bf16",
            },
        },
        variant={
            "family": "wgmma",
            "pack_heads": False,
            "br": 192,
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
            "bias_stages": 2,
            "bias_heads": 1,
            "seen_bits": False,
            "far_keys": "walked",
            "copiers": 1,
            "k_stages": 2,
            "v_stages": 2,
            "summed_columns": 0,
            "schedule": "chained",
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
            "tangent": "polynomial",
        },
        device={
            "name": "NVIDIA H200",
            "arch": 90,
        },
        measurement={
            "median_us": 986.6560101509094,
            "spread": 0.01684883432293215,
            "tflops": 557.190964461783,
            "registers": 128,
            "spill_bytes": 0,
            "smem_bytes": 193536,
            "occupancy": 0.25,
            "error": 0.0027176360140973694,
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
                symbol="attention_bf16_d128_biasbf16_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, seqlen_q: (
                    (seqlen_q + 192 - 1) // 192 * num_q_heads * batch
                ),
                threads=512,
                smem_bytes=193536,
                rows_per_block=192,
                max_blocks=132,
                maps=(
                    TensorMap("q", 64, 64, 128, 128),
                    TensorMap("k", 80, 64, 128, 128),
                    TensorMap("v", 80, 64, 128, 128),
                    TensorMap("o", 64, 64, 128, 128),
                    TensorMap("bias", 192, 16, 32, 128),
                ),
            ),
        ),
        tolerance=0.01,
        only_arch=90,
        arch_suffix="a",
        source=SOURCE,
        asked="--bias bf16",
        scalars={},
        buffers={
            "bias": Buffer("bf16", (("batch",), ("num_q_heads",), ("seqlen_q",), ("seqlen_k",))),
        },
        sees=_sees,
        change=_change,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = ScoredAttention(KERNELS, operator="attention_bf16_d128_biasbf16_f00fffde")
attention, explain, use, register_torch = _bound.attention, _bound.explain, _bound.use, _bound.register_torch
sdpa, register_transformers = _bound.sdpa, _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_scored_module(_bound, __doc__))
