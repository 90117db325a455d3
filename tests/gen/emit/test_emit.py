"""What is written out: deterministic, readable, and standing alone."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import struct_of
from flashgen.gen.emit.cuda import as_rendered, emit_cuda, read_cuda
from flashgen.gen.emit.inline import (
    CACHE_PARTS,
    FOLDER,
    GRADIENT_PARTS,
    LATENT_PAGED_PARTS,
    LATENT_PARTS,
    PACKED_GRADIENT_PARTS,
    PACKED_PARTS,
    PAGED_PARTS,
    PARTS,
    SCORED_GRADIENT_PARTS,
    SCORED_PARTS,
)
from flashgen.gen.emit.literals import source_literal, to_literal
from flashgen.gen.emit.module import emit_module, emit_thin_module
from flashgen.gen.families.ladder.family import steps
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.families.wgmma_backward.family import WgmmaBackward
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import Launch, TensorMap
from flashgen.gen.limits import PRESETS, preset
from flashgen.gen.problem import FEW_QUERIES, TOLERANCES, Problem
from flashgen.gen.render import render
from flashgen.gen.space import enumerate_space
from flashgen.gen.variant import Variant
from flashgen.templates.runtime import table as runtime_table
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.shelf.emitted_kernels import read_emitted

from tests.support.formatting import assert_ruff_is_content

H200 = preset("h200")
#: Of a launch, what modules of plain dense kernels need not know, or have in their own words.
OF_OTHER_MODULES = {
    "tensor_maps",
    "role",
    "packed",
    "rotates",
    "of_keys",
    "keys_per_block",
    "makes",
    "wanted_blocks",
}
MEASURED: dict[str, Any] = {
    "times_us": [5100.0, 5123.4, 5150.0],
    "median_us": 5123.4,
    "spread": 0.0123,
    "tflops": 53.7,
    "registers": 168,
    "spill_bytes": 0,
    "smem_bytes": 70656,
    "occupancy": 0.25,
    "error": 3.1e-7,
    "predicted": False,
    "driver": '580.159 "R"',
    "toolkit": "nvcc 13.0.88",
    "flashgen": "0.1.0",
    "seed": 0,
}


def simt(problem: Problem) -> Simt:
    """Some legal variant near the default."""
    free = ("br", "bc", "lanes", "min_blocks", "stages", "vec")
    held = {p.name: p.default for p in Simt.parameters() if p.name not in free}
    legal = enumerate_space(Simt, problem, H200, held).legal
    assert legal and isinstance(legal[0], Simt)
    return legal[0]


def make(family: str = "simt", **problem: Any) -> Kernel:
    wanted = Problem(**{"head_dim": 64, **problem})
    if family == "mma":
        return render(Mma(parts="f16" if wanted.precision == "3xf16" else "tf32", br=64, bc=64), wanted, H200)
    if family == "wgmma":
        return render(Wgmma(br=64, bc=64, persistent=wanted.causal), wanted, H200)
    return render(simt(wanted) if family == "simt" else steps(wanted.head_dim)[family], wanted, H200)


@pytest.fixture(
    params=[
        ("simt", {}),
        ("simt", {"head_dim": 40, "causal": True, "num_kv_heads": 4, "seqlen_k": 777}),
        ("4.2.2", {"head_dim": 32}),
        ("4.2.10", {}),
        ("mma", {"dtype": "f16", "head_dim": 40, "head_dim_v": 72}),
        ("mma", {"dtype": "bf16", "causal": True}),
        ("mma", {"precision": "tf32"}),
        ("mma", {"precision": "3xf16"}),
        ("mma", {}),
        ("wgmma", {"dtype": "f16", "head_dim": 40, "head_dim_v": 72}),
        ("wgmma", {"dtype": "bf16", "causal": True}),
        ("wgmma", {"dtype": "e4m3"}),
    ],
    ids=[
        "simt",
        "simt-causal",
        "ladder-4.2.2",
        "ladder-4.2.10",
        "mma-f16",
        "mma-bf16",
        "mma-tf32",
        "mma-3xf16",
        "mma-f32",
        "wgmma-f16",
        "wgmma-bf16",
        "wgmma-e4m3",
    ],
    name="kernel",
)
def a_kernel(request: pytest.FixtureRequest) -> Kernel:
    family, problem = request.param
    return make(family, **problem)


def data_of(text: str, path: Path | None = None) -> ModuleType:
    """The module, run as one that is not among the loaded ones."""
    module = ModuleType("emitted_module")
    module.__file__ = str(path)
    exec(compile(text, "emitted_module.py", "exec", dont_inherit=True), module.__dict__)
    assert "emitted_module" not in sys.modules
    return module


@pytest.mark.parametrize("emit", [emit_module, emit_thin_module])
def test_the_module_carries_its_data(kernel: Kernel, emit: Callable[..., str], tmp_path: Path) -> None:
    cuda = emit_cuda(kernel, device="NVIDIA H200", measurement=MEASURED)
    (tmp_path / "best.cu").write_text(cuda)
    text = emit(kernel, device="NVIDIA H200", measurement=MEASURED)
    module = data_of(text, tmp_path / "best.py")
    assert kernel.problem.to_dict() == module.PROBLEM
    assert {"family": kernel.variant.family, **kernel.variant.to_dict()} == module.VARIANT
    assert module.DEVICE == {"name": "NVIDIA H200", "arch": 90}
    assert {k: v for k, v in MEASURED.items() if k != "times_us"} == module.MEASUREMENT
    assert (kernel.source if emit is emit_module else cuda) == module.SOURCE
    (tuned,) = module.KERNELS
    (launch,) = tuned.launches
    assert (tuned.name, tuned.source) == (kernel.problem.name, module.SOURCE)
    assert (tuned.head_dim, tuned.head_dim_v) == (kernel.problem.head_dim, kernel.problem.head_dim_v)
    assert tuned.tolerance == kernel.problem.tolerance
    assert tuned.oldest_arch == kernel.variant.oldest_arch(kernel.problem, 90)
    assert launch.symbol == kernel.symbol
    assert tuple(TensorMap(*each) for each in launch.maps) == kernel.launch.tensor_maps
    for name in (field.name for field in dataclasses.fields(kernel.launch)):
        if name not in OF_OTHER_MODULES:
            assert getattr(launch, name) == getattr(kernel.launch, name), name


def test_a_thin_module_reads_back(kernel: Kernel, tmp_path: Path) -> None:
    told = {"device": "NVIDIA H200", "measurement": MEASURED}
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, **told))
    (tmp_path / "best.py").write_text(emit_thin_module(kernel, **told))
    for name in ("best.cu", "best.py"):
        found = read_emitted(tmp_path / name)
        assert (as_rendered(found.kernel), found.device) == (kernel, "NVIDIA H200")
    (tmp_path / "best.cu").unlink()
    with pytest.raises(FlashgenError, match=r"takes its source from .*best\.cu, which cannot be read"):
        read_emitted(tmp_path / "best.py")


def test_kernels_of_a_shared_last_turn_read_back(tmp_path: Path) -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    kernel = render(Wgmma(br=64, bc=64, last_turn="shared"), problem, H200)
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="NVIDIA H200", measurement=MEASURED))
    (tmp_path / "best.py").write_text(emit_thin_module(kernel, device="NVIDIA H200", measurement=MEASURED))
    for name in ("best.cu", "best.py"):
        found = read_emitted(tmp_path / name).kernel
        assert (as_rendered(found), found.launches) == (kernel, kernel.launches)


def test_arguments_lie_as_in_the_struct(kernel: Kernel) -> None:
    module = data_of(emit_module(kernel, device="NVIDIA H200"))
    wanted = struct_of(kernel.problem)
    packed = module._Arguments(module.ARGUMENTS)
    values = {field.name: i + 1 for i, field in enumerate(wanted.fields)}
    packed.write(values)
    packed.write_numbers(-1.0, (-2.0,) * kernel.problem.has_scales)
    packed.write_addresses(*range(71, 76))
    values |= dict(zip(("q", "k", "v", "o", "lse"), range(71, 76), strict=True)) | {"scale": -1.0}
    values |= {"value_scale": -2.0} if kernel.problem.has_scales else {}
    assert packed.buffer.raw == wanted.pack(values)


@pytest.mark.parametrize("emit", [emit_module, emit_thin_module])
def test_the_module_is_deterministic_and_clean(
    kernel: Kernel, emit: Callable[..., str], tmp_path: Path
) -> None:
    text = emit(kernel, device="NVIDIA H200", measurement=MEASURED)
    assert text == emit(kernel, device="NVIDIA H200", measurement=dict(MEASURED))
    compile(text, "module.py", "exec")
    code = text.replace(kernel.source, "")
    assert "\n\n\n\n" not in code and not re.search(r"[ \t]\n", code) and text.endswith(")\n")
    assert not re.search(r"\b20\d\d-\d\d", code), "a date makes the output differ from day to day"
    path = tmp_path / f"{kernel.problem.name}.py"
    path.write_text(text)
    assert_ruff_is_content(path)


def test_the_module_imports_without_pycuda_or_a_gpu(tmp_path: Path) -> None:
    """Nothing of flashgen, nothing beyond numpy."""
    (tmp_path / "best.py").write_text(emit_module(make(), device="H200"))
    script = (
        "import sys, best; loaded = {m.partition('.')[0] for m in sys.modules}; "
        "print(*sorted(best.__all__), *loaded & {'flashgen', 'pycuda', 'torch', 'cupy', 'jinja2'})"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    functions = ["attention", "explain", "register_torch", "register_transformers", "sdpa", "use"]
    data = ["DEVICE", "KERNELS", "MEASUREMENT", "PROBLEM", "SOURCE", "VARIANT"]
    assert set(result.stdout.split()) == {*data, "Choice", "Launch", "TensorMap", "Tuned", *functions}


def test_the_module_passes_a_strict_type_checker(tmp_path: Path) -> None:
    """And results are known to be of the arrays' type."""
    mypy = shutil.which("mypy", path=str(Path(sys.executable).parent)) or shutil.which("mypy")
    if mypy is None:
        pytest.skip("mypy is not installed")
    (tmp_path / "best.py").write_text(emit_module(make("wgmma", dtype="bf16"), device="H200"))
    (tmp_path / "user.py").write_text(
        "import numpy as np\n"
        "from numpy.typing import NDArray\n\n"
        "from best import KERNELS, attention, explain, sdpa\n\n"
        "x: NDArray[np.float32] = np.zeros((1, 1, 4, 64), np.float32)\n"
        "o: NDArray[np.float32] = attention(x, x, x, scale=0.5)\n"
        "both: tuple[NDArray[np.float32], NDArray[np.float32]] = attention(x, x, x, return_lse=True)\n"
        "as_asked: int = attention(x, x, x)  # type: ignore[assignment]\n"
        "attention(x, x, x, layout='bhds')  # type: ignore[call-overload]\n"
        "like: NDArray[np.float32] = sdpa(x, x, x, is_causal=True)\n"
        "told: str = explain(x, x, x).how + KERNELS[0].launches[0].symbol\n"
    )
    command = [mypy, "--strict", "--no-error-summary", "best.py", "user.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("emit", [emit_module, emit_thin_module])
def test_the_module_is_loaded_from_its_path_alone(emit: Callable[..., str], tmp_path: Path) -> None:
    """As loaders of plugins do, who do not put it among the loaded modules."""
    kernel = make()
    (tmp_path / "best.cu").write_text(emit_cuda(kernel, device="H200"))
    (tmp_path / "best.py").write_text(emit(kernel, device="H200"))
    spec = importlib.util.spec_from_file_location("nobody_knows_it", tmp_path / "best.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "nobody_knows_it" not in sys.modules
    q = np.zeros((4, 16, 4096, 64), np.float32)
    assert module.explain(q, q, q).exact


def test_no_name_of_the_runtime_means_two_things() -> None:
    """All its files are one module where they are inlined: of two of a name, the latter would stand."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            written = [each for target in targets if target for each in ast.walk(target)]
            names = {getattr(node, "name", ""), *(each.id for each in written if isinstance(each, ast.Name))}
            for name in names - {"", "__all__"}:
                assert found.setdefault(name, path.stem) == path.stem, f"{name} of {path.stem}"


def test_the_runtime_is_inlined_whole() -> None:
    """All its files, those first that others import."""
    parts = (*PARTS, *SCORED_PARTS, *PACKED_PARTS, *PAGED_PARTS, *LATENT_PARTS, *LATENT_PAGED_PARTS)
    parts = (*parts, *CACHE_PARTS[1:], *GRADIENT_PARTS, *SCORED_GRADIENT_PARTS, *PACKED_GRADIENT_PARTS)
    assert {path.stem for path in FOLDER.glob("*.py")} == {*parts, "__init__"}
    for place, part in enumerate(parts):
        imported = re.findall(r"^from \.(\w+) import", (FOLDER / f"{part}.py").read_text(), re.MULTILINE)
        assert set(imported) <= set(parts[:place])
    assert runtime_table._FEW_QUERIES == FEW_QUERIES


@pytest.mark.parametrize("emit", [emit_cuda, emit_module])
def test_figures_are_told_as_what_they_are(emit: Callable[..., str]) -> None:
    chosen = make(causal=True, batch=2, num_q_heads=8, num_kv_heads=2, seqlen_q=100)

    def told(**arguments: Any) -> str:
        return " ".join(emit(chosen, **arguments).replace("//", "").split())

    assert (
        "Measured on NVIDIA H200, batch 2, 8 query and 2 key/value heads, 100 query and 4096 key rows, "
        "with a causal mask: 5.123 ms (median), spread 1.2 %, 53.7 TFLOP/s, 168 registers per thread, "
        "occupancy 25 %. Largest error per head against float64: 3.1e-07. "
        'Built by nvcc 13.0.88, driver 580.159 "R". Tuned by flashgen 0.1.0, seed 0.'
    ) in told(device="NVIDIA H200", measurement=MEASURED)
    predicted = told(device="GTX 1080", measurement={**MEASURED, "predicted": True})
    assert "Predicted by a cost model, not measured, for GTX 1080" in predicted
    assert "Measured on" not in predicted and "driver 580" not in predicted
    unbuilt = told(device="NVIDIA H200")
    assert "Not measured: emitted for NVIDIA H200, of a variant that was chosen, not tuned." in unbuilt
    assert "Not built either: it may spill registers." in unbuilt
    build = {"toolkit": "nvcc 13.0.88", "registers": 168, "spill_bytes": 0}
    assert "Built by nvcc 13.0.88: 168 registers per thread, none spilled." in told(
        device="H200", build=build
    )
    assert "12 bytes spilled." in told(device="H200", build={**build, "spill_bytes": 12})


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("H100 SXM5", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("GTX 1080", "gtx-1080"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "sm_90"),
    ],
)
def test_a_file_names_the_card_it_was_made_for(device: str, card: str) -> None:
    problem: dict[str, Any] = {"batch": 2, "num_q_heads": 8, "num_kv_heads": 2, "seqlen_q": 100}
    kernel = make(**problem)
    for emit in (emit_cuda, emit_module):
        text = " ".join(emit(kernel, device=device).replace("//", "").replace("\\\n", " ").split())
        sizes = "--d 64 --batch 2 --heads 8 --kv-heads 2 --seqlen-q 100 --family"
        assert f"--device {card} {sizes}" in text


def test_files_call_themselves_by_their_names() -> None:
    kernel = make()
    cuda = emit_cuda(kernel, device="H200", stem="mine")
    assert "-c mine.cu\n" in cuda and "flashgen emit mine.cu " in cuda and "attention_f32_d64.cu" not in cuda
    module = emit_module(kernel, device="H200", name="mine")
    assert "from mine import attention" in module and "flashgen emit mine.py " in module


def test_the_command_regenerates_the_variant() -> None:
    chosen = make(causal=True, head_dim=40)
    doc = ast.get_docstring(ast.parse(emit_module(chosen, device="H200")))
    assert doc is not None
    words = doc.partition("Regenerate:")[2].replace("\\\n", " ").split()
    assert words[:3] == ["flashgen", "emit", "f32_d40_causal.py"]
    assert "--causal" in words and words[words.index("--d") + 1] == "40"
    settings = dict(w.split("=") for i, w in enumerate(words) if words[i - 1] == "--set")
    family = type(chosen.variant)
    assert family(**family.parse(settings)) == chosen.variant
    assert words[words.index("--family") + 1] == family.family
    assert words[words.index("--device") + 1] == "h200"


def by_hand(source: str = "// by hand\n", arch: int = 90, heads_per_block: int = 1, **problem: Any) -> Kernel:
    """A kernel of any problem, as a family would make it that serves all."""
    wanted = Problem(**problem)
    entry = f"attention_{wanted.stem}"
    launch = Launch(128, 4096, 64, heads_per_block)
    return Kernel(wanted, Simt(vec=1), arch, source, entry, (launch,))


PROBLEMS: list[dict[str, Any]] = [
    {"dtype": "f16"},
    {"dtype": "bf16", "causal": True},
    {"dtype": "f16", "head_dim": 192, "head_dim_v": 128},
    {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128},
    {"head_dim": 192, "head_dim_v": 128, "precision": "tf32"},
]


@pytest.mark.parametrize("heads_per_block", [1, 4])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: Problem(**problem).name)
def test_the_module_of_every_type_is_clean(
    problem: dict[str, Any], heads_per_block: int, tmp_path: Path
) -> None:
    kernel = by_hand(heads_per_block=heads_per_block, **problem)
    for emit in (emit_module, emit_thin_module):
        test_the_module_is_deterministic_and_clean(kernel, emit, tmp_path)
    text = emit_module(kernel, device="NVIDIA H200", measurement=MEASURED)
    (tuned,), wanted = data_of(text).KERNELS, kernel.problem
    assert tuned.problem == wanted.to_dict()
    assert tuned.tolerance == wanted.tolerance
    assert tuned.dtype == {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[wanted.dtype]
    assert tuned.launches[0].heads_per_block == heads_per_block
    assert tuned.head_dim_v == wanted.head_dim_v


def test_the_title_and_the_command_tell_type_and_dims() -> None:
    kernel = by_hand(head_dim=192, head_dim_v=128, precision="tf32")
    doc = ast.get_docstring(ast.parse(emit_module(kernel, device="H200")))
    assert doc is not None
    assert doc.startswith("Flash attention for NVIDIA GPUs: f32 (tf32), head dim 192 (values 128).")
    assert "from f32_tf32_d192v128 import attention" in doc
    assert "--precision tf32 --d 192 --dv 128" in " ".join(doc.replace("\\\n", " ").split())
    doc = ast.get_docstring(ast.parse(emit_module(by_hand(dtype="bf16", head_dim=80), device="H200")))
    assert doc is not None and doc.startswith("Flash attention for NVIDIA GPUs: bf16, head dim 80.")


@pytest.mark.parametrize(
    ("variant", "problem", "words"),
    [
        (Mma(parts="tf32"), {}, "each float32 product is three of TF32"),
        (Mma(parts="tf32"), {"precision": "3xtf32"}, "each float32 product is three of TF32"),
        (Mma(parts="f16"), {}, "each float32 product is three of f16"),
        (Mma(parts="f16"), {"precision": "3xf16"}, "computed again in double precision"),
        (
            Mma(parts="tf32"),
            {"precision": "tf32"},
            f"errors up to {TOLERANCES['tf32']:.0e} are within its class",
        ),
        (Wgmma(), {}, "each float32 product is three of f16"),
        (Simt(vec=1), {}, None),
        (Simt(vec=1), {"precision": "ieee"}, None),
        (Mma(), {"dtype": "f16"}, None),
    ],
)
def test_how_float32_is_multiplied_is_told(
    variant: Variant, problem: dict[str, Any], words: str | None
) -> None:
    kernel = dataclasses.replace(by_hand(**problem), variant=variant)
    text = " ".join(emit_module(kernel, device="H200").split())
    if words is None:
        assert "TF32" not in text and "float32 product" not in text
    else:
        assert words in text


def test_what_parts_of_gradients_lose_is_told() -> None:
    """No row of gradients is computed again."""
    variant = WgmmaBackward(dq_path="bulk", ds_stages=1)
    kernel = render(variant, Problem(backward=True, head_dim=64), PRESETS["h200"])
    text = " ".join(emit_module(kernel, device="H200").split())
    assert "each float32 product is three of f16" in text and "shares a power of two with them" in text
    assert "computed again" not in text


@pytest.mark.parametrize(
    ("arch", "variant"), [(75, Mma()), (80, Mma()), (90, Mma()), (90, Wgmma()), (61, Simt(vec=1))]
)
def test_what_families_say_of_their_instructions_is_in_their_sources(arch: int, variant: Variant) -> None:
    problem = Problem(dtype="f32" if isinstance(variant, Simt) else "f16", head_dim=64)
    card = next(card for card in PRESETS.values() if card.arch == arch)
    legal = enumerate_space(
        type(variant),
        problem,
        card,
        {
            p.name: p.default
            for p in variant.parameters()
            if p.name not in ("br", "bc", "lanes", "stages", "vec", "swizzle", "min_blocks")
        },
    ).legal
    kernel = render(legal[0], problem, card)
    assert ("mma.sync" in kernel.source) == (kernel.variant.oldest_arch(kernel.problem, arch) is not None)
    assert ("wgmma" in kernel.source) == bool(kernel.variant.arch_suffix)
    assert variant.oldest_arch(kernel.problem, arch) in (None, arch, 80)


@pytest.mark.parametrize(
    "source",
    [
        "plain\n",
        '#define A(x) "\\"" \\\n  x\n',
        "a '''b''' c\n",
        'a """b""" c\n',
        "both \"\"\" and '''\n",
        'ends in a quote"',
        "ends in a backslash\\",
        "carriage\r\nreturn\r",
        "\\N{BULLET} \\x41 \\u0041 {{ jinja }} {% raw %} é ≤\n",
        "",
    ],
)
def test_any_source_survives(source: str) -> None:
    assert ast.literal_eval(source_literal(source)) == source
    carried = dataclasses.replace(make(), source=source)
    assert source == data_of(emit_module(carried, device="H200")).SOURCE
    if source.endswith("\n") and "\r" not in source:
        kernel, device = read_cuda(emit_cuda(carried, device="H200"))
        assert (as_rendered(kernel), device) == (carried, "H200")


def test_literals() -> None:
    data = {"a": True, "b": None, "c": 1e-7, "d": 'say "é"\\', "e": -3}
    assert ast.literal_eval(to_literal(data)) == data
    assert to_literal({}) == "{}"


def test_the_cuda_file_is_the_source_with_its_figures(kernel: Kernel) -> None:
    text = emit_cuda(kernel, device="NVIDIA H200", measurement=MEASURED)
    assert text == emit_cuda(kernel, device="NVIDIA H200", measurement=MEASURED)
    added = set(text.splitlines()) - set(kernel.source.splitlines())
    assert added and all(line.startswith("// ") for line in added)
    assert [line for line in text.splitlines() if not line.startswith("//")] == [
        line for line in kernel.source.splitlines() if not line.startswith("//")
    ]
    assert "\n\n\n" not in text.partition("#include")[0]


@pytest.mark.thorough
@pytest.mark.nvcc
def test_the_cuda_file_builds_alone_with_its_launcher(kernel: Kernel, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    source = tmp_path / "best.cu"
    source.write_text(emit_cuda(kernel, device="NVIDIA H200", measurement=MEASURED, stem="best"))
    built = tmp_path / "best.o"
    build = re.search(r"^//     (nvcc .*) -c best\.cu$", source.read_text(), re.MULTILINE)
    assert build is not None
    command = [*build[1].replace("-O3", "-O1").split(), "-Werror", "all-warnings", "-c"]
    result = subprocess.run([*command, source, "-o", built], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    symbols = subprocess.run(
        ["nm", "--defined-only", built], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"\bT {kernel.entry}$", symbols, re.MULTILINE)
