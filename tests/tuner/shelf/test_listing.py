"""Lists of problems on the command line, the list of tuned kernels, and two of them side by side."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from flashgen.gen.problem import Problem
from flashgen.tuner.commands.flags import parse_list
from flashgen.tuner.errors import UsageError
from flashgen.tuner.request import Shape, Shapes
from flashgen.tuner.shelf import library
from flashgen.tuner.shelf.listing import Difference, find, fitting, name_of
from flashgen.tuner.suites import SUITES
from flashgen.tuner.view.listing import show_difference, show_kernels
from rich.console import Console

from tests.support.tuned_kernels import H200, LADDER, entry, tuned

D32, D64 = Problem(head_dim=32), Problem(head_dim=64)
H100 = replace(H200, name="NVIDIA H100")


def shown(show, *arguments, **options) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, *arguments, **options)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


# -- several problems ---------------------------------------------------------------------------------------


def test_lists_are_multiplied_out():
    shapes = Shapes(head_dim=(64, 128), seqlen=(512, 2048), causal=(False, True), dtype=("bf16",))
    problems = shapes.problems()
    assert len(problems) == len(set(problems)) == 8
    assert {(p.head_dim, p.seqlen_q, p.seqlen_k, p.causal) for p in problems} == {
        (d, n, n, c) for d in (64, 128) for n in (512, 2048) for c in (False, True)
    }
    assert all(shapes.fits(p) for p in problems) and not shapes.fits(Problem(dtype="bf16", head_dim=32))


def test_one_problem_is_what_a_shape_is():
    shapes = Shapes(head_dim=(40,), seqlen_q=(7,), causal=(True,))
    (problem,) = shapes.problems()
    assert shapes.of_one(problem) == Shape(head_dim=40, seqlen_q=7, causal=True)
    assert shapes.of_one(problem).problem() == problem
    assert Shapes().problems() == [Problem()] and Shapes().of_one(Problem()) == Shape()
    suite = Shapes(suites=("gpt2",))
    (problem,) = suite.problems()
    assert suite.of_one(problem).problem() == problem and suite.of_one(problem).has_sizes


def test_options_are_written_as_they_are_typed():
    shapes = Shapes(suites=("llm",), head_dim=(64, 128), kv_heads=(4,), causal=(False, True))
    assert shapes.words() == ["--suite llm", "--d 64,128", "--kv-heads 4", "--causal both"]
    assert Shapes(causal=(False,)).words() == ["--no-causal"] and Shapes().words() == []


def test_of_a_suite_the_other_options_choose():
    every = Shapes(suites=("llm",)).problems()
    assert every == list(SUITES["llm"].problems.values())
    some = Shapes(suites=("llm",), head_dim=(64, 128), causal=(True,), seqlen=(512,)).problems()
    assert (
        some == [p for p in every if p.head_dim < 256 and p.causal and p.seqlen_q == 512] and len(some) == 2
    )
    both = Shapes(suites=("gpt2", "llm")).problems()
    assert len(both) == 1 + len(every)
    with pytest.raises(UsageError, match="did you mean 'llm'"):
        Shapes(suites=("lm",)).problems()
    with pytest.raises(UsageError, match="none of the 1 problems of suite 'gpt2'"):
        Shapes(suites=("gpt2",), head_dim=(128,)).problems()


def test_lists_are_read():
    assert parse_list("--d", "64, 128,64", int) == (64, 128)
    assert parse_list("--d", None, int) == () and parse_list("--suite", "llm,odd", str) == ("llm", "odd")
    for text in ("64,x", "64,", "", "1.5"):
        with pytest.raises(UsageError, match=r"--d .* is no whole number"):
            parse_list("--d", text, int)


# -- the list -----------------------------------------------------------------------------------------------


def test_options_choose_kernels_and_each_is_there_once():
    known = [entry(D64), entry(D32), entry(D64, H100), entry(replace(D64, causal=True)), entry(D64)]
    assert [name_of(e) for e in fitting(known, Shapes())] == [
        "nvidia_h100/f32_d64", "nvidia_h200/f32_d32", "nvidia_h200/f32_d64", "nvidia_h200/f32_d64_causal",
    ]  # fmt: skip
    assert [name_of(e) for e in fitting(known, Shapes(head_dim=(64,), causal=(False,)), H100)] == [
        "nvidia_h100/f32_d64"
    ]
    assert fitting(known, Shapes(dtype=("bf16",))) == []


def write(folder, problem, **others):
    kernel = tuned(problem, **others)
    return library.write(folder, kernel.device.lower().replace(" ", "_"), kernel, kernel.source, "# module\n")


def test_list_as_table_and_json(flashgen, tmp_path):
    assert "no kernels: tune with" in flashgen("list").stdout
    for causal in (False, True):
        write(tmp_path / "out", replace(D64, causal=causal))
    table = flashgen("list").stdout
    assert "nvidia_h200: NVIDIA H200" in table and "f32_d64_causal" in table and "101.0 us" in table
    told = json.loads(flashgen("list", "--d", "64,128", "--causal", "both", "--json").stdout)
    assert [each["name"] for each in told] == ["nvidia_h200/f32_d64", "nvidia_h200/f32_d64_causal"]
    assert told[0]["file"].endswith("f32_d64.json") and "times_us" not in told[0]["measurement"]
    assert len(json.loads(flashgen("list", "--causal", "--json").stdout)) == 1
    assert "none of 2 fits" in flashgen("list", "--no-causal", "--d", "32").stdout
    assert "unknown suite" in flashgen("list", "--suite", "lm", code=2).stderr


def test_the_list_tells_what_has_no_files():
    assert "f32_d64 (no files)" in shown(show_kernels, [entry(D64)])
    assert "(predicted, not measured)" in shown(show_kernels, [entry(D64, predicted=True)])


# -- two kernels --------------------------------------------------------------------------------------------


def test_a_kernel_goes_by_its_name_or_file(tmp_path):
    known = [entry(D64), entry(D32), entry(D64, H100)]
    assert find(known, "nvidia_h200/f32_d64") is known[0] and find(known, "f32_d32") is known[1]
    paths = write(tmp_path, D64)
    for path in (paths.json, paths.cu, paths.py):
        assert find([], str(path)).kernel.problem == D64
    for text, words in (
        ("f32_d64", "several cards; name one of nvidia_h200/f32_d64, nvidia_h100/f32_d64"),
        ("f32_d63", "did you mean"),
        ("f32_d3", "did you mean 'f32_d32'"),
        (str(tmp_path / "none.json"), "is no tuned kernel of a library folder"),
    ):
        with pytest.raises(UsageError, match=words):
            find(known, text)
    with pytest.raises(UsageError, match="nothing was tuned yet"):
        find([], "f32_d64")


def test_what_differs_is_told_and_only_that():
    a = entry(D64, variant=LADDER.from_dict(LADDER().to_dict() | {"bc": 16}))
    b = entry(replace(D64, causal=True), variant=LADDER.from_dict(LADDER().to_dict() | {"bc": 32}))
    difference = Difference(a, b)
    assert difference.problem == {"causal": (False, True)} and difference.made == {}
    assert difference.parameters == {"bc": (16, 32)}
    assert difference.figures["tflops"][0] == 2 * difference.figures["tflops"][1]
    assert difference.source.startswith("--- nvidia_h200/f32_d64.cu\n+++ nvidia_h200/f32_d64_causal.cu\n@@")
    assert "-//   bc = 16" in difference.source and "+//   bc = 32" in difference.source
    text = shown(show_difference, difference, source=True)
    assert "x 0.5" in text and difference.source in text
    assert "lines added" in shown(show_difference, difference, source=False)
    same = Difference(a, a)
    assert same.parameters == {} and same.source == ""
    text = shown(show_difference, same, source=True)
    assert "the sources are the same" in text and "bc=16" in text


def test_a_prediction_is_not_held_against_a_measurement():
    text = shown(show_difference, Difference(entry(D64), entry(D64, predicted=True)), source=True)
    assert "one is predicted, the other measured" in text


def test_diff_as_table_and_json(flashgen, tmp_path):
    a, b = write(tmp_path / "out", D64), write(tmp_path / "out", D32)
    text = flashgen("diff", "f32_d64", str(b.py)).stdout
    assert "head_dim" in text and "-constexpr" in text
    told = json.loads(flashgen("diff", str(a.json), "nvidia_h200/f32_d32", "--json").stdout)
    assert told["problem"]["head_dim"] == [64, 32] and told["source"].startswith("--- nvidia_h200/f32_d64.cu")
    assert "did you mean 'f32_d64'" in flashgen("diff", "f32_d65", "f32_d32", code=2).stderr
