"""The CUDA runner against a stand-in for PyCUDA: addresses, guards, timing and errors, without a GPU."""

import builtins
import gc
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from flashgen.gen.append import HALVES, Append
from flashgen.gen.arguments import MapDescription, describe_maps, make_arguments
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.handover.plan import Plan
from flashgen.gen.launch import Launch, TensorMap
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import typical_values
from flashgen.tuner.cards import cuda, driver, nvml, timed_tensors
from flashgen.tuner.cards.driver import DriverError
from flashgen.tuner.cards.dtypes import NUMPY_DTYPES, bits_dtype, numpy_dtype, unwritten_bits
from flashgen.tuner.cards.pages import gather
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.cards.sequences import sequence_slices
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate.cases import Case
from flashgen.tuner.evaluate.comparison import WrongResult, compare
from flashgen.tuner.evaluate.inputs import make_inputs
from flashgen.tuner.evaluate.reference import attention
from flashgen.tuner.evaluate.validate import validate

from tests.support import fake_cuda
from tests.support.fakes import arithmetic_of, attend, fake_build

DTYPES = tuple(NUMPY_DTYPES)
PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=1, seqlen_q=50, seqlen_k=60, head_dim=32)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A fake card in place of PyCUDA."""
    fake_cuda.state.__init__()
    fake_cuda.KERNELS.clear()
    fake_cuda.Device.num_devices = 1
    package = ModuleType("pycuda")
    package.driver = fake_cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", fake_cuda)
    libcuda = fake_cuda.Libcuda()
    monkeypatch.setattr(driver, "library", lambda: libcuda)
    monkeypatch.setattr(nvml, "_library", lambda: None)
    monkeypatch.setattr(cuda, "MIN_FLUSH_BYTES", 0)
    cuda._driver.cache_clear()
    yield fake_cuda.state
    cuda._driver.cache_clear()


@pytest.fixture
def runner(card):
    runner = cuda.find_device(0).open()
    yield runner
    runner.close()


def right(args):
    q, k, v, o = (args.tensor(i) for i in range(4))
    result, lse = attend(q, k, v, args.scale, False, arithmetic_of(args.problem))
    o[...] = result
    if args.lse() is not None:
        args.lse()[...] = lse


def build_of(tmp_path, kernel, name="kernel", problem=PROBLEM, smem_bytes=65536):
    """A build whose launches call ``kernel``."""
    symbol = f"{name}_kernel"
    fake_cuda.KERNELS[symbol], fake_cuda.PROBLEMS[symbol] = kernel, problem
    cubin = tmp_path / f"{name}.cubin"
    cubin.write_bytes(b"\x7fELF")
    plain = fake_build(problem=problem)
    launch = Launch(threads=128, smem_bytes=smem_bytes, rows_per_block=16)
    return replace(plain, kernel=replace(plain.kernel, entry=name, launches=(launch,)), artifact=cubin)


# -- the card -----------------------------------------------------------------------------------------


def test_limits_are_read_from_the_driver():
    device = cuda.find_device(0)
    limits = device.limits
    assert (limits.name, limits.slug, limits.arch, limits.num_sms) == ("NVIDIA H200", "nvidia_h200", 90, 132)
    assert (limits.smem_per_block, limits.smem_per_sm) == (232448, 233472)
    assert (limits.clock_mhz, limits.dram_gbps, limits.max_blocks_per_sm) == (1980, 4917, 32)
    assert (device.spec, device.predicted, device.driver) == ("0", False, "CUDA 13.0")
    assert cuda.count_devices() == 1


def test_absent_cards_are_named():
    with pytest.raises(FlashgenError, match="there is no CUDA device 3; this machine has device 0"):
        cuda.find_device(3)
    fake_cuda.Device.num_devices = 0
    with pytest.raises(FlashgenError, match=r"no CUDA device.*nvidia-smi.*--device sim:"):
        cuda.find_device(0)


def test_another_card_of_the_same_number_is_refused():
    device = replace(cuda.find_device(0), pci_bus_id="0000:FF:00.0")
    with pytest.raises(FlashgenError, match=r"at 0000:FF:00\.0 and is now .*CUDA_VISIBLE_DEVICES"):
        device.open()


def test_without_pycuda_and_without_a_driver_there_is_no_gpu(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    monkeypatch.delitem(sys.modules, "pycuda")
    monkeypatch.setattr(driver, "library", lambda: refuse("libcuda.so.1"))
    with pytest.raises(FlashgenError, match=r"no CUDA device was found \(libcuda.*--device sim:"):
        cuda.find_device(0)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("libcuda.so.1: cannot open shared object file", r"no CUDA device was found.*sim:"),
        ("libcurand.so.10: cannot open shared object file", r"libcurand.*reinstall"),
    ],
)
def test_pycuda_that_cannot_load_says_why(monkeypatch, message, advice):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "pycuda.driver":
            raise ImportError(message)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(FlashgenError, match=advice):
        cuda.find_device(0)


def test_driver_that_fails_to_start_is_no_gpu(monkeypatch):
    def fail():
        raise fake_cuda.Error("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(fake_cuda, "init", fail)
    with pytest.raises(FlashgenError, match=r"no CUDA device was found \(cuInit failed.*sim:"):
        cuda.count_devices()


# -- running ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed", "padded"])
@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim_v", [32, 40])
def test_any_layout_arrives_and_comes_back(runner, tmp_path, layout, want_lse, dtype, head_dim_v):
    case = Case(2, 4, 4, 33, 33, layout=layout)
    problem = replace(PROBLEM, dtype=dtype, head_dim_v=head_dim_v)
    q, k, v, scale = make_inputs(case, problem, np.random.default_rng(0), access_width=8)
    build = build_of(tmp_path, right, problem=problem)
    o, lse = runner.attend(build, q, k, v, scale=scale, want_lse=want_lse)
    assert o.shape == (*q.shape[:3], head_dim_v) and o.dtype == numpy_dtype(problem.output_dtype)
    if head_dim_v == 32:
        assert [s // o.itemsize for s in o.strides] == [s // q.itemsize for s in q.strides]
    else:
        assert np.argsort(o.strides).tolist() == np.argsort(q.strides).tolist()
        assert (min(o.strides[:3]) > 40 * o.itemsize) == (layout == "padded"), "a gap where q has one"
    assert (lse is None) == (not want_lse)
    compare(o, lse, attention(q, k, v, scale=scale), v, problem, "case")


def test_shared_elements_of_q_get_an_o_of_their_own(runner, tmp_path):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 20, 32)).astype(np.float32) for _ in "qkv")
    wide = np.broadcast_to(q, (3, 2, 20, 32))
    o, _ = runner.attend(
        build_of(tmp_path, right), wide, *(np.broadcast_to(x, (3, 1, 20, 32)) for x in (k, v)), scale=0.2
    )
    assert o.flags.c_contiguous
    np.testing.assert_array_equal(o[2, 1], o[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_suite_passes_through_the_runner(runner, tmp_path, dtype):
    problem = replace(PROBLEM, dtype=dtype)
    build = build_of(tmp_path, right, problem=problem)
    assert 0 < validate(runner, build, seed=4, depth="full", problem=problem) < problem.tolerance


def stray(offset, tensor=3):
    def kernel(args):
        right(args)
        pointer = args.pointers[tensor]
        extent, dtype = args.tensor(tensor).size, bits_dtype(args.dtype)
        address = pointer + dtype.itemsize * (extent + offset if offset >= 0 else offset)
        fake_cuda.state.at(address, 1, dtype)[0] = 7

    return kernel


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (stray(0), "1 elements outside the outputs were written, the first 1 elements past the end of o"),
        (stray(10), "the first 11 elements past the end of o"),
        (stray(-1), "the first 1 elements before o"),
        (stray(0, tensor=0), "elements before o"),
    ],
)
@pytest.mark.parametrize("dtype", sorted({*DTYPES} - {"e4m3"}))
def test_stray_writes_are_seen(runner, tmp_path, kernel, complaint, dtype):
    q, k, v = (np.ones((1, 1, 20, 32), numpy_dtype(dtype)) for _ in "qkv")
    build = build_of(tmp_path, kernel, problem=replace(PROBLEM, dtype=dtype))
    with pytest.raises(CorruptedMemory, match=complaint):
        runner.attend(build, q, k, v, scale=0.2)


def test_a_write_past_the_log_sum_exp_is_seen_beside_16_bit_tensors(runner, tmp_path):
    def kernel(args):
        right(args)
        fake_cuda.state.at(args.pointers[4] + 4 * 20, 1)[0] = 7

    q, k, v = (np.ones((1, 1, 20, 32), np.float16) for _ in "qkv")
    build = build_of(tmp_path, kernel, problem=replace(PROBLEM, dtype="f16"))
    # A float32 is two elements of the image.
    with pytest.raises(
        CorruptedMemory, match=r"2 elements .* the first 1 elements past the end of the log-sum"
    ):
        runner.attend(build, q, k, v, scale=0.2, want_lse=True)


def test_overwritten_input_and_gap_are_seen(runner, tmp_path):
    def spoils_input(args):
        right(args)
        args.tensor(1)[0, 0, 3, 3] += 1

    q, k, v, scale = make_inputs(Case(1, 1, 1, 20, 20, layout="padded"), PROBLEM, np.random.default_rng(0))
    with pytest.raises(CorruptedMemory, match="1 elements outside"):
        runner.attend(build_of(tmp_path, spoils_input), q, k, v, scale=scale)

    def fills_gap(args):
        right(args)
        fake_cuda.state.at(args.pointers[3] + 4 * 32, 1)[0] = 0

    with pytest.raises(CorruptedMemory, match="in a gap that the strides of o leave"):
        runner.attend(build_of(tmp_path, fills_gap, "gap"), q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_output_is_seen(runner, tmp_path, dtype):
    def forgets(args):
        # As bits: the mark of unwritten memory is no number that numpy need keep.
        bits = args.tensor(3).view(bits_dtype(args.output_dtype))
        saved = bits[0, 0, 4:6].copy()
        right(args)
        bits[0, 0, 4:6] = saved

    q, k, v = (np.ones((1, 1, 20, 32), numpy_dtype(dtype)) for _ in "qkv")
    build = build_of(tmp_path, forgets, problem=replace(PROBLEM, dtype=dtype))
    with pytest.raises(
        CorruptedMemory, match=r"64 of 640 elements of o were not written, the first at \(0, 0, 4, 0\)"
    ):
        runner.attend(build, q, k, v, scale=0.2)


def test_unwritten_log_sum_exp_is_seen_beside_16_bit_tensors(runner, tmp_path):
    def forgets(args):
        right(args)
        args.lse().view(np.uint32)[0, 0, 7] = unwritten_bits(np.dtype(np.float32))

    q, k, v = (np.ones((1, 1, 20, 32), np.float16) for _ in "qkv")
    build = build_of(tmp_path, forgets, problem=replace(PROBLEM, dtype="f16"))
    with pytest.raises(CorruptedMemory, match=r"1 of 20 elements of the log-sum-exp .* at \(0, 0, 7\)"):
        runner.attend(build, q, k, v, scale=0.2, want_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_around_inputs_is_poison(runner, tmp_path, dtype):
    """A kernel that reads past the end of v and uses what it finds yields NaN."""

    def reads_on(args):
        right(args)
        v = args.tensor(2)
        beyond = fake_cuda.state.at(args.pointers[2] + v.nbytes, 1, args.dtype)[0]
        args.tensor(3)[0, 0, 0, 0] += 0 * beyond

    q, k, v = (np.ones((1, 1, 20, 32), numpy_dtype(dtype)) for _ in "qkv")
    build = build_of(tmp_path, reads_on, problem=replace(PROBLEM, dtype=dtype))
    with np.errstate(invalid="ignore"):
        o, _ = runner.attend(build, q, k, v, scale=0.2)
    assert np.isnan(o[0, 0, 0, 0]) and np.isfinite(o[0, 0, 1].astype(float)).all()


def test_arrays_of_another_type_or_width_are_refused(runner, tmp_path):
    q, k, v = (np.ones((1, 1, 20, 32), np.float32) for _ in "qkv")
    build = build_of(tmp_path, right, problem=replace(PROBLEM, dtype="bf16", head_dim_v=8))
    with pytest.raises(ValueError, match="q is float32 with 32 columns, the kernel takes bfloat16 with 32"):
        runner.attend(build, q, k, v, scale=0.2)
    with pytest.raises(ValueError, match="v is bfloat16 with 32 columns, the kernel takes bfloat16 with 8"):
        runner.attend(build, *(x.astype(numpy_dtype("bf16")) for x in (q, k, v)), scale=0.2)


# -- maps ---------------------------------------------------------------------------------------------


MAPS = (
    TensorMap("q", 64),
    TensorMap("k", 96),
    TensorMap("v", 128, 32, 64, 0),
    TensorMap("o", 16, 16, 32, 256),
)


def with_maps(tmp_path, kernel, name="maps", **problem):
    """A build whose launches call ``kernel`` with maps of all arrays, by at most three blocks."""
    wanted = replace(PROBLEM, **{"dtype": "bf16", "head_dim_v": 48, **problem})
    build = build_of(tmp_path, kernel, name, wanted)
    fake_cuda.NUM_MAPS[f"{name}_kernel"] = len(MAPS)
    launch = replace(build.kernel.launch, tensor_maps=MAPS, max_blocks=3)
    variant = Wgmma(br=64, bc=16)
    return replace(build, kernel=replace(build.kernel, launches=(launch,), variant=variant))


def test_maps_tell_what_the_arguments_tell(runner, tmp_path, card):
    seen = []

    def kernel(args):
        right(args)
        seen.append(args)

    problem = with_maps(tmp_path, kernel).kernel.problem
    case = Case(2, 4, 2, 33, 47, layout="bnhd")
    q, k, v, scale = make_inputs(case, problem, np.random.default_rng(0), access_width=8)
    runner.attend(with_maps(tmp_path, kernel), q, k, v, scale=scale)
    (args,) = seen
    q_map, k_map, v_map, o_map = args.maps
    assert [each.address for each in args.maps] == list(args.pointers[:4])
    assert all(each.dtype == 9 for each in args.maps)
    assert (q_map.sizes, k_map.sizes) == ((32, 33, 4, 2), (32, 47, 2, 2))
    assert (v_map.sizes, o_map.sizes) == ((48, 47, 2, 2), (48, 33, 4, 2))
    # Rows, heads, batch of bnhd arrays, in bytes.
    assert q_map.strides == (2 * 4 * 32, 2 * 32, 2 * 33 * 4 * 32)
    assert v_map.strides == (2 * 2 * 48, 2 * 48, 2 * 47 * 2 * 48)
    assert o_map.strides == (2 * 4 * 48, 2 * 48, 2 * 33 * 4 * 48)
    assert [each.box for each in args.maps] == [
        (64, 64, 1, 1),
        (64, 96, 1, 1),
        (32, 128, 1, 1),
        (16, 16, 1, 1),
    ]
    assert [each.swizzle for each in args.maps] == [3, 3, 2, 1]
    assert [each.promotion for each in args.maps] == [2, 2, 0, 3]
    # 2 * 4 heads of 3 tiles of 16 rows each, by three blocks.
    assert card.grids == [(3, 128)]


def test_a_dimension_of_one_has_a_stride_that_a_map_can_hold(runner, tmp_path):
    def kernel(args):
        right(args)
        assert [each.strides for each in args.maps] == [
            (64, 16, 16),
            (16, 16, 16),
            (16, 16, 16),
            (96, 16, 16),
        ]

    build = with_maps(tmp_path, kernel)
    q, k, v, scale = make_inputs(Case(1, 1, 1, 9, 1), build.kernel.problem, np.random.default_rng(0))
    # A stride that is never used may be anything.
    k = np.lib.stride_tricks.as_strided(k, k.shape, (6, 10, 14, 2))
    runner.attend(build, q, k, v, scale=scale)


def test_kernels_with_maps_are_validated_and_timed(runner, tmp_path, card):
    build = with_maps(tmp_path, right, batch=2)
    problem = build.kernel.problem
    assert 0 < validate(runner, build, seed=4, problem=problem) < problem.tolerance
    card.durations_ms["maps_kernel"] = 2.0
    timing = runner.measure(build, problem, budget_ms=10)
    assert timing.times_us == pytest.approx((2000.0,) * len(timing.times_us))


def test_an_array_without_rows_has_a_map_of_something():
    launch = Launch(128, 0, 16, tensor_maps=MAPS)
    sizes = {"batch": 3, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 5, "seqlen_k": 0}
    arguments = make_arguments(
        PROBLEM, {"q": 4096, "o": 8192}, dict.fromkeys("qkvo", (0, 0, 0)), scale=1.0, sizes=sizes
    )
    described = describe_maps(launch, replace(PROBLEM, dtype="f16"), arguments)
    assert [each.address for each in described] == [4096, 4096, 4096, 8192]
    assert [each.sizes for each in described[:2]] == [(32, 5, 4, 3), (32, 1, 1, 1)]
    assert described[1].strides == described[2].strides == (16, 16, 16)


@pytest.mark.parametrize(
    ("strides", "refusal"),
    [
        (
            (-64, 640, 64),
            r"no map can be made of k at 0x1000, .* strides must be from 0 to below 2\^40 bytes",
        ),
        ((640, 2**40, 64), r"no map can be made of k .* below 2\^40 bytes"),
        (
            (640, 60, 64),
            r"cuTensorMapEncodeTiled failed: invalid argument, for a map of k at 0x1000, \(2, 3, 10, ",
        ),
    ],
)
def test_strides_that_no_map_holds_are_named(card, strides, refusal):
    described = MapDescription("k", "bf16", 4096, (32, 10, 3, 2), strides[::-1], 64, 96, 128, 128)
    with pytest.raises(DriverError, match=refusal):
        driver.encode_maps([described])


def test_a_driver_without_maps_is_told(monkeypatch, card):
    monkeypatch.delattr(fake_cuda.Libcuda, "cuTensorMapEncodeTiled")
    described = MapDescription("k", "bf16", 4096, (32, 10, 3, 2), (64, 640, 1920), 64, 96, 128, 128)
    with pytest.raises(
        DriverError, match=r"driver has no cuTensorMapEncodeTiled; install one for CUDA 12\.0"
    ):
        driver.encode_maps([described])


def test_a_map_that_is_refused_is_a_launch_error(runner, tmp_path):
    build = with_maps(tmp_path, right, head_dim_v=44)
    q, k, v, scale = make_inputs(Case(1, 2, 2, 9, 9), build.kernel.problem, np.random.default_rng(0))
    with pytest.raises(
        LaunchError, match=r"maps_kernel: cuTensorMapEncodeTiled failed: invalid argument, for a map of v"
    ):
        runner.attend(build, q, k, v, scale=scale)
    assert runner.alive


def test_kernels_are_unloaded_once_nothing_needs_them(runner, tmp_path, card):
    builds = [build_of(tmp_path, right, f"kernel{i}") for i in range(40)]
    runner.measure_interleaved(builds, PROBLEM, rounds=1)
    gc.collect()
    assert len(card.modules) == 32
    runner.close()
    assert not card.modules


# -- errors -------------------------------------------------------------------------------------------


def test_refused_launch_leaves_the_runner_alive(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_cuda.Libcuda, "cuFuncSetAttribute", lambda *_: 0)
    q, k, v = (np.ones((1, 1, 20, 32), np.float32) for _ in "qkv")
    with pytest.raises(LaunchError, match="kernel: cuLaunchKernel failed: invalid argument"):
        runner.attend(build_of(tmp_path, right), q, k, v, scale=0.2)
    assert runner.alive
    runner.attend(build_of(tmp_path, right, "small", smem_bytes=1024), q, k, v, scale=0.2)


def test_illegal_address_ends_the_runner(runner, tmp_path, card):
    def faults(args):
        card.sticky = fake_cuda.LogicError(
            "cuStreamSynchronize failed: an illegal memory access was encountered"
        )

    q, k, v = (np.ones((1, 1, 20, 32), np.float32) for _ in "qkv")
    with pytest.raises(LaunchError, match="illegal memory access"):
        runner.attend(build_of(tmp_path, faults), q, k, v, scale=0.2)
    assert not runner.alive
    with pytest.raises(LaunchError, match="lost to an earlier error"):
        runner.measure(build_of(tmp_path, right), PROBLEM)


def test_damaged_cubin_is_a_launch_error(runner, tmp_path):
    build = build_of(tmp_path, right)
    build.artifact.write_bytes(b"junk")
    with pytest.raises(LaunchError, match="kernel image is invalid"):
        runner.measure(build, PROBLEM)


def test_too_large_a_problem_names_both_numbers(runner, tmp_path):
    big = replace(PROBLEM, batch=4096)
    with pytest.raises(
        FlashgenError, match=r"take \d+\.\d\d GiB, device 0 has 0\.0\d GiB free of 0\.0\d; choose"
    ) as error:
        runner.measure(build_of(tmp_path, right), big)
    assert not isinstance(error.value, LaunchError)


# -- what masks and changes of scores read ---------------------------------------------------------------

ASKED = {
    "numbers": Scoring(window=(5, 2), softcap=20.0),
    "arrays": Scoring(documents=3, alibi=True, sinks=True, bias="f16"),
    "bytes": Scoring(lengths=True, bias="u8"),
    "expressions": Scoring(
        score="score + table[h, k - q] * n",
        mask="doc[b, q] >= doc[b, k]",
        buffers=(("doc", "i64"), ("table", "bf16")),
        scalars=(("n", 2.0),),
    ),
}


def scored(asked: str, **more: object) -> Problem:
    return replace(PROBLEM, scoring=ASKED[asked], batch=2, **more)


def by_the_book(args):
    """The kernel of a problem with masks and changes of scores."""
    q, k, v, o = (args.tensor(i) for i in range(4))
    found = attention(q, k, v, scale=args.scale, scores=args.problem.scores, values=args.scoring())
    o[...] = found.o
    if args.lse() is not None:
        args.lse()[...] = found.lse


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_what_scores_read_arrives(runner, tmp_path, asked, dtype):
    problem = scored(asked, dtype=dtype)
    error = validate(runner, build_of(tmp_path, by_the_book, problem=problem), seed=3)
    assert error < problem.tolerance


@pytest.mark.parametrize(
    ("asked", "name"), [("numbers", "window_right"), ("arrays", "bias"), ("bytes", "bias")]
)
def test_values_that_do_not_arrive_are_missed(runner, tmp_path, asked, name):
    def blind(args):
        known = args.scoring()
        args.scoring = lambda: {**known, name: known[name] * 0 + 1}
        by_the_book(args)

    with pytest.raises(WrongResult):
        validate(runner, build_of(tmp_path, blind, problem=scored(asked)), seed=3)


def test_what_scores_read_must_be_given(runner, tmp_path):
    q, k, v, scale = make_inputs(Case(2, 2, 1, 9, 9), PROBLEM, np.random.default_rng(0))
    build = build_of(tmp_path, by_the_book, problem=scored("bytes"))
    with pytest.raises(ValueError, match=r"the kernel reads lengths, i32\[batch\]"):
        runner.attend(build, q, k, v, scale=scale, values={"bias": np.ones((2, 2, 9, 9), bool)})
    assert not fake_cuda.state.launches


def test_writes_to_what_scores_read_are_seen(runner, tmp_path):
    def spoils(args):
        by_the_book(args)
        args.scoring()["lengths"][1] = 3

    problem = scored("bytes")
    q, k, v, scale = make_inputs(Case(2, 2, 1, 9, 9), problem, np.random.default_rng(0))
    values = {"bias": np.ones((2, 2, 9, 9), bool), "lengths": np.array([9, 5])}
    with pytest.raises(CorruptedMemory, match="1 elements outside the outputs were written"):
        runner.attend(build_of(tmp_path, spoils, problem=problem), q, k, v, scale=scale, values=values)


@pytest.mark.parametrize("asked", ASKED)
def test_kernels_are_timed_on_what_is_typical(runner, tmp_path, asked):
    read = []

    def remembers(args):
        if not read:
            assert np.isnan(args.tensor(3)).all()
            read.append({name: np.array(each) for name, each in args.scoring().items()})

    problem = scored(asked)
    runner.measure(build_of(tmp_path, remembers, problem=problem), problem)
    typical = values_as_read(problem, typical_values(problem))
    assert read[0].keys() == typical.keys()
    for name, expected in typical.items():
        np.testing.assert_array_equal(read[0][name], expected)


def test_a_bias_that_does_not_fit_is_told_by_name(runner, tmp_path):
    problem = scored("bytes", seqlen_q=4000, seqlen_k=5000)
    with pytest.raises(FlashgenError, match=r"q, k, v, o, .*bias of f32_.* take 0\.02 GiB, device 0 has"):
        runner.measure(build_of(tmp_path, by_the_book, problem=problem), problem)


# -- timing -------------------------------------------------------------------------------------------


def test_every_timed_launch_finds_a_cold_cache(runner, tmp_path, card):
    card.durations_ms["kernel_kernel"] = 2.0
    timing = runner.measure(build_of(tmp_path, right), PROBLEM, budget_ms=40)
    assert timing.times_us == pytest.approx((2000.0,) * len(timing.times_us))
    assert 15 <= len(timing.times_us) <= 20 and not timing.stopped_early and timing.busy == ""
    assert card.flushed_bytes >= 2 * fake_cuda.device_attribute.L2_CACHE_SIZE


def test_repeats_follow_the_budget_within_limits(runner, tmp_path, card):
    build = build_of(tmp_path, right)
    for duration_ms, repeats in ((0.001, cuda.MAX_REPEATS), (500.0, cuda.MIN_REPEATS)):
        card.durations_ms["kernel_kernel"] = duration_ms
        assert len(runner.measure(build, PROBLEM, budget_ms=100).times_us) == repeats
    before = len(card.launches)
    runner.measure(build, PROBLEM, budget_ms=100)
    assert len(card.launches) - before == cuda.MIN_REPEATS + 1, "a slow kernel is warmed up once"


def test_beaten_candidates_are_stopped_early(runner, tmp_path, card):
    build = build_of(tmp_path, right)
    card.durations_ms["kernel_kernel"] = 3.0
    stopped = runner.measure(build, PROBLEM, best_us=1400.0)
    assert stopped.stopped_early and len(stopped.times_us) == cuda.MIN_REPEATS
    hopeless = runner.measure(build, PROBLEM, best_us=10.0)
    assert hopeless.stopped_early and len(hopeless.times_us) == 1
    behind = runner.measure(build, PROBLEM, best_us=2000.0)
    assert not behind.stopped_early and len(behind.times_us) == cuda.BEHIND_REPEATS
    close = runner.measure(build, PROBLEM, best_us=2900.0)
    assert not close.stopped_early and len(close.times_us) > cuda.BEHIND_REPEATS


def test_finalists_take_turns_in_both_directions(runner, tmp_path, card):
    builds = [build_of(tmp_path, right, name) for name in "abc"]
    card.durations_ms = {"a_kernel": 20.0, "b_kernel": 30.0, "c_kernel": 40.0}
    timings = runner.measure_interleaved(builds, PROBLEM, rounds=4)
    assert [t.times_us for t in timings] == [pytest.approx((ms * 1000,) * 4) for ms in (20, 30, 40)]
    assert "".join(name[0] for name in card.launches[-12:]) == "abccbaabccba"


@pytest.mark.parametrize(("dtype", "head_dim_v"), [("f32", 32), ("f16", 32), ("bf16", 40), ("f16", 7)])
def test_timed_inputs_are_random_and_kept(runner, tmp_path, card, dtype, head_dim_v):
    seen, outputs = [], []
    problem = replace(PROBLEM, dtype=dtype, head_dim_v=head_dim_v)

    def looks(args):
        seen.append([args.tensor(i).copy() for i in range(3)])
        outputs.append(args.tensor(3).copy().view(bits_dtype(args.output_dtype)))
        right(args)

    build = build_of(tmp_path, looks, problem=problem)
    runner.measure(build, problem, budget_ms=5)
    q, k, v = seen[0]
    assert q.shape == (1, 2, 50, 32) and k.shape == (1, 1, 60, 32) and v.shape == (1, 1, 60, head_dim_v)
    for x in (q, k, v):
        assert x.dtype == numpy_dtype(dtype)
        assert 0.9 < x.astype(float).std() < 1.1 and np.abs(x.astype(float).mean()) < 0.15
    assert not np.array_equal(k[..., :7], v[..., :7])
    unwritten = unwritten_bits(numpy_dtype(problem.output_dtype))
    assert (outputs[0] == unwritten).all() and (outputs[1] != unwritten).all()
    allocations = set(card.live)
    runner.measure(build, problem, budget_ms=5)
    assert set(card.live) == allocations
    np.testing.assert_array_equal(seen[-1][0], q)


def test_what_one_problem_took_is_free_for_the_next(runner, tmp_path, card):
    """A runner outlives the problems of a batch, the largest of which fill a card's memory."""

    def compute(problem):
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((4, 8, 200, 32), np.float32) for _ in range(3))
        runner.attend(build_of(tmp_path, right, problem=problem), q, k, v, scale=1.0)

    def measure(problem):
        runner.measure(build_of(tmp_path, right, problem=problem), problem, budget_ms=5)

    large = replace(PROBLEM, batch=64)
    runner.measure(build_of(tmp_path, right), PROBLEM, budget_ms=5)
    least = sum(card.live.values())
    measure(large)
    taken = sum(card.live.values())
    assert taken > least
    compute(large)
    with_arena = sum(card.live.values())
    assert with_arena > taken
    compute(PROBLEM)
    assert sum(card.live.values()) < with_arena - (taken - least) / 2
    measure(PROBLEM)
    assert sum(card.live.values()) == least


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_pool_is_repeated_to_any_size(runner, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(timed_tensors, "POOL_ITEMS", 1001)
    seen = []

    def looks(args):
        seen.append(args.tensor(2).astype(float))
        right(args)

    problem = replace(PROBLEM, dtype=dtype)
    runner.measure(build_of(tmp_path, looks, problem=problem), problem, budget_ms=5)
    assert 0.9 < seen[0].std() < 1.1 and np.isfinite(seen[0]).all()


def test_occupancy_counts_what_the_driver_reports(runner, tmp_path):
    # 128 registers for 128 threads: four blocks of four warps on an SM of 64.
    assert runner.occupancy(build_of(tmp_path, right, smem_bytes=1024)) == 16 / 64
    assert runner.occupancy(build_of(tmp_path, right, "large", smem_bytes=200_000)) == 4 / 64


# -- packed sequences ------------------------------------------------------------------------------------

PACKED = replace(PROBLEM, batch=7, seqlen_q=60, varlen="uniform:3-60")
MARK = 4711


def packed_build_of(tmp_path, kernel, problem=PACKED):
    """A build whose plan is a mark, and whose kernel finds it there."""
    build = build_of(tmp_path, kernel, problem=problem)
    main = replace(build.kernel.launch, packed=True)
    fake_cuda.KERNELS["kernel_plan"], fake_cuda.PROBLEMS["kernel_plan"] = plans, problem
    return replace(build, kernel=replace(build.kernel, launches=(Plan(main).launch, main)))


def plans(args):
    fake_cuda.state.at(args.values["plan"], 1, np.int32)[0] = MARK


def by_sequences(args):
    """The kernel of packed sequences."""
    assert fake_cuda.state.at(args.values["plan"], 1, np.int32)[0] == MARK and not args.values["plan_made"]
    q, k, v, o = (args.tensor(i) for i in range(4))
    told = args.sequences()
    for rows, keys in zip(sequence_slices(told, "q"), sequence_slices(told, "k"), strict=True):
        found = attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=args.scale, scores=args.problem.scores
        )
        o[:, :, rows] = found.o
        if args.lse() is not None:
            args.lse()[:, :, rows] = found.lse


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_packed_sequences_arrive_and_come_back(runner, tmp_path, dtype):
    problem = replace(PACKED, dtype=dtype)
    error = validate(runner, packed_build_of(tmp_path, by_sequences, problem), seed=3, problem=problem)
    assert error < problem.tolerance
    assert set(fake_cuda.state.launches) == {"kernel_plan", "kernel_kernel"}


