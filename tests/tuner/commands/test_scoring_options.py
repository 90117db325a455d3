"""Masks and changes of scores on the command line: what words mean, and that names, files and words agree."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.tuner.asked_scoring import AskedScoring, parse_scoring
from flashgen.tuner.cli import Commands
from flashgen.tuner.commands import flags
from flashgen.tuner.errors import UsageError
from flashgen.tuner.request import Shape, Shapes
from flashgen.tuner.shelf import library

from tests.support.command_line import command_runner
from tests.support.tuned_kernels import tuned

#: Of each option, a value that it may have, and what is asked for then.
ASKED = {
    "--window 127,0": Scoring(window=(127, 0)),
    "--window 127": Scoring(window=(127, -1)),
    "--window all,0": Scoring(window=(-1, 0)),
    "--window -1,64": Scoring(window=(-1, 64)),
    "--window 127,0,4": Scoring(window=(127, 0), always=4),
    "--chunk 1024": Scoring(chunk=1024),
    "--prefix 256": Scoring(prefix=256),
    "--lengths": Scoring(lengths=True),
    "--documents 16": Scoring(documents=16),
    "--dilation 2": Scoring(dilation=2),
    "--tree --seqlen-q 16": Scoring(tree=True),
    "--softcap 30": Scoring(softcap=30.0),
    "--softcap 0.5": Scoring(softcap=0.5),
    "--alibi": Scoring(alibi=True),
    "--bias f16": Scoring(bias="f16"),
    "--bias": Scoring(bias="bf16"),
    "--bias u8": Scoring(bias="u8"),
    "--sinks": Scoring(sinks=True),
    "--mask 'doc[b, q] == doc[b, k]'": Scoring(mask="doc[b, q] == doc[b, k]"),
    "--mask 'doc[b, q] == doc[b, k]' --buffer doc=i16": Scoring(
        mask="doc[b, q] == doc[b, k]", buffers=(("doc", "i16"),)
    ),
    "--score 'score + table[h, q - k]' --buffer table=f16": Scoring(
        score="score + table[h, q - k]", buffers=(("table", "f16"),)
    ),
    "--mask '(q - k) // n < 3' --scalar n=4": Scoring(mask="(q - k) // n < 3", scalars=(("n", 4),)),
    "--score 'score * w' --scalar w=0.5": Scoring(score="score * w", scalars=(("w", 0.5),)),
}


def asked(words: str, command: str = "list") -> Shapes:
    """What the words of a command mean."""
    given = Commands()[command].make_context(command, shlex.split(words)).params
    options = {*flags.SHAPE_OPTIONS, *(each.name for each in flags.SCORING_OPTIONS), "causal", "both_masks"}
    return flags.shapes_of(**{name: value for name, value in given.items() if name in options})


@pytest.mark.parametrize("words", ASKED)
def test_options_ask_for_what_they_say_and_are_said_again(words):
    shapes = asked(f"--dtype bf16 --causal {words}")
    (problem,) = shapes.problems()
    assert problem.scoring == ASKED[words] and problem.dtype == "bf16"
    assert asked(" ".join(shapes.words())) == shapes and shapes.of_one(problem).problem() == problem


def test_options_hold_together_and_for_all_problems_of_lists():
    words = "--d 64,128 --causal --window 127,0 --softcap 30 --alibi --sinks --bias --dtype f32,bf16"
    problems = asked(words).problems()
    assert len(problems) == 4 and {p.scoring.bias for p in problems} == {"f32", "bf16"}
    assert {replace(p.scoring, bias="") for p in problems} == {
        Scoring(window=(127, 0), softcap=30.0, alibi=True, sinks=True)
    }
    assert asked("--dtype e4m3 --bias").problems()[0].scoring.bias == "f32"


def test_a_bias_may_stand_anywhere():
    for words in ("--bias --d 64", "--d 64 --bias", "--bias=f16 --d 64", "--d 64 --bias f32"):
        assert asked(words).scoring.is_given and asked(words).head_dim == (64,)
    given = Commands()["emit"].make_context("emit", ["--bias", "best.py", "--d", "64"]).params
    assert given["bias"] == "own" and given["target"] == Path("best.py")


def test_what_is_given_chooses_among_what_there_is():
    problem = Problem(dtype="f16", causal=True, scoring=Scoring(window=(127, 0), softcap=30.0, bias="f16"))
    for words in ("", "--window 127,0", "--softcap 30", "--bias", "--bias f16 --causal"):
        assert asked(words).fits(problem), words
    for words in ("--window 127", "--window 127,0,4", "--softcap 31", "--bias u8", "--alibi", "--no-causal"):
        assert not asked(words).fits(problem), words
    assert asked("--prefix 8").fits(Problem(causal=True, scoring=Scoring(prefix=8)))
    always = Problem(scoring=Scoring(window=(9, 0), always=2))
    assert asked("--window 9,0,2").fits(always) and not asked("--window 9,0").fits(always)


def test_nothing_asked_is_plain():
    assert Shapes() == asked("") and not asked("").is_given and not Shape().is_given
    assert AskedScoring().of("bf16") == PLAIN and asked("--alibi").is_given and not asked("--alibi").has_sizes
    assert parse_scoring() == AskedScoring() and Problem() == Shape(scoring=parse_scoring()).problem()


def test_wrong_numbers_are_told_with_the_way_out():
    with pytest.raises(UsageError, match=r"chunk is 0; it must lie in 1..1073741824: leave --chunk out"):
        parse_scoring(chunk="0")
    with pytest.raises(UsageError, match=r"prefix is 8, but it widens a causal mask, and none is asked for"):
        Shape(scoring=parse_scoring(prefix="8")).problem()
    assert Shape(causal=True, scoring=parse_scoring(prefix="8")).problem().scoring.prefix == 8


@pytest.mark.parametrize(
    ("words", "told", "caret"),
    [
        (["--mask", "doc[b q] == 1"], "--mask, column 5: this cannot be read", "  doc[b q] == 1\n      ^"),
        (["--score", "score + x.y"], "--score, column 9: a formula has no attributes", "        ^"),
        (["--mask", "q < m"], "--mask, column 5: ", "  q < m\n      ^"),
    ],
)
def test_what_is_wrong_in_an_expression_is_shown_in_its_place(flashgen, words, told, caret):
    shown = flashgen("list", *words, code=2).stderr
    assert told in shown and caret in shown


# -- files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def flashgen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(library, "shipped_folder", lambda: tmp_path / "shipped")
    return command_runner()


def test_names_words_and_json_of_kernels_say_them(flashgen, tmp_path):
    problems = [Problem(dtype="bf16", causal=True, scoring=each) for each in ASKED.values()]
    assert len({each.name for each in problems}) == len(problems)
    for each in [*problems, Problem(dtype="bf16", causal=True)]:
        library.write(
            tmp_path / "out", "nvidia_h200", replace(tuned(), problem=each), "// source\n", "# module\n"
        )
    assert {entry.kernel.problem for entry in library.entries([tmp_path / "out"])} >= set(problems)
    told = json.loads(flashgen("list", "--json").stdout)
    assert {each["name"] for each in told} >= {f"nvidia_h200/{each.name}" for each in problems}
    capped = json.loads(flashgen("list", "--softcap", "30", "--json").stdout)
    assert [each["problem"]["scoring"] for each in capped] == [{"softcap": 30.0}]
    assert capped[0]["name"] == "nvidia_h200/bf16_d64_softcap30_causal"
    table = " ".join(flashgen("list", "--window", "127,0").stdout.split())
    assert "masks, scores" in table and "window of 127 keys" in table and "bf16_d64_window127x0" in table
    difference = flashgen("diff", "bf16_d64_causal", "bf16_d64_softcap30_causal").stdout
    assert "scoring" in difference and "none" in difference and "soft cap 30" in difference
    assert flashgen("list", "--chunk", "5").stdout.startswith("no kernels: none of")


def test_help_has_a_panel_of_them(flashgen):
    for name in ("tune", "space", "emit", "list", "export", "report", "bench"):
        told = flashgen(name, "--help").stdout.partition("Masks and scores")[2]
        assert all(f" {each.flag} " in told for each in flags.SCORING_OPTIONS), name
