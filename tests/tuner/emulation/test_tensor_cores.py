"""Tensor cores and 16-bit floats of the emulated card, against numpy and against sums in plain integers."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
from flashgen.tuner.errors import LaunchError

from tests.support import fragments
from tests.support.fragments import (
    ADA,
    AMPERE,
    COLUMNS,
    E4M3,
    HOPPER,
    INSTRUCTIONS,
    LANES,
    ROWS,
    Cores,
    Instruction,
)

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

INSTRUCTION_BY_NAME = {instruction.name: instruction for instruction in INSTRUCTIONS}
F16_K16 = INSTRUCTION_BY_NAME["mma_m16n8k16_f16"]
BF16_K16 = INSTRUCTION_BY_NAME["mma_m16n8k16_bf16"]
TF32 = INSTRUCTION_BY_NAME["mma_m16n8k8_tf32"]
QUIET_NAN = 0x7FFFFFFF

each_instruction = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
#: Of all, of eight bits as well, whose sums keep fewer bits.
each_of_any_width = pytest.mark.parametrize("instruction", [*INSTRUCTIONS, E4M3], ids=lambda i: i.name)


def cores_of(instruction: Instruction) -> Cores:
    """The least accurate ones, which emulated cards have."""
    return ADA if instruction is E4M3 else AMPERE


def zeros(instruction: Instruction) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One product of nothing but zeros: bits of A, bits of B, C."""
    a = np.zeros((1, ROWS, instruction.k), np.uint32)
    b = np.zeros((1, instruction.k, COLUMNS), np.uint32)
    return a, b, np.zeros((1, ROWS, COLUMNS), np.float32)


def one_dot(instruction: Instruction, a: list[float], b: list[float], c: float = 0.0) -> np.float32:
    """Row 0 times column 0, plus c."""
    bits_a, bits_b, bits_c = zeros(instruction)
    bits_a[0, 0, : len(a)] = instruction.from_float(np.array(a))
    bits_b[0, : len(b), 0] = instruction.from_float(np.array(b))
    bits_c[0, 0, 0] = c
    return fragments.emulated_products(instruction, bits_a, bits_b, bits_c)[0, 0, 0]


# -- products -------------------------------------------------------------------------------------------


@each_of_any_width
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_products_are_within_the_bound(instruction, spread):
    a, b, c = fragments.random_factors(instruction, 16, np.random.default_rng(1), spread)
    d = fragments.emulated_products(instruction, a, b, c)
    wide_a, wide_b = (instruction.to_float(x).astype(np.float64) for x in (a, b))
    error = np.abs(d - (wide_a @ wide_b + c))
    assert (error <= fragments.error_bound(instruction, wide_a, wide_b, c, cores_of(instruction))).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    ("instruction", "cores"),
    [*((each, cores) for each in INSTRUCTIONS for cores in (None, HOPPER)), (E4M3, None)],
    ids=lambda each: each and getattr(each, "name", "hopper"),
)
def test_products_are_the_models_to_the_bit(instruction, cores):
    rng = np.random.default_rng(2)
    drawn = [fragments.random_factors(instruction, 2, rng, spread) for spread in (0.0, 1.0, 4.0)]
    a, b, c = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    # Subnormals, zeros and the largest numbers among them.
    extremes = {
        "f16": (0x0001, 0x83FF, 0x7BFF),
        "bf16": (0x0001, 0x807F, 0x3F80),
        "tf32": (0x3000, 0x807FF000, 0),
        "e4m3": (0x01, 0x87, 0x7E),
    }
    for bits in (a, b):
        for extreme in (0, *extremes[instruction.type]):
            bits[rng.random(bits.shape) < 0.05] = extreme
    d = fragments.emulated_products(instruction, a, b, c, cores)
    for one in range(len(a)):
        expected = fragments.product(instruction, cores or cores_of(instruction), a[one], b[one], c[one])
        np.testing.assert_array_equal(d[one].view(np.uint32), expected.view(np.uint32))