def test_only_what_follows_a_launch_of_its_call_may_begin_before_that_ends(runner, tmp_path):
    build = packed_build_of(tmp_path, lambda args: None)
    plan, main = build.kernel.launches
    dependent = replace(main, dependent=True)
    build = replace(build, kernel=replace(build.kernel, launches=(plan, dependent, dependent)))
    runner.measure(build, PACKED)
    state = fake_cuda.state
    assert state.launches[:5] == ["kernel_plan"] + ["kernel_kernel"] * 4
    assert state.dependent[:3] == [1, 2, 4]  # without the plan, another's kernel stands in front of the third


def test_rows_of_no_sequence_stay_as_they_were(runner, tmp_path):
    def spills(args):
        by_sequences(args)
        args.tensor(3)[0, 0, -1] = 1.0

    with pytest.raises(CorruptedMemory, match="elements outside the outputs were written"):
        validate(runner, packed_build_of(tmp_path, spills), seed=3)

    def stops_short(args):
        by_sequences(args)
        last = sequence_slices(args.sequences(), "q")[0].stop - 1
        args.tensor(3).view(np.uint32)[0, 0, last] = unwritten_bits(np.dtype(np.float32))

    with pytest.raises(CorruptedMemory, match="were not written"):
        validate(runner, packed_build_of(tmp_path, stops_short), seed=3)


