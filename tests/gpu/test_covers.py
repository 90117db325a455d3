"""Kernels for tensor cores on a real card: right over all pairs of values, in full depth over every value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.build.compile import CompilePool
from flashgen.tuner.cards.cuda import CudaDevice, CudaRunner
from flashgen.tuner.errors import BuildError, FlashgenError
from flashgen.tuner.evaluate.cases import Depth
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import (
    NUMBERS,
    WGMMA_NUMBERS,
    Setting,
    each_value,
    mma_settings,
    parts_settings,
    wgmma_settings,
)

#: Variants in full depth, and lengths of the real problem they are then tried on.
FULL_DEPTH, LENGTH = 40, 1000
SETTINGS = {"mma": mma_settings, "wgmma": wgmma_settings, "wgmma in parts": parts_settings}
#: Family, or its own cover, dtype and precision.
CLASSES = [
    *(("mma", *numbers) for numbers in NUMBERS),
    *(("wgmma", *numbers) for numbers in WGMMA_NUMBERS),
    ("wgmma in parts", "f32", "3xf16"),
]
each_class = pytest.mark.parametrize(("family", "dtype", "precision"), CLASSES)


@pytest.fixture(scope="module")
def runner(device: CudaDevice) -> Iterator[CudaRunner]:
    runner = device.open()
    yield runner
    runner.close()


@cache
def settings(device: CudaDevice, family: str) -> list[Setting]:
    return SETTINGS[family]([device.limits])


def of_class(chosen: Sequence[Setting], dtype: str, precision: str) -> list[Setting]:
    """Those of that arithmetic; skips the test where there are none."""
    found = [s for s in chosen if (s.problem.dtype, s.problem.precision) == (dtype, precision)]
    if not found:
        pytest.skip(f"no kernel of this family multiplies {dtype} on this card")
    return found


def lengthened(problem: Problem) -> Problem:
    """The same kernel's problem at a length that many tiles make, with shared heads."""
    shape = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": LENGTH, "seqlen_k": LENGTH}
    return Problem(**{**problem.to_dict(), **shape})


def check_all(device: CudaDevice, runner: CudaRunner, chosen: Sequence[Setting], depth: Depth) -> None:
    """Builds and validates all; fails with every kernel that is wrong."""
    with CompilePool(device.toolchain()) as pool:
        futures = [pool.submit(render(s.variant, s.problem, s.limits)) for s in chosen]
        built = [future.result() for future in futures]
    wrong = []
    for seed, (setting, build) in enumerate(zip(chosen, built, strict=True)):
        if isinstance(build, BuildError):
            wrong.append(f"{setting.name}\n  {build}")
            continue
        real = lengthened(setting.problem) if depth == "full" else None
        try:
            error = validate(runner, build, seed=seed, depth=depth, problem=real)
        except FlashgenError as failure:
            wrong.append(f"{setting.name}\n  {failure}")
            if not runner.alive:
                break
        else:
            assert 0 < error <= setting.problem.tolerance, setting.name
    assert not wrong, "\n".join(wrong)


@each_class
def test_any_two_values_together_are_right(
    device: CudaDevice, runner: CudaRunner, family: str, dtype: str, precision: str
) -> None:
    check_all(device, runner, of_class(settings(device, family), dtype, precision), "quick")


@each_class
def test_every_value_is_right_in_full_depth(
    device: CudaDevice, runner: CudaRunner, family: str, dtype: str, precision: str
) -> None:
    chosen = each_value(settings(device, family), FULL_DEPTH) if settings(device, family) else []
    check_all(device, runner, of_class(chosen, dtype, precision), "full")
