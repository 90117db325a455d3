"""Hopper's units on the emulated card: products of warpgroups, copies of boxes, barriers; their misuse."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from flashgen.tuner.cards.device import Build
from flashgen.tuner.errors import LaunchError

from tests.support import fragments, warpgroups
from tests.support.fragments import HOPPER, INSTRUCTIONS, Instruction
from tests.support.warpgroups import GROUP, HEADER, ROWS, STEP, SWIZZLES, Boxes

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

FACTORS = {i.type: i for i in INSTRUCTIONS if i.k == STEP}
each_type = pytest.mark.parametrize("type_", FACTORS)
each_swizzle = pytest.mark.parametrize("swizzle", SWIZZLES)
QUIET_NAN, UNINITIALIZED = 0x7FFFFFFF, 0x7FA07FA0

# -- products -------------------------------------------------------------------------------------------

WIDTHS = (8, 24, 64, 72, 80, 128, 176, 256)
#: A in shared memory or registers; B by columns (its rows along what is summed over), or by rows.
FORMS = ("ss", "rs", "ss_trans", "rs_trans")
MAX_STEPS = 8

PRODUCT_DEVICE = """
template <int n, typename Call>
void multiply(const unsigned* accumulators, unsigned* out, int steps, const Call& call) {
  float d[n / 2];
  for (int r = 0; r < n / 2; ++r) d[r] = __uint_as_float(accumulators[threadIdx.x * n / 2 + r]);
  wgmma_fence();
  for (int step = 0; step < steps; ++step) call(d, step);
  wgmma_commit();
  wgmma_wait<0>();
  for (int r = 0; r < n / 2; ++r) out[threadIdx.x * n / 2 + r] = __float_as_uint(d[r]);
}
"""
#: The header: case, steps, whether to accumulate, words of shared memory; from word 16 on the descriptors of
#: each step. Then come shared memory and the registers of A, by step and thread.
PRODUCT_BODY = f"""
  const unsigned* image = in + {HEADER};
  for (int j = i; j < in[3]; j += {GROUP}) reinterpret_cast<unsigned*>(shared_bytes)[j] = image[j];
  fence_proxy_async();
  __syncthreads();
  unsigned a[{MAX_STEPS}][4] = {{}};
  const int steps = in[1];
  for (int j = 0; j < 4 * steps; ++j) a[j / 4][j % 4] = image[in[3] + (j / 4 * {GROUP} + i) * 4 + j % 4];
  const auto word = [&](int step, int w) {{
    return in[16 + 4 * step + w] | static_cast<unsigned long long>(in[17 + 4 * step + w]) << 32;
  }};
  const bool accumulate = in[2];
"""


@cache
def product_build(type_: str, sanitize: bool = False) -> Build:
    cases = []
    for number, (form, n) in enumerate((form, n) for form in FORMS for n in WIDTHS):
        a = "a[s]" if form.startswith("rs") else "word(s, 0)"
        call = f"wgmma_m64n{n}k16_{type_}_{form}(d, {a}, word(s, 2), accumulate || s > 0);"
        multiply = f"multiply<{n}>(accumulators, out, steps, [&](float (&d)[{n // 2}], int s) {{ {call} }});"
        cases.append(f"    case {number}: {multiply} break;")
    body = PRODUCT_BODY + "  switch (in[0]) {\n" + "\n".join(cases) + "\n  }"
    return warpgroups.emulated(body, device=PRODUCT_DEVICE, smem=96 * 1024, sanitize=sanitize)


def products(
    type_: str,
    form: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    swizzle: int = 128,
    accumulate: bool = True,
    sanitize: bool = False,
) -> np.ndarray:
    """D for A (64 by k) and B (k by n) as bits, and C."""
    (k, n), steps = b.shape, b.shape[0] // STEP
    a, b = a.astype(np.uint16), b.astype(np.uint16)
    image_a = warpgroups.tile_image(a, swizzle)
    image_b = warpgroups.tile_image(b if form.endswith("trans") else b.T, swizzle)
    start_b = len(image_a) + -len(image_a) % 1024
    image = np.zeros(start_b + len(image_b), np.uint8)
    image[: len(image_a)], image[start_b:] = image_a, image_b
    header = np.zeros(HEADER, np.uint32)
    header[:4] = FORMS.index(form) * len(WIDTHS) + WIDTHS.index(n), steps, accumulate, len(image) // 4
    for step in range(steps):
        if form.endswith("trans"):
            place = warpgroups.step_by_columns(step, swizzle)
            of_b = warpgroups.descriptor(start_b + place, swizzle, k * swizzle)
        else:
            of_b = warpgroups.descriptor(start_b + warpgroups.step_by_rows(step, n, swizzle), swizzle)
        of_a = warpgroups.descriptor(warpgroups.step_by_rows(step, ROWS, swizzle), swizzle)
        header[16 + 4 * step : 20 + 4 * step] = np.array([of_a, of_b], np.uint64).view(np.uint32)
    registers = [warpgroups.pack_a(a[:, STEP * step :][:, :STEP]) for step in range(steps)]
    words = np.concatenate([header, image.view(np.uint32), np.stack(registers).reshape(-1)])
    places = warpgroups.places_d(n)
    build = product_build(type_, sanitize)
    found = warpgroups.run(build, words, c.astype(np.float32)[places], sanitize=sanitize)
    d = np.empty((ROWS, n), np.float32)
    d[places] = found.view(np.float32).reshape(GROUP, n // 2)
    return d


def draw(instruction: Instruction, k: int, n: int, rng: np.random.Generator, spread: float = 0.0):
    def numbers(*shape: int) -> np.ndarray:
        drawn = rng.standard_normal(shape) * 2.0 ** (spread * rng.standard_normal(shape))
        return np.clip(drawn, -60000, 60000).astype(np.float32)

    a, b, c = numbers(ROWS, k), numbers(k, n), numbers(ROWS, n)
    return instruction.from_float(a), instruction.from_float(b), c


@each_type
@pytest.mark.parametrize("form", FORMS)
def test_products_are_numpys(type_, form):
    """All widths and swizzles, some numbers of steps, with accumulators and without."""
    instruction, rng = FACTORS[type_], np.random.default_rng(1)
    for number, n in enumerate(WIDTHS):
        for swizzle in SWIZZLES:
            accumulate = bool((number + swizzle // 32) % 2)
            steps = int(rng.integers(1, MAX_STEPS + 1 if n <= 128 else 5))
            a, b, c = draw(instruction, STEP * steps, n, rng)
            d = products(type_, form, a, b, c, swizzle=swizzle, accumulate=accumulate)
            wide_a, wide_b = (instruction.to_float(x).astype(np.float64) for x in (a, b))
            expected = wide_a @ wide_b + c * accumulate
            magnitudes = np.abs(wide_a) @ np.abs(wide_b) + np.abs(c)
            # A step cuts off 17 terms and their sum.
            error = np.abs(d - expected)
            assert (error <= steps * (17 * 2.0**-25 + 2.0**-23) * magnitudes).all(), (n, swizzle, steps)
            assert error.max() > 0


def model(instruction: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Sums in integers, for one step."""
    with np.errstate(over="ignore"):
        sums = [[fragments.dot(instruction, HOPPER, x, y, z) for y, z in zip(b.T, row, strict=True)]
                for x, row in zip(a, c, strict=True)]  # fmt: skip
    return np.array(sums, np.float32)


EXTREMES = {"f16": (0x0001, 0x83FF, 0x7BFF), "bf16": (0x0001, 0x807F, 0x3F80)}


@each_type
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_products_are_the_models_to_the_bit(type_, spread):
    instruction, rng = FACTORS[type_], np.random.default_rng(2)
    a, b, c = draw(instruction, STEP, 24, rng, spread)
    if spread:
        for bits in (a, b):
            for extreme in (0, *EXTREMES[type_]):
                bits[rng.random(bits.shape) < 0.05] = extreme
        c[rng.random(c.shape) < 0.2] = 0
    d = products(type_, "ss", a, b, c)
    np.testing.assert_array_equal(d.view(np.uint32), model(instruction, a, b, c).view(np.uint32))


@each_type
@pytest.mark.parametrize("exponents", [(-30, -60), (-66, -132), (-20, -30), (50, 100), (63, 127)])
def test_tiny_and_huge_products_are_the_models_to_the_bit(type_, exponents):
    """Sums that are subnormal, too large, or near what the host's floats can hold."""
    instruction, rng = FACTORS[type_], np.random.default_rng(3)
    low, high = (-24, 15) if type_ == "f16" else (-140, 127)
    a, b = (
        np.ldexp(rng.standard_normal(shape), np.clip(exponents[0] + rng.integers(-8, 9, shape), low, high))
        for shape in ((ROWS, STEP), (STEP, 8))
    )
    c = np.ldexp(rng.standard_normal((ROWS, 8)), exponents[1] + rng.integers(-20, 1, (ROWS, 8)))
    # Rows and columns of nothing but zeros leave even the tiniest accumulator alone.
    a[5], b[:, 3], c[7] = 0, 0, -0.0
    with np.errstate(over="ignore"):
        bits_a, bits_b, c = instruction.from_float(a), instruction.from_float(b), c.astype(np.float32)
    finite = {"f16": 0x7C00, "bf16": 0x7F80}[type_]
    for bits in (bits_a, bits_b):
        bits[bits & finite == finite] = 0
    c[~np.isfinite(c)] = 1
    d = products(type_, "rs", bits_a, bits_b, c)
    expected = model(instruction, bits_a, bits_b, c)
    np.testing.assert_array_equal(d.view(np.uint32), expected.view(np.uint32))


#: 64 x 32 by 32 x 24 numbers of e4m3 in shared memory, by rows of 32 bytes in 128, swizzled. What follows
#: has descriptors of both, and a thread's row and place among the four that share it.
EIGHT_BITS_COLUMNS = 24
EIGHT_BITS_BODY = f"""
  // Rows of 128 bytes, swizzled, of which the first 32 are used: those of a from byte 0 on, b behind them.
  for (int j = i; j < (64 + {EIGHT_BITS_COLUMNS}) * 8; j += {GROUP}) {{
    const int row = j / 8, piece = (j % 8 / 4) ^ row % 8;
    reinterpret_cast<unsigned*>(shared_bytes)[row * 32 + piece * 4 + j % 4] = in[j];
  }}
  fence_proxy_async();
  __syncthreads();
  const unsigned long long layout = 1ULL << 62 | 1024ULL >> 4 << 32, of_b = layout | 64 * 128 >> 4;
  const int row = i / 32 * 16 + i % 32 / 4, word = i % 4;
"""


def eight_bits(largest, seed):
    """Whole numbers up to some, as e4m3 has them: the factors, and their products in float64."""
    rng = np.random.default_rng(seed)
    a, b = (
        rng.integers(-largest, largest + 1, (n, 32)).astype(ml_dtypes.float8_e4m3fn)
        for n in (64, EIGHT_BITS_COLUMNS)
    )
    return np.concatenate([a, b]).view(np.uint32).reshape(-1), a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("form", ["ss", "rs"])