def test_packed_kernels_are_timed_on_drawn_lengths_with_a_plan_made_once(runner, tmp_path):
    met = []

    def remembers(args):
        met.append({name: each.copy() for name, each in args.sequences().items()})
        assert args.tensor(0).shape == (1, 2, PACKED.total_q, 32)
        assert args.strides[0] == [0, 32, 64]  # heads of one position side by side
        assert fake_cuda.state.at(args.values["plan"], 1, np.int32)[0] == MARK

    runner.measure(packed_build_of(tmp_path, remembers), PACKED)
    assert fake_cuda.state.launches.count("kernel_plan") == 1 < len(met)
    assert np.diff(met[0]["cu_seqlens_q"]).tolist() == list(PACKED.lengths.q)
    assert "seqused_q" not in met[0]


# -- caches in pages -------------------------------------------------------------------------------------

PAGED = replace(PROBLEM, batch=3, seqlen_q=2, seqlen_k=50, page_size=16)


def by_pages(args):
    """The kernel of keys and values in pages."""
    q, k, v, o = (args.tensor(i) for i in range(4))
    used, table = args.sequences()["seqused_k"], args.page_table()
    for b, length in enumerate(used):
        keys, values = (gather(x, (int(length),), table[b : b + 1]) for x in (k, v))
        found = attention(q[b : b + 1], keys, values, scale=args.scale, scores=args.problem.scores)
        o[b] = found.o[0]
        if args.lse() is not None:
            args.lse()[b] = found.lse[0]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_pages_arrive_on_the_card(runner, tmp_path, dtype):
    problem = replace(PAGED, dtype=dtype)
    error = validate(runner, build_of(tmp_path, by_pages, problem=problem), seed=3, problem=problem)
    assert error < problem.tolerance


