"""Tensor cores of a real card against the emulated one: the PTX means what the emulation takes it for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch
from flashgen.gen.problem import Problem
from flashgen.gen.render import environment
from flashgen.tuner.cards.cuda import CudaDevice, CudaRunner

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

PRODUCTS = 512
TURING, AMPERE_ARCH, ADA_ARCH, HOPPER_ARCH = 75, 80, 89, 90

#: The functions that a card of that compute capability can compile.
FUNCTIONS = """
{% import "common/ptx/ampere.cu.jinja" as ampere %}
{% for count in (1, 2, 4) %}
{{ ampere.ldmatrix(count) }}
{{ ampere.ldmatrix(count, transposed=true) }}
{% endfor %}
{{ ampere.mma(8, "f16") }}
{% if arch >= 80 %}
{{ ampere.asynchronous_copy() }}
{% for k, type in ((16, "f16"), (16, "bf16"), (8, "bf16"), (8, "tf32")) %}
{{ ampere.mma(k, type) }}
{% endfor %}
{% endif %}
{% if arch >= 89 %}
{{ ampere.mma(32, "e4m3") }}
{% endif %}
"""
SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
%(functions)s
extern "C" __global__ void tiny_kernel(const unsigned* in, const unsigned* accumulators, unsigned* out,
                                       int count) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  [[maybe_unused]] const int lane = i %% 32;
  %(body)s
}
"""

Run = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def runner(device: CudaDevice) -> Iterator[CudaRunner]:
    if device.limits.arch < TURING:
        pytest.skip(f"{device.limits.name} has no mma of these shapes")
    runner = device.open()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def run(device: CudaDevice, runner: CudaRunner) -> Run:
    """Runs a body of `fragments` on the card: words and accumulators in, as many words out."""
    arch, cuda = device.limits.arch, runner._cuda
    functions = environment().from_string(FUNCTIONS).render(arch=arch)

    def launch(
        body: str, words: np.ndarray, accumulators: np.ndarray, *, blocks: int = 1, threads: int = LANES
    ) -> np.ndarray:
        source = SOURCE % {"functions": functions, "body": body}
        kernel = Kernel(Problem(head_dim=1), Simt(), arch, source, "tiny", (Launch(threads, 1024, None),))
        build = device.toolchain().build(kernel)
        function = cuda.module_from_buffer(build.artifact.read_bytes()).get_function("tiny_kernel")
        words, accumulators = (np.ascontiguousarray(x).view(np.uint32).ravel() for x in (words, accumulators))
        # What the kernel leaves out shows as what it never writes.
        out = np.full(accumulators.size, 0x7FA5A5A5, np.uint32)
        function(
            cuda.In(words),
            cuda.In(accumulators),
            cuda.InOut(out),
            np.int32(out.size),
            block=(threads, 1, 1),
            grid=(blocks, 1),
            shared=1024,
        )
        return out

    return launch


def require(device: CudaDevice, instruction: Instruction) -> None:
    if device.limits.arch < AMPERE_ARCH and instruction.name != "mma_m16n8k8_f16":
        pytest.skip(f"sm_{device.limits.arch} has no {instruction.name}")


