"""Kernels of e4m3: on the emulated card, their arguments and scales, their modules."""

from __future__ import annotations

import functools
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.arguments import argument_struct, describe_maps, make_arguments
from flashgen.gen.emit.module import emit_module
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.variant import Illegal, Variant
from flashgen.tuner.cards import beside
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import E4M3_HEAD_DIMS, e4m3_settings, each_value
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy
from tests.support.modules import import_path

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
H200 = preset("h200")
EIGHT = Problem(dtype="e4m3", head_dim=64)
#: Of the kernels that between them have every value, those tried, in as many shards: the 16-bit forms, which
#: share all but V's way, are tried in full.
EVERY, SHARDS = 2, 4


def built(variant: Variant, problem: Problem, *, sanitize: bool = False):
    device = SimDevice("h200", H200, sanitize)
    return device.open(), device.toolchain().build(render(variant, problem, H200))


# -- numerics -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("shard", sampled(range(SHARDS), 1))
def test_kernels_are_right(shard):
    for seed, setting in list(enumerate(each_value(e4m3_settings([H200]), 0)[::EVERY]))[shard::SHARDS]:
        runner, build = built(setting.variant, setting.problem)
        assert 0 < validate(runner, build, seed=seed) <= setting.problem.tolerance, setting.name


def test_head_dims_in_multiples_of_sixteen():
    for d, dv in E4M3_HEAD_DIMS:
        problem = Problem(dtype="e4m3", head_dim=d, head_dim_v=dv)
        assert_tidy(render(Wgmma(br=64, bc=32), problem, H200).source, problem.stem)
    for d, dv in ((24, 16), (16, 24)):
        with pytest.raises(Illegal, match="alignment: rows of 24 elements are not multiples of 16 bytes"):
            render(Wgmma(br=64, bc=32), Problem(dtype="e4m3", head_dim=d, head_dim_v=dv), H200)


@needs_compiler
def test_kernels_pass_the_sanitizer():
    problem = replace(EIGHT, head_dim=48, head_dim_v=16, causal=True)
    runner, build = built(Wgmma(br=64, bc=32), problem, sanitize=True)
    validate(runner, build, seed=2)


@needs_compiler
def test_outputs_are_multiplied_by_the_scale_of_values(monkeypatch):
    runner, build = built(Wgmma(br=64, bc=32), EIGHT)
    rng = np.random.default_rng(1)
    shape = (1, 2, 33, 64)
    q, k, v = reference.random_inputs("normal", shape, shape, scale=0.1, rng=rng, dtype="e4m3")
    plain, _ = runner.attend(build, q, k, v, scale=0.1)
    scaled_values = functools.partial(make_arguments, value_scale=-4.0)
    monkeypatch.setattr(beside, "make_arguments", scaled_values)
    scaled, _ = runner.attend(build, q, k, v, scale=0.1)
    np.testing.assert_array_equal(scaled.astype(np.float32), -4 * plain.astype(np.float32))
    assert plain.dtype == numpy_dtype("bf16") and np.abs(plain.astype(np.float32)).max() > 0.1


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    fence_proxy_async();\n    __syncwarp();\n    if (conv", "    __syncwarp();\n    if (conv"),
        ("barrier_wait(&smem.v_empty[v_pipe.stage], v_pipe.phase ^ 1);\n#pragma", "\n#pragma"),
        ("barrier_wait(&smem.v_raw_full[raw_pipe.stage], raw_pipe.phase);", ""),
        ("barrier_arrive(&smem.v_raw_empty[raw_pipe.stage]);", ""),
        ("column / 8 ^ first_row % 8", "column / 8"),
    ],
    ids=["no fence", "full stages", "empty stages", "kept for ever", "no swizzle"],
)
def test_mistakes_in_turning_values_are_caught(right, wrong):
    kernel = render(Wgmma(br=64, bc=32), replace(EIGHT, causal=True), H200)
    assert right in kernel.source
    broken = replace(kernel, source=kernel.source.replace(right, wrong))
    device = SimDevice("h200", H200)
    build = device.toolchain().build(broken)
    with pytest.raises(Exception, match=r"wrong result|launch|nobody|fence|deadlock|wait"):
        for seed in range(4):
            validate(device.open(), build, seed=seed)