def test_products_of_eight_bits_are_numpys(form):
    """Of small whole numbers, whose sums thirteen bits hold."""
    columns = EIGHT_BITS_COLUMNS
    body = f"""{EIGHT_BITS_BODY}
  const unsigned registers[4] = {{in[row * 8 + word], in[(row + 8) * 8 + word], in[row * 8 + 4 + word],
                                 in[(row + 8) * 8 + 4 + word]}};
  float d[{columns // 2}];
  wgmma_fence();
  wgmma_m64n{columns}k32_e4m3_{form}(d, {"layout" if form == "ss" else "registers"}, of_b, false);
  wgmma_commit();
  wgmma_wait<0>();
  for (int r = 0; r < {columns // 2}; ++r) {{
    out[(row + r / 2 % 2 * 8) * {columns} + r / 4 * 8 + word * 2 + r % 2] = __float_as_uint(d[r]);
  }}"""
    words, expected = eight_bits(8, seed=5)
    build = fragments.emulated(body, threads=GROUP, smem=(64 + columns) * 128)
    found = fragments.run_emulated(build, words, np.zeros(64 * columns, np.uint32)).view(np.float32)
    np.testing.assert_array_equal(found.reshape(64, columns), expected)


def test_sums_of_eight_bits_may_be_pairs_of_halves():
    """Each product rounds them anew."""
    columns = EIGHT_BITS_COLUMNS
    body = f"""{EIGHT_BITS_BODY}
  unsigned d[{columns // 4}];
  wgmma_fence();
  for (int step = 0; step < 3; ++step) wgmma_m64n{columns}k32_e4m3_ss(d, layout, of_b, step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  for (int r = 0; r < {columns // 4}; ++r) {{
    for (int j = 0; j < 2; ++j) {{
      out[(row + r % 2 * 8) * {columns} + r / 2 * 8 + word * 2 + j] = d[r] >> 16 * j & 0xffff;
    }}
  }}"""
    words, once = eight_bits(16, seed=6)
    build = fragments.emulated(body, threads=GROUP, smem=(64 + columns) * 128)
    found = fragments.run_emulated(build, words, np.zeros(64 * columns, np.uint32)).astype(np.uint16)
    expected = np.zeros_like(once)
    for _ in range(3):
        expected = (expected + once).astype(np.float16).astype(np.float64)
    assert (expected != 3 * once).any()
    np.testing.assert_array_equal(found.view(np.float16).reshape(64, columns), expected)


def by_halves(words):
    """Of each word the low half and the high one."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)


@pytest.mark.parametrize(
    ("call", "numpys"),
    [
        ("__vimax3_s16x2(a, b, c)", lambda a, b, c: np.max([x.view(np.int16) for x in (a, b, c)], axis=0)),
        ("__vimax3_u16x2(a, b, c)", lambda a, b, c: np.max([a, b, c], axis=0)),
        (
            "fma_halves(a, b, c)",
            # In extended precision, where neither the product nor the sum is rounded.
            lambda *abc: (lambda x, y, z: (x * y + z).astype(np.float16))(
                *(each.view(np.float16).astype(np.longdouble) for each in abc)
            ),
        ),
        ("larger_halves(a, b)", lambda a, b, c: np.fmax(a.view(np.float16), b.view(np.float16))),
    ],
)
def test_functions_of_two_halves(call, numpys):
    rng = np.random.default_rng(8)
    words = rng.integers(0, 2**32, (3, GROUP), dtype=np.uint32)
    body = f"const unsigned a = in[i], b = in[{GROUP} + i], c = in[{2 * GROUP} + i]; out[i] = {call};"
    build = fragments.emulated(body, threads=GROUP)
    found = by_halves(fragments.run_emulated(build, words.reshape(-1), np.zeros(GROUP, np.uint32)))
    with np.errstate(all="ignore"):
        expected = numpys(*map(by_halves, words))
    if expected.dtype == np.float16:
        np.testing.assert_array_equal(found.view(np.float16), expected)
    else:
        np.testing.assert_array_equal(found, expected.view(np.uint16))


def test_halves_are_rounded_down():
    floats = np.random.default_rng(9).integers(0, 2**32, GROUP, dtype=np.uint32).view(np.float32)
    floats[:8] = (0.0, -0.0, 1e-9, -1e-9, 1 / 3, -1 / 3, 1143.543, -2047.3)
    floats[8:12] = (65504.0, 1e6, -1e6, -65504.5)
    floats[64:] = np.random.default_rng(9).standard_normal(64) * 300
    body = "out[i] = __half_as_ushort(__float2half_rd(__uint_as_float(in[i])));"
    build = fragments.emulated(body, threads=GROUP)
    found = fragments.run_emulated(build, floats.view(np.uint32), np.zeros(GROUP, np.uint32))
    with np.errstate(all="ignore"):
        nearest = floats.astype(np.float16)
        below = np.nextafter(nearest, np.float16(-np.inf))
        expected = np.where(nearest.astype(np.float64) > floats, below, nearest)
    np.testing.assert_array_equal(found.astype(np.uint16).view(np.float16), expected)


INF, NAN = float("inf"), float("nan")


@each_type
def test_infinity_and_nan(type_):
    instruction = FACTORS[type_]
    table = [
        ([1, INF], [1, 2], 1, INF),
        ([1, -INF], [1, 2], 1, -INF),
        ([1, INF], [1, 0], 1, NAN),
        ([INF, INF], [1, -1], 1, NAN),
        ([INF, 1], [1, 1], -INF, NAN),
        ([1, 1], [1, 1], -INF, -INF),
        ([1, 1], [1, 1], NAN, NAN),
        ([1, 1], [1, NAN], INF, NAN),
    ]
    a, b, c = np.zeros((ROWS, STEP)), np.zeros((STEP, 8)), np.zeros((ROWS, 8))
    for case, (x, y, z, _) in enumerate(table):
        # Each in rows and a column of its own.
        a[case + 8, 2 * case : 2 * case + 2], b[2 * case : 2 * case + 2, case], c[case + 8, case] = x, y, z
    bits_a, bits_b = instruction.from_float(a), instruction.from_float(b)
    d = products(type_, "ss", bits_a, bits_b, c)
    for case, (*_, expected) in enumerate(table):
        np.testing.assert_equal(d[case + 8, case], np.float32(expected))
        if np.isnan(expected):
            assert d[case + 8, case].view(np.uint32) == QUIET_NAN
    # The NaN in B spoils its column and no other.
    assert np.isnan(d[:, 7]).all()
    assert (d[40:, :7] == 0).all()


@each_type
def test_the_sanitizer_leaves_good_products_alone_and_catches_uninitialized_ones(type_):
    instruction, rng = FACTORS[type_], np.random.default_rng(5)
    a, b, c = draw(instruction, 2 * STEP, 24, rng, 2.0)
    a[1, 2], c[9, 9] = instruction.from_float(np.array([INF]))[0], NAN
    expected = products(type_, "ss_trans", a, b, c)
    found = products(type_, "ss_trans", a, b, c, sanitize=True)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    b[3, 4] = UNINITIALIZED & 0xFFFF
    with pytest.raises(LaunchError, match="computed with an uninitialized value"):
        products(type_, "ss_trans", a, b, c, sanitize=True)


GROUPS_BODY = """
  // Zeros everywhere but for the first column of A and the first row of B, which are ones.
  for (int j = i; j < 2048; j += 128) reinterpret_cast<unsigned*>(shared_bytes)[j] = 0;
  __syncthreads();
  if (i < 8) reinterpret_cast<unsigned short*>(shared_bytes)[64 * i + i % 8 * 8] = 0x3c00;
  unsigned ones[4] = {lane % 4 == 0 ? 0x3c00u : 0, lane % 4 == 0 ? 0x3c00u : 0, 0, 0};
  fence_proxy_async();
  __syncthreads();
  const unsigned long long b = 1ULL << 62 | 64ULL << 32 | 1ULL << 16;
  float d[4] = {}, e[4] = {};
  const volatile unsigned* bits_d = reinterpret_cast<const volatile unsigned*>(d);
  wgmma_fence();
  for (int step = 0; step < 3; ++step) wgmma_m64n8k16_f16_rs(d, ones, b, true);
  wgmma_commit();
  wgmma_fence();
  wgmma_m64n8k16_f16_rs(e, ones, b, true);
  wgmma_m64n8k16_f16_rs(d, ones, b, true);
  wgmma_commit();
  out[8 * i] = bits_d[0];
  wgmma_wait<1>();
  out[8 * i + 1] = bits_d[0];
  out[8 * i + 2] = __float_as_uint(e[0]);
  wgmma_wait<0>();
  out[8 * i + 3] = bits_d[0];
  out[8 * i + 4] = __float_as_uint(e[0]);
  wgmma_fence();
  wgmma_m64n8k16_f16_rs(d, ones, b, false);
  wgmma_commit();
  wgmma_wait<0>();
  for (int r = 5; r < 8; ++r) out[8 * i + r] = bits_d[0];
"""


def test_accumulators_are_nan_until_their_last_group_is_waited_for():
    words = np.zeros(8 * GROUP, np.uint32)
    found = warpgroups.run(warpgroups.emulated(GROUPS_BODY, smem=8192), words, words).reshape(GROUP, 8)
    expected = [UNINITIALIZED] * 3 + [int(np.float32(x).view(np.uint32)) for x in (4, 1, 1, 1, 1)]
    np.testing.assert_array_equal(found, np.tile(np.array(expected, np.uint32), (GROUP, 1)))


# -- boxes ----------------------------------------------------------------------------------------------

#: By the header: corner and place of the box, its bytes, and whether to store instead of to load.
BOX_BODY = f"""
  const int* corner = reinterpret_cast<const int*>(in + 32);
  unsigned* box = reinterpret_cast<unsigned*>(shared_bytes + in[36]);
  const unsigned bytes = in[37];
  if (in[38]) {{
    for (int j = i; j < count; j += {GROUP}) out[j] = accumulators[j];
    for (int j = i; j < bytes / 4; j += {GROUP}) box[j] = in[{HEADER} + j];
    fence_proxy_async();
    __syncthreads();
    if (i != 5) return;
    prefetch_map(&maps.store);
    tma_store(&maps.store, box, corner[0], corner[1], corner[2], corner[3]);
    tma_commit();
    tma_wait_read<0>();
    return;
  }}
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  if (i == 0) {{
    barrier_init(barrier, 1);
    fence_barrier_init();
    prefetch_map(&maps.load);
    barrier_expect(barrier, bytes);
    tma_load(box, &maps.load, barrier, corner[0], corner[1], corner[2], corner[3]);
  }}
  __syncthreads();
  barrier_wait(barrier, 0);
  for (int j = i; j < bytes / 4; j += {GROUP}) out[j] = box[j];