@each_instruction
def test_tiny_products_are_the_models_to_the_bit(instruction):
    if instruction.type == "f16":
        scale, c_scale = 2.0**-22, 2.0**-44  # products down to 2^-48, all factors subnormal
    else:
        scale, c_scale = 2.0**-66, 2.0**-132  # results subnormal
    rng = np.random.default_rng(3)
    shapes = (2, ROWS, instruction.k), (2, instruction.k, COLUMNS), (2, ROWS, COLUMNS)
    a, b = (instruction.from_float((rng.standard_normal(s) * scale).astype(np.float32)) for s in shapes[:2])
    c = (rng.standard_normal(shapes[2]) * c_scale).astype(np.float32)
    d = fragments.emulated_products(instruction, a, b, c)
    assert (d != c).any()
    for one in range(2):
        expected = fragments.product(instruction, AMPERE, a[one], b[one], c[one])
        np.testing.assert_array_equal(d[one].view(np.uint32), expected.view(np.uint32))


@each_of_any_width
def test_every_element_has_its_place(instruction):
    """One element of A is one, B counts: a row of D is a row of B, all others are zero."""
    count = ROWS * instruction.k
    a = np.zeros((count, ROWS, instruction.k), np.float32)
    a[np.arange(count), np.arange(count) // instruction.k, np.arange(count) % instruction.k] = 1
    b = np.arange(1, 1 + instruction.k * COLUMNS, dtype=np.float32).reshape(instruction.k, COLUMNS)
    if instruction is E4M3:  # every number that it has
        b = np.nan_to_num(E4M3.to_float(b.astype(np.uint32) - 1))
    bits_a = instruction.from_float(a)
    bits_b = instruction.from_float(np.broadcast_to(b, (count, *b.shape)))
    c = np.zeros((count, ROWS, COLUMNS), np.float32)
    d = fragments.emulated_products(instruction, bits_a, bits_b, c)
    np.testing.assert_array_equal(d, a @ b)


@each_of_any_width
def test_the_accumulator_has_its_place(instruction):
    a, b, _ = zeros(instruction)
    c = np.arange(1, 1 + ROWS * COLUMNS, dtype=np.float32).reshape(1, ROWS, COLUMNS)
    np.testing.assert_array_equal(fragments.emulated_products(instruction, a, b, c), c)


@pytest.mark.parametrize("sign", [1, -1])
@each_instruction
def test_results_are_cut_off_toward_zero(instruction, sign):
    # 1 + 3 * 2^-25 is nearer to 1 + 2^-23 than to 1.
    products = [sign * 2.0**-12], [3 * 2.0**-13]
    assert one_dot(instruction, *products, sign) == sign
    assert np.float32(sign * (1 + 3 * 2.0**-25)) != sign


def test_sums_of_eight_bits_keep_fourteen():
    # A fraction of 13 bits, of a block of sixteen and of its sum: 1 + 2^-13 is exact, half of that lost.
    assert one_dot(E4M3, [2.0**-6] * 2, [2.0**-7, 2.0**-8], 1.0) == 1 + 2.0**-13
    assert one_dot(E4M3, [-(2.0**-6)], [2.0**-8], -1.0) == -1.0
    assert one_dot(E4M3, [2.0**-6] * 2, [2.0**-8] * 2, 1.0) == 1.0
    # What follows in the next block meets what is left of the sum.
    assert one_dot(E4M3, [1.0, *[0.0] * 15, 2.0**-6], [1.0, *[0.0] * 15, 2.0**-8]) == 1.0
    assert one_dot(E4M3, [448.0] * 32, [448.0] * 32) == 32 * 448.0**2
    assert np.isnan(one_dot(E4M3, [float("nan")], [0.0]))


@each_instruction
def test_terms_are_cut_off_below_the_largest(instruction):
    # A fraction of 24 bits: four times 2^-24 counts for 2^-22, four times just less counts for nothing.
    assert one_dot(instruction, [2.0**-12] * 4, [2.0**-12] * 4, 1.0) == 1 + 2.0**-22
    assert one_dot(instruction, [2.0**-12] * 4, [1.75 * 2.0**-13] * 4, 1.0) == 1.0
    assert np.float32(1 + 4 * 1.75 * 2.0**-25) != 1.0


def test_sixteen_products_are_two_blocks():
    small, one, minus = [2.0**-13], [1.0], [-1.0]
    tiny = small * 2
    # In the block of the ones they are lost; in the other they are kept, then cut off with its sum.
    assert one_dot(F16_K16, one + minus + tiny + [0.0] * 12, one + one + tiny + [0.0] * 12) == 0
    split = one + minus + [0.0] * 6 + tiny + [0.0] * 6
    assert one_dot(F16_K16, split, one + one + [0.0] * 6 + tiny + [0.0] * 6) == 2.0**-25
    assert one_dot(TF32, [1, -1, 0, 0, 2.0**-13, 0, 0, 0], [1, 1, 0, 0, 2.0**-13, 0, 0, 0]) == 2.0**-26


def test_tf32_ignores_the_low_bits():
    a, b, c = zeros(TF32)
    a[0, 0, 0], b[0, 0, 0] = 0x3F801FFF, 0x40001FFF
    assert fragments.emulated_products(TF32, a, b, c)[0, 0, 0] == 2.0


# -- infinities and NaN ---------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@each_instruction
@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ([1, INF], [1, 2], 1, INF),
        ([1, -INF], [1, 2], 1, -INF),
        ([1, -INF], [1, -INF], 1, INF),
        ([1, INF], [1, 0], 1, NAN),
        ([INF, INF], [1, -1], 1, NAN),
        ([INF, 1], [1, 1], -INF, NAN),
        ([1, 1], [1, 1], -INF, -INF),
        ([1, 1], [1, 1], NAN, NAN),
        ([NAN, 1], [1, 1], 1, NAN),
        ([1, 1], [1, NAN], INF, NAN),
    ],
)
def test_infinity_and_nan(instruction, a, b, c, expected):
    d = one_dot(instruction, a, b, c)
    np.testing.assert_equal(d, np.float32(expected))
    if np.isnan(d):
        assert d.view(np.uint32) == QUIET_NAN


