"""The script that runs compute-sanitizer, as far as it goes without a GPU."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.arguments import argument_struct
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.cards.device import Build
from flashgen.tuner.evaluate import reference

from tests.support import sanitize as script
from tests.support.covering import HEAD_DIMS, NUMBERS
from tests.support.stand_in_driver import FAKE

#: What the script's launches never ask for: soft caps, biases, pages and launches in front.
LEFT_TO_EMULATED_CARDS = {
    "tangent",
    "bias_stages",
    "bias_heads",
    "seen_bits",
    "far_keys",
    "split",
    "summed_columns",
    "values",
    "powers",
    "score_type",
    "promotion",
    "copiers",
    "last_turn",
}


@pytest.mark.thorough
def test_the_sample_takes_every_legal_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PROBLEMS", ((128, False, 1000), (64, True, 197)))
    kernels = script.choose(30, 1, preset("h200"))
    simt = [k for k in kernels if k.variant.family == "simt"]
    assert len(simt) >= 30 and len({k.digest for k in simt}) == len(simt)
    assert {k.problem.causal for k in simt} == {False, True}
    assert {k.problem.head_dim for k in simt} == {64, 128}
    assert sum(k.variant.family == "ladder" for k in kernels) >= 30
    mma = [k for k in kernels if k.variant.family == "mma"]
    assert len(mma) >= 30 and len({k.digest for k in mma}) == len(mma)
    assert {(k.problem.dtype, k.problem.precision) for k in mma} == set(NUMBERS)
    assert {(k.problem.head_dim, k.problem.head_dim_v) for k in mma} == set(HEAD_DIMS)
    assert {k.problem.causal for k in mma} == {False, True}
    for parameter in Mma.parameters():
        if parameter.name in LEFT_TO_EMULATED_CARDS:
            continue
        assert {getattr(k.variant, parameter.name) for k in mma} == set(parameter.choices)
    wgmma = [k for k in kernels if k.variant.family == "wgmma"]
    assert {k.problem.dtype for k in wgmma} == {"f16", "bf16", "f32", "e4m3"}
    for parameter in Wgmma.parameters():
        if parameter.name in LEFT_TO_EMULATED_CARDS:
            continue
        assert {getattr(k.variant, parameter.name) for k in wgmma} == set(parameter.choices)
    said = capsys.readouterr().out
    assert all(f"{family} variants with" in said for family in ("simt", "mma", "wgmma"))


@pytest.mark.thorough
def test_the_manifest_holds_what_a_launch_takes(tmp_path: Path) -> None:
    """Without building: no artifact is read before the launch."""

    class Toolchain:
        version = "none"

        def build(self, kernel: Kernel) -> Build:
            return Build(kernel, Path("none.cubin"), registers=1, spill_bytes=0, seconds=0.0, cached=False)

    limits = preset("h200")
    kernels = [k for family in ("mma", "wgmma") for k in script.choose_covering(family, 1, 0, limits)]
    kernels += script.choose_eight_bits(0, limits)
    manifest = tmp_path / "manifest.json"
    script.write_manifest(kernels, Toolchain(), manifest)
    for kernel, entry in zip(kernels, json.loads(manifest.read_text()), strict=True):
        problem = kernel.problem
        assert (entry["dtype"], entry["head_dim"]) == (problem.dtype, problem.head_dim)
        assert entry["head_dim_v"] == problem.head_dim_v
        assert entry["has_value_scale"] == (problem.dtype == "e4m3")
        assert entry["heads_per_block"] == kernel.launch.heads_per_block
        assert entry["max_blocks"] == kernel.launch.max_blocks
        assert entry["cluster"] == kernel.launch.cluster
        assert entry["pack_heads"] == kernel.launch.pack_heads
        assert entry["splits"] == kernel.launch.splits
        assert entry["workspace_splits"] == kernel.launch.workspace_splits
        assert (entry["combine"] is None) == (kernel.workspace is None) == (entry["workspace_floats"] == 0)
        assert entry["heads_per_cluster"] == kernel.launch.heads_per_cluster
        # Threads write what blocks make together, and bring packed rows too, which lie apart.
        together = kernel.launch.splits > 1 or kernel.launch.workspace_splits > 1
        by_copy_engine = "kv" if kernel.launch.pack_heads else "qkv" if together else "qkvo"
        assert [each["array"] for each in entry["tensor_maps"]] == list(
            by_copy_engine if kernel.variant.family == "wgmma" else ""
        )
        assert entry["allowed_error"] > problem.tolerance
        assert max(keys for *_, keys in entry["shapes"]) < 3 * kernel.variant.bc
        assert any(heads > kv_heads for _, heads, kv_heads, _, _ in entry["shapes"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_launches_are_right_and_wrong_ones_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = tmp_path / "libcuda.so.1"
    source = FAKE
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", built], check=True)
    driver = ctypes.CDLL(str(built))
    driver.fake_reset(16, 9, 0, 232448)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    entries = []
    for causal in (False, True):
        cubin = tmp_path / f"{causal}.cubin"
        cubin.write_text(f"causal={int(causal)}")
        entries.append(
            {
                "name": f"mask {causal}",
                "cubin": str(cubin),
                "symbol": "kernel",
                "threads": 128,
                "smem_bytes": 4096,
                "rows_per_block": None if causal else 64,
                "heads_per_block": 1,
                "max_blocks": None,
                "cluster": 1,
                "pack_heads": False,
                "splits": 1,
                "workspace_splits": 1,
                "workspace_floats": 0,
                "combine": None,
                "heads_per_cluster": 1,
                "tensor_maps": [],
                "dtype": "f32",
                "output_dtype": "f32",
                "has_value_scale": False,
                "head_dim": 16,
                "head_dim_v": 16,
                "causal": causal,
                "allowed_error": 1e-5,
                "args_format": argument_struct().format,
                "shapes": [(1, 2, 1, 69, 35), (2, 1, 1, 3, 13), (1, 1, 1, 65, 1)],
            }
        )
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(entries))
    script.launch_all(manifest)
    assert capsys.readouterr().out == "# mask False\n# mask True\n# done\n"
    assert driver.fake_num_launches() == 6
    assert driver.fake_num_allocated() == 0
    manifest.write_text(json.dumps([entries[0] | {"causal": True}]))
    script.launch_all(manifest)
    assert "!!!!!!!!! wrong by" in capsys.readouterr().out
    for number, (dtype, allowed) in enumerate((("f16", 6e-3), ("bf16", 3e-2)), start=1):
        driver.fake_reset(16, 9, 0, 232448)
        driver.fake_kernel(24, number)
        half = entries[0] | {
            "dtype": dtype,
            "output_dtype": dtype,
            "head_dim_v": 24,
            "allowed_error": allowed,
            "heads_per_block": 2,
        }
        manifest.write_text(json.dumps([half]))
        script.launch_all(manifest)
        assert capsys.readouterr().out == "# mask False\n# done\n"
        # Far less than the type's rounding: the comparison looks at what the kernel wrote.
        manifest.write_text(json.dumps([half | {"allowed_error": 1e-6}]))
        script.launch_all(manifest)
        assert "!!!!!!!!! wrong by" in capsys.readouterr().out


def test_the_comparison_agrees_with_the_reference() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.uniform(-3, 3, s).astype(np.float32) for s in ((2, 4, 9, 8), (2, 2, 5, 8), (2, 2, 5, 8)))
    for causal in (False, True):
        right = reference.attention(q, k, v, scale=8**-0.5, scores=scores_of(causal=causal))
        assert script.difference(right.o, right.lse, q, k, v, causal=causal) < 1e-12
        assert script.difference(right.o + 0.1, right.lse, q, k, v, causal=causal) == pytest.approx(0.1)
        assert script.difference(right.o * np.nan, right.lse, q, k, v, causal=causal) == np.inf
        assert script.difference(right.o, right.lse + 1, q, k, v, causal=causal) > 0.05
    for dtype in (np.float16, ml_dtypes.bfloat16):
        q, k, v = (x.astype(dtype) for x in (q, k, v[..., :5]))
        right = reference.attention(q, k, v, scale=8**-0.5)
        assert script.difference(right.o, right.lse, q, k, v, causal=False) < 1e-12
        assert 1e-5 < script.difference(right.o.astype(dtype), right.lse, q, k, v, causal=False) < 1e-2


OUTPUT = """========= COMPUTE-SANITIZER
# first
# second
========= Invalid __shared__ read of size 4 bytes
=========     at kernel+0x10
========= Error: Race reported between Write access and Read access
========= Host API memory access error at host access to 0x7f0000000000 of size 32 bytes
!!!!!!!!! wrong by 1.00e-02 with 3 rows and 5 keys
# done
========= ERROR SUMMARY: 2 errors
"""


def test_findings_go_to_the_kernel_that_ran() -> None:
    report = script.parse("memcheck", OUTPUT, 86, 1.0)
    assert report.ran == 2 and report.finished and report.supported and not report.clean
    assert list(report.findings) == ["second"] and len(report.findings["second"]) == 4
    clean = "\n".join(line for line in OUTPUT.splitlines() if "#" in line or "SUMMARY" in line)
    assert script.parse("memcheck", clean, 0, 1.0).clean
    assert not script.parse("memcheck", clean, 86, 1.0).clean  # the exit code alone is enough
    assert not script.parse("memcheck", clean.replace("# done\n", ""), 0, 1.0).clean
    assert not script.parse("memcheck", clean.replace("=========", ""), 0, 1.0).clean
    refused = script.parse("memcheck", "========= Error: Device not supported\n", 1, 1.0)
    assert not refused.supported and not refused.clean


def test_the_exit_code_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    clean = script.Report("memcheck", {}, 5, True, True, 1.0, "")
    dirty = script.Report("racecheck", {"kernel": ["Race reported"]}, 5, True, True, 1.0, "")
    short = script.Report("racecheck", {}, 4, True, True, 1.0, "")
    refused = script.Report("racecheck", {}, 0, False, False, 1.0, "Device not supported")
    assert script.show([clean, clean], 5) == 0
    assert script.show([clean, dirty], 5) == 1
    assert script.show([clean, short], 5) == 1
    assert script.show([clean, refused], 5) == script.CANNOT_RUN_EXIT
    assert "Race reported" in capsys.readouterr().out