"""


def box_build(sanitize: bool = False) -> Build:
    smem = 160 * 1024
    return warpgroups.emulated(BOX_BODY, host=warpgroups.BOX_HOST, smem=smem, sanitize=sanitize)


def load(boxes: Boxes, memory: np.ndarray, corner, place: int = 1024, **options) -> np.ndarray:
    words = np.concatenate([boxes.header(corner, place), memory.view(np.uint32)])
    out = np.zeros(boxes.bytes // 4, np.uint32)
    return warpgroups.run(box_build(options.get("sanitize", False)), words, out, **options).view(np.uint8)


def store(boxes: Boxes, memory: np.ndarray, corner, box: np.ndarray, place: int = 1024) -> np.ndarray:
    header = boxes.header(corner, place)
    header[38] = 1
    words = np.concatenate([header, warpgroups.box_image(box, boxes.swizzle).view(np.uint32)])
    return warpgroups.run(box_build(), words, memory.view(np.uint32)).view(np.uint8)


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, count, dtype=np.uint8)


def tiles_of(swizzle: int, type_: str = "f16", **changes) -> Boxes:
    """Boxes of 24 rows of an array of 3 batches of 4 heads of 45 rows, stored by rows of all heads, of which
    the last columns are half a box."""
    size = warpgroups.TYPES[type_][1]
    columns = (swizzle or 96) // size
    width = columns + columns // 2
    pitch = (width * size + 31) // 16 * 16
    boxes = Boxes(
        (width, 45, 4, 3), (4 * pitch, pitch, 45 * 4 * pitch), (columns, 24, 1, 1), swizzle, type_, offset=64
    )
    return replace(boxes, **changes)


#: Inside, and over every edge: past the last column, row, head and batch, before the first, and far outside.
CORNERS = (
    (0, 0, 0, 0),
    (0, 21, 3, 2),
    (0, 24, 1, 1),
    (16, 30, 2, 0),
    (17, 3, 0, 1),
    (0, -5, 1, 2),
    (-8, -23, 0, 0),
    (-3, 44, 3, 1),
    (0, 45, 0, 0),
    (0, 0, 4, 0),
    (0, 0, -1, 1),
    (0, 0, 0, 3),
    (0, 0, 0, -1),
    (-2147483648, 2147483647, 0, 0),
)


@pytest.mark.parametrize("type_", warpgroups.TYPES)
@pytest.mark.parametrize("swizzle", [*SWIZZLES, 0])
def test_boxes_are_loaded_with_zeros_outside(swizzle, type_):
    boxes = tiles_of(swizzle, type_)
    memory = random_bytes(boxes.offset + 3 * boxes.strides[2])
    for seed, corner in enumerate(CORNERS):
        found = load(boxes, memory, corner, seed=seed)
        np.testing.assert_array_equal(found, boxes.loaded(memory, corner), str(corner))


@pytest.mark.parametrize("type_", warpgroups.TYPES)
@pytest.mark.parametrize("swizzle", [*SWIZZLES, 0])
def test_boxes_are_stored_up_to_the_edges(swizzle, type_):
    boxes = tiles_of(swizzle, type_)
    memory = random_bytes(boxes.offset + 3 * boxes.strides[2])
    elements = random_bytes(boxes.bytes, 1).view(np.uint16 if type_ != "f32" else np.uint32)
    box = elements.reshape(boxes.box[::-1])
    for corner in CORNERS:
        found = store(boxes, memory, corner, box)
        np.testing.assert_array_equal(found, boxes.stored(memory, corner, box), str(corner))


def test_boxes_may_span_heads_and_batches():
    boxes = tiles_of(64, box=(32, 7, 3, 2))
    memory = random_bytes(boxes.offset + 3 * boxes.strides[2])
    for corner in ((0, 0, 0, 0), (16, 40, 2, 1), (0, 3, -1, 2)):
        np.testing.assert_array_equal(load(boxes, memory, corner), boxes.loaded(memory, corner))
        box = random_bytes(boxes.bytes, 2).view(np.uint16).reshape(boxes.box[::-1])
        np.testing.assert_array_equal(
            store(boxes, memory, corner, box), boxes.stored(memory, corner, box), str(corner)
        )


def test_a_dimension_may_have_no_stride():
    """Heads that share one head's rows."""
    boxes = Boxes((64, 40, 6, 2), (128, 0, 40 * 128), (64, 16, 1, 1))
    memory = random_bytes(2 * 40 * 128)
    for head in range(6):
        corner = (0, 30, head, 1)
        np.testing.assert_array_equal(load(boxes, memory, corner), boxes.loaded(memory, corner))


def test_the_swizzle_goes_by_addresses():
    """A box from the middle of a pattern on is turned as there."""
    boxes = Boxes((64, 64, 1, 1), (128, 16, 16), (64, 16, 1, 1))
    memory = random_bytes(64 * 128)
    first = boxes.loaded(memory, (0, 0, 0, 0))
    # Rows 3 to 10 of a pattern that begins three rows earlier.
    rows = Boxes((64, 64, 1, 1), (128, 16, 16), (64, 8, 1, 1))
    found = load(rows, memory, (0, 3, 0, 0), place=2048 + 3 * 128)
    np.testing.assert_array_equal(found, first[3 * 128 : 11 * 128])


GOOD = Boxes((64, 40, 6, 2), (128, 40 * 128, 6 * 40 * 128), (64, 16, 1, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "8"},
        {"rank": 3},
        {"misalignment": 32},
        {"offset": 8},
        {"sizes": (64, 0, 6, 2)},
        {"sizes": (64, 40, 6, 2**32 + 1)},
        {"strides": (130, 40 * 128, 6 * 40 * 128)},
        {"strides": (128, 40 * 128 + 8, 6 * 40 * 128)},
        {"strides": (128, 40 * 128, 2**40)},
        {"strides": (2**64 - 128, 40 * 128, 6 * 40 * 128)},
        {"box": (64, 257, 1, 1)},
        {"box": (64, 0, 1, 1)},
        {"box": (60, 16, 1, 1)},
        {"box": (72, 16, 1, 1)},
        {"swizzle": 64},
        {"swizzle": 7},
        {"element_stride": 2},
        {"element_stride": 0},
        {"interleave": 1},
        {"fill": 1},
    ],
    ids=lambda wrong: "-".join(f"{k}-{v}" for k, v in wrong.items()),
)
def test_what_the_driver_refuses_to_encode_is_refused(wrong):
    boxes = replace(GOOD, **wrong)
    words = np.zeros(HEADER + 16 * 1024, np.uint32)
    words[:HEADER] = GOOD.header()
    words[:29] = replace(boxes, type="f16").header()[:29] if boxes.type == "8" else boxes.header()[:29]
    if boxes.type == "8":
        words[0] = 8
    with pytest.raises(LaunchError, match=r"its launcher returned CUDA error 1$"):
        warpgroups.run(box_build(), words, np.zeros(64, np.uint32))


def test_the_largest_maps_are_encoded():
    boxes = Boxes((2**32, 2**32, 2**32, 2**32), (2**40 - 16, 16, 2**40 - 16), (64, 256, 1, 1))
    memory = random_bytes(1024)
    # All of it is before the array.
    assert not load(boxes, memory, (0, -256, 0, 0)).any()


ENTRY_HOST = """
  void* other = &maps;
  const auto get = [&](const char* name, unsigned version) {
    return cudaGetDriverEntryPointByVersion(name, &other, version, cudaEnableDefault, &found);
  };
  if (get("cuUnknown", 12000) != cudaSuccess) return 90;
  if (other != nullptr || found != cudaDriverEntryPointSymbolNotFound) return 91;
  other = &maps;
  if (get(name, 11080) != cudaSuccess) return 92;
  if (other != nullptr || found != cudaDriverEntryPointVersionNotSufficent) return 93;
  return 97;
"""


def test_functions_that_the_driver_lacks_are_null():
    words = np.zeros(HEADER, np.uint32)
    with pytest.raises(LaunchError, match="CUDA error 97"):
        warpgroups.run(warpgroups.emulated("", host=ENTRY_HOST), words, words)


@pytest.mark.parametrize(("storing", "access"), [(False, "read"), (True, "write")])
def test_the_sanitizer_notices_maps_that_reach_beyond_the_array(storing, access):
    """One row more than there are."""
    boxes = Boxes((64, 33, 1, 1), (128, 16, 16), (64, 16, 1, 1))
    memory = random_bytes(32 * 128)
    build = box_build(sanitize=True)
    header = boxes.header((0, 17, 0, 0), 1024)
    header[38] = storing
    words = np.concatenate([header, memory.view(np.uint32)])
    out = np.zeros(32 * 32, np.uint32)
    array = "o" if storing else "[kv]"
    message = (
        rf"out of bounds: {access} of \d+ bytes at global memory, \d+ bytes (past the end of|before) {array}"
    )
    call = r"\n  line \d+: " + ("tma_store" if storing else "tma_load")
    with pytest.raises(LaunchError, match=message) as caught:
        warpgroups.run(build, words, out, sanitize=True)
    assert re.search(call, str(caught.value))


# -- barriers -------------------------------------------------------------------------------------------

#: A ring of two buffers of words: warp 0 fills them, warps 1 to 3 read them, each in its own time.
RING_BODY = """
  struct Ring {
    unsigned words[2][32];
    unsigned long long full[2], empty[2];
  };
  Ring& ring = *reinterpret_cast<Ring*>(shared_bytes);
  if (i == 0) {
    for (int s = 0; s < 2; ++s) {
      barrier_init(&ring.full[s], 1);
      barrier_init(&ring.empty[s], 3);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int rounds = count / 96;
  if (warp == 0) {
    for (int r = 0; r < rounds; ++r) {
      barrier_wait(&ring.empty[r % 2], r / 2 % 2 ^ 1);
      ring.words[r % 2][lane] = in[32 * r + lane];
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.full[r % 2]);
    }
    return;
  }
  for (int r = 0; r < rounds; ++r) {
    unsigned long long* full = &ring.full[r % 2];
    if (warp == 1) {
      while (!barrier_test(full, r / 2 % 2)) {
      }
    } else {
      barrier_wait(full, r / 2 % 2);
    }
    out[(3 * r + warp - 1) * 32 + lane] = ring.words[r % 2][lane];
    __syncwarp();
    if (lane == 0) barrier_arrive(&ring.empty[r % 2]);
  }
"""


def ring(body: str, seed: int) -> bool:
    """Whether all readers saw all words."""
    words = np.arange(1, 1 + 32 * 11, dtype=np.uint32)
    found = warpgroups.run(warpgroups.emulated(body), words, np.zeros(3 * len(words), np.uint32), seed=seed)
    return bool((found.reshape(11, 3, 32) == words.reshape(11, 1, 32)).all())


def test_a_ring_of_buffers_loses_nothing():
    assert all(ring(RING_BODY, seed) for seed in range(8))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("barrier_wait(&ring.empty[r % 2], r / 2 % 2 ^ 1);", ""),
        ("barrier_wait(&ring.empty[r % 2], r / 2 % 2 ^ 1);", "barrier_wait(&ring.empty[r % 2], r / 2 % 2);"),
        ("barrier_wait(full, r / 2 % 2);", ""),
        ("barrier_init(&ring.empty[s], 3)", "barrier_init(&ring.empty[s], 1)"),
        ("barrier_init(&ring.empty[s], 3)", "barrier_init(&ring.empty[s], 4)"),
    ],
)
def test_a_ring_with_a_mistake_loses_words(right, wrong):
    assert right in RING_BODY

    def loses(seed: int) -> bool:
        try:
            return not ring(RING_BODY.replace(right, wrong), seed)
        except LaunchError:
            return True

    assert any(loses(seed) for seed in range(8))


LATE_BODY = """
  unsigned long long* barriers = reinterpret_cast<unsigned long long*>(shared_bytes);
  if (i == 0) {
    barrier_init(&barriers[0], 1);
    barrier_init(&barriers[1], 1);
  }
  __syncthreads();
  if (warp == 0) {
    // Two phases at once: whoever still waits for the first of them has missed it.
    barrier_wait(&barriers[1], 0);
    if (lane == 0) barrier_arrive(&barriers[0]);
    if (lane == 0) barrier_arrive(&barriers[0]);
  } else if (warp == 1) {
    if (lane == 0) barrier_arrive(&barriers[1]);
    barrier_wait(&barriers[0], 0);
  }
  for (int j = i; j < count; j += 128) out[j] = 1;
"""