def test_nan_stays_in_its_rows_and_columns():
    a, b, c = fragments.random_factors(F16_K16, 1, np.random.default_rng(4))
    clean = fragments.emulated_products(F16_K16, a, b, c)
    a[0, 3, 11] = b[0, 9, 5] = 0x7E00
    c[0, 8, 2] = NAN
    d = fragments.emulated_products(F16_K16, a, b, c)
    spoilt = np.zeros(d.shape, bool)
    spoilt[0, 3, :] = spoilt[0, :, 5] = spoilt[0, 8, 2] = True
    np.testing.assert_array_equal(np.isnan(d), spoilt)
    np.testing.assert_array_equal(d[~spoilt], clean[~spoilt])


def test_a_block_that_overflows_stays_infinite():
    large = [2.0**120, 0, 0, 0, 0, 0, 0, 0]
    assert one_dot(BF16_K16, [*large, -1.0], [*large, 2.0**127]) == INF
    assert one_dot(BF16_K16, [-(2.0**120)], [2.0**120]) == -INF


def test_the_largest_float_is_not_rounded_to_infinity():
    largest = float(np.finfo(np.float32).max)
    assert one_dot(BF16_K16, [2.0**60], [1.5 * 2.0**43], largest) == largest
    assert one_dot(BF16_K16, [2.0**60], [2.0**44], largest) == INF


# -- loading matrices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded(count, transposed):
    matrices = np.arange(1, 1 + 4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    name = f"ldmatrix_x{count}{'_trans' if transposed else ''}"
    build = fragments.emulated(fragments.LOAD_BODY % (name, 8 * count))
    found = fragments.run_emulated(build, matrices.view(np.uint32), np.zeros(4 * LANES, np.uint32))
    expected = np.zeros((LANES, 4), np.uint32)
    for i, matrix in enumerate(matrices[:count]):
        # Element pairs along a row, a lane each.
        pairs = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32)
        expected[:, i] = pairs.ravel()
    np.testing.assert_array_equal(found.reshape(LANES, 4), expected)