def test_paged_kernels_are_timed_on_pages_in_any_order(runner, tmp_path):
    met = []

    def remembers(args):
        met.append(args.page_table().copy())
        assert args.tensor(1).shape == (12, 1, 16, 32) and args.sequences()["seqused_k"].tolist() == [50] * 3
        assert args.strides[1] == [16 * 32, 32, 32]

    runner.measure(build_of(tmp_path, remembers, problem=PAGED), PAGED)
    assert sorted(met[0].ravel()) == list(range(12)) != met[0].ravel().tolist()


# -- caches that grow ------------------------------------------------------------------------------------

GROWING = replace(PAGED, append=Append(HALVES, 8), causal=True)


def growing_build_of(tmp_path, problem=GROWING):
    """A build whose first launch appends and rotates, and whose kernel takes what that has left."""
    build = build_of(tmp_path, by_pages_with_new, problem=problem)
    first = problem.append.launch(build.kernel.launch)
    fake_cuda.KERNELS["kernel_append"], fake_cuda.PROBLEMS["kernel_append"] = appends, problem
    return replace(build, kernel=replace(build.kernel, launches=(first, build.kernel.launch)))


def by_pages_with_new(args):
    """The kernel of pages, whose sequences have as many keys more as are new."""
    used = args.sequences()["seqused_k"]
    used += args.values["seqlen_new"]
    by_pages(args)
    used -= args.values["seqlen_new"]