def test_a_thread_that_misses_a_phase_waits_for_ever():
    words, outcomes = np.zeros(128, np.uint32), set()
    for seed in range(8):
        try:
            warpgroups.run(warpgroups.emulated(LATE_BODY), words, words, seed=seed)
            outcomes.add("")
        except LaunchError as error:
            assert re.search(
                r"32 wait at barrier_wait in line \d+ for parity 0 of the barrier at byte 0, whose phase 2"
                r" lacks 1 of 1 arrivals and 0 bytes \(from thread 32\)",
                str(error),
            )
            outcomes.add("late")
    assert "late" in outcomes


FLIGHT_BODY = """
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  const volatile unsigned* box = reinterpret_cast<unsigned*>(shared_bytes + 1024);
  if (i == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (i == 0) {
    // Bytes may come before they are announced.
    tma_load(shared_bytes + 1024, &maps.load, barrier, 0, 0, 0, 0);
    out[0] = box[77];
    barrier_expect(barrier, 2048);
  }
  if (warp == 1) {
    // As long as the phase goes on, nothing of the box is there; then all of it.
    bool done = barrier_test(barrier, 0);
    out[32 + lane] = done ? 1 : box[lane] == out[1];
    while (!barrier_test(barrier, 0)) {
    }
    out[64 + lane] = box[lane];
  }
"""


def test_a_load_is_uninitialized_until_its_phase_ends():
    boxes = Boxes((64, 16, 1, 1), (128, 16, 16), (64, 16, 1, 1), swizzle=128)
    memory = random_bytes(16 * 128)
    body = FLIGHT_BODY.replace("out[1]", f"{UNINITIALIZED}u") + "\n if (warp == 0 && i > 0) out[i] = 0;"
    words = np.concatenate([boxes.header(), memory.view(np.uint32)])
    build = warpgroups.emulated(body, host=warpgroups.BOX_HOST, smem=4096)
    for seed in range(6):
        found = warpgroups.run(build, words, np.zeros(96, np.uint32), seed=seed)
        assert found[0] == UNINITIALIZED
        assert (found[32:64] == 1).all()
        np.testing.assert_array_equal(found[64:], boxes.loaded(memory, (0, 0, 0, 0)).view(np.uint32)[:32])


NAMED_BODY = """
  // Warps 0 and 1 write, warps 2 and 3 read what they wrote; then the other way round. Writers do not wait.
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes);
  for (int r = 0; r < count / 64; ++r) {
    if (warp < 2) {
      if (r > 0) named_barrier_sync(2, 128);
      words[i] = in[64 * r + i];
      named_barrier_arrive(1, 128);
    } else {
      named_barrier_sync(1, 128);
      out[64 * r + i - 64] = words[i - 64];
      named_barrier_sync(3, 64);
      if (r + 1 < count / 64) named_barrier_arrive(2, 128);
    }
  }
"""


def test_named_barriers_hold_those_who_sync():
    words = np.arange(1, 1 + 64 * 9, dtype=np.uint32)
    build = warpgroups.emulated(NAMED_BODY)
    for seed in range(8):
        np.testing.assert_array_equal(warpgroups.run(build, words, words, seed=seed), words)


# -- clusters -------------------------------------------------------------------------------------------

HALVES_BODY = """
  // Each block copies its half of a box to both.
  const int rank = blockIdx.x % 2;
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes);
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  if (i == 0) {
    barrier_init(barrier, 1);
    fence_barrier_init();
  }
  cluster_sync();
  if (i == 0) {
    barrier_expect(barrier, 2048);
    tma_multicast(words + 256 * (1 + rank), &maps.load, barrier, 3, 0, 8 * rank, blockIdx.x / 2, 0);
  }
  barrier_wait(barrier, 0);
  for (int j = i; j < 512; j += 128) out[512 * blockIdx.x + j] = words[256 + j];
  cluster_sync();
"""


def halves_come(body: str, seed: int) -> bool:
    """Whether each block of two clusters has all of its cluster's box."""
    boxes = Boxes((64, 16, 2, 1), (128, 2048, 16), (64, 8, 1, 1), swizzle=128)
    memory = random_bytes(2 * 16 * 128)
    words = np.concatenate([boxes.header(), memory.view(np.uint32)])
    build = warpgroups.emulated(body, host=warpgroups.BOX_HOST, blocks=4, smem=4096, cluster=2)
    found = warpgroups.run(build, words, np.zeros((4, 512), np.uint32), seed=seed).reshape(4, 2, 256)
    halves = [
        boxes.loaded(memory, (0, 8 * half, head, 0)).view(np.uint32) for head in (0, 1) for half in (0, 1)
    ]
    return bool((found == np.array(halves).reshape(2, 1, 2, 256).repeat(2, 1).reshape(4, 2, 256)).all())


def test_blocks_of_a_cluster_copy_to_each_other():
    assert all(halves_come(HALVES_BODY, seed) for seed in range(8))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("  }\n  cluster_sync();", "  }\n  __syncthreads();"),
        ("barrier, 3, 0", "barrier, 1 << rank, 0"),
        ("barrier, 3, 0", "barrier, 2 >> rank, 0"),
        ("barrier, 3, 0", "barrier, 1, 0"),
        ("barrier_expect(barrier, 2048)", "barrier_expect(barrier, 1024)"),
        ("barrier_wait(barrier, 0);", ""),
    ],
)
def test_mistakes_in_copies_to_each_other_are_caught(right, wrong):
    assert HALVES_BODY.count(right) == 1

    def caught(seed: int) -> bool:
        try:
            return not halves_come(HALVES_BODY.replace(right, wrong), seed)
        except LaunchError:
            return True

    assert any(caught(seed) for seed in range(8))


RALLY_BODY = """
  // Two blocks by turns: each adds one to what the other made, and tells it.
  const int rank = blockIdx.x;
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  if (i == 0) barrier_init(barrier, 1);
  cluster_sync();
  if (i > 0) return;
  for (int r = 0; r < count; ++r) {
    if (r % 2 != rank) continue;
    if (r > 0) WAIT(barrier, (r - 1) / 2 % 2);
    out[r] = r > 0 ? out[r - 1] + 1 : 1;
    if (r + 1 < count) barrier_arrive_at(barrier, 1 - rank);
  }
  cluster_sync();
"""


@pytest.mark.parametrize("wait", ["barrier_wait", "while (!barrier_test"])
def test_blocks_of_a_cluster_arrive_at_each_others_barriers(wait):
    call = "barrier_wait" if wait == "barrier_wait" else "POLL"
    poll = "#define POLL(b, p) while (!barrier_test(b, p)) {}\n"
    body = RALLY_BODY.replace("WAIT", call)
    build = warpgroups.emulated(body, device=poll, blocks=2, cluster=2)
    for seed in range(8):
        found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros(41, np.uint32), seed=seed)
        np.testing.assert_array_equal(found, np.arange(1, 42))


MEETING_BODY = """
  // Shared memory is a block's own; what all have written before they meet, all see. Half of the warps end.
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes);
  words[i] = 1000 * blockIdx.x + i;
  const unsigned blocks = gridDim.x;
  out[blockIdx.x * 128 + i] = in[i];
  if (warp % 2) return;
  for (int r = 0; r < 3; ++r) {
    cluster_sync();
    const unsigned told = out[(blockIdx.x + 1) % blocks * 128 + i];
    cluster_sync();
    out[blockIdx.x * 128 + i] = told + words[i] - 1000 * blockIdx.x;
  }
"""


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_cluster_waits_for_all_its_threads_but_those_that_have_ended(blocks):
    words = np.arange(5, 5 + 128, dtype=np.uint32)
    cluster = blocks if blocks > 1 else None
    build = warpgroups.emulated(MEETING_BODY, blocks=blocks, cluster=cluster)
    threads = np.arange(128)
    expected = words + np.where(threads // 32 % 2, 0, 3 * threads)
    for seed in range(6):
        found = warpgroups.run(build, words, np.zeros((blocks, 128), np.uint32), seed=seed)
        np.testing.assert_array_equal(found.reshape(blocks, 128), np.tile(expected, (blocks, 1)))


READING_BODY = """
  // Each block writes its rank and reads all of them.
  float* floats = reinterpret_cast<float*>(shared_bytes);
  for (int j = 0; j < 4; ++j) floats[4 * i + j] = 1000 * blockIdx.x + 4 * i + j;
  cluster_sync();
  float sum = 0;
  for (int block = 0; block < 4; ++block) {
    float one[1], two[2], four[4];
    load_from_block(one, floats + (i + 1) % 128, block);
    load_from_block(two, floats + 2 * i, block);
    load_from_block(four, floats + 4 * i, block);
    sum += one[0] + two[0] + 2 * two[1] + four[0] + four[3];
  }
  out[128 * blockIdx.x + i] = unsigned(sum);
  cluster_sync();
"""


def sums_read(body: str, seed: int) -> bool:
    build = warpgroups.emulated(body, blocks=4, cluster=4, smem=2048)
    i, nothing = np.arange(128), np.zeros((4, 128), np.uint32)
    found = warpgroups.run(build, np.zeros(1, np.uint32), nothing, seed=seed).reshape(4, 128)
    expected = 6 * 6000 + 4 * ((i + 1) % 128 + 2 * i + 2 * (2 * i + 1) + 4 * i + 4 * i + 3)
    return bool((found == expected).all())


def test_blocks_of_a_cluster_read_each_other():
    assert all(sums_read(READING_BODY, seed) for seed in range(6))


def test_reading_a_block_too_early_or_too_late_is_caught():
    early = READING_BODY.replace("cluster_sync();\n  float sum", "__syncthreads();\n  float sum")
    assert not all(sums_read(early, seed) for seed in range(6))
    late = READING_BODY.replace("unsigned(sum);\n  cluster_sync();", "unsigned(sum);")
    with pytest.raises(LaunchError, match=r"load_from_block in line \d+ at block \d, which has ended"):
        for seed in range(20):
            sums_read(late, seed)


BRINGING_BODY = """
  // Each block brings every block what it has of it, once all have begun.
  float* floats = reinterpret_cast<float*>(shared_bytes);
  cluster_arrive();
  if (blockIdx.x == 3) for (int j = 0; j < 4; ++j) __syncthreads();
  cluster_wait();
  for (int block = 0; block < 4; ++block) {
    const float one[1] = {float(1000 * blockIdx.x + block)}, two[2] = {1, 2}, four[4] = {1, 2, 3, 4};
    if (i == 0) store_to_block(floats + blockIdx.x, one, block);
    if (i == 1) store_to_block(floats + 4 + 2 * blockIdx.x, two, block);
    if (i == 2) store_to_block(floats + 12 + 4 * blockIdx.x, four, block);
  }
  cluster_sync();
  if (i < 28) out[28 * blockIdx.x + i] = unsigned(floats[i]);
"""


def is_brought(body: str, seed: int) -> bool:
    build = warpgroups.emulated(body, blocks=4, cluster=4)
    nothing = np.zeros((4, 28), np.uint32)
    found = warpgroups.run(build, np.zeros(1, np.uint32), nothing, seed=seed).reshape(4, 28)
    ones = 1000 * np.arange(4) + np.arange(4)[:, None]
    return bool((found == np.hstack([ones, np.tile([1, 2] * 4 + [1, 2, 3, 4] * 4, (4, 1))])).all())


def test_blocks_of_a_cluster_bring_each_other_results():
    assert all(is_brought(BRINGING_BODY, seed) for seed in range(6))


def test_bringing_too_early_and_reading_too_early_are_caught():
    early = BRINGING_BODY.replace("  cluster_wait();\n", "").replace("  cluster_arrive();\n", "")
    with pytest.raises(LaunchError, match=r"store_to_block in line \d+ at block \d, not all of which"):
        is_brought(early, 0)
    unasked = BRINGING_BODY.replace("  cluster_arrive();\n", "")
    with pytest.raises(LaunchError, match=r"cluster_wait in line \d+ before it has arrived"):
        is_brought(unasked, 0)
    unmet = BRINGING_BODY.replace("cluster_sync();\n  if (i < 28)", "__syncthreads();\n  if (i < 28)")

    def goes_wrong(seed: int) -> bool:
        try:
            return not is_brought(unmet, seed)
        except LaunchError:
            return True  # a block had ended

    assert any(goes_wrong(seed) for seed in range(8))


def test_a_block_reads_no_other_cluster():
    body = "float one[1]; cluster_sync(); load_from_block(one, (float*)shared_bytes, 2); cluster_sync();"
    words = np.zeros(1, np.uint32)
    with pytest.raises(LaunchError, match=r"load_from_block in line \d+ at block 2 of a cluster of 2"):
        warpgroups.run(warpgroups.emulated(body, blocks=4, cluster=2), words, words)


SENDING_BODY = """
  // Two blocks send each other numbers, three times, through one place: who has read it says so.
  const unsigned rank = blockIdx.x, other = 1 - rank;
  unsigned long long* full = reinterpret_cast<unsigned long long*>(shared_bytes);
  unsigned long long* room = full + 1;
  float* floats = reinterpret_cast<float*>(shared_bytes + 128);
  const unsigned place = unsigned(__cvta_generic_to_shared(floats + 4 * i));
  if (i == 0) {
    barrier_init(full, 1);
    barrier_init(room, 128);
  }
  cluster_sync();
  float told = 1000 * rank + i;
  for (unsigned r = 0; r < 3; ++r) {
    const float four[4] = {told, told + 1, told + 2, told + 3};
    if (r > 0) barrier_wait(room, (r - 1) % 2);
    send_to_block(place_in_block(place, other), four,
                  place_in_block(unsigned(__cvta_generic_to_shared(full)), other));
    if (i == 0) barrier_expect(full, 128 * 16);
    barrier_wait(full, r % 2);
    const float* came = floats + 4 * ((i + 1) % 128);
    told = came[0] + came[3] - 3;
    if (r < 2) barrier_arrive_at(room, other);
  }
  out[128 * rank + i] = unsigned(told);
  cluster_sync();
"""


def floats_sent(body: str, seed: int) -> bool:
    build = warpgroups.emulated(body, blocks=2, cluster=2, smem=4096)
    found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros((2, 128), np.uint32), seed=seed)
    told = 1000 * np.arange(2)[:, None] + np.arange(128)
    for _ in range(3):
        told = 2 * np.roll(told[::-1], -1, axis=1)
    return bool((found.reshape(2, 128) == told).all())