def test_loading_what_another_lane_wrote_needs_a_barrier():
    body = (fragments.LOAD_BODY % ("ldmatrix_x4", 32)).replace(
        "rows + place(lane % 32)", "rows + place((lane + 1) % 32)"
    )
    matrices = np.zeros((LANES, 4), np.uint32)
    fenced, loose = fragments.emulated(body), fragments.emulated(body.replace("__syncwarp();", ""))
    for seed in range(4):
        accumulators = np.zeros(4 * LANES, np.uint32)
        assert not fragments.run_emulated(fenced, matrices, accumulators, seed=seed).any()
        assert fragments.run_emulated(loose, matrices, accumulators, seed=seed).any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "unsigned m[4]; ldmatrix_x4(m, shared_bytes + 16 * lane + (lane == 9 ? 8 : 0));",
            r"thread 9: ldmatrix_x4 in line \d+ of the row at byte 152 of 1024 bytes of shared memory: it",
        ),
        (
            "unsigned m[4]; ldmatrix_x2_trans(m, shared_bytes + (lane == 4 ? 1024 : 0));",
            r"thread 4: ldmatrix_x2_trans in line \d+ of the row at byte 1024 of 1024 bytes",
        ),
        (
            "unsigned m[4]; ldmatrix_x1(m, shared_bytes - 16);",
            r"ldmatrix_x1 in line \d+ of the row at byte -16 of 1024 bytes",
        ),
        (
            "unsigned m[4]; ldmatrix_x1(m, in);",
            r"ldmatrix_x1 in line \d+ of the row at byte -?\d+ of 1024 bytes",
        ),
        (
            "unsigned m[4]; if (lane != 6) ldmatrix_x4(m, shared_bytes); out[lane] = 0;",
            r"1 have returned, 31 wait at ldmatrix_x4\(0xffffffff\) in line \d+",
        ),
        (
            "float d[4]; unsigned a[4], b[2]; if (lane < 8) mma_m16n8k16_f16(d, a, b);",
            r"24 have returned, 8 wait at mma_m16n8k16_f16\(0xffffffff\) in line \d+",
        ),
        (
            "float d[4]; unsigned a[4], b[2];\n if (lane < 3)\n mma_m16n8k8_tf32(d, a, b);\n else\n"
            " mma_m16n8k8_tf32(d, a, b);",
            r"divergent mma_m16n8k8_tf32 in block 0: thread 0 calls it in line (\d+), thread 3 in line \d+",
        ),
        (
            "float d[4]; unsigned a[4], b[2]; if (lane < 16) mma_m16n8k8_f16(d, a, b); else"
            " mma_m16n8k8_bf16(d, a, b);",
            r"16 wait at mma_m16n8k8_bf16\(0xffffffff\) in line \d+, 16 wait at mma_m16n8k8_f16",
        ),
        (
            "float x[4] = {}; add_to_sums(reinterpret_cast<float*>(out) + lane % 8, x);",
            r"thread \d+: add_to_sums in line \d+ of the address 0x\w+: it adds to 4 numbers from a multiple",
        ),
    ],
)
def test_misuse_is_reported(body, message):
    words = np.zeros(LANES, np.uint32)
    with pytest.raises(LaunchError, match=message):
        fragments.run_emulated(fragments.emulated(body), words, words)


@pytest.mark.parametrize(
    "add", ["add_to_sums(place, x)", "for (int e = 0; e < 4; ++e) add_to_sum(place + e, x[e])"]
)
def test_all_who_add_to_a_number_are_in_its_sum(add):
    body = f"""
      float* const sums = reinterpret_cast<float*>(out);
      if (i < 8) sums[i] = 0.5f;
      __syncthreads();
      const float x[4] = {{1.0f, 2.0f, float(i), 1.0f}};
      float* const place = sums + i % 2 * 4;
      {add};"""
    words = np.zeros(8, np.uint32)
    found = fragments.run_emulated(fragments.emulated(body, threads=64), words, words)
    expected = [[32.5, 64.5, 0.5 + sum(range(first, 64, 2)), 32.5] for first in (0, 1)]
    np.testing.assert_array_equal(found.view(np.float32).reshape(2, 4), expected)


