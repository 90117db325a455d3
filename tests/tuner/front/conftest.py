"""Fixtures of calls on a card whose driver is a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flashgen.gen.kernel import Kernel
from flashgen.gen.launch import repeats_bits
from flashgen.gen.limits import preset
from flashgen.gen.variant import Illegal
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.front import bound, candidates, table
from flashgen.tuner.front.card import CudaCard

from tests.support.stand_in_driver import Driver
from tests.templates.conftest import cupy, driver, library, torch

__all__ = ["cupy", "driver", "library", "torch"]


@dataclass(frozen=True, eq=False)
class StandInToolchain:
    """Binaries that the stand-in driver loads: they say under which mask they are."""

    folder: Path
    spills: dict[str, int]
    """Bytes spilled by kernels whose variant's name has that in it."""
    built: list[Kernel]
    version = "stand-in"

    def build(self, kernel: Kernel) -> Build:
        self.built.append(kernel)
        artifact = self.folder / f"{kernel.digest}.cubin"
        artifact.write_text(f"causal={int(kernel.problem.causal)}")
        spilled = next((size for part, size in self.spills.items() if part in kernel.variant.name), 0)
        return Build(kernel, artifact, registers=64, spill_bytes=spilled, seconds=0.0, cached=False)


@dataclass(frozen=True)
class StandInCard(CudaCard):
    made_by: StandInToolchain | None = None

    def toolchain(self) -> StandInToolchain:
        assert self.made_by is not None
        return self.made_by


def _first_of_each(problem, families, errors, tuned, repeating) -> Iterator[candidates.Candidate]:
    for family in families:
        with contextlib.suppress(Illegal):
            family().check(problem, errors.limits)
            if repeating and not repeats_bits(family().launches(problem, errors.limits)):
                continue
            yield candidates.Candidate(family(), 1e6, 1e6, "issue")


@pytest.fixture
def card(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInCard]:
    """An H200 of ordinal 0 that launches are logged on, without choices or binaries from before. Of untuned
    variants only each family's own first are chosen among, which is soon done."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHGEN_HOME", str(tmp_path / "home"))
    made_by = StandInToolchain(tmp_path, {}, [])
    made = StandInCard(0, preset("h200"), "stand-in", made_by)
    monkeypatch.setattr(table, "cuda_card", lambda ordinal: made)
    monkeypatch.setattr(bound, "_WORKSHOPS", {})
    monkeypatch.setattr(candidates, "_untuned", _first_of_each)
    bound.forget_choices()
    yield made
    bound.forget_choices()