def test_blocks_of_a_cluster_send_each_other_floats():
    assert all(floats_sent(SENDING_BODY, seed) for seed in range(8))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("barrier_wait(full, r % 2);", "__syncthreads();"),
        ("if (r > 0) barrier_wait(room, (r - 1) % 2);", ""),
        ("barrier_expect(full, 128 * 16)", "barrier_expect(full, 128 * 8)"),
        ("(__cvta_generic_to_shared(full)), other)", "(__cvta_generic_to_shared(full)), rank)"),
        ("(floats + 4 * i));", "(floats + 4 * i)) + 8;"),
        ("place_in_block(place, other)", "place_in_block(place, 2)"),
    ],
)
def test_what_is_sent_wrongly_is_caught(right, wrong):
    assert right in SENDING_BODY

    def caught(seed: int) -> bool:
        try:
            return not floats_sent(SENDING_BODY.replace(right, wrong), seed)
        except LaunchError:
            return True

    assert any(caught(seed) for seed in range(8))


def test_a_block_does_not_end_before_what_is_sent_to_it_has_come():
    body = """
  unsigned long long* full = reinterpret_cast<unsigned long long*>(shared_bytes);
  if (i == 0) barrier_init(full, 1);
  cluster_sync();
  const float four[4] = {};
  if (i == 0 && blockIdx.x == 0) send_to_block(place_in_block(64, 1), four, place_in_block(0, 1));
  if (i == 0) out[0] = 0;
  cluster_sync();
"""
    build, words = warpgroups.emulated(body, blocks=2, cluster=2), np.zeros(1, np.uint32)
    with pytest.raises(LaunchError, match=r"block 1 ended with the send_to_block of line \d+ by thread 0 of"):
        for seed in range(20):
            warpgroups.run(build, words, words, seed=seed)


def test_clusters_that_not_every_card_forms_must_be_asked_for():
    words = np.zeros(1, np.uint32)
    with pytest.raises(LaunchError, match="a cluster of 16 blocks, more than 8 only after cudaFuncSetAttr"):
        warpgroups.run(warpgroups.emulated("", blocks=16, cluster=16), words, words)


def test_threads_meet_at_one_line():
    body = "if (blockIdx.x) cluster_sync();\n  else cluster_sync();"
    words = np.zeros(1, np.uint32)
    with pytest.raises(
        LaunchError,
        match=r"divergent cluster_sync: block 0, thread 0 waits at line (\d+), block 1, thread 0 at line",
    ):
        warpgroups.run(warpgroups.emulated(body, blocks=2, cluster=2), words, words)


def test_a_grid_is_of_whole_clusters():
    words = np.zeros(1, np.uint32)
    with pytest.raises(LaunchError, match="a grid of 3 blocks in x, in clusters of 2"):
        warpgroups.run(warpgroups.emulated("", blocks=3, cluster=2), words, words)


# -- warps ----------------------------------------------------------------------------------------------

OWN_ROWS_BODY = """
  // Each warp multiplies by its own sixteen rows of A, and changes them in between.
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes);
  for (int j = i; j < 2048 + 256; j += 128) words[j] = 0;
  __syncthreads();
  if (i < 8) reinterpret_cast<unsigned short*>(shared_bytes + 8192)[64 * i + i % 8 * 8] = 0x3c00;
  fence_proxy_async();
  __syncthreads();
  const unsigned long long a = 1ULL << 62 | 64ULL << 32 | 1ULL << 16, b = a + 512;
  float d[4];
  for (int r = 0; r < count / 512; ++r) {
    const int row = 16 * warp + lane;
    // The first of sixteen columns.
    if (lane < 16) words[32 * row + row % 8 * 4] = in[64 * r + row];
    fence_proxy_async();
    __syncwarp();
    wgmma_fence();
    wgmma_m64n8k16_f16_ss(d, a, b, false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int j = 0; j < 4; ++j) out[(r * 128 + i) * 4 + j] = __float_as_uint(d[j]);
  }
"""


def test_a_warp_may_change_its_own_rows_between_products():
    column = np.random.default_rng(8).standard_normal((6, ROWS)).astype(np.float16)
    words = column.view(np.uint16).astype(np.uint32)
    build = warpgroups.emulated(OWN_ROWS_BODY, smem=16 * 1024)
    for seed in range(4):
        found = warpgroups.run(build, words, np.zeros((6, GROUP, 4), np.uint32), seed=seed)
        rows, _ = warpgroups.places_d(8)
        np.testing.assert_array_equal(found.view(np.float32).reshape(6, GROUP, 4), column[:, rows])


STMATRIX_BODY = """
  unsigned m[4];
  for (int r = 0; r < 4; ++r) m[r] = in[4 * lane + r];
  uint4* rows = reinterpret_cast<uint4*>(shared_bytes);
  const auto place = [](int row) { return (row * 5 + 3) % 32; };
  if (warp == 0) stmatrix_x4(rows + place(lane), m);
  if (warp == 1) stmatrix_x2(rows + 32 + place(lane % 16), m);
  __syncthreads();
  unsigned n[4] = {};
  if (warp == 0) ldmatrix_x4(n, rows + place(lane));
  if (warp == 1) ldmatrix_x2(n, rows + 32 + place(lane % 16));
  if (warp < 2) for (int r = 0; r < 4; ++r) out[4 * i + r] = n[r];
  // Row 3 of matrix 2 as it lies there: pairs of columns 0 to 7 are lanes 12 to 15's.
  if (i == 0) for (int r = 0; r < 4; ++r) out[256 + r] = reinterpret_cast<unsigned*>(rows + place(19))[r];
"""


def test_stored_matrices_are_loaded_again():
    words = random_bytes(512).view(np.uint32)
    found = warpgroups.run(warpgroups.emulated(STMATRIX_BODY), words, np.zeros(260, np.uint32))
    four, two = found[:256].reshape(2, 32, 4)
    np.testing.assert_array_equal(four, words.reshape(32, 4))
    np.testing.assert_array_equal(two[:, :2], words.reshape(32, 4)[:, :2])
    np.testing.assert_array_equal(found[256:], words.reshape(32, 4)[12:16, 2])


TRANSPOSED_BODY = """
  unsigned m[4], n[4];
  for (int r = 0; r < 4; ++r) m[r] = in[4 * lane + r];
  uint4* columns = reinterpret_cast<uint4*>(shared_bytes);
  const auto place = [](int column) { return (column * 5 + 3) % 32; };
  if (warp != 0) return;
  stmatrix_x4_trans(columns + place(lane), m);
  __syncwarp();
  ldmatrix_x4_trans(n, columns + place(lane));
  for (int r = 0; r < 4; ++r) out[4 * i + r] = n[r];
  // Column 3 of matrix 2 as it lies there: the high halves of every fourth lane from lane 1 on.
  if (i == 0) for (int r = 0; r < 4; ++r) out[128 + r] = reinterpret_cast<unsigned*>(columns + place(19))[r];
"""


def test_matrices_are_transposed_where_they_are_stored():
    words = random_bytes(512).view(np.uint32)
    found = warpgroups.run(warpgroups.emulated(TRANSPOSED_BODY), words, np.zeros(132, np.uint32))
    np.testing.assert_array_equal(found[:128], words)
    column = (words.reshape(32, 4)[1::4, 2] >> 16).astype(np.uint16)
    np.testing.assert_array_equal(found[128:].view(np.uint16), column)


BYTES_BODY = f"""
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes) + 16;
  if (i == 0) {{
    barrier_init(barrier, 1);
    fence_barrier_init();
    barrier_expect(barrier, 64 + 32);
    bulk_load(words + 4, in + 8, 64, barrier);
    bulk_load(words + 20, in, 32, barrier);
  }}
  __syncthreads();
  barrier_wait(barrier, 0);
  if (i < 24) out[i] = words[4 + i];
  if (i < 32) out[24 + i] = 0;
  float* addends = reinterpret_cast<float*>(words) + 64;
  if (i < 32) addends[i] = float(i + 1);
  fence_proxy_async();
  __syncthreads();
  if (i % {GROUP // 4} != 0) return;
  for (int n = 0; n < 3; ++n) bulk_add(reinterpret_cast<float*>(out) + 24, addends, 32 * sizeof(float));
  tma_commit();
  tma_wait_read<0>();
"""