def test_a_part_of_a_warp_cannot_multiply():
    body = "float d[4] = {}; unsigned a[4] = {}, b[2] = {}; mma_m16n8k16_f16(d, a, b); out[i] = 0;"
    words = np.zeros(40, np.uint32)
    with pytest.raises(LaunchError, match=r"called mma_m16n8k16_f16 in line \d+ in a warp of 8 threads"):
        fragments.run_emulated(fragments.emulated(body, threads=40), words, words)


# -- what nobody wrote ----------------------------------------------------------------------------------


def spoilt_product(instruction: Instruction, where: str) -> tuple[str, np.ndarray, np.ndarray]:
    """The body of a product of zeros, one of whose registers was never written; factors and accumulators."""
    spoil = f"if (lane == 5) {where} = reinterpret_cast<const volatile unsigned*>(shared_bytes)[7];"
    body = fragments.product_body(instruction, f"{spoil} {instruction.name}(d, a, b);")
    factors = np.zeros(LANES * (instruction.num_a + instruction.num_b), np.uint32)
    return body, factors, np.zeros(4 * LANES, np.uint32)


@pytest.mark.parametrize("instruction", [F16_K16, BF16_K16, TF32, E4M3], ids=lambda i: i.name)
@pytest.mark.parametrize("where", ["a[0]", "b[1]"])
def test_uninitialized_factors_spoil_the_product(instruction, where):
    body, factors, c = spoilt_product(instruction, where)
    d = fragments.run_emulated(fragments.emulated(body), factors, c).view(np.float32)
    # A row or a column of D.
    assert np.isnan(d).sum() == (COLUMNS if where == "a[0]" else ROWS)


@pytest.mark.parametrize("instruction", [F16_K16, BF16_K16, TF32], ids=lambda i: i.name)
@pytest.mark.parametrize("where", ["a[0]", "b[1]"])
def test_the_sanitizer_catches_uninitialized_factors(instruction, where):
    """Of e4m3 none is told: what is no number there is so quietly."""
    body, factors, c = spoilt_product(instruction, where)
    with pytest.raises(LaunchError, match="computed with an uninitialized value"):
        fragments.run_emulated(fragments.emulated(body, sanitize=True), factors, c, sanitize=True)


def test_uninitialized_sixteen_bit_floats_are_nan():
    body = """
  const __half half = reinterpret_cast<const __half*>(shared_bytes)[lane];
  const __nv_bfloat16 bfloat = reinterpret_cast<const __nv_bfloat16*>(shared_bytes)[lane];
  const float x = __half2float(half), y = __bfloat162float(bfloat);
  out[lane] = isnan(x) && isnan(y) && isnan(x + 1.0f);"""
    words = np.zeros(LANES, np.uint32)
    assert fragments.run_emulated(fragments.emulated(body), words, words).all()


@pytest.mark.parametrize(
    "expression",
    [
        "__half2float(reinterpret_cast<const __half*>(shared_bytes)[lane]) + 1.0f",
        "__bfloat162float(reinterpret_cast<const __nv_bfloat16*>(shared_bytes)[lane]) + 1.0f",
        "__half2float(__float2half_rn(reinterpret_cast<const float*>(shared_bytes)[lane]))",
        "__bfloat162float(__float2bfloat16_rn(reinterpret_cast<const float*>(shared_bytes)[lane]))",
    ],
)
def test_the_sanitizer_catches_uninitialized_sixteen_bit_floats(expression):
    body = f"const float x = {expression}; out[lane] = x > 0.0f ? 1 : 0;"
    words = np.zeros(LANES, np.uint32)
    with pytest.raises(LaunchError, match="computed with an uninitialized value"):
        fragments.run_emulated(fragments.emulated(body, sanitize=True), words, words, sanitize=True)


