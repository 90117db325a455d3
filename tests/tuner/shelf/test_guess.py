"""The cost model's guess: the first of its ranking that a compiler builds without spills."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.errors import BuildError, FlashgenError
from flashgen.tuner.shelf import guess
from flashgen.tuner.shelf.guess import built_guess

CARD, PROBLEM, LADDER = preset("gtx-1080"), Problem(head_dim=32), FAMILIES["ladder"]


@dataclass
class Compiler:
    """Spills so many bytes of each variant in turn, or refuses one; and of the other mask of some."""

    spills: list[int | None]
    other_mask: dict[int, int] = field(default_factory=dict)
    version: str = "nvcc 99"

    def build(self, kernel: Kernel) -> Build:
        place = RANKED.index(kernel.variant)
        spilled = self.other_mask.get(place, 0) if kernel.problem.causal else self.spills[place]
        if spilled is None:
            raise BuildError("too deep for me")
        return Build(kernel, Path("x.cubin"), registers=100 + place, spill_bytes=spilled, seconds=0.0)


RANKED = list(islice(guess._ranked([LADDER], PROBLEM, CARD), 60))


def guessed(monkeypatch, compiler: Compiler) -> guess.Guess:
    monkeypatch.setattr(guess, "cuda_toolchain", lambda arch: compiler)
    return built_guess([LADDER], PROBLEM, CARD, jobs=2)


@pytest.mark.parametrize(
    ("spills", "other_mask", "place", "words"),
    [
        ([0] * 60, {}, 0, "built by nvcc 99 without spills"),
        ([100, 8, 0, *[0] * 57], {}, 2, "without spills, the 3rd of its ranking"),
        ([None, 0, *[8] * 58], {}, 1, "without spills, the 2nd of its ranking"),
        ([0, 0, *[8] * 58], {0: 12}, 1, "without spills, the 2nd of its ranking"),
        ([9, 7, 5, *[6] * 57], {}, 2, "it spills 5 bytes, the least of 48"),
    ],
)
def test_the_first_that_builds_clean_is_taken(monkeypatch, spills, other_mask, place, words):
    found = guessed(monkeypatch, Compiler(spills, other_mask))
    assert found.variant == RANKED[place] and words in found.how
    assert found.build == {"toolkit": "nvcc 99", "registers": 100 + place, "spill_bytes": spills[place]}


def test_where_none_builds_the_compilers_words_are_told(monkeypatch):
    with pytest.raises(FlashgenError, match=r"none of the 48 variants .* builds: too deep for me"):
        guessed(monkeypatch, Compiler([None] * 60))


def test_without_a_compiler_it_is_said_to_be_unbuilt(monkeypatch, flashgen):
    def none(arch: int) -> Compiler:
        raise FlashgenError("no compiler")

    def header() -> str:
        return " ".join(Path("best.cu").read_text().replace("//", "").split())

    monkeypatch.setattr(guess, "cuda_toolchain", none)
    words = ["--device", "gtx-1080", "--d", "32", "--family", "ladder"]
    told = flashgen("emit", "best.cu", *words).stdout
    assert "untuned, unbuilt, for no compiler for sm_61 is here: it may spill registers" in told
    assert "Not built either: it may spill registers." in header()
    monkeypatch.setattr(guess, "cuda_toolchain", lambda arch: Compiler([100, 0, *[8] * 58]))
    told = flashgen("emit", "best.cu", *words).stdout
    assert "built by nvcc 99 without spills, the 2nd of its ranking" in told
    assert "Built by nvcc 99: 101 registers per thread, none spilled." in header()