def products(run: Run, instruction: Instruction, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    factors = np.stack([fragments.pack_factors(instruction, x, y) for x, y in zip(a, b, strict=True)])
    accumulators = np.stack([fragments.pack_d(x) for x in c])
    out = run(fragments.product_body(instruction), factors, accumulators, blocks=len(a))
    return np.stack([fragments.unpack_d(d) for d in out.view(np.float32).reshape(-1, LANES, 4)])


def cores_of(device: CudaDevice) -> Cores:
    return HOPPER if device.limits.arch >= HOPPER_ARCH else AMPERE


def same_numbers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Bit for bit, but any NaN is as good as another."""
    return (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))


each_instruction = pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)


@each_instruction
@pytest.mark.parametrize("spread", [0.0, 2.0, 4.0])
def test_products(device, run, record_property, instruction, spread):
    require(device, instruction)
    a, b, c = fragments.random_factors(instruction, PRODUCTS, np.random.default_rng(1), spread)
    card = products(run, instruction, a, b, c)
    emulated = fragments.emulated_products(instruction, a, b, c)
    same_generation = fragments.emulated_products(instruction, a, b, c, cores_of(device))
    for name, other in (("default", emulated), (cores_of(device).emulated, same_generation)):
        differ = int((~same_numbers(card, other)).sum())
        record_property(f"differ_from_{name}", differ)
        print(f"{instruction.name}, spread {spread:g}: {differ} of {card.size} differ from emulated {name}")

    wide_a, wide_b = (instruction.to_float(x).astype(np.float64) for x in (a, b))
    exact, bound = wide_a @ wide_b + c, fragments.error_bound(instruction, wide_a, wide_b, c)
    for name, d in (("card", card), ("emulated", emulated), ("same generation", same_generation)):
        assert (np.abs(d - exact) <= bound).all(), name


@pytest.mark.parametrize("spread", [0.0, 2.0, 4.0])
def test_products_of_eight_bits(device, run, record_property, spread):
    """Each element has its place, and no card keeps fewer bits than the emulation."""
    if device.limits.arch < ADA_ARCH:
        pytest.skip(f"{device.limits.name} multiplies no e4m3")
    a, b, c = fragments.random_factors(E4M3, PRODUCTS, np.random.default_rng(1), spread)
    card, emulated = products(run, E4M3, a, b, c), fragments.emulated_products(E4M3, a, b, c)
    record_property("differ_from_default", int((~same_numbers(card, emulated)).sum()))
    wide_a, wide_b = (E4M3.to_float(x).astype(np.float64) for x in (a, b))
    bound = fragments.error_bound(E4M3, wide_a, wide_b, c, ADA)
    for name, d in (("card", card), ("emulated", emulated)):
        assert (np.abs(d - (wide_a @ wide_b + c)) <= bound).all(), name


@each_instruction
def test_every_element_has_its_place(device, run, instruction):
    require(device, instruction)
    count = ROWS * instruction.k
    a = np.zeros((count, ROWS, instruction.k), np.float32)
    a[np.arange(count), np.arange(count) // instruction.k, np.arange(count) % instruction.k] = 1
    b = np.arange(1, 1 + instruction.k * COLUMNS, dtype=np.float32).reshape(instruction.k, COLUMNS)
    c = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    bits_a = instruction.from_float(a)
    bits_b = instruction.from_float(np.broadcast_to(b, (count, *b.shape)))
    d = products(run, instruction, bits_a, bits_b, np.broadcast_to(c, (count, *c.shape)))
    np.testing.assert_array_equal(d, a @ b + c)


@each_instruction
def test_infinities_nan_and_subnormals(device, run, record_property, instruction):
    """A product is NaN or infinite on the card where it is in the emulation; subnormal factors count."""
    require(device, instruction)
    rng = np.random.default_rng(2)
    a, b, c = fragments.random_factors(instruction, PRODUCTS, rng)
    special = {
        "f16": (0x7C00, 0xFC00, 0x7E00, 0x0000, 0x0001, 0x83FF),
        "bf16": (0x7F80, 0xFF80, 0x7FC0, 0x0000, 0x0001, 0x807F),
        "tf32": (0x7F800000, 0xFF800000, 0x7FC00000, 0x00000000, 0x00002000, 0x807FE000),
    }[instruction.type]
    for bits in (a, b):
        for value in special:
            bits[rng.random(bits.shape) < 0.01] = value
    c[rng.random(c.shape) < 0.01] = np.inf
    c[rng.random(c.shape) < 0.01] = np.nan
    card = products(run, instruction, a, b, c)
    emulated = fragments.emulated_products(instruction, a, b, c, cores_of(device))
    finite = np.isfinite(emulated)
    assert 0 < finite.sum() < finite.size
    assert same_numbers(card, emulated)[~finite].all()
    assert np.isfinite(card[finite]).all()
    differ = int((~same_numbers(card, emulated)).sum())
    record_property("differ", differ)
    print(f"{instruction.name}, special values: {differ} of {card.size} differ from the emulation")


def test_subnormal_factors_are_kept(device, run):
    instruction = next(i for i in INSTRUCTIONS if i.name == "mma_m16n8k8_f16")
    a = np.full((1, ROWS, 8), 0x0001, np.uint32)
    b = np.full((1, 8, COLUMNS), 0x4000, np.uint32)
    d = products(run, instruction, a, b, np.zeros((1, ROWS, COLUMNS), np.float32))
    np.testing.assert_array_equal(d, np.float32(16 * 2.0**-24))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loaded_matrices(run, count, transposed):
    words = np.random.default_rng(3).integers(0, 2**32, (LANES, 4), dtype=np.uint32)
    body = fragments.LOAD_BODY % (f"ldmatrix_x{count}{'_trans' if transposed else ''}", 8 * count)
    nothing = np.zeros(4 * LANES, np.uint32)
    card = run(body, words, nothing)
    assert card.any()
    np.testing.assert_array_equal(card, fragments.run_emulated(fragments.emulated(body), words, nothing))


def test_a_guarded_copy(device, run):
    if device.limits.arch < AMPERE_ARCH:
        pytest.skip(f"sm_{device.limits.arch} has no cp.async")
    words = np.arange(1, 41, dtype=np.uint32)
    body = fragments.GUARDED_COPY_BODY.replace("nullptr", "in") % "__pipeline_wait_prior(0);"
    card = run(body, words, np.zeros(2 * LANES, np.uint32))
    np.testing.assert_array_equal(card, np.concatenate([words, np.zeros(24, np.uint32)]))


def test_widening_conversions(run):
    nothing = np.zeros(2 * 65536, np.uint32)
    card = run(fragments.TO_FLOAT_BODY, np.zeros(1, np.uint32), nothing, threads=256)
    built = fragments.emulated(fragments.TO_FLOAT_BODY, threads=256)
    emulated = fragments.run_emulated(built, np.zeros(1, np.uint32), nothing)
    assert same_numbers(card.view(np.float32), emulated.view(np.float32)).all()


def test_rounding_conversions(run):
    words = fragments.floats_to_round()
    nothing = np.zeros(words.size, np.uint32)
    card = run(fragments.FROM_FLOAT_BODY, words, nothing, threads=256)
    emulated = fragments.run_emulated(
        fragments.emulated(fragments.FROM_FLOAT_BODY, threads=256), words, nothing
    )
    np.testing.assert_array_equal(card, emulated)