def test_bytes_side_by_side_are_loaded_and_floats_added():
    words = random_bytes(128).view(np.uint32)
    build = warpgroups.emulated(BYTES_BODY, smem=4096)
    found = warpgroups.run(build, words, np.zeros(56, np.uint32))
    np.testing.assert_array_equal(found[:24], np.concatenate([words[8:24], words[:8]]))
    # Three times by each of four threads.
    np.testing.assert_array_equal(found[24:].view(np.float32), 12.0 * np.arange(1, 33))


#: A block's turn to add floats of its own to those that all add to: one thread's.
TURN_BODY = """
  float* sums = reinterpret_cast<float*>(shared_bytes);
  __shared__ int number;
  if (i == 0) number = atomicAdd(&taken, 1);
  __syncthreads();
  sums[i] = float(1 << number) * float(i);
  fence_proxy_async();
  __syncthreads();
  if (i != 0) return;
  AWAIT
  float* there = reinterpret_cast<float*>(out);
  if (number == 0) bulk_store(there, sums, 512); else bulk_add(there, sums, 512);
  tma_commit();
  tma_wait<0>();
  TELL
"""
#: One behind the other, the first of them by storing its own; or whoever comes, once that is there, and the
#: last to come waits until all are counted.
TURNS = {
    "in order": (
        "wait_for_number(&told, number);",
        "if (number + 1 == gridDim.x) taken = 0; leave_number(&told, (number + 1) % gridDim.x);",
    ),
    "counted": (
        "if (number > 0) wait_for_any_number(&told);",
        "add_to_number(&told, 1); if (number + 1 < gridDim.x) return; wait_for_number(&told, gridDim.x);"
        " taken = told = 0;",
    ),
}


@pytest.mark.parametrize("way", TURNS)
def test_blocks_hand_on_what_is_in_memory(way):
    waits, tells = TURNS[way]
    body = TURN_BODY.replace("AWAIT", waits).replace("TELL", tells)
    build = warpgroups.emulated(body, device="__device__ int taken, told;", blocks=5)
    for seed in range(6):
        found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros(128, np.uint32), seed=seed)
        np.testing.assert_array_equal(found.view(np.float32), 31.0 * np.arange(128))


#: A thread that awaits what another one of its block leaves, in whatever order warps run.
LEFT_IN_BLOCK_DEVICE = "__device__ int left[3];"
LEFT_IN_BLOCK_BODY = """
  if (i == 64) {
    wait_for_number(&left[blockIdx.x], 7);
    out[blockIdx.x] = 1 + blockIdx.x;
  }
  if (i == 0) leave_number(&left[blockIdx.x], 7);
"""


def test_a_block_goes_on_while_a_thread_awaits_a_number():
    build = warpgroups.emulated(LEFT_IN_BLOCK_BODY, device=LEFT_IN_BLOCK_DEVICE, blocks=3)
    for seed in range(6):
        found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros(3, np.uint32), seed=seed)
        np.testing.assert_array_equal(found, [1, 2, 3])


DISCARDED_BODY = """
  float* const there = reinterpret_cast<float*>(out);
  there[i] = float(i);
  __syncwarp();
  if (i == 32) discard_line(there + 32);
"""


def test_what_is_discarded_is_no_number():
    build = warpgroups.emulated(DISCARDED_BODY)
    found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros(128, np.uint32)).view(np.float32)
    assert np.isnan(found[32:64]).all()
    np.testing.assert_array_equal(
        np.delete(found, np.arange(32, 64)), np.delete(np.arange(128), np.arange(32, 64))
    )


STORED_BODY = """
  float* words = reinterpret_cast<float*>(shared_bytes);
  words[i] = float(i);
  fence_proxy_async();
  __syncthreads();
  if (i != 0) return;
  float* const there = reinterpret_cast<float*>(out);
  bulk_store(there, words, 512);
  tma_commit();
  tma_wait_read<0>();
  words[0] = 99;
  tma_wait<0>();
  for (int j = 0; j < 128; ++j) out[128 + j] = there[j] == float(j);
"""


def test_floats_are_stored_once_that_is_waited_for():
    def is_right(body: str, seed: int) -> bool:
        found = warpgroups.run(
            warpgroups.emulated(body), np.zeros(1, np.uint32), np.zeros(256, np.uint32), seed=seed
        )
        np.testing.assert_array_equal(found[:128].view(np.float32), np.arange(128))
        return bool(found[128:].all())

    assert all(is_right(STORED_BODY, seed) for seed in range(6))
    # What has been read need not be there yet.
    unwaited = [is_right(STORED_BODY.replace("  tma_wait<0>();\n", ""), seed) for seed in range(16)]
    assert set(unwaited) == {True, False}


SHARES_BODY = """
  if (warp / 4 == 1) give_registers<24>();
  else take_registers<240>();
  out[i] = elect_one() + 2 * elect_one();
"""


def test_one_lane_of_each_warp_is_elected():
    build = warpgroups.emulated(SHARES_BODY, threads=3 * GROUP)
    lanes = set()
    for seed in range(8):
        found = warpgroups.run(build, np.zeros(1, np.uint32), np.zeros(3 * GROUP, np.uint32), seed=seed)
        elected = found.reshape(-1, 32)
        assert ((elected == 3).sum(axis=1) == 1).all()
        assert (elected == 0).sum() == 31 * len(elected)
        lanes.add(int(elected[0].argmax()))
    assert len(lanes) > 1


# -- a kernel -------------------------------------------------------------------------------------------

KEYS, DIM = 96, 80
#: S = Q K^T for two heads of queries that share one of keys: one thread brings tiles of K to a ring of two, a
#: warpgroup multiplies and stores S as f16, 32 columns at a time. Rows of S are padded to whole 16 bytes.
SCORES_BODY = f"""
  constexpr int kKeys = {KEYS}, kSteps = {DIM // STEP}, kChunks = 2, kStages = 2;
  using Row = unsigned short[64];
  struct Storage {{
    alignas(1024) Row q[kChunks][64];
    alignas(1024) Row k[kStages][kChunks][kKeys];
    alignas(1024) unsigned short s[64][32];
    unsigned long long q_full, full[kStages], empty[kStages];
  }};
  static_assert(sizeof(Storage) <= 72 * 1024, "what the launch asks for");
  Storage& smem = *reinterpret_cast<Storage*>(shared_bytes);
  const int keys = in[0], tiles = (keys + kKeys - 1) / kKeys, head = blockIdx.x;
  if (i == 0) {{
    barrier_init(&smem.q_full, 1);
    for (int s = 0; s < kStages; ++s) {{
      barrier_init(&smem.full[s], 1);
      barrier_init(&smem.empty[s], 1);
    }}
    fence_barrier_init();
  }}
  __syncthreads();
  if (warp >= 4) {{
    if (warp == 4 && elect_one()) {{
      barrier_expect(&smem.q_full, sizeof(smem.q));
      for (int c = 0; c < kChunks; ++c) tma_load(smem.q[c], &maps.q, &smem.q_full, 64 * c, 0, head, 0);
      for (int t = 0; t < tiles; ++t) {{
        const int s = t % kStages;
        barrier_wait(&smem.empty[s], t / kStages % 2 ^ 1);
        barrier_expect(&smem.full[s], sizeof(smem.k[s]));
        for (int c = 0; c < kChunks; ++c) {{
          tma_load(smem.k[s][c], &maps.k, &smem.full[s], 64 * c, t * kKeys, head / 2, 0);
        }}
      }}
    }}
    // Meanwhile others fill the padding.
    const int pitch = (keys + 7) / 8 * 4;
    for (int row = i - 160; row >= 0 && row < 64; row += 96) {{
      for (int w = keys / 2; w < pitch; ++w) out[(64 * head + row) * pitch + w] = 0;
    }}
    return;
  }}
  const auto of = [](const void* start) {{
    return 1ULL << 62 | 64ULL << 32 | 1ULL << 16 | __cvta_generic_to_shared(start) >> 4;
  }};
  barrier_wait(&smem.q_full, 0);
  for (int t = 0; t < tiles; ++t) {{
    const int s = t % kStages;
    float d[kKeys / 2];
    barrier_wait(&smem.full[s], t / kStages % 2);
    wgmma_fence();
    for (int step = 0; step < kSteps; ++step) {{
      const unsigned long long q = of(smem.q[step / 4]), k = of(smem.k[s][step / 4]);
      wgmma_m64n{KEYS}k16_f16_ss(d, q + step % 4 * 2, k + step % 4 * 2, step > 0);
    }}
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
    if (i == 0) barrier_arrive(&smem.empty[s]);
    for (int part = 0; part < kKeys; part += 32) {{
      for (int n = 0; n < 4; n += 2) {{
        unsigned m[4];
        for (int j = 0; j < 4; ++j) {{
          const float* pair = d + (part / 8 + n) * 4 + 2 * j;
          const __half2 both = __floats2half2_rn(pair[0], pair[1]);
          m[j] = reinterpret_cast<const unsigned&>(both);
        }}
        // Rows of 64 bytes, swizzled.
        const int row = warp * 16 + lane % 16, piece = n + lane / 16;
        stmatrix_x4(&smem.s[row][(piece ^ row / 2 % 4) * 8], m);
      }}
      fence_proxy_async();
      named_barrier_sync(1, {GROUP});
      if (i == 0) {{
        tma_store(&maps.s, smem.s, t * kKeys + part, 0, head, 0);
        tma_commit();
        tma_wait_read<0>();
      }}
      named_barrier_sync(2, {GROUP});
    }}
  }}
"""
SCORES_HOST = f"""
  const cuuint64_t keys = args->k[0], pitch = (keys + 7) / 8 * 16;
  char* const q = (char*)(args->k + {HEADER});
  const cuuint32_t ones[] = {{1, 1, 1, 1}};
  const auto make = [&](CUtensorMap* map, char* base, cuuint64_t columns, cuuint64_t rows, cuuint64_t heads,
                        cuuint64_t pitch, cuuint32_t box_columns, cuuint32_t box_rows, int bytes) {{
    const cuuint64_t sizes[] = {{columns, rows, heads, 1}}, strides[] = {{pitch, rows * pitch, 16}};
    const cuuint32_t box[] = {{box_columns, box_rows, 1, 1}};
    const auto swizzle = bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, base, sizes, strides, box, ones,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }};
  constexpr cuuint64_t kRow = 2 * {DIM};
  if (make(&maps.q, q, {DIM}, 64, 2, kRow, 64, 64, 128) != CUDA_SUCCESS) return 97;
  char* const k = q + 2 * 64 * kRow;
  if (make(&maps.k, k, {DIM}, keys, 1, kRow, 64, {KEYS}, 128) != CUDA_SUCCESS) return 98;
  if (make(&maps.s, (char*)args->o, keys, 64, 2, pitch, 32, 64, 64) != CUDA_SUCCESS) return 99;
"""


