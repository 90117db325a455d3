"""The emulated runner's memory in every type: strides, guards, poison and the sanitizer's gaps."""

from __future__ import annotations

import shutil
from functools import cache

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.dtypes import NUMPY_DTYPES, bits_dtype, unwritten_bits
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import CorruptedMemory, LaunchError
from flashgen.tuner.evaluate.cases import LAYOUTS, Case
from flashgen.tuner.evaluate.comparison import compare
from flashgen.tuner.evaluate.inputs import make_inputs
from flashgen.tuner.evaluate.reference import attention
from flashgen.tuner.evaluate.validate import validate

from tests.support.plain_kernel import changed_build, plain_build

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

CARD = preset("a100")
#: A thread for each query row, float32 inside: as plain as can be.
SOURCE = """
#include <%(header)s>

struct AttentionArgs {
  const %(type)s* q;
  const %(type)s* k;
  const %(type)s* v;
  %(type)s* o;
  float* lse;
  long long q_stride[3], k_stride[3], v_stride[3], o_stride[3];
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;
};

constexpr int kD = %(d)d, kDv = %(dv)d;

extern "C" __global__ void plain_kernel(const AttentionArgs args) {
  const int all_heads = args.batch * args.num_q_heads;
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i >= all_heads * args.seqlen_q) return;
  const int row = i %% args.seqlen_q, head = i / args.seqlen_q %% args.num_q_heads;
  const int batch = i / args.seqlen_q / args.num_q_heads;
  const int kv_head = head / (args.num_q_heads / args.num_kv_heads);
  const %(type)s* q = args.q + batch * args.q_stride[0] + head * args.q_stride[1] + row * args.q_stride[2];
  const %(type)s* k = args.k + batch * args.k_stride[0] + kv_head * args.k_stride[1];
  const %(type)s* v = args.v + batch * args.v_stride[0] + kv_head * args.v_stride[1];
  %(type)s* o = args.o + batch * args.o_stride[0] + head * args.o_stride[1] + row * args.o_stride[2];
  float top = -__builtin_inff(), sum = 0.0f, out[kDv] = {};
  for (int j = 0; j < args.seqlen_k; ++j) {
    float s = 0.0f;
    for (int x = 0; x < kD; ++x) s += %(load)s(q[x]) * %(load)s(k[j * args.k_stride[2] + x]);
    s *= args.scale;
    const float larger = s > top ? s : top, rescale = expf(top - larger), p = expf(s - larger);
    sum = sum * rescale + p;
    for (int x = 0; x < kDv; ++x) out[x] = out[x] * rescale + p * %(load)s(v[j * args.v_stride[2] + x]);
    top = larger;
  }
  for (int x = 0; x < kDv; ++x) o[x] = %(store)s(out[x] / sum);
  if (args.lse) args.lse[i] = top + logf(sum);
  %(fault)s
}

extern "C" int plain(const AttentionArgs* args, cudaStream_t stream) {
  const int rows = args->batch * args->num_q_heads * args->seqlen_q;
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(plain_kernel, dim3((rows + 63) / 64), dim3(64), parameters, 0, stream);
}
"""
TYPES = {
    "f32": ("cuda_runtime.h", "float", "", ""),
    "f16": ("cuda_fp16.h", "__half", "__half2float", "__float2half_rn"),
    "bf16": ("cuda_bf16.h", "__nv_bfloat16", "__bfloat162float", "__float2bfloat16_rn"),
}


class Plain(Simt):
    """Scalar accesses: any stride serves."""

    def access_width(self, problem):
        return 1


@cache
def plain(dtype: str, d: int = 16, dv: int = 16, fault: str = "", *, sanitize: bool = False) -> Build:
    header, element, load, store = TYPES[dtype]
    parts = {"header": header, "type": element, "load": load, "store": store}
    source = SOURCE % {**parts, "d": d, "dv": dv, "fault": fault}
    problem = Problem(dtype=dtype, head_dim=d, head_dim_v=dv)
    launch = Launch(threads=64, smem_bytes=0, rows_per_block=64)
    kernel = Kernel(problem, Plain(br=16, bc=16), CARD.arch, source, "plain", (launch,))
    return SimDevice("a100", CARD, sanitize=sanitize).toolchain().build(kernel)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (5, 3), (8, 24)])
