"""One list of fields: what C sees of a struct is where Python packs it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from flashgen.gen.arguments import VOID_ELEMENTS, argument_struct, describe_maps, make_arguments
from flashgen.gen.launch import Launch, TensorMap
from flashgen.gen.operation import FORWARD
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("has_scales", [False, True])
def test_c_finds_every_field_where_it_was_packed(has_scales: bool, tmp_path: Path) -> None:
    struct = argument_struct(has_scales=has_scales)
    members = "\n".join(struct.declared(VOID_ELEMENTS))
    checks = "\n".join(
        f"  if ((long long)args->{field.name} != {i + 1}) return {i + 1};"
        for i, field in enumerate(struct.fields)
    )
    source = tmp_path / "check.cpp"
    source.write_text(
        f"struct Args {{\n{members}\n}};\nstatic_assert(sizeof(Args) == {struct.num_bytes});\n"
        f'extern "C" int check(const Args* args) {{\n{checks}\n  return 0;\n}}\n'
    )
    library = tmp_path / "check.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    packed = struct.pack({field.name: i + 1 for i, field in enumerate(struct.fields)})
    assert ctypes.CDLL(str(library)).check(packed) == 0
    assert struct.unpack(packed) == {field.name: i + 1 for i, field in enumerate(struct.fields)}


def test_arguments_are_of_the_operations_arrays() -> None:
    problem = Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=7, seqlen_k=9, head_dim=64)
    strides = {each.name: (3, 2, 1) for each in FORWARD.strided}
    arguments = make_arguments(problem, {"q": 16, "o": 64}, strides, scale=0.5)
    assert arguments.address("q") == 16 and arguments.address("lse") == 0
    assert arguments.strides("v") == (3, 2, 1)
    unpacked = arguments.struct.unpack(arguments.pack())
    assert (unpacked["num_kv_heads"], unpacked["seqlen_k"], unpacked["scale"]) == (2, 9, 0.5)
    with pytest.raises(KeyError):
        arguments.struct.pack({"q": 1})


def test_bytes_and_operations_are_the_arrays() -> None:
    problem = Problem(dtype="e4m3", batch=2, num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=32)
    shapes = {each.name: each.shape(problem) for each in FORWARD.arrays}
    assert (
        shapes["q"] == (2, 4, 4096, 64) and shapes["v"] == (2, 2, 4096, 32) and shapes["lse"] == (2, 4, 4096)
    )
    assert FORWARD.array("o").dtype(problem) == "bf16" and FORWARD.array("k").dtype(problem) == "e4m3"
    assert FORWARD.flops(problem, 10) == 2 * 10 * (64 + 32)
    assert FORWARD.min_bytes(problem) == 4096 * 2 * (4 * 64 + 2 * 64 + 2 * 32 + 2 * 4 * 32)


@pytest.mark.parametrize(
    ("address", "strides", "sizes", "stride_bytes"),
    [
        (64, (3584, 896, 128), (100, 7, 4, 2), (256, 1792, 7168)),
        (64, (896, 0, 128), (100, 7, 1, 2), (256, 16, 1792)),
        (64, (0, 0, 0), (100, 1, 1, 1), (16, 16, 16)),
        (66, (3584, 896, 128), (1, 1, 1, 1), (16, 16, 16)),
        (64, (2800, 700, 100), (1, 1, 1, 1), (16, 16, 16)),
        (64, (3584, 896, -128), (1, 1, 1, 1), (16, 16, 16)),
    ],
)
def test_what_scores_meet_has_a_map_where_the_copy_engine_takes_it(
    address: int, strides: tuple[int, ...], sizes: tuple[int, ...], stride_bytes: tuple[int, ...]
) -> None:
    sized = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 7, "seqlen_k": 100, "head_dim": 64}
    problem = Problem(dtype="bf16", scoring=Scoring(bias="f16"), **sized)
    placed = {f"bias_stride_{axis}": step for axis, step in enumerate(strides)}
    of_tensors = {each.name: (3, 2, 1) for each in FORWARD.strided}
    told = {"bias": address, **placed}
    arguments = make_arguments(problem, {"q": 32}, of_tensors, scale=0.5, scoring=told)
    launch = Launch(1, 0, 128, tensor_maps=(TensorMap("bias", 128, 32, 64),))
    (described,) = describe_maps(launch, problem, arguments)
    assert (described.sizes, described.strides) == (sizes, stride_bytes)
    assert described.address == (address if sizes[0] > 1 else 32)
    assert (described.dtype, described.columns, described.rows, described.swizzle) == ("f16", 32, 128, 64)