@each_of_any_width
def test_the_sanitizer_leaves_good_products_alone(instruction):
    a, b, c = fragments.random_factors(instruction, 2, np.random.default_rng(5), 2.0)
    a[0, 1, 2] = 0x7F if instruction is E4M3 else instruction.from_float(np.array([INF]))[0]
    expected = fragments.emulated_products(instruction, a, b, c)
    found = fragments.emulated_products(instruction, a, b, c, sanitize=True)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


# -- conversions ----------------------------------------------------------------------------------------

PAIRS_BODY = """
  const float x = __uint_as_float(in[2 * i]), y = __uint_as_float(in[2 * i + 1]);
  const __half2 half = __floats2half2_rn(x, y);
  const __nv_bfloat162 bfloat = __floats2bfloat162_rn(x, y);
  static_assert(sizeof(__half2) == 4 && alignof(__half2) == 4 && alignof(__half) == 2, "as CUDA's");
  static_assert(sizeof(__nv_bfloat162) == 4 && alignof(__nv_bfloat162) == 4, "as CUDA's");
  static_assert(sizeof(__nv_bfloat16) == 2 && alignof(__nv_bfloat16) == 2, "as CUDA's");
  memcpy(out + 2 * i, &half, 4);
  memcpy(out + 2 * i + 1, &bfloat, 4);
  if (__half22float2(half).y != __half2float(half.y)) out[2 * i] = 0;
  if (__bfloat1622float2(bfloat).x != __bfloat162float(bfloat.x)) out[2 * i] = 0;"""


