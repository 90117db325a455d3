"""Modules of several kernels from the command line: what is chosen, what they carry, how each is proved."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flashgen.gen.emit.cuda import FACTS, emit_cuda
from flashgen.gen.emit.made import Made
from flashgen.gen.emit.module import emit_many, emit_thin_module
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.device import Build
from flashgen.tuner.errors import BuildError, FlashgenError, LaunchError
from flashgen.tuner.prove.proof import prove_emitted
from flashgen.tuner.request import Shapes
from flashgen.tuner.shelf import bundle, library, records
from flashgen.tuner.shelf.bundle import module_name, pick, widened
from flashgen.tuner.shelf.emitted_kernels import read_each, read_emitted
from flashgen.tuner.suites import SUITES

from tests.support.modules import import_path
from tests.support.tuned_kernels import H100, H200, LADDER, entry, tuned

D64, D128 = Problem(head_dim=64), Problem(head_dim=128)
SHORT = replace(D64, seqlen_q=512, seqlen_k=512)


@pytest.fixture
def out(tmp_path):
    """Three kernels for an H200, and one for another card."""
    for problem, card in ((D64, H200), (SHORT, H200), (D128, H200), (D64, preset("gtx-1080"))):
        kernel = tuned(problem, card, variant=LADDER())
        rendered = render(kernel.variant, problem, card)
        told = {"device": card.name, "measurement": records.figures(kernel)}
        cuda, module = emit_cuda(rendered, **told), emit_thin_module(rendered, **told)
        library.write(tmp_path / "out", card.slug, kernel, cuda, module)
    return tmp_path / "out"


def load(path: Path) -> Any:
    return import_path(path, for_good=True)


def names(path: Path) -> list[str]:
    return [tuned.name for tuned in load(path).KERNELS]


# -- choice -------------------------------------------------------------------------------------------------


def test_for_each_problem_the_best_known():
    known = [entry(D64), entry(SHORT), entry(D128), entry(D64, H100)]
    picks = pick(known, [D64, replace(SHORT, seqlen_q=600), D128, replace(D64, causal=True)], H200)
    assert [each.match.entry for each in picks] == [known[0], known[1], known[2], known[0]]
    assert [each.match.exact for each in picks] == [True, False, True, False]
    assert bundle.kernels_of(picks) == known[:3]
    missing = [replace(D64, head_dim=d, head_dim_v=d) for d in (32, 40, 64)]
    words = "on NVIDIA H200 for f32, head dim 32; f32, head dim 40: 2 of 3 problems; tune them"
    with pytest.raises(FlashgenError, match=words):
        pick(known, missing, H200)


def test_lists_without_sizes_mean_all_that_was_tuned():
    known = [entry(D64), entry(SHORT), entry(D128), entry(D64, H100), entry(replace(D128, causal=True))]
    shapes = Shapes(head_dim=(64, 128), causal=(False,))
    assert widened(known, shapes, shapes.problems(), H200) == [D64, SHORT, D128]
    sized = Shapes(head_dim=(64, 128), seqlen=(512,))
    assert widened(known, sized, sized.problems(), H200) == sized.problems()
    # What was never tuned is asked for all the same, so that its lack is told.
    more = Shapes(head_dim=(64, 40))
    assert [p.head_dim for p in widened(known, more, more.problems(), H200)] == [64, 64, 40]
    suite = Shapes(suites=("gpt2",))
    assert widened(known, suite, suite.problems(), H200) == suite.problems()


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (Shapes(suites=("llm",)), "llm"),
        (Shapes(suites=("llm", "odd"), head_dim=(64,)), "llm_odd"),
        (Shapes(seqlen=(512, 2048)), "f32_d64_many"),
        (Shapes(dtype=("bf16", "f16"), head_dim=(64, 128), causal=(False, True)), "bf16_f16_d64_128_many"),
        (Shapes(head_dim=(64,), head_dim_v=(64, 128)), "f32_d64_64v128_many"),
    ],
)
def test_a_module_of_several_is_called_by_what_it_is_for(shapes, name):
    assert module_name(shapes, shapes.problems()) == name and name.isidentifier()
    assert name not in {problem.name for problem in shapes.problems()}


# -- emit ---------------------------------------------------------------------------------------------------


def test_emit_of_lists_and_of_names(flashgen, out, tmp_path):
    told = flashgen("emit", "both.py", "--device", "h200", "--d", "64,128").stdout
    assert re.match(r"wrote both\.py: 3 kernels, 0\.\d MiB; 3 of 3 problems were tuned for just this\n", told)
    assert names(tmp_path / "both.py") == ["f32_d128", "f32_d64", "f32_d64_n512"]
    text = (tmp_path / "both.py").read_text()
    assert "    flashgen emit both.py \\\n        --d 64,128 --device h200\n" in text
    # On that card, however it was named.
    flashgen("emit", "both.py", "--d", "64,128", "--preset", "h200")
    assert (tmp_path / "both.py").read_text() == text
    told = flashgen("emit", "near.py", "--device", "h200", "--seqlen", "512,700,4096", "--json").stdout
    kernels = json.loads(told)["kernels"]
    assert [(each["asked"]["seqlen_q"], each["problem"]["seqlen_q"], each["exact"]) for each in kernels] == [
        (512, 512, True), (700, 512, False), (4096, 4096, True),
    ]  # fmt: skip
    assert names(tmp_path / "near.py") == ["f32_d64_n512", "f32_d64"]
    # Where one kernel serves all, it is a module of one.
    told = flashgen("emit", "one.py", "--device", "h200", "--seqlen", "512,700").stdout
    assert SHORT.to_dict() == load(tmp_path / "one.py").PROBLEM and "wrote one.py: f32_d64_n512" in told
    file = out / "nvidia_h200" / "f32_d128.json"
    flashgen("emit", "named.py", "nvidia_h200/f32_d64", str(file))
    assert names(tmp_path / "named.py") == ["f32_d64", "f32_d128"]
    flashgen("emit", "one.cu", "nvidia_h200/f32_d64")
    kept = (out / "nvidia_h200" / "f32_d64.cu").read_text()
    told = (tmp_path / "one.cu").read_text().replace("one.cu", "f32_d64.cu")
    assert told.partition(FACTS)[0] == kept.partition(FACTS)[0]


def test_emit_of_a_suite(flashgen, tmp_path, monkeypatch):
    problems = list(SUITES["report"].problems.values())
    known = [entry(p, variant=LADDER()) for p in problems]
    known = [replace(e, rendered=render(LADDER(), e.kernel.problem, H200)) for e in known]
    monkeypatch.setattr("flashgen.tuner.shelf.known_kernels.known_kernels", lambda *_: known)
    flashgen("emit", "report.py", "--suite", "report")
    module = load(tmp_path / "report.py")
    assert [each.problem for each in module.KERNELS] == [p.to_dict() for p in problems]
    flashgen("emit", "some.py", "--suite", "report", "--d", "64")
    assert len(names(tmp_path / "some.py")) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x.cu", "--d", "64,128"), "3 kernels make a module; name the file .py"),
        (("x.py", "--d", "64,128", "--set", "bc=16"), "--set renders one variant"),
        (("x.py", "f32_d64", "--d", "64"), "the kernels are named; leave out"),
        (("x.py", "f32_d64", "f32_d128"), "several cards; name one of"),
        (("x.py", "nvidia_h200/f32_d64", "geforce/f32_d64"), "there is no kernel 'geforce/f32_d64'"),
        (("x.py", "nvidia_h200/f32_d64", "gtx_1080/f32_d64"), "two kernels were tuned for f32_d64"),
        (("x.cu", "--embed", "--d", "64"), "--embed is for modules"),
        (("x.py", "--suite", "lm"), "did you mean 'llm'"),
    ],
)
def test_what_emit_of_several_refuses(flashgen, out, arguments, words):
    device = () if "f32_d64" in " ".join(arguments) else ("--device", "h200")
    assert words in flashgen("emit", *arguments, *device, code=2).stderr


class Compiler:
    """Makes cubins that say what they are of; refuses what ``refuses`` is in."""

    version = "stand-in"

    def __init__(self, folder: Path, refuses: str = "nothing") -> None:
        self.folder, self.refuses = folder, refuses

    def build(self, kernel: Kernel) -> Build:
        if self.refuses in kernel.problem.name:
            raise BuildError("ptxas fatal: made to fail")
        path = self.folder / f"{kernel.digest}.cubin"
        path.write_text(f"{kernel.problem.head_dim} {kernel.problem.causal}")
        return Build(kernel, path, registers=40, spill_bytes=0, seconds=0.001)


def test_embedded_kernels_are_compiled_for_both_masks(flashgen, out, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bundle, "cuda_toolchain", lambda arch: asked.append(arch) or Compiler(tmp_path))
    told = json.loads(
        flashgen("emit", "both.py", "--device", "h200", "--d", "64,128", "--embed", "--json").stdout
    )
    assert told["embedded"] and asked == [90]
    module = load(tmp_path / "both.py")
    for kernel in module.KERNELS:
        for causal in (False, True):
            carried = module._built(kernel, 90, causal)
            assert carried == f"{kernel.head_dim} {causal}".encode()
            assert module._built(kernel, 80, causal) is None
    flashgen("emit", "one.py", "--device", "h200", "--d", "128", "--embed")
    one = load(tmp_path / "one.py")
    (kernel,) = one.KERNELS
    assert one._built(kernel, 90, True) == b"128 True" and one._built(kernel, 89, True) is None
    monkeypatch.setattr(bundle, "cuda_toolchain", lambda arch: Compiler(tmp_path, refuses="d128"))
    told = flashgen("emit", "both.py", "--device", "h200", "--d", "64,128", "--embed", code=1).stderr
    assert "f32_d128 cannot be embedded: ptxas fatal" in told


# -- proof --------------------------------------------------------------------------------------------------


def several(tmp_path: Path) -> tuple[Path, list[Kernel]]:
    card = preset("gtx-1080")
    variant = LADDER.from_dict(LADDER().to_dict() | {"br": 64, "bc": 16})
    problems = [Problem(head_dim=d, batch=1, seqlen_q=64, seqlen_k=64, causal=d == 32) for d in (32, 16)]
    kernels = [render(variant, problem, card) for problem in problems]
    path = tmp_path / "several.py"
    path.write_text(emit_many([Made(k, card.name) for k in kernels], name="several", command=[]))
    return path, kernels


def test_a_module_of_several_reads_back_as_its_kernels(tmp_path):
    path, kernels = several(tmp_path)
    found = read_each(path)
    assert [each.kernel for each in found] == kernels
    assert [each.name for each in found] == [k.problem.name for k in kernels] and found[
        0
    ].device == "GTX 1080"
    with pytest.raises(FlashgenError, match=r"holds 2 kernels \(f32_d32_causal_b1_n64, f32_d16_b1_n64\)"):
        read_emitted(path)


def test_each_kernel_of_a_module_is_proved(tmp_path, monkeypatch):
    path, kernels = several(tmp_path)
    proved: list[tuple[str, bool]] = []

    def prove_mask(emitted, kernel, target, sanitize, seed, _doing):
        if len(proved) == 3:
            raise LaunchError("wrong")
        proved.append((emitted.name, kernel.problem.causal))
        return 1e-7, 0

    monkeypatch.setattr("flashgen.tuner.prove.proof._prove_mask", prove_mask)
    proofs = (prove_emitted(each, device="sim:gtx-1080") for each in read_each(path))
    assert next(proofs).kernel == kernels[0].problem.name and len(proved) == 2
    with pytest.raises(FlashgenError, match=r"several\.py, f32_d16_b1_n64, causal mask: wrong"):
        next(proofs)
    assert proved == [(kernels[0].problem.name, c) for c in (True, False)] + [
        (kernels[1].problem.name, False)
    ]
