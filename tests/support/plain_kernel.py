"""A kernel of any scores that is as plain as can be: a thread for each query row, float32 inside.

It calls the functions that all families call, so that those and whoever runs scored kernels are tried without
a family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flashgen.gen.arguments import struct_of
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import elements_of, environment
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice

CARD = preset("a100")
#: How an element becomes a float, and a float an element.
TYPES = {
    "f32": ("", ""),
    "f16": ("__half2float", "__float2half_rn"),
    "bf16": ("__bfloat162float", "__float2bfloat16_rn"),
}
SOURCE = """
{% import "common/scores.cu.jinja" as score %}
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#ifndef FLASHGEN_CAUSAL
#define FLASHGEN_CAUSAL {{ 1 if problem.causal else 0 }}
#endif

struct AttentionArgs {
{% for line in arguments.declared(elements) %}
  {{ line }}
{% endfor %}
};
static_assert(sizeof(AttentionArgs) == {{ arguments.num_bytes }}, "packed by hand");

{{ score.flags() }}
constexpr int kD = {{ problem.head_dim }}, kDv = {{ problem.head_dim_v }};
constexpr float kLog2e = 1.4426950408889634f;

{{ score.functions(problem.scores) }}

extern "C" __global__ void {{ entry }}_kernel(const AttentionArgs args) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i >= args.batch * args.num_q_heads * args.seqlen_q) return;
  const int row = i % args.seqlen_q, head = i / args.seqlen_q % args.num_q_heads;
  const int batch = i / args.seqlen_q / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const auto* q = args.q + batch * args.q_stride_batch + head * args.q_stride_head + row * args.q_stride_row;
  const auto* k = args.k + batch * args.k_stride_batch + kv_head * args.k_stride_head;
  const auto* v = args.v + batch * args.v_stride_batch + kv_head * args.v_stride_head;
  auto* o = args.o + batch * args.o_stride_batch + head * args.o_stride_head + row * args.o_stride_row;
  const float none = -__builtin_inff();
{% if problem.scores.is_plain %}
  const int begin = 0, end = {{ problem.scores.end("row", diagonal="args.seqlen_k - args.seqlen_q") }};
{% else %}
  const int begin = first_key_of(args, batch, row), end = end_key_of(args, batch, row);
{% endif %}
  float top = {{ score.sink() if problem.scores.sinks else "none" }};
  float sum = top == none ? 0.0f : 1.0f, out[kDv] = {};
  for (int j = begin; j < end; ++j) {
{% if problem.scores.predicate is not none %}
    if (!sees(args, batch, head, row, j)) continue;
{% endif %}
    float s = 0.0f;
    for (int x = 0; x < kD; ++x) s += {{ load }}(q[x]) * {{ load }}(k[j * args.k_stride_row + x]);
    s *= args.scale;
{% if problem.scores.change is not none %}
    s = change_score(args, s, batch, head, row, j);
{% else %}
    s *= kLog2e;
{% endif %}
    const float larger = s <= top ? top : s;  // what is no number stays
    if (larger == none) continue;
    const float rescale = exp2f(top - larger), p = exp2f(s - larger);
    sum = sum * rescale + p;
    for (int x = 0; x < kDv; ++x) out[x] = out[x] * rescale + p * {{ load }}(v[j * args.v_stride_row + x]);
    top = larger;
  }
  for (int x = 0; x < kDv; ++x) o[x] = {{ store }}(sum == 0.0f ? 0.0f : out[x] / sum);
  if (args.lse) args.lse[i] = sum == 0.0f ? none : (top + log2f(sum)) / kLog2e;
}

extern "C" int {{ entry }}(const AttentionArgs* args, cudaStream_t stream) {
  const int rows = args->batch * args->num_q_heads * args->seqlen_q;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel({{ entry }}_kernel, dim3((rows + 63) / 64), dim3(64), parameters, 0, stream);
}
"""


class Plain(Simt):
    """Scalar accesses: any stride serves."""

    def access_width(self, problem: Problem) -> int:
        return 1


def plain_kernel(problem: Problem) -> Kernel:
    """Returns the kernel of a problem of 32 or 16 bits."""
    load, store = TYPES[problem.dtype]
    entry = f"attention_{problem.stem}"
    source = (
        environment()
        .from_string(SOURCE)
        .render(
            problem=problem,
            arguments=struct_of(problem),
            elements=elements_of(problem),
            entry=entry,
            load=load,
            store=store,
        )
    )
    launch = Launch(threads=64, smem_bytes=0, rows_per_block=64)
    return Kernel(problem, Plain(br=16, bc=16), CARD.arch, source, entry, (launch,))


@cache
def plain_build(problem: Problem, *, sanitize: bool = False) -> Build:
    """Builds the kernel of a problem for the emulated card."""
    return SimDevice("a100", CARD, sanitize=sanitize).toolchain().build(plain_kernel(problem))


def changed_build(problem: Problem, right: str, wrong: str, *, sanitize: bool = False) -> Build:
    """Builds the kernel with a mistake in its text."""
    kernel = plain_kernel(problem)
    assert right in kernel.source
    mistaken = replace(kernel, source=kernel.source.replace(right, wrong))
    return SimDevice("a100", CARD, sanitize=sanitize).toolchain().build(mistaken)