def scores_are_right(body: str, keys: int, seed: int, *, sanitize: bool = False) -> bool:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, 64, DIM)).astype(np.float16)
    # The larger the later, so that a tile too early or too late shows.
    k = (rng.standard_normal((keys, DIM)) * np.linspace(0.5, 2, keys)[:, None]).astype(np.float16)
    header = np.zeros(HEADER, np.uint32)
    header[0] = keys
    words = np.concatenate([header, q.reshape(-1).view(np.uint32), k.reshape(-1).view(np.uint32)])
    build = warpgroups.emulated(
        body,
        host=SCORES_HOST,
        maps="q, k, s",
        blocks=2,
        threads=2 * GROUP,
        smem=72 * 1024,
        sanitize=sanitize,
    )
    pitch = -(-keys // 8) * 8
    found = warpgroups.run(build, words, np.zeros(64 * pitch, np.uint32), seed=seed, sanitize=sanitize)
    s = found.view(np.float16).reshape(2, 64, pitch)
    expected = q.astype(np.float64) @ k.T.astype(np.float64)
    return bool(np.allclose(s[..., :keys], expected, rtol=1e-3, atol=1e-3) and not s[..., keys:].any())


@pytest.mark.parametrize("keys", [KEYS, 250, 400])
def test_a_pipeline_of_copies_and_products_is_right(keys):
    assert all(scores_are_right(SCORES_BODY, keys, seed) for seed in range(4))


def test_the_sanitizer_leaves_a_good_pipeline_alone():
    assert scores_are_right(SCORES_BODY, 250, 0, sanitize=True)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("barrier_wait(&smem.q_full, 0);", ""),
        ("barrier_wait(&smem.full[s], t / kStages % 2);", ""),
        ("barrier_wait(&smem.empty[s], t / kStages % 2 ^ 1);", ""),
        ("if (i == 0) barrier_arrive(&smem.empty[s]);", ""),
        ("sizeof(smem.k[s]))", "sizeof(smem.k[s]) / 2)"),
        ("fence_barrier_init();", ""),
        ("wgmma_fence();", ""),
        ("wgmma_commit();", ""),
        ("wgmma_wait<0>();", ""),
        ("wgmma_wait<0>();", "wgmma_wait<1>();"),
        ("fence_proxy_async();", ""),
        ("fence_proxy_async();", "if (i == 0) fence_proxy_async();"),
        ("named_barrier_sync(1, 128);", ""),
        ("named_barrier_sync(2, 128);", ""),
        ("tma_commit();", ""),
        ("tma_wait_read<0>();", ""),
        ("step % 4 * 2, step > 0", "step % 4 * 2, true"),
    ],
)
def test_a_pipeline_with_a_mistake_is_caught(right, wrong):
    assert SCORES_BODY.count(right) == 1
    body = SCORES_BODY.replace(right, wrong)

    def caught(seed: int) -> bool:
        try:
            return not scores_are_right(body, 400, seed)
        except LaunchError:
            return True

    assert any(caught(seed) for seed in range(6))


# -- misuse ---------------------------------------------------------------------------------------------

#: Two warpgroups and a warp. Shared memory is zeros, but for the last KiB: A is at its start, B 8 KiB on.
MISUSE_BODY = f"""
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes);
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes + 32 * 1024);
  const unsigned long long a = 1ULL << 62 | 64ULL << 32 | 1ULL << 16, b = a + 512;
  float d[32] = {{}};
  unsigned f[4] = {{}};
  [[maybe_unused]] volatile float* accumulator = d;
  [[maybe_unused]] volatile unsigned* factor = f;
  for (int j = i; j < 8 * 1024; j += blockDim.x) words[j] = 0;
  for (int j = i; j < count; j += blockDim.x) out[j] = 0;
  fence_proxy_async();
  __syncthreads();
  const auto ready = [&] {{
    if (i == 0) {{
      barrier_init(barrier, 1);
      fence_barrier_init();
    }}
    __syncthreads();
  }};
  switch (in[{HEADER - 1}]) {{
"""
LOAD = "tma_load(words, &maps.load, barrier, 0, 0, 0, 0);"
STORE = "tma_store(&maps.store, words, 0, 0, 0, 0);"
ADD = "bulk_add(reinterpret_cast<float*>(out), reinterpret_cast<float*>(words), 16);"
MULTIPLY = "wgmma_m64n64k16_f16_ss(d, a, b, false);"
NAME = "wgmma_m64n64k16_f16_ss"
MISUSES = [
    # Barriers in shared memory.
    (
        "barrier_arrive(barrier);",
        r"barrier_arrive in line \d+ of the uninitialised barrier at byte 32768 of sh",
    ),
    (
        "if (i == 3) { barrier_init(barrier, 1); barrier_init(barrier, 1); }",
        r"thread 3: barrier_init in line \d+ for 1 arrivals, where a barrier is already",
    ),
    (
        "if (i == 3) barrier_init(barrier, 0);",
        r"barrier_init in line \d+ for 0 arrivals: 1 to 1048575 are ser",
    ),
    (
        "if (i == 3) barrier_init((unsigned long long*)(words + 1), 1);",
        r"thread 3: barrier_init in line \d+ at byte 4 of 33792 bytes of shared memory: it takes 8 bytes",
    ),
    (
        "ready(); if (i == 1) { barrier_expect(barrier, 16); barrier_arrive(barrier); }",
        r"thread 1: barrier_arrive in line \d+ is one arrival more than the 1 of a phase of the barrier",
    ),
    (
        "ready(); if (i == 1) barrier_expect(barrier, 1 << 20);",
        r"barrier_expect in line \d+ announces 1048576 bytes where 0 are to come: 1048575 is the limit",
    ),
    (
        "ready(); if (i == 1) *(unsigned*)barrier = 0; __syncthreads(); barrier_wait(barrier, 0);",
        r"barrier_wait in line \d+ of the overwritten barrier at byte 32768 of shared memory",
    ),
    (
        "ready(); if (i == 9) barrier_wait(barrier, 0);",
        r"287 have returned, 1 wait at barrier_wait in line \d+ for parity 0 of the barrier at byte 32768,"
        r" whose phase 0 lacks 1 of 1 arrivals and 0 bytes \(thread 9\)",
    ),
    (
        "ready(); if (i == 9) while (!barrier_test(barrier, 0)) {}",
        r"287 have returned, 1 wait at barrier_test in line \d+ for parity 0 of the barrier",
    ),
    (
        f"ready(); if (i == 0) {{ barrier_expect(barrier, 4096); {LOAD} }} barrier_wait(barrier, 0);",
        r"288 wait at barrier_wait .* lacks 0 of 1 arrivals and 2048 bytes \(from thread 0\)",
    ),
    (
        f"ready(); if (i == 0) {{ barrier_expect(barrier, 1024); {LOAD} }} barrier_wait(barrier, 0);",
        r"288 wait at barrier_wait .* lacks 0 of 1 arrivals and -1024 bytes",
    ),
    # Copies of boxes.
    (
        f"if (i == 4) {{ barrier_init(barrier, 1); barrier_expect(barrier, 2048); {LOAD} }}",
        r"tma_load in line \d+ by the barrier at byte 32768, which thread 4 initialised without fence_",
    ),
    (
        "ready(); if (i == 0) tma_load(words + 16, &maps.load, barrier, 0, 0, 0, 0);",
        r"tma_load in line \d+ at byte 64 of 33792 bytes of shared memory: it takes 2048 bytes from a"
        " multiple of 128",
    ),
    (
        "if (i == 0) tma_store(&maps.store, words + 8 * 1024, 0, 0, 0, 0);",
        r"tma_store in line \d+ at byte 32768 of 33792 bytes of shared memory: it takes 2048 bytes",
    ),
    (
        "if (i == 0) prefetch_map(reinterpret_cast<const CUtensorMap*>(words));",
        r"prefetch_map in line \d+ of what is no tensor map",
    ),
    (
        "if (i == 0) tma_store((const CUtensorMap*)(&maps.store.opaque[1]), words, 0, 0, 0, 0);",
        r"tma_store in line \d+ of what is no tensor map",
    ),
    (
        f"ready(); if (i == 7) {{ barrier_expect(barrier, 2048); {LOAD} }}",
        r"block 0 ended with the tma_load of line \d+ by thread 7 under way",
    ),
    (
        f"if (i == 5) {{ {STORE} tma_commit(); }}",
        r"thread 5 ended with the tma_store of line \d+ not waited for$",
    ),
    (
        f"if (i == 5) {{ {STORE} tma_wait_read<0>(); }}",
        r"thread 5 ended with the tma_store of line \d+ not waited for: no tma_commit follows it",
    ),
    (
        f"if (i == 5) {{ {STORE} tma_commit(); words[0] = 1; tma_wait_read<0>(); }}",
        r"thread 5: the source of the tma_store in line \d+, from byte 0 of shared memory, changed before",
    ),
    (
        # Nobody has fenced since the copy engine last saw the place.
        f"if (i == 5) {{ {STORE} tma_commit(); tma_wait_read<0>(); }} __syncthreads(); words[i] = 1;"
        f" __syncthreads(); if (i == 5) {{ {STORE} }}",
        r"thread 5: tma_store in line \d+ of byte 0 of shared memory, written without fence_proxy_async",
    ),
    (
        "if (warp == 1) stmatrix_x4(words + 4 * lane, f); if (i != 33) fence_proxy_async();"
        f" __syncthreads(); if (i == 5) {{ {STORE} }}",
        r"thread 5: tma_store in line \d+ of byte 16 of shared memory, written by thread 33 without fence_",
    ),
    # Copies of bytes side by side.
    (
        "ready(); if (i == 2) bulk_load(words, in + 1, 64, barrier);",
        r"thread 2: bulk_load in line \d+ of 64 bytes at 0x[0-9a-f]+: it takes multiples of 16",
    ),
    (
        "if (i == 2) bulk_add(reinterpret_cast<float*>(out), reinterpret_cast<float*>(words), 24);",
        r"thread 2: bulk_add in line \d+ of 24 bytes at 0x[0-9a-f]+: it takes multiples of 16",
    ),
    (
        f"if (i == 5) {{ {ADD} tma_commit(); }}",
        r"thread 5 ended with the bulk_add of line \d+ not waited for$",
    ),
    (
        f"if (i == 5) {{ {ADD} tma_commit(); tma_wait_read<0>(); }} __syncthreads(); words[i] = 1;"
        f" __syncthreads(); if (i == 5) {{ {ADD} }}",
        r"thread 5: bulk_add in line \d+ of byte 0 of shared memory, written without fence_proxy_async",
    ),
    (
        f"if (i == 5) {{ {ADD} tma_commit(); words[1] = 1; tma_wait_read<0>(); }}",
        r"thread 5: the source of the bulk_add in line \d+, from byte 0 of shared memory, changed before it",
    ),
    (
        "if (i == 5) wait_for_number(reinterpret_cast<int*>(out), 7);",
        r"thread 5: wait_for_number in line \d+ for 7, where 0 is: no block leaves it there",
    ),
    (
        "if (i == 5) wait_for_any_number(reinterpret_cast<int*>(out));",
        r"thread 5: wait_for_any_number in line \d+ for any, where 0 is: no block leaves it there",
    ),
    (
        "if (i == 5) discard_line(reinterpret_cast<float*>(out) + 4);",
        r"thread 5: discard_line in line \d+ at 0x\w+, which does not begin a line of 128 bytes",
    ),
    # Products of warpgroups.
    (
        f"if (warp < 4) {MULTIPLY}",
        rf"{NAME} in line \d+ without wgmma_fence since the last wgmma_commit or wgm",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_commit(); {MULTIPLY} }}",
        rf"{NAME} in line \d+ without wgmma_fence since the last wgmma_commit or wgmma_wait",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_wait<0>(); }}",
        rf"ended with the {NAME} of line \d+ not waited for: no wgmma_commit follows it",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_commit(); }}",
        rf"ended with the {NAME} of line \d+ not waited for$",
    ),
    (
        f"if (warp < 3) {{ wgmma_fence(); {MULTIPLY} wgmma_commit(); wgmma_wait<0>(); }}",
        r"96 wait at wgmma_wait in line \d+ for warpgroup 0, whose four warps must all come \(from thr",
    ),
    (
        f"if (warp == 8) {{ wgmma_fence(); {MULTIPLY} }}",
        rf"called {NAME} in line \d+ in a warpgroup of 32 threads: it takes all 128",
    ),
    ("if (warp == 8) wgmma_wait<0>();", r"called wgmma_wait in line \d+ in a warpgroup of 32 threads"),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_f16_ss(d, a, b + (warp == 2 ? 2 : 0), false);"
        " wgmma_commit(); wgmma_wait<0>(); }",
        rf"divergent products in block 0: thread \d+ of warpgroup 0 comes to {NAME} of 0x4000004000010000 and"
        r" 0x400000400001020[02] in line \d+, others to",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); if (warp != 1) {MULTIPLY} wgmma_commit(); wgmma_wait<0>(); }}",
        r"divergent wgmma_wait in line \d+ of block 0: threads 0 and 32 have started different products",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_commit(); if (i == 70) accumulator[3] = 1;"
        " wgmma_wait<0>(); }",
        rf"thread 70: accumulator 3 of {NAME} in line \d+ changed before it was waited for",
    ),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_bf16_rs(d, f, b, false); wgmma_commit();"
        " if (i == 70) factor[2] = 1; wgmma_wait<0>(); }",
        r"thread 70: the factor in registers of wgmma_m64n64k16_bf16_rs in line \d+ changed before it was",
    ),
    (
        f"if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_commit();"
        " if (i == 70) { words[2048 + 33] = 1; fence_proxy_async(); } wgmma_wait<0>(); }",
        rf"what {NAME} in line \d+ reads from shared memory changed before it was waited for",
    ),
    (
        f"for (int t = 0; t < 2; ++t) {{ if (warp < 4) {{ wgmma_fence(); {MULTIPLY} wgmma_commit();"
        " wgmma_wait<0>(); } __syncthreads(); if (i == 70) words[2048] = 1; __syncthreads(); }",
        rf"{NAME} in line \d+ of byte 8192 of shared memory, written without fence_proxy_async",
    ),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_f16_ss(d, a & ~(3ULL << 62), b, false); }",
        r"by the descriptor 0x0000004000010000, without a swizzle: that is not emulated",
    ),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_f16_ss(d, a, b | 1ULL << 49, false); }",
        r"by the descriptor 0x4002004000010200, with a base offset: that is not emulated",
    ),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_f16_ss(d, a, b + 8, false); }",
        r"by the descriptor 0x4000004000010208, from where its swizzle does not begin: that is not emulated",
    ),
    (
        "if (warp < 4) { wgmma_fence(); wgmma_m64n64k16_f16_ss(d, a, b + 1536, false); }",
        rf"{NAME} in line \d+ reads byte 33792 of 33792 bytes of shared memory",
    ),
    # Named barriers.
    (
        "named_barrier_sync(0, 64);",
        r"named_barrier_sync in line \d+ at barrier 0 for 64 threads: 1 to 15 are served, for whole warps of"
        " the block's 288",
    ),
    ("named_barrier_arrive(16, 64);", r"named_barrier_arrive in line \d+ at barrier 16 for 64 threads"),
    ("named_barrier_sync(1, 40);", r"at barrier 1 for 40 threads: 1 to 15 are served, for whole warps"),
    ("named_barrier_sync(1, 320);", r"at barrier 1 for 320 threads: 1 to 15 are served"),
    (
        "if (warp == 0) named_barrier_arrive(1, 64); __syncthreads();"
        " if (warp == 1) named_barrier_arrive(1, 96);",
        r"named_barrier_arrive in line \d+ at barrier 1 for 96 threads, others came to it for 64",
    ),
    (
        "if (i < 16) named_barrier_sync(1, 32);",
        r"272 have returned, 16 wait at named_barrier_sync\(0xffffffff\)",
    ),
    (
        "if (warp == 0) named_barrier_sync(1 + lane % 2, 32);",
        r"a warp comes to barrier 1 for 32 threads and to barrier 2 for 32",
    ),
    (
        "if (warp == 2 || warp == 5) named_barrier_sync(3, 96);",
        r"64 wait at named_barrier_sync in line \d+ for barrier 3, to which 64 of 96 threads have come \(fr",
    ),
    # Registers, election, matrices.
    (
        "if (warp == 1) give_registers<24>();",
        r"threads 0 and 32 of a warpgroup came to different take_registers or give_registers",
    ),
    (
        "if (warp < 8) take_registers<240>();",
        r"68608 registers are taken, a launch of 288 threads has at most 64512: take_registers",
    ),
    (
        "if (warp == 8) take_registers<240>();",
        r"called take_registers in line \d+ in a warpgroup of 32 threads",
    ),
    ("if (i != 35) elect_one();", r"31 wait at elect_one\(0xffffffff\) in line \d+"),
    (
        "stmatrix_x4(words + 2, f);",
        r"stmatrix_x4 in line \d+ at byte 8 of 33792 bytes of shared memory: it takes 16",
    ),
]


