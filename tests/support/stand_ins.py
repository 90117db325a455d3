"""Stand-ins for the card, the compiler and the worker of a run of `tune`, with made-up times."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from flashgen.gen.families import FAMILIES
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS, DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.variant import Variant
from flashgen.tuner.cards.device import Build
from flashgen.tuner.errors import BuildError, FlashgenError
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status

LADDER = FAMILIES["ladder"]
PROBLEM = Problem(head_dim=40)


def cost(variant: Variant) -> float:
    v = variant.to_dict()
    return 100.0 + abs(int(v["br"]) - 64) + 2 * abs(int(v["bc"]) - 16) + 20 / int(v["vec"])


@dataclass(frozen=True)
class StandInToolchain:
    """Builds nothing; refuses variants with ``bc`` in ``refuses``."""

    refuses: tuple[int, ...] = ()
    disk_full_after: int | None = None
    built: list[Kernel] = field(default_factory=list, compare=False)
    version: str = "stand-in 1.0"

    def build(self, kernel: Kernel) -> Build:
        self.built.append(kernel)
        if self.disk_full_after is not None and len(self.built) > self.disk_full_after:
            raise FlashgenError("the kernel cache cannot be written: No space left on device")
        if kernel.variant.to_dict()["bc"] in self.refuses:
            raise BuildError("ptxas fatal: made to fail")
        return Build(kernel, Path("nowhere"), registers=40, spill_bytes=0, seconds=0.001)


@dataclass(frozen=True)
class StandInDevice:
    limits: DeviceLimits = PRESETS["h200"]
    chain: StandInToolchain = StandInToolchain()
    spec: str = "0"
    predicted: bool = False
    driver: str = "580"
    lock_key: str = ""

    def toolchain(self) -> StandInToolchain:
        return self.chain

    def open(self):
        raise AssertionError("the stand-in evaluator opens nothing")


class StandInEvaluator:
    """Made-up times; ``noise`` lets a variant look better in its trial than it is."""

    def __init__(self, *, wrong: tuple[int, ...] = (), wrong_in_full: tuple[int, ...] = ()) -> None:
        self.wrong, self.wrong_in_full = wrong, wrong_in_full
        self.evaluated: list[Variant] = []
        self.finalists: list[Variant] = []
        self.closed = False
        self.on_evaluate = lambda: None
        self.on_finals = lambda: None
        self.started = 0

    def start(self) -> None:
        self.started += 1

    def evaluate(self, build: Build, problem: Problem, *, best_us: float | None = None) -> Outcome:
        self.on_evaluate()
        variant = build.kernel.variant
        self.evaluated.append(variant)
        if variant.to_dict()["br"] in self.wrong:
            return Outcome(
                variant=variant, status=Status.WRONG, reason="head 0: error 1.0, 2e-06 allowed\nmore"
            )
        return self._fine(build, problem, cost(variant))

    def finals(
        self,
        builds: list[Build],
        problem: Problem,
        errors: list[float],
        quiet: AbstractContextManager[None] | None = None,
    ) -> list[Outcome]:
        assert len(errors) == len(builds)
        with quiet or nullcontext():
            self.on_finals()
        self.finalists = [b.kernel.variant for b in builds]
        return [
            Outcome(variant=b.kernel.variant, status=Status.WRONG, reason="wrong in full")
            if b.kernel.variant.to_dict()["bc"] in self.wrong_in_full
            else self._fine(b, problem, cost(b.kernel.variant) + 1)
            for b in builds
        ]

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _fine(self, build: Build, problem: Problem, us: float) -> Outcome:
        measurement = Measurement(
            times_us=(us,) * 5,
            median_us=us,
            spread=0.02,
            tflops=problem.flops / us * 1e-6,
            registers=build.registers,
            spill_bytes=0,
            smem_bytes=build.kernel.launch.smem_bytes,
            occupancy=0.5,
            error=2e-7,
        )
        return Outcome(variant=build.kernel.variant, status=Status.OK, measurement=measurement)