def appends(args):
    """The launch that writes new rows and rotated queries, a column at a time."""
    told, at = args.values, fake_cuda.state.at
    used, table, size = args.sequences()["seqused_k"], args.page_table(), told["page_size"]
    k, v, q = (args.tensor(i) for i in (1, 2, 0))
    positions, half = told["rotary_rows"], args.problem.append.rotary_dim // 2
    cos, sin = (
        at(told[f"rotary_{x}"], positions * half, q.dtype).reshape(positions, half).astype(float)
        for x in ("cos", "sin")
    )

    def turned(rows, position):
        rows = rows.astype(float)
        first, second = rows[..., :half], rows[..., half : 2 * half]
        c, s = (each[min(position, positions - 1)] for each in (cos, sin))
        return np.concatenate([first * c - second * s, second * c + first * s, rows[..., 2 * half :]], -1)

    rotated = at(told["rotated_q"], q.size, q.dtype).reshape(q.shape[0], q.shape[2], q.shape[1], -1)
    for b in range(q.shape[0]):
        for row in range(q.shape[2]):
            rotated[b, row] = turned(q[b, :, row], used[b] + row)
        for row in range(told["seqlen_new"]):
            key = used[b] + row
            place = table[b, key // size], key % size
            for name, cache in (("k", k), ("v", v)):
                batch, head = (told[f"{name}_new_stride_{axis}"] for axis in ("batch", "head"))
                start = b * batch + row * told[f"{name}_new_stride_row"]
                flat = at(told[f"{name}_new"], start + (k.shape[1] - 1) * head + 32, q.dtype)
                new = np.stack([flat[start + h * head :][:32] for h in range(k.shape[1])])
                cache[place[0], :, place[1]] = turned(new, key) if name == "k" else new


def test_new_rows_come_back_in_caches(runner, tmp_path):
    error = validate(runner, growing_build_of(tmp_path), seed=3, problem=GROWING)
    assert error < GROWING.tolerance
    assert {"kernel_append", "kernel_kernel"} == set(fake_cuda.state.launches)


def test_kernels_that_append_are_timed_with_a_new_row_for_each_query(runner, tmp_path):
    build = growing_build_of(tmp_path)
    met = []

    def remembers(args):
        met.append((args.values["seqlen_new"], args.sequences()["seqused_k"].tolist()))

    fake_cuda.KERNELS["kernel_append"] = remembers
    runner.measure(build, GROWING)
    assert met[0] == (2, [48] * 3)