def test_all_sixteen_bit_floats_widen():
    accumulators = np.zeros(2 * 65536, np.uint32)
    build = fragments.emulated(fragments.TO_FLOAT_BODY, threads=256)
    half, bfloat = fragments.run_emulated(build, np.zeros(1, np.uint32), accumulators).reshape(2, -1)
    bits = np.arange(65536, dtype=np.uint32)
    expected = fragments.f16_to_float(bits)
    np.testing.assert_array_equal(half.view(np.float32), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(half[numbers], expected.view(np.uint32)[numbers])
    np.testing.assert_array_equal(bfloat, bits << 16)


#: A number moved, added to zero, multiplied, converted to double and back, and compared with zero.
SUBNORMAL_BODY = """
  const float x = __uint_as_float(in[i]);
  const float found[] = {x, x + 0.0f, x * 0.5f, float(double(x) * 0.5), x == 0.0f ? 1.0f : 0.0f};
  for (int j = 0; j < 5; ++j) out[5 * i + j] = __float_as_uint(found[j]);"""


def test_arithmetic_flushes_numbers_below_the_least_normal_one():
    least = np.float32(2.0**-126)
    numbers = np.resize(np.array([least, -least, least / 2, -least / 8, 2 * least, 1.0], np.float32), 32)
    build = fragments.emulated(SUBNORMAL_BODY)
    words = fragments.run_emulated(build, numbers.view(np.uint32), np.zeros(5 * 32, np.uint32))
    moved, added, halved, converted, is_zero = words.view(np.float32).reshape(32, 5).T

    def flushed(x):
        return np.where(np.abs(x) < least, np.copysign(np.float32(0), x), x)

    np.testing.assert_array_equal(moved, numbers)
    np.testing.assert_array_equal(added, flushed(numbers))
    np.testing.assert_array_equal(halved, flushed(numbers * np.float32(0.5)))
    np.testing.assert_array_equal(converted, halved)
    np.testing.assert_array_equal(is_zero, flushed(numbers) == 0)


def test_floats_round_to_nearest_even():
    words = fragments.floats_to_round()
    values = words.view(np.float32)
    build = fragments.emulated(fragments.FROM_FLOAT_BODY, threads=256)
    found = fragments.run_emulated(build, words, np.zeros(len(words), np.uint32))
    half, bfloat = found & 0xFFFF, found >> 16
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(half[numbers], fragments.f16_from_float(values)[numbers])
    np.testing.assert_array_equal(bfloat[numbers], fragments.bf16_from_float(values)[numbers])
    # CUDA's NaN, whatever the sign and payload.
    assert (half[~numbers] == 0x7FFF).all()
    assert (bfloat[~numbers] == 0x7FFF).all()


def test_floats_become_the_nearest_e4m3():
    numbers = ml_dtypes.float8_e4m3fn
    exact = np.arange(256, dtype=np.uint8).view(numbers).astype(np.float32)
    ties = np.unique(exact[np.isfinite(exact)])
    ties = (ties[1:] + ties[:-1]) / 2
    words = np.concatenate([fragments.floats_to_round(), exact.view(np.uint32), ties.view(np.uint32)])
    words = np.concatenate([words, np.nextafter(ties, np.float32(0)).view(np.uint32)])
    words = np.resize(words, len(words) // 4 * 4 + 4)
    body = """
  for (int j = 4 * i; j < count; j += 4 * 256) {
    const float* x = reinterpret_cast<const float*>(in + j);
    const unsigned four = floats_to_e4m3(x[0], x[1], x[2], x[3]);
    for (int k = 0; k < 4; ++k) out[j + k] = four >> 8 * k & 0xff;
  }"""
    found = fragments.run_emulated(
        fragments.emulated(body, threads=256), words, np.zeros(len(words), np.uint32)
    )
    values = words.view(np.float32)
    kept = ~np.isnan(values)
    expected = np.clip(values[kept], -448, 448).astype(numbers).view(np.uint8)
    np.testing.assert_array_equal(found[kept], expected)
    assert (found[~kept] == 0x7F).all() and (~kept).any()


def test_pairs_hold_the_first_number_below():
    values = np.random.default_rng(7).standard_normal(2 * LANES).astype(np.float32)
    build = fragments.emulated(PAIRS_BODY)
    found = fragments.run_emulated(build, values, np.zeros(2 * LANES, np.uint32)).reshape(LANES, 2)
    for column, convert in enumerate((fragments.f16_from_float, fragments.bf16_from_float)):
        low, high = convert(values).reshape(LANES, 2).T
        np.testing.assert_array_equal(found[:, column], low | high << 16)


# -- asynchronous copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_copy_fills_up_with_zeros(size):
    """Of the last elements of a row only some bytes are copied."""
    for zero_fill in range(0, size + 1, 2):
        body = f"""
  __pipeline_memcpy_async(shared_bytes + 16 * lane, in + 4 * lane, {size}, {zero_fill});
  __pipeline_commit();
  __pipeline_wait_prior(0);
  for (int r = 0; r < {size // 4}; ++r) {{
    out[{size // 4} * lane + r] = reinterpret_cast<const unsigned*>(shared_bytes)[4 * lane + r];
  }}"""
        source = np.random.default_rng(size).integers(0, 256, (LANES, 16), dtype=np.uint8)
        expected = source[:, :size].copy()
        expected[:, size - zero_fill :] = 0
        accumulators = np.zeros(LANES * size // 4, np.uint32)
        found = fragments.run_emulated(fragments.emulated(body), source.view(np.uint32), accumulators)
        np.testing.assert_array_equal(found.view(np.uint8).reshape(LANES, size), expected)


def test_a_guarded_copy_reads_only_inside():
    words, accumulators = np.arange(1, 1 + 40, dtype=np.uint32), np.zeros(2 * LANES, np.uint32)
    landed = fragments.emulated(fragments.GUARDED_COPY_BODY % "__pipeline_wait_prior(0);")
    expected = np.concatenate([words, np.zeros(24, np.uint32)])
    np.testing.assert_array_equal(fragments.run_emulated(landed, words, accumulators), expected)
    in_flight = fragments.run_emulated(
        fragments.emulated(fragments.GUARDED_COPY_BODY % ""), words, accumulators
    )
    assert np.isnan(in_flight.view(np.float32)).all()
    astray = fragments.emulated("copy_async<16>(shared_bytes + 16 * lane, in + 1, true); out[lane] = 0;")
    with pytest.raises(
        LaunchError, match=r"copy_async in line \d+ of 16 bytes, 0 of them zeros: it copies 4, 8 or"
    ):
        fragments.run_emulated(astray, words, np.zeros(LANES, np.uint32))
