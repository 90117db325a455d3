"""The proof of a kernel on the card where it is to serve: a small problem, once, beside the binary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..build.cache import cached
from ..build.protocol import Build
from ..errors import CorruptedMemory, FlashgenError
from ..evaluate.cases import cases
from ..evaluate.comparison import WrongResult
from ..evaluate.validate import check_case


class WrongKernel(FlashgenError):
    """A kernel that computes something else than what it is for, on this card."""


def prove(build: Build, runs: Any, where: str) -> None:
    """Compares a kernel with float64 on a problem that no tile divides, unless that binary was right on that
    card before.

    ``runs`` attends and differentiates as a `Runner` does; ``where`` names the card and its driver. Raises
    `WrongKernel`, and LaunchError where it cannot be run.
    """
    kernel = build.kernel

    def produce(target: Path) -> Mapping[str, Any]:
        rng = np.random.default_rng(0)
        case = next(iter(cases(kernel.variant, kernel.problem, "quick", rng)))
        try:
            error = check_case(runs, build, case, rng)
        except (WrongResult, CorruptedMemory) as wrong:
            told = f"{kernel.problem.name} by {kernel.variant.name} is wrong on {where} and is left out"
            raise WrongKernel(f"{told}: {wrong}") from wrong
        target.write_text(f"{error:.3e}\n", encoding="utf-8")
        return {"error": error, "where": where}

    cached(["proof", build.artifact.name, where], ".proof", produce)
