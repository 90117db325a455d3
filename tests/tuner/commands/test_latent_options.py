"""Latent attention on the command line: what options mean, and that names, files and words agree."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from flashgen.gen.emit.options import shape_options, size_options
from flashgen.gen.problem import Problem
from flashgen.tuner.cli import Commands
from flashgen.tuner.commands import flags
from flashgen.tuner.errors import UsageError
from flashgen.tuner.request import Shapes

from tests.support.command_line import command_runner

LATENT = Problem(
    dtype="bf16", num_q_heads=128, num_kv_heads=1, head_dim=576, head_dim_v=512, page_size=64, latent=True
)


def asked(words: str) -> Shapes:
    """What the words of a command mean."""
    given = Commands()["list"].make_context("list", shlex.split(words)).params
    options = {*flags.SHAPE_OPTIONS, *(each.name for each in flags.SCORING_OPTIONS)}
    options |= {"causal", "both_masks", "varlen", "seqlens", "latent"}
    return flags.shapes_of(**{name: value for name, value in given.items() if name in options})


def test_columns_and_heads_are_those_of_models_unless_they_are_said() -> None:
    (problem,) = asked("--latent --dtype bf16 --heads 128 --page-size 64").problems()
    assert problem == LATENT
    (small,) = asked("--latent --d 192 --dv 128 --heads 4 --kv-heads 2").problems()
    assert (small.head_dim, small.head_dim_v, small.num_kv_heads) == (192, 128, 2)
    assert asked("--latent").fits(LATENT) and not asked("--latent").fits(Problem())
    assert asked("--dtype bf16").fits(LATENT)


def test_words_bring_the_problem_back() -> None:
    for problem in (LATENT, replace(LATENT, num_kv_heads=2, causal=True, seqlen_q=1, page_size=0)):
        words = " ".join([*shape_options(problem), *size_options(problem)])
        assert asked(words).problems() == [problem]
        assert asked(" ".join(asked(words).words())).problems() == [problem]
        assert Problem.from_dict(problem.to_dict()) == problem
    assert LATENT.stem == "bf16_d576v512_latent_paged64"
    assert "latent" not in Problem().to_dict()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--d 576", "head_dim is 576; it must lie in 1..256"),
        ("--latent --d 600", "head_dim is 600; it must lie in 1..576"),
        ("--latent --d 128 --dv 256", "head_dim_v is 256, of keys with 128 columns"),
    ],
)
def test_what_cannot_be_is_told(words: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        asked(words).problems()


def test_libraries_say_what_values_are(tmp_path: Path) -> None:
    run = command_runner()
    run("emit", str(tmp_path / "best.cu"), "--cmake", "--device", "h200", "--latent", "--dtype", "bf16")
    assert "Values are the first 512 columns of k." in (tmp_path / "best.h").read_text()