# -- what may run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "problem", "message"),
    [
        (Wgmma(), replace(EIGHT, head_dim=72, head_dim_v=72), "72 elements are not multiples of 16 bytes"),
        (Wgmma(cluster=2), EIGHT, "cluster=2: each block turns values"),
        (Wgmma(p_in_shared=True), EIGHT, "p_in_shared=True: not made for e4m3"),
        (Simt(), EIGHT, "family simt computes f32, this problem is e4m3"),
    ],
)
def test_rules(variant, problem, message):
    with pytest.raises(Illegal, match=message):
        render(variant, problem, H200)


def test_shared_memory_holds_values_twice():
    half = Wgmma(bc=64).smem_bytes(replace(EIGHT, dtype="f16"), H200)
    eight = Wgmma(bc=64).smem_bytes(EIGHT, H200)
    # Rows of 64 bytes take a chunk all the same; two tiles of 64 keys by 64 columns come raw.
    assert eight == half + 2 * 64 * 64


def test_scores_take_half_the_time():
    problem = replace(EIGHT, head_dim=128, head_dim_v=128)
    eight, half = (Wgmma().work(replace(problem, dtype=dtype), H200) for dtype in ("e4m3", "f16"))
    assert eight.score_cycles == half.score_cycles / 2 and eight.output_cycles == half.output_cycles
    assert eight.tile_bytes == half.tile_bytes / 2


# -- arguments ------------------------------------------------------------------------------------------


def test_arguments_end_in_the_scale_of_values():
    plain, scaled = argument_struct(), argument_struct(has_scales=True)
    values = {field.name: i for i, field in enumerate(scaled.fields)} | {"value_scale": 0.25}
    packed = scaled.pack(values)
    assert len(packed) == scaled.num_bytes == 168 and packed[:160] == plain.pack(values)
    assert struct.unpack_from("<f", packed, 160) == (0.25,)
    assert scaled.unpack(packed) == values


def test_maps_are_of_bytes_but_for_outputs():
    kernel = render(Wgmma(bc=64), replace(EIGHT, head_dim_v=208), H200)
    addresses = {"q": 16, "k": 32, "v": 48, "o": 64}
    arguments = make_arguments(EIGHT, addresses, dict.fromkeys("qkvo", (10**6, 10**4, 256)), scale=1.0)
    found = {each.array: each for each in describe_maps(kernel.launch, kernel.problem, arguments)}
    assert [found[name].dtype for name in "qkvo"] == ["e4m3", "e4m3", "e4m3", "bf16"]
    assert [found[name].columns for name in "qkvo"] == [128, 128, 128, 64]
    assert [found[name].swizzle for name in "qkvo"] == [128, 128, 16, 128]
    assert found["o"].strides == tuple(2 * s for s in found["q"].strides)


# -- the module -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> ModuleType:
    kernel: Kernel = render(Wgmma(), EIGHT, H200)
    path = Path(tmp_path_factory.mktemp("module")) / "eight.py"
    path.write_text(emit_module(kernel, device="NVIDIA H200"))
    return import_path(path)


def test_the_module_knows_what_bytes_stand_for(module):
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(module._values_of_eight_bits(), expected)
    found = module._to_host(np.array([-3.1, 0.07, 1.0, 500.0], np.float32), "float8_e4m3fn")
    assert [expected[bits] for bits in found] == [-3.25, 0.0625, 1.0, 448.0]


def test_scales_are_folded(module):
    fold, q = module._bound._fold, np.zeros((1, 1, 16, 64))
    assert fold(q, None, (2, 0.5, 3)) == (module.KERNELS[0].default_scale, 3.0)
    assert fold(q, 0.5, (2, 4, 1)) == (4.0, 1.0)
    for scales in ((1, float("nan"), 1), (1, 1, float("inf")), (1e30, 1e30, 1)):
        with pytest.raises(ValueError, match="must be finite"):
            fold(q, 1.0, scales)


def test_other_types_are_refused(module):
    q = np.zeros((1, 1, 16, 64), np.float16)
    with pytest.raises(TypeError, match=r"q is float16, not float8_e4m3fn: pass q\.astype"):
        module.attention(q, q, q)
    eight = q.astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(TypeError, match="out is float16, not bfloat16"):
        module.attention(eight, eight, eight, out=q)
    assert not hasattr(module, "sdpa") and "sdpa" not in module.__all__