def test_every_type_and_value_width_passes_the_suite(dtype, d, dv):
    build = plain(dtype, d, dv)
    error = validate(SimRunner(CARD), build, seed=1)
    assert build.kernel.problem.tolerance / 100 < error < build.kernel.problem.tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_outputs_are_of_the_type_and_layout_of_q(dtype, layout):
    build = plain(dtype, 8, 24)
    q, k, v, scale = make_inputs(
        Case(2, 4, 4, 9, 9, layout=layout), build.kernel.problem, np.random.default_rng(0)
    )
    o, lse = SimRunner(CARD).attend(build, q, k, v, scale=scale, want_lse=True)
    assert o.shape == (2, 4, 9, 24) and o.dtype == q.dtype and lse.dtype == np.float32
    assert np.argsort(o.strides).tolist() == np.argsort(q.strides).tolist()
    compare(o, lse, attention(q, k, v, scale=scale), v, build.kernel.problem, "case")


def test_outputs_of_repeated_arrays_have_contiguous_rows():
    build = plain("f16", 8, 24)
    q, k, v, scale = make_inputs(Case(2, 4, 4, 9, 9), build.kernel.problem, np.random.default_rng(0))
    q, k, v = (np.broadcast_to(x[:1], x.shape) for x in (q, k, v))
    o, lse = SimRunner(CARD).attend(build, q, k, v, scale=scale, want_lse=True)
    assert o.strides[3] == o.itemsize
    compare(o, lse, attention(q, k, v, scale=scale), v, build.kernel.problem, "case")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("if (i == 0) args.o[-1] = args.q[0];", "overwrote {size} bytes before o"),
        ("if (i == 0) args.o[9 * 5] = args.q[0];", "overwrote {size} bytes past o, .* byte 0 there"),
        (
            "if (i == 0) const_cast<{type}*>(args.k)[2] = args.v[0];",
            "overwrote {size} bytes in k, .* byte {two}",
        ),
        ("if (i == 0) args.lse[9] = 0.0f;", "overwrote 4 bytes past lse"),
    ],
)
def test_stray_writes_are_noticed_to_the_byte(dtype, fault, complaint):
    size = NUMPY_DTYPES[dtype].itemsize
    build = plain(dtype, 5, 5, fault.format(type=TYPES[dtype][1]))
    q, k, v, scale = make_inputs(Case(1, 1, 1, 9, 9), build.kernel.problem, np.random.default_rng(0))
    with pytest.raises(CorruptedMemory, match=complaint.format(size=size, two=2 * size)):
        SimRunner(CARD).attend(build, q, k, v, scale=scale, want_lse=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_unwritten_element_is_noticed(dtype):
    # As good as not written: what was there is there again.
    bits = unwritten_bits(NUMPY_DTYPES[dtype])
    fault = f"const unsigned bits = {bits}; if (i == 3) __builtin_memcpy(o + 2, &bits, sizeof(*o));"
    build = plain(dtype, 5, 5, fault)
    q, k, v, scale = make_inputs(Case(1, 1, 1, 9, 9), build.kernel.problem, np.random.default_rng(0))
    with pytest.raises(
        CorruptedMemory, match=r"1 of 45 elements of o unwritten, the first at \(0, 0, 3, 2\)"
    ):
        SimRunner(CARD).attend(build, q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", TYPES)
def test_unwritten_memory_is_nan_of_the_type(dtype):
    bits = np.array([unwritten_bits(NUMPY_DTYPES[dtype])], bits_dtype(NUMPY_DTYPES[dtype]))
    with np.errstate(invalid="ignore"):
        assert np.isnan(bits.view(NUMPY_DTYPES[dtype])).all()


@pytest.mark.parametrize("layout", ["bhnd", "padded"])
@pytest.mark.parametrize("d", [8, 5])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_good_kernels_pass_the_sanitizer(dtype, d, layout):
    build = plain(dtype, d, d, sanitize=True)
    q, k, v, scale = make_inputs(
        Case(1, 2, 1, 7, 5, layout=layout),
        build.kernel.problem,
        np.random.default_rng(0),
        access_width=d & -d,
    )
    o, lse = SimRunner(CARD, sanitize=True).attend(build, q, k, v, scale=scale, want_lse=True)
    compare(o, lse, attention(q, k, v, scale=scale), v, build.kernel.problem, "case")


def test_the_sanitizer_knows_the_gaps_between_rows_of_two_bytes():
    build = plain("f16", 8, 8, "if (i == 0) args.o[0] = args.q[8];", sanitize=True)
    q, k, v, scale = make_inputs(
        Case(1, 1, 1, 9, 9, layout="padded"), build.kernel.problem, np.random.default_rng(0), access_width=8
    )
    with pytest.raises(LaunchError, match="read of 2 bytes at global memory, between the rows of q"):
        SimRunner(CARD, sanitize=True).attend(build, q, k, v, scale=scale)


def test_arrays_of_another_problem_are_refused():
    build = plain("f16")
    q = np.zeros((1, 1, 4, 16), np.float16)
    with pytest.raises(ValueError, match="q is float32 with 16 columns, the kernel takes float16 with 16"):
        SimRunner(CARD).attend(build, q.astype(np.float32), q, q, scale=1.0)
    with pytest.raises(ValueError, match="v is float16 with 8 columns, the kernel takes float16 with 16"):
        SimRunner(CARD).attend(build, q, q, q[..., :8], scale=1.0)


# -- what masks and changes of scores read ---------------------------------------------------------------

TABLE = Scoring(score="score + table[h, k]", buffers=(("table", "f16"),))


def scored_case() -> tuple[Problem, tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    problem = Problem(dtype="f32", head_dim=8, scoring=TABLE)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 9, 8), np.float32) for _ in range(3))
    # A gap between the rows, and nothing behind the last.
    return problem, (q, k, v), {"table": rng.standard_normal((2, 12)).astype(np.float16)[:, :9]}


