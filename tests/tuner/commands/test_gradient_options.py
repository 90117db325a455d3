"""Gradients on the command line: what --backward means, and that names, files and words agree."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.emit.options import shape_options, size_options
from flashgen.gen.emit.words import class_words
from flashgen.gen.families.simt_backward.family import SimtBackward
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cli import Commands
from flashgen.tuner.commands import flags
from flashgen.tuner.errors import NotServed, UsageError
from flashgen.tuner.request import Shapes
from flashgen.tuner.serving import serving_families
from flashgen.tuner.shelf.emitted_kernels import read_emitted

from tests.support.command_line import command_runner

GRADIENTS = Problem(dtype="bf16", head_dim=128, causal=True, backward=True)


def asked(words: str) -> Shapes:
    """What the words of a command mean."""
    given = Commands()["list"].make_context("list", shlex.split(words)).params
    options = {*flags.SHAPE_OPTIONS, *(each.name for each in flags.SCORING_OPTIONS)}
    options |= {"causal", "both_masks", "varlen", "seqlens", "latent", "append", "rotary", "backward"}
    return flags.shapes_of(**{name: value for name, value in given.items() if name in options})


def test_words_and_names_bring_the_problem_back() -> None:
    for problem in (GRADIENTS, replace(GRADIENTS, num_kv_heads=2, seqlen_q=100, dtype="f32", causal=False)):
        words = " ".join([*shape_options(problem), *size_options(problem)])
        assert "--backward" in words
        assert asked(words).problems() == [problem]
        assert asked(" ".join(asked(words).words())).problems() == [problem]
        assert Problem.from_dict(problem.to_dict()) == problem
    assert GRADIENTS.name == "bf16_d128_backward_causal"
    assert class_words(GRADIENTS) == "gradients, bf16, head dim 128"
    assert "backward" not in Problem().to_dict()


def test_filters_find_gradients_alone_where_they_are_asked_for() -> None:
    assert asked("--backward").fits(GRADIENTS) and not asked("--backward").fits(Problem(dtype="bf16"))
    assert asked("--dtype bf16").fits(GRADIENTS)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--backward --latent", "gradients are those of keys and values apart, not of latent values"),
        (
            "--backward --append",
            "gradients are those of keys and values apart, not of keys that a call appends",
        ),
    ],
)
def test_what_has_no_gradients_is_told(words: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        asked(words).problems()


def test_families_follow_the_operation() -> None:
    def names(problem: Problem, card: str) -> list[str]:
        return [family.family for family in serving_families(problem, PRESETS[card])]

    assert names(GRADIENTS, "a100") == ["mma-backward"]
    assert names(GRADIENTS, "h200") == ["mma-backward", "wgmma-backward"]
    assert names(replace(GRADIENTS, dtype="f32"), "gtx-1080") == ["simt-backward"]
    of_parts = ["mma-backward", "simt-backward", "wgmma-backward"]
    assert names(replace(GRADIENTS, dtype="f32"), "h200") == of_parts
    assert names(replace(GRADIENTS, backward=False), "a100") == ["mma"]
    with pytest.raises(NotServed) as told:
        serving_families(Problem(dtype="e4m3", backward=True), PRESETS["h200"])
    assert "simt-backward" in str(told.value) and "family simt " not in str(told.value)
    with pytest.raises(NotServed) as told:
        serving_families(Problem(dtype="e4m3"), PRESETS["t4"])
    assert "backward" not in str(told.value)


def test_a_kernel_of_gradients_is_emitted_and_read_back(tmp_path: Path) -> None:
    run = command_runner()
    words = ("--backward", "--d", "64", "--causal", "--device", "gtx-1080", "--family", "simt-backward")
    held = ("--set", "br=32", "--set", "bc=32", "--set", "threads_per_block=64", "--set", "lanes=8")
    path = tmp_path / "best.cu"
    run("emit", str(path), *words, *held)
    read = read_emitted(path).kernel
    rendered = render(read.variant, read.problem, PRESETS["gtx-1080"])
    assert isinstance(read.variant, SimtBackward) and read.problem.backward and read.problem.causal
    assert read.workspace == rendered.workspace and read.launches == rendered.launches
    assert f"{read.entry}_workspace_bytes" in path.read_text()
    run("emit", str(tmp_path / "best.py"), *words, *held)
    assert "\ngradients, explain, use, " in (tmp_path / "best.py").read_text()
    run("emit", str(tmp_path / "best.py"), *words, *held, "--softcap", "30")
    assert "ScoredGradients(GRADIENTS" in (tmp_path / "best.py").read_text()
    run("emit", str(tmp_path / "best.py"), *words, *held, "--varlen", "same")
    assert "PackedGradients(GRADIENTS" in (tmp_path / "best.py").read_text()
    assert "simt-backward" in run("space", *words, *held).stdout


def test_programs_and_libraries_that_there_are_none_of_are_refused(tmp_path: Path) -> None:
    run = command_runner()
    words = ("emit", str(tmp_path / "best.cu"), "--backward", "--device", "gtx-1080", "--set", "br=32")
    for asked, has_program in (((), True), (("--softcap", "30"), False)):
        told = " ".join(run(*words, *asked, "--cmake", code=2).stderr.split())
        assert "makes no libraries of gradients" in told
        assert ("--main makes a program of it" in told) == has_program
    told = run(*words, "--main", "--softcap", "30", code=2).stderr
    assert "that check themselves under the causal mask or none" in " ".join(told.split())
    assert not list(tmp_path.glob("best*"))
