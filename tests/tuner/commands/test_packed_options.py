"""Packed sequences on the command line: what options mean, and that names, files and words agree."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.append import HALVES, Append
from flashgen.gen.emit.options import shape_options, size_options
from flashgen.gen.lengths import draw_lengths
from flashgen.gen.problem import Problem
from flashgen.tuner.cli import Commands
from flashgen.tuner.commands import flags
from flashgen.tuner.errors import UsageError
from flashgen.tuner.request import Shape, Shapes, with_lengths, with_pages
from flashgen.tuner.search.nearness import shape_distance

from tests.support.command_line import command_runner
from tests.support.emulated import needs_compiler


def asked(words: str, command: str = "list") -> Shapes:
    """What the words of a command mean."""
    given = Commands()[command].make_context(command, shlex.split(words)).params
    options = {*flags.SHAPE_OPTIONS, *(each.name for each in flags.SCORING_OPTIONS)}
    options |= {"causal", "both_masks", "varlen", "seqlens", "append", "rotary"}
    return flags.shapes_of(**{name: value for name, value in given.items() if name in options})


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("# queries keys\n30 70\n5\n0, 3\n1 90\n")
    return path


def test_lengths_bring_what_is_not_said() -> None:
    (drawn,) = asked("--varlen uniform:512-2048 --causal").problems()
    assert drawn == Problem(varlen="uniform:512-2048", seqlen_q=2048, seqlen_k=2048, causal=True)
    (apart,) = asked("--varlen uniform:1-16/uniform:512-4000 --batch 32").problems()
    assert (apart.batch, apart.seqlen_q, apart.seqlen_k) == (32, 16, 4000)
    (same,) = asked("--varlen same --seqlen-q 1").problems()
    assert (same.seqlen_q, same.seqlen_k) == (1, 4096)
    several = asked("--varlen uniform:5-9 --batch 2,4 --d 64,128").problems()
    assert len(several) == 4 and {each.varlen for each in several} == {"uniform:5-9"}


def test_a_file_lists_sequences(listed: Path) -> None:
    (problem,) = asked(f"--seqlens {listed}").problems()
    assert problem.lengths.pairs == ((30, 70), (5, 5), (0, 3), (1, 90))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (4, 30, 90)
    with pytest.raises(UsageError, match="lists 4 sequences, batch is 3"):
        asked(f"--seqlens {listed} --batch 3").problems()
    with pytest.raises(UsageError, match="a sequence of 90, seqlen_k is 80"):
        asked(f"--seqlens {listed} --seqlen-k 80").problems()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--varlen same --seqlens nowhere", "both say how long sequences are; give one"),
        ("--seqlens nowhere", "--seqlens: nowhere cannot be read"),
        ("--varlen normal:3", "is none of same"),
        ("--varlen uniform:9-3", "must rise"),
        ("--varlen uniform:5-9 --seqlen 8", "reaches 9, but seqlen is 8; give seqlen 9"),
    ],
)
def test_what_says_no_lengths_is_told(words: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        asked(words).problems()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(dtype="bf16", varlen="uniform:512-4096", batch=32, num_q_heads=32, num_kv_heads=8),
        Problem(varlen="uniform:1-16/uniform:5-90", seqlen_q=16, seqlen_k=90, causal=True),
        Problem(varlen="list:30x70,5,0x3", batch=3, seqlen_q=30, seqlen_k=70),
        Problem(varlen="uniform:5-90", seqlen_q=1),
        Problem(varlen="same"),
        Problem(dtype="bf16", page_size=16, seqlen_q=1, num_q_heads=32, num_kv_heads=8),
        Problem(varlen="uniform:1-16/uniform:5-90", seqlen_q=16, seqlen_k=90, page_size=7),
        Problem(dtype="bf16", kv_dtype="e4m3", page_size=16, seqlen_q=1, num_q_heads=32, num_kv_heads=8),
    ],
)
def test_options_of_a_problem_mean_that_problem(problem: Problem) -> None:
    words = " ".join([*shape_options(problem), *size_options(problem)])
    assert Problem.from_dict(problem.to_dict()) == problem
    shapes = asked(words)
    assert shapes.problems() == [problem]
    assert shapes.fits(problem) and not shapes.fits(Problem(dtype=problem.dtype, causal=problem.causal))
    assert asked(" ".join(shapes.words())).problems() == [problem]


def test_kernels_of_other_lengths_do_for_validation() -> None:
    tuned = Shape(varlen="uniform:5-90", batch=8).problem()
    other = with_lengths(tuned, "list:3x500,7")
    assert (other.batch, other.seqlen_q, other.seqlen_k) == (2, 7, 500)
    assert with_lengths(tuned, "uniform:1-7").lengths == draw_lengths("uniform:1-7", 8, 7, 7)
    with pytest.raises(UsageError, match="leave --varlen and --seqlens out"):
        with_lengths(Problem(), "same")


def test_pages_are_asked_for_alone_or_of_packed_sequences() -> None:
    several = asked("--page-size 16,256 --seqlen-q 1 --heads 8 --kv-heads 2").problems()
    assert [each.page_size for each in several] == [16, 256]
    assert several[0].name == "f32_d64_paged16_h8_kv2_n1_m4096"
    (both,) = asked("--page-size 16 --varlen uniform:5-9 --batch 2").problems()
    assert both.layout.is_packed and both.layout.is_paged
    assert both.name == "f32_d64_packed_paged16_uniform5to9_b2_n9"
    assert asked("--page-size 16").fits(both) and not asked("--page-size 32").fits(both)
    assert asked("").fits(both) and not asked("--page-size 16").fits(Problem())


def test_new_keys_are_appended_to_caches_that_there_are() -> None:
    (paged,) = asked("--page-size 16 --seqlen-q 1 --append --rotary halves:64").problems()
    assert paged.append == Append(HALVES, 64)
    assert shape_options(paged)[-2:] == ["--append", "--rotary halves:64"]
    (dense,) = asked("--append").problems()
    assert dense.append == Append() and dense.name == "f32_d64_append"
    assert asked("--append").fits(dense) and not asked("--append").fits(paged) and asked("").fits(dense)
    assert asked("--append --rotary interleaved:32").words() == ["--append", "--rotary interleaved:32"]
    assert replace(dense, append=None).to_dict() == Problem().to_dict()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rotary halves:64", "add --append"),
        ("--append --rotary quarters:64", "say how columns pair"),
        ("--append --rotary halves:128 --d 64", "rotary_dim is 128, but head_dim 64"),
        ("--append --varlen same", "give a page_size"),
    ],
)
def test_what_cannot_be_appended_is_told(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        asked(words).problems()


def test_keys_of_another_type_are_asked_for() -> None:
    (problem,) = asked("--dtype bf16 --kv-dtype e4m3 --page-size 16").problems()
    assert problem.name == "bf16_kve4m3_d64_paged16" and problem.key_dtype == "e4m3"
    assert asked("--kv-dtype e4m3").fits(problem) and asked("--dtype bf16").fits(problem)
    assert not asked("--kv-dtype bf16").fits(problem)
    assert asked("--dtype bf16 --kv-dtype bf16").problems() == asked("--dtype bf16").problems()
    with pytest.raises(UsageError, match=r"keys of f16 are not served beside queries of bf16; .* --kv-dtype"):
        asked("--dtype bf16 --kv-dtype f16").problems()
    with pytest.raises(UsageError, match="unknown dtype 'e5m2'"):
        asked("--kv-dtype e5m2")


@pytest.mark.parametrize(("size", "told"), [("0", "0"), ("-3", "-3"), ("2147483648", "2147483648")])
def test_pages_without_keys_are_none(size: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"page_size is {told}"):
        asked(f"--page-size {size}").problems()
    with pytest.raises(UsageError, match="'x' is no whole number"):
        asked("--page-size x")


def test_kernels_are_validated_with_the_pages_that_they_take() -> None:
    tuned = Problem(page_size=16)
    assert with_pages(tuned, 16, knows_page_size=True) == tuned
    with pytest.raises(UsageError, match=r"made for pages of 16 keys, not of 32; .* --page-size 32"):
        with_pages(tuned, 32, knows_page_size=True)
    assert with_pages(replace(tuned, page_size=48), 5, knows_page_size=False).page_size == 5
    with pytest.raises(UsageError, match="lie in no pages; leave --page-size out"):
        with_pages(Problem(), 16, knows_page_size=False)
    with pytest.raises(UsageError, match="page_size is 0, and a page has 1 key or more"):
        with_pages(tuned, 0, knows_page_size=False)


def test_the_nearest_lengths_are_those_of_as_many_rows() -> None:
    long, short, alike = (
        Shape(varlen=text, seqlen=4096, batch=64).problem()
        for text in ("same", "uniform:64-128", "uniform:4090-4096")
    )
    assert shape_distance(long, long) == 0 < shape_distance(alike, long) < 0.01
    assert 9 < shape_distance(short, long) < 12


@needs_compiler
def test_a_kernel_is_emitted_validated_and_told(tmp_path: Path) -> None:
    run, path = command_runner(), tmp_path / "packed.cu"
    problem = "--dtype bf16 --d 32 --heads 4 --kv-heads 2 --batch 3 --varlen uniform:5-60"
    where = "--device sim:h200 --family mma"
    run("emit", str(path), *problem.split(), *where.split(), "--set", "br=32", "--set", "bc=32")
    text = path.read_text()
    assert '"varlen": "uniform:5-60"' in text and "attention_bf16_d32_packed_plan_ints" in text
    run("emit", str(path.with_suffix(".py")), *problem.split(), *where.split(), "--set", "br=32")
    assert "attention_varlen" in path.with_suffix(".py").read_text()
    asked = (*problem.split(), *where.split(), "--set", "br=32")
    run("emit", str(tmp_path / "main.cu"), *asked, "--main")
    assert "B + 1 offsets each" in (tmp_path / "main.cu").read_text()
    run("emit", str(tmp_path / "lib" / "best.cu"), *asked, "--page-size", "16", "--cmake")
    assert "_plan_ints(const AttentionArgs* args);" in (tmp_path / "lib" / "best.h").read_text()
    told = run("validate", str(path), "--device", "sim:h200", "--sanitize", "--varlen", "list:3x20", "--json")
    assert json.loads(told.stdout)["sanitized"]
    assert "is correct on H200" in told.stderr
    nobody = run("space", *problem.split(), *where.replace("mma", "ladder").split()).stdout
    assert "packed (lengths uniform from 5 to 60)" in nobody and "removed by arithmetic" in nobody