@pytest.mark.parametrize("sanitize", [False, True])
def test_buffers_lie_as_they_are_given(sanitize):
    problem, (q, k, v), values = scored_case()
    build = plain_build(problem, sanitize=sanitize)
    o, lse = SimRunner(CARD, sanitize=sanitize).attend(
        build, q, k, v, scale=0.3, want_lse=True, values=values
    )
    expected = attention(q, k, v, scale=0.3, scores=problem.scores, values=values)
    compare(o, lse, expected, v, problem, "case")


def test_writes_to_buffers_are_noticed():
    problem, (q, k, v), values = scored_case()
    spoiled = "const_cast<unsigned short*>(args.table)[1] = 7;\n  const int row = i %"
    build = changed_build(problem, "const int row = i %", spoiled)
    with pytest.raises(CorruptedMemory, match="overwrote 2 bytes in table, the first of them byte 2 there"):
        SimRunner(CARD).attend(build, q, k, v, scale=0.3, values=values)


@pytest.mark.parametrize(
    ("index", "place"),
    [
        ("table_at(args, head, key + 4)", "(0 bytes past the end|between the rows) of table"),
        ("table_at(args, head, key - 1)", "(2 bytes before|between the rows of) table"),
    ],
)
def test_the_sanitizer_names_the_buffer(index, place):
    problem, (q, k, v), values = scored_case()
    build = changed_build(problem, "table_at(args, head, key)", index, sanitize=True)
    with pytest.raises(LaunchError, match=f"read of 2 bytes at global memory, {place}"):
        SimRunner(CARD, sanitize=True).attend(build, q, k, v, scale=0.3, values=values)


def test_buffers_that_are_missing_are_asked_for():
    problem, (q, k, v), _ = scored_case()
    with pytest.raises(ValueError, match=r"the kernel reads table, f16\[num_q_heads, seqlen_k\]"):
        SimRunner(CARD).attend(plain_build(problem), q, k, v, scale=0.3)
