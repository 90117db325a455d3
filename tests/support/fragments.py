"""What tests of tensor cores share: elements as bits, fragments as registers, sums as tensor cores form them.

Written from the PTX ISA's tables and from published measurements, apart from the emulation that is held
against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner

CARD = preset("a100")
ROWS, COLUMNS, LANES = 16, 8, 32


def f16_from_float(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def f16_to_float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def bf16_from_float(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint32)


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tf32_from_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32)


def tf32_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def e4m3_from_float(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)


def e4m3_to_float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def floats_to_round() -> np.ndarray:
    """Bits of floats: all that are exact in 16 bits, all half way between two of those or a bit beside, and
    random ones."""
    rng = np.random.default_rng(6)
    every = np.arange(65536, dtype=np.uint32)
    exact = np.concatenate([f16_to_float(every).view(np.uint32), every << 16])
    # Half way between neighbours, and a bit to either side.
    halves = np.concatenate(
        [exact + np.uint32(half + side) for half in (1 << 12, 1 << 15) for side in (-1, 0, 1)]
    )
    f16_subnormal_halves = ((2 * np.arange(1025) + 1) * 2.0**-25).astype(np.float32).view(np.uint32)
    beside = np.concatenate([f16_subnormal_halves - 1, f16_subnormal_halves, f16_subnormal_halves + 1])
    words = np.concatenate([exact, halves, beside, rng.integers(0, 2**32, 100_000, dtype=np.uint32)])
    return words.astype(np.uint32)


@dataclass(frozen=True)
class Instruction:
    """An mma of flashgen's: its shape, its element type, and how the emulation names it."""

    name: str
    emulated: str
    k: int
    type: str
    fraction_bits: int
    bias: int
    from_float: Callable[[np.ndarray], np.ndarray]
    to_float: Callable[[np.ndarray], np.ndarray]

    @property
    def bytes(self) -> int:
        return {"tf32": 4, "e4m3": 1}.get(self.type, 2)

    @property
    def num_a(self) -> int:
        """Registers of a per lane."""
        return ROWS * self.k * self.bytes // (4 * LANES)

    @property
    def num_b(self) -> int:
        return COLUMNS * self.k * self.bytes // (4 * LANES)


_F16 = (10, 15, f16_from_float, f16_to_float)
_BF16 = (7, 127, bf16_from_float, bf16_to_float)
INSTRUCTIONS = (
    Instruction("mma_m16n8k16_f16", "kK16F16", 16, "f16", *_F16),
    Instruction("mma_m16n8k16_bf16", "kK16Bf16", 16, "bf16", *_BF16),
    Instruction("mma_m16n8k8_f16", "kK8F16", 8, "f16", *_F16),
    Instruction("mma_m16n8k8_bf16", "kK8Bf16", 8, "bf16", *_BF16),
    Instruction("mma_m16n8k8_tf32", "kK8Tf32", 8, "tf32", 10, 127, tf32_from_float, tf32_to_float),
)
#: What products of e4m3 are, of which far fewer bits are kept.
E4M3 = Instruction("mma_m16n8k32_e4m3", "kK32E4m3", 32, "e4m3", 3, 7, e4m3_from_float, e4m3_to_float)

# -- fragments ------------------------------------------------------------------------------------------
# PTX ISA, "Matrix fragments for mma": groupID is lane / 4, threadID_in_group is lane % 4.


def place_a(instruction: Instruction, lane: int, i: int) -> tuple[int, int]:
    """Row and column in A of element ``i`` of a lane's fragment."""
    group, thread = lane // 4, lane % 4
    if instruction.type == "tf32":
        return group + (8 if i in (1, 3) else 0), thread + (4 if i >= 2 else 0)
    if instruction.type == "e4m3":
        row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
        return row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)
    if instruction.k == 16:
        row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
        return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    return group + (8 if i >= 2 else 0), thread * 2 + (i & 1)


