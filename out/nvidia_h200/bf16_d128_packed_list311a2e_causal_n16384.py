r"""Flash attention for NVIDIA GPUs: bf16, head dim 128, packed sequences.

For NVIDIA H200 (sm_90a) at batch 4, 16 heads, 16384 rows, 4 sequences of 31750 queries and 31750 keys in all,
with a causal mask. Serves any batch, number of heads, lengths and strides, grouped-query heads, and either
mask.

Measured on NVIDIA H200, batch 4, 16 heads, 16384 rows, 4 sequences of 31750 queries and 31750 keys in all,
with a causal mask: 1.418 ms (median), spread 0.4 %, 739.3 TFLOP/s, 128 registers per thread, occupancy 25 %.
Largest error per head against float64: 1.9e-03. Built by nvcc 13.0.88, driver 580.159.04 (CUDA 13.0). Tuned
by flashgen 0.2.0, seed 0.

    from bf16_d128_packed_list311a2e_causal_n16384 import attention_varlen

    # q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim); cu_seqlens int32 (batch + 1)
    o = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=most, max_seqlen_k=most)
    attention_varlen(..., plan=plan, out=o)          # plan = SequencePlan(): all layers of a step may share it
    flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, most, most)    # as flash-attn has it
    register_transformers("tuned")                   # attn_implementation="tuned" for Hugging Face's packed batches

Needs an NVIDIA driver for CUDA 12 or newer, flashgen and a CUDA compiler, 12.5 or newer: nvcc, or the NVRTC
that PyTorch brings; the first call compiles the .cu beside it (and keeps the result). Make that call before
capturing a CUDA graph. Forward only. `flashgen emit` makes a module of it that stands alone.

Regenerate:

    flashgen emit bf16_d128_packed_list311a2e_causal_n16384.py \
        --device h200 --dtype bf16 --d 128 --causal --seqlen 16384 --varlen list:6617,7379,8810,8944 \
        --family wgmma --set br=192 --set bc=64 --set persistent=true --set q_stages=1 --set k_stages=3 \
        --set v_stages=3 --set schedule=chained --set q_in_registers=false --set order_of_groups=products \
        --set rescale=lazy --set poly_exp=0 --set section=1 --set min_blocks=1 --set o_apart=true
"""

import sys
from pathlib import Path

from flashgen.templates.runtime import Launch, Tuned, TensorMap
from flashgen.templates.runtime.packed_attention import PackedAttention
from flashgen.templates.runtime.packed_program import run_packed_module
from flashgen.templates.runtime.packed_values import SequencePlan

__all__ = [
    "DEVICE",
    "KERNELS",
    "MEASUREMENT",
    "PROBLEM",
    "SOURCE",
    "VARIANT",
    "SequencePlan",
    "attention_varlen",
    "explain",
    "flash_attn_varlen_func",
    "register_torch",
    "register_transformers",
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
    ("cu_seqlens_q", "Q"),
    ("cu_seqlens_k", "Q"),
    ("seqused_q", "Q"),
    ("seqused_k", "Q"),
    ("plan", "Q"),
    ("q_stride_head", "q"),
    ("q_stride_row", "q"),
    ("k_stride_head", "q"),
    ("k_stride_row", "q"),
    ("v_stride_head", "q"),
    ("v_stride_row", "q"),
    ("o_stride_head", "q"),
    ("o_stride_row", "q"),
    ("batch", "i"),
    ("num_q_heads", "i"),
    ("num_kv_heads", "i"),
    ("seqlen_q", "i"),
    ("seqlen_k", "i"),
    ("total_q", "i"),
    ("total_k", "i"),
    ("plan_made", "i"),
    ("scale", "f"),
)

SOURCE = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")

# What each was tuned for, which of its family's variants won, on which card, how fast it was there, and its launch.
KERNELS: tuple[Tuned, ...] = (
    Tuned(
        name="bf16_d128_packed_list311a2e_causal_n16384",
        problem={
            "dtype": "bf16",
            "batch": 4,
            "num_q_heads": 16,
            "num_kv_heads": 16,
            "seqlen_q": 16384,
            "seqlen_k": 16384,
            "head_dim": 128,
            "head_dim_v": 128,
            "causal": True,
            "precision": "auto",
            "varlen": "list:6617,7379,8810,8944",
        },
        variant={
            "family": "wgmma",
            "pack_heads": False,
            "br": 192,
            "splits": 1,
            "workspace_splits": 1,
            "split": "in_place",
            "bc": 64,
            "persistent": True,
            "last_turn": "whole",
            "q_stages": 1,
            "o_apart": True,
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
            "median_us": 1417.743980884552,
            "spread": 0.0036734526911164677,
            "tflops": 739.254407331069,
            "registers": 128,
            "spill_bytes": 0,
            "smem_bytes": 197632,
            "occupancy": 0.25,
            "error": 0.001901212927028055,
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
                symbol="attention_bf16_d128_packed_plan",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, total_q: (batch + 127) // 128,
                threads=128,
                smem_bytes=1024,
                rows_per_block=192,
                plans=True,
            ),
            Launch(
                symbol="attention_bf16_d128_packed_kernel",
                arguments=ARGUMENTS,
                count=lambda batch, num_q_heads, num_kv_heads, total_q: (
                    (total_q // 192 + batch) * num_q_heads
                ),
                threads=512,
                smem_bytes=197632,
                rows_per_block=192,
                max_blocks=132,
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
        plan_ints=lambda batch, num_q_heads, num_kv_heads, total_q: (total_q // 192 + batch + 1) * 8,
        source=SOURCE,
    ),
)
PROBLEM, VARIANT, DEVICE = KERNELS[0].problem, KERNELS[0].variant, KERNELS[0].device
MEASUREMENT = KERNELS[0].measurement

_bound = PackedAttention(KERNELS, operator="attention_bf16_d128_packed_1c6d7706")
attention_varlen, explain, use = _bound.attention_varlen, _bound.explain, _bound.use
register_torch = _bound.register_torch
flash_attn_varlen_func = _bound.flash_attn_varlen_func
register_transformers = _bound.register_transformers

if __name__ == "__main__":
    sys.exit(run_packed_module(_bound, __doc__))