#: Two blocks of a warpgroup, each with a barrier at byte 0.
CLUSTER_BODY = f"""
  const unsigned rank = blockIdx.x;
  unsigned* words = reinterpret_cast<unsigned*>(shared_bytes + 1024);
  unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_bytes);
  for (int j = i; j < count; j += blockDim.x) out[j] = 0;
  const auto ready = [&] {{
    if (i == 0) {{
      barrier_init(barrier, 1);
      fence_barrier_init();
    }}
    cluster_sync();
  }};
  switch (in[{HEADER - 1}]) {{
"""
MULTICAST = "tma_multicast(words, &maps.load, barrier, {}, 0, 0, 0, 0);"
CLUSTER_MISUSES = [
    (
        "if (i == 0 && rank == 0) barrier_arrive_at(barrier, 1); cluster_sync();",
        r"block 0, thread 0: barrier_arrive_at in line \d+ of the uninitialised barrier at byte 0 of shared"
        " memory of block 1",
    ),
    (
        "ready(); if (i == 0 && rank == 0) barrier_expect(barrier, 16); cluster_sync();"
        " if (i == 5 && rank == 1) barrier_arrive_at(barrier, 0); cluster_sync();",
        r"block 1, thread 5: barrier_arrive_at in line \d+ is one arrival more than the 1 of a phase of the"
        " barrier at byte 0 of block 0",
    ),
    (
        "ready(); if (i == 0) barrier_arrive_at(barrier, 2); cluster_sync();",
        r"block [01], thread 0: barrier_arrive_at in line \d+ at block 2 of a cluster of 2",
    ),
    (
        f"ready(); if (i == 0) {{ barrier_expect(barrier, 2048); {MULTICAST.format(5)} }} cluster_sync();",
        r"thread 0: tma_multicast in line \d+ at block 2 of a cluster of 2",
    ),
    (
        "ready(); if (i == 0 && rank == 0) barrier_arrive_at(barrier, 1);",
        r"block 0, thread 0: barrier_arrive_at in line \d+ at block 1, which has ended",
    ),
    (
        f"ready(); if (i == 0 && rank == 1) {{ {MULTICAST.format(1)} }}",
        r"block 1, thread 0: tma_multicast in line \d+ at block 0, which has ended",
    ),
    (
        f"ready(); if (i == 9 && rank == 0) {{ {MULTICAST.format(2)} }} cluster_sync();",
        r"block 1 ended with the tma_multicast of line \d+ by thread 9 of block 0 under way",
    ),
    (
        "if (i == 7) barrier_init(barrier, 1); cluster_sync();"
        f" if (i == 0 && rank == 0) {{ {MULTICAST.format(2)} }} cluster_sync();",
        r"block 0, thread 0: tma_multicast in line \d+ by the barrier at byte 0 of block 1, which thread 7"
        " initialised without fence_barrier_init",
    ),
    (
        "ready(); if (rank == 1 && i == 3) barrier_wait(barrier, 0); cluster_sync();",
        r"deadlock in block 0 of 128 threads: 128 wait at cluster_sync in line \d+ for all threads of the"
        r" cluster \(from thread 0\); deadlock in block 1 of 128 threads: 1 wait at barrier_wait in line \d+"
        r" .* \(thread 3\), 127 wait at cluster_sync",
    ),
]


@cache
def misuse_build() -> Build:
    body = MISUSE_BODY + cases_of(MISUSES)
    return warpgroups.emulated(body, host=warpgroups.BOX_HOST, threads=288, smem=33 * 1024)


@cache
def cluster_misuse_build() -> Build:
    body = CLUSTER_BODY + cases_of(CLUSTER_MISUSES)
    return warpgroups.emulated(body, host=warpgroups.BOX_HOST, blocks=2, smem=4096, cluster=2)


def cases_of(misuses: list[tuple[str, str]]) -> str:
    cases = (f"    case {number}:\n      {code}\n      break;\n" for number, (code, _) in enumerate(misuses))
    return "".join(cases) + "  }"


@pytest.mark.parametrize("number", range(len(MISUSES)), ids=lambda number: MISUSES[number][0][:60])
def test_misuse_is_reported(number):
    check_misuse(misuse_build(), number, *MISUSES[number])


@pytest.mark.parametrize(
    "number", range(len(CLUSTER_MISUSES)), ids=lambda number: CLUSTER_MISUSES[number][0][:60]
)
def test_misuse_of_a_cluster_is_reported(number):
    check_misuse(cluster_misuse_build(), number, *CLUSTER_MISUSES[number])


def check_misuse(build: Build, number: int, code: str, message: str) -> None:
    boxes = Boxes((64, 16, 1, 1), (128, 16, 16), (64, 16, 1, 1))
    header = boxes.header()
    header[HEADER - 1] = number
    words = np.concatenate([header, np.zeros(512, np.uint32)])
    line = build.kernel.source.split(f"case {number}:")[0].count("\n") + 2
    with pytest.raises(LaunchError, match=message) as caught:
        # Some show in most orders of events, not in all.
        for seed in range(8):
            warpgroups.run(build, words, np.zeros(512, np.uint32), seed=seed)
    for named in re.findall(r"line (\d+)", str(caught.value)):
        assert int(named) == line, code


def test_boxes_narrower_than_their_swizzle_are_refused():
    boxes = Boxes((32, 16, 1, 1), (64, 16, 16), (32, 16, 1, 1), swizzle=128)
    with pytest.raises(
        LaunchError, match=r"tma_load in line \d+ of rows of 64 bytes swizzled by 128: only whole"
    ):
        load(boxes, random_bytes(1024), (0, 0, 0, 0))