def place_b(instruction: Instruction, lane: int, i: int) -> tuple[int, int]:
    """Row and column in B."""
    group, thread = lane // 4, lane % 4
    if instruction.type == "tf32":
        return thread + 4 * i, group
    if instruction.type == "e4m3":
        return thread * 4 + (i & 3) + (16 if i >= 4 else 0), group
    return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group


def place_d(lane: int, i: int) -> tuple[int, int]:
    """Row and column in D."""
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def pack_factors(instruction: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Registers of A, then those of B, of each lane, from their elements' bits."""
    per_register = 4 // instruction.bytes
    registers = np.zeros((LANES, instruction.num_a + instruction.num_b), np.uint32)
    for lane in range(LANES):
        for matrix, place, first, count in (
            (a, place_a, 0, instruction.num_a),
            (b, place_b, instruction.num_a, instruction.num_b),
        ):
            for i in range(count * per_register):
                shift = np.uint32(8 * instruction.bytes * (i % per_register))
                bits = np.uint32(matrix[place(instruction, lane, i)])
                registers[lane, first + i // per_register] |= bits << shift
    return registers


def pack_d(d: np.ndarray) -> np.ndarray:
    return np.array([[d[place_d(lane, i)] for i in range(4)] for lane in range(LANES)], np.float32)


def unpack_d(registers: np.ndarray) -> np.ndarray:
    d = np.empty((ROWS, COLUMNS), np.float32)
    for lane in range(LANES):
        for i in range(4):
            d[place_d(lane, i)] = registers[lane, i]
    return d


# -- sums -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """A generation's sums: bytes of factors in a block, and bits of fraction that a term and a sum keep."""

    emulated: str
    block_bytes: int
    fraction_bits: int
    sum_bits: int = 23


AMPERE, HOPPER = Cores("kAmpere", 16, 24), Cores("kHopper", 32, 25)
#: Of Ada Lovelace, of e4m3.
ADA = Cores("kAmpere", 16, 13, 13)


def _significand(bits: int, fraction_bits: int, bias: int, width: int) -> tuple[int, int]:
    """(s, e): an element's value is s * 2 ** (e - fraction_bits)."""
    field = bits >> fraction_bits & ((1 << (width - 1 - fraction_bits)) - 1)
    s = bits & ((1 << fraction_bits) - 1) | (min(field, 1) << fraction_bits)
    return (-s if bits >> (width - 1) else s), max(field, 1) - bias


def _shifted(s: int, shift: int) -> int:
    """s * 2 ** shift, cut off toward zero."""
    return int(math.copysign(1, s)) * (abs(s) << shift if shift >= 0 else abs(s) >> -shift)


def dot(instruction: Instruction, cores: Cores, a: np.ndarray, b: np.ndarray, c: np.float32) -> np.float32:
    """One element of A B + C from finite bits, in integers."""
    drop, width = (13 if instruction.type == "tf32" else 0), 8 * instruction.bytes
    block = cores.block_bytes // instruction.bytes
    for first in range(0, instruction.k, block):
        bits = int(np.float32(c).view(np.uint32))
        terms = [(*_significand(bits, 23, 127, 32), 23)]
        for x, y in zip(a[first : first + block], b[first : first + block], strict=True):
            (s, e), (t, f) = (
                _significand(int(z) >> drop, instruction.fraction_bits, instruction.bias, width - drop)
                for z in (x, y)
            )
            terms.append((s * t, e + f, 2 * instruction.fraction_bits))
        largest = max([-126, *(e for s, e, _ in terms if s)])
        unit = largest - cores.fraction_bits
        total = sum(_shifted(s, e - point - unit) for s, e, point in terms)
        # To a float, toward zero: 24 bits or fewer, of subnormals those from 2^-149 on.
        cut = max(abs(total).bit_length() - 1 - cores.sum_bits, -149 - unit, 0)
        try:
            c = np.float32(math.ldexp(_shifted(_shifted(total, -cut), cut), unit))
        except OverflowError:
            c = np.float32(math.copysign(math.inf, total))
    return c


def product(
    instruction: Instruction, cores: Cores, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    d = np.empty((ROWS, COLUMNS), np.float32)
    with np.errstate(over="ignore"):
        for i in range(ROWS):
            for j in range(COLUMNS):
                d[i, j] = dot(instruction, cores, a[i], b[:, j], c[i, j])
    return d


def error_bound(
    instruction: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray, cores: Cores = AMPERE
) -> np.ndarray:
    """How far A B + C may be off on any card, from finite factors as float64.

    Each term of a block, and the accumulator, loses less than 2^-24 of the largest, of which a subnormal
    counts as the least normal number; then the sum less than 2^-23 of itself; of e4m3 2^-13. No term and no
    partial sum is beyond the sum of all magnitudes.
    """
    least = 2.0 ** (1 - instruction.bias)
    sizes_a, sizes_b = (np.where(x == 0, 0, np.maximum(np.abs(x), least)) for x in (a, b))
    magnitudes = sizes_a @ sizes_b + np.abs(c) + 2.0**-126
    block = cores.block_bytes // instruction.bytes
    lost = (block + 1) * 2.0**-cores.fraction_bits + 2.0**-cores.sum_bits
    return instruction.k // block * lost * magnitudes


# -- kernels --------------------------------------------------------------------------------------------

FRAME = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

struct AttentionArgs {
  const unsigned* q;
  const unsigned* k;
  const unsigned* v;
  unsigned* o;
  float* lse;
  long long strides[12];
  int batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  float scale;
};

extern "C" __global__ void tiny_kernel(const AttentionArgs args) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  [[maybe_unused]] const int lane = i %% 32;
  const unsigned* in = args.k;
  const unsigned* accumulators = args.q;
  unsigned* out = args.o;
  const int count = args.seqlen_q;
  %(body)s
}

extern "C" int tiny(const AttentionArgs* args, cudaStream_t stream) {
  void* parameters[] = {const_cast<AttentionArgs*>(args)};
  return cudaLaunchKernel(tiny_kernel, dim3(%(blocks)d), dim3(%(threads)d), parameters, %(smem)d, stream);
}
"""


#: Bodies, for an emulated card and a real one alike. Loads matrices from shared memory, by the function's
#: name and the number of lanes whose rows count.
LOAD_BODY = """
  // Rows of 16 bytes in the order of a permutation, as swizzled ones are.
  uint4* rows = reinterpret_cast<uint4*>(shared_bytes);
  const auto place = [](int row) { return (row * 5 + 3) %% 32; };
  rows[place(lane)] = make_uint4(in[4 * lane], in[4 * lane + 1], in[4 * lane + 2], in[4 * lane + 3]);
  __syncwarp();
  unsigned m[4] = {};
  %s(m, rows + place(lane %% %d));
  for (int r = 0; r < 4; ++r) out[4 * lane + r] = m[r];
"""
#: All 16-bit floats, widened: f16, then bf16. For 256 threads.
TO_FLOAT_BODY = """
  for (int j = i; j < 65536; j += 256) {
    out[j] = __float_as_uint(__half2float(__ushort_as_half(j)));
    out[65536 + j] = __float_as_uint(__bfloat162float(__ushort_as_bfloat16(j)));
  }"""
#: ``in`` rounded to f16 below and bf16 above. For 256 threads.
FROM_FLOAT_BODY = """
  for (int j = i; j < count; j += 256) {
    const float x = __uint_as_float(in[j]);
    const unsigned high = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    out[j] = __half_as_ushort(__float2half_rn(x)) | high << 16;
  }"""
#: Eight bytes per lane, zeros from lane 20 on. Waits by a statement of one's own.
GUARDED_COPY_BODY = """
  copy_async<8>(shared_bytes + 8 * lane, lane < 20 ? in + 2 * lane : nullptr, lane < 20);
  __pipeline_commit();
  %s
  const unsigned* words = reinterpret_cast<const unsigned*>(shared_bytes);
  for (int r = 0; r < 2; ++r) out[2 * lane + r] = words[2 * lane + r];"""


def emulated(
    body: str, *, blocks: int = 1, threads: int = LANES, smem: int = 1024, sanitize: bool = False
) -> Build:
    """A kernel of one's own for the emulated card: ``body`` reads words of ``in`` and ``accumulators`` and
    writes as many words to ``out`` as there are accumulators."""
    source = FRAME % {"body": body, "blocks": blocks, "threads": threads, "smem": smem}
    kernel = Kernel(Problem(head_dim=1), Simt(), CARD.arch, source, "tiny", (Launch(threads, smem, None),))
    return SimDevice("a100", CARD, sanitize).toolchain().build(kernel)


def run_emulated(
    build: Build, words: np.ndarray, accumulators: np.ndarray, *, seed: int = 0, sanitize: bool = False
) -> np.ndarray:
    """What the kernel makes of them, as words."""

    def column(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).view(np.float32).reshape(1, 1, -1, 1)

    q, k = column(accumulators), column(words)
    o, _ = SimRunner(CARD, sanitize=sanitize, seed=seed).attend(build, q, k, k, scale=1.0)
    return o.reshape(-1).view(np.uint32)


def product_body(instruction: Instruction, call: str | None = None) -> str:
    """D of one product per warp; ``call`` takes d, a and b, by default to the instruction's own function."""
    call = call or f"{instruction.name}(d, a, b);"
    total = instruction.num_a + instruction.num_b
    return f"""
  unsigned a[{instruction.num_a}], b[{instruction.num_b}];
  float d[4];
  for (int r = 0; r < {instruction.num_a}; ++r) a[r] = in[i * {total} + r];
  for (int r = 0; r < {instruction.num_b}; ++r) b[r] = in[i * {total} + {instruction.num_a} + r];
  for (int r = 0; r < 4; ++r) d[r] = __uint_as_float(accumulators[4 * i + r]);
  {call}
  for (int r = 0; r < 4; ++r) out[4 * i + r] = __float_as_uint(d[r]);
"""


def emulated_products(
    instruction: Instruction,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    cores: Cores | None = None,
    **options: bool,
) -> np.ndarray:
    """D for stacks of A and B (bits) and C; in the arithmetic of ``cores`` instead of the emulation's own."""
    call = cores and (
        f"emulation::multiply(emulation::Mma::{instruction.emulated}, d, a, b, "
        f'"{instruction.name}", __LINE__, emulation::TensorCores::{cores.emulated});'
    )
    built = emulated(product_body(instruction, call), blocks=len(a), **options)  # type: ignore[arg-type]
    factors = np.stack([pack_factors(instruction, x, y) for x, y in zip(a, b, strict=True)])
    out = run_emulated(built, factors, np.stack([pack_d(x) for x in c]), **options)
    return np.stack([unpack_d(d) for d in out.view(np.float32).reshape(-1, LANES, 4)])


def random_factors(
    instruction: Instruction, count: int, rng: np.random.Generator, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bits of A and B, and C: normal numbers, times two to the power of ``spread`` times normal numbers,
    within the range of f16, or of e4m3."""
    most = 448 if instruction.type == "e4m3" else 60000

    def draw(*shape: int) -> np.ndarray:
        numbers = rng.standard_normal(shape) * 2.0 ** (spread * rng.standard_normal(shape))
        return np.clip(numbers, -most, most).astype(np.float32)

    a, b = draw(count, ROWS, instruction.k), draw(count, instruction.k, COLUMNS)
    return instruction.from_float(a), instruction.from_float(b), draw(count, ROWS, COLUMNS)
