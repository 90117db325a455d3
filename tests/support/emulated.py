"""Kernels run on the emulated card: held to the suite, and mistakes put into them found out."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.errors import CorruptedMemory, FlashgenError, LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import prove_promise
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.validate import validate

from tests.support.covering import Setting

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

#: What each tile of 16 keys is multiplied by: K and V growing, shrinking, nothing at first or at last, and
#: what float32 has at its ends.
COURSES = {
    "growing": (1e-3, 1.0, 40.0, 3e4, 7e4),
    "shrinking": (1e4, 1e2, 1.0, 1e-2, 1e-4),
    "zero first": (0.0, 0.0, 1.0, 0.0, 50.0),
    "zero": (0.0,) * 5,
    "tiny": (2e-38, 4e-38, 1e-36, 1e-30, 1e-30),
    "huge": (1e15, 1e17, 1e18, 1e18, 1e18),
}


def check(setting: Setting, seed: int, *, depth="quick", sanitize: bool = False) -> float:
    """The largest error of a kernel on its emulated card."""
    device = SimDevice("emulated", setting.limits, sanitize)
    build = device.toolchain().build(render(setting.variant, setting.problem, setting.limits))
    return validate(device.open(), build, seed=seed, depth=depth)


def assert_all_right(settings: Iterable[tuple[int, Setting]]) -> None:
    """Checks settings with a seed each; fails with every kernel that is wrong."""
    wrong = []
    for seed, setting in settings:
        try:
            error = check(setting, seed)
        except FlashgenError as failure:
            wrong.append(f"{setting.name}\n  {failure}")
        else:
            assert 0 < error <= setting.problem.tolerance, setting.name
    assert not wrong, "\n".join(wrong)


def inputs(
    problem: Problem,
    rows: int,
    keys: int,
    scale: float,
    distribution: str = "normal",
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
):
    """q, k, v of query heads that share heads of keys."""
    return reference.random_inputs(
        distribution,
        (batch, heads, rows, problem.head_dim),
        (batch, kv_heads, keys, problem.head_dim),
        scale=abs(scale),
        rng=np.random.default_rng(1),
        dtype=problem.dtype,
        head_dim_v=problem.head_dim_v,
    )


def attend(built: Build, case, scale: float, limits: DeviceLimits, seed: int):
    """The outputs of a kernel, or None where its launch fails."""
    try:
        return SimRunner(limits, seed=seed).attend(built, *case, scale=scale, want_lse=True)
    except (CorruptedMemory, LaunchError):
        return None


def assert_breaks(kernel: Kernel, right: str, wrong: str, limits: DeviceLimits) -> None:
    """Fails unless a kernel with what is ``right`` turned ``wrong`` everywhere has wrong results, in a quick
    validation or on the inputs that its class promises to serve."""
    assert right in kernel.source
    device = SimDevice("h200", limits)
    build = device.toolchain().build(replace(kernel, source=kernel.source.replace(right, wrong)))
    with pytest.raises(FlashgenError, match="wrong"):
        for seed in range(4):
            validate(device.open(), build, seed=seed)
        prove_promise(device.open(), build, "few")


def trusting(source: str) -> str:
    """A kernel that computes no row again: what a mistake makes of rows is not put right in the end."""
    verdicts = r"return (fabsf\(row_max\) <= \S+ && row_sum < \S+|scores_keep && .+);"
    return re.sub(verdicts, "return true;", source)


def is_caught(
    kernel: Kernel,
    right: str,
    wrong: str,
    limits: DeviceLimits,
    shapes: Sequence[tuple[int, int, float]],
    nth: int = 0,
    **shape: int,
) -> bool:
    """Whether a kernel with its ``nth`` passage ``right`` turned ``wrong`` fails, or errs, on some rows, keys
    and scale."""
    start = -1
    for _ in range(nth + 1):
        start = kernel.source.index(right, start + 1)
    source = trusting(kernel.source[:start] + wrong + kernel.source[start + len(right) :])
    built = SimDevice("h200", limits).toolchain().build(replace(kernel, source=source))
    for rows, keys, scale in shapes:
        case = inputs(kernel.problem, rows, keys, scale, **shape)
        expected = reference.attention(*case, scale=scale, scores=kernel.problem.scores).o
        for seed in range(8):
            found = attend(built, case, scale, limits, seed)
            if not found or not np.abs(found[0].astype(np.float64) - expected).max() < 2e-2:
                return True
    return False


def assert_a_forgotten_mask_is_caught(kernel: Kernel, limits: DeviceLimits) -> None:
    """The suite notices where a kernel masks no keys behind the last."""
    unmasked, masks = re.subn(r"if \(\w+ >= \w+\) mask\(", "if (false) mask(", kernel.source)
    assert masks
    device = SimDevice("emulated", limits)
    build = device.toolchain().build(replace(kernel, source=unmasked))
    with pytest.raises(WrongResult):
        validate(device.open(), build, seed=0)


def assert_tidy(source: str, name: str, *, longest: int = 120) -> None:
    """A reader finds nothing odd in a kernel's source, and nothing that is not used."""
    lines = source.splitlines()
    assert source.count("{") == source.count("}"), name
    assert not re.search(r"\{%[ -]", source), name  # a tag of Jinja; PTX has "{%0, %1}"
    assert "\n\n\n" not in source, name
    assert [line for line in lines if line != line.rstrip()] == [], name
    assert [line for line in lines if len(line) > longest] == [], name
    code = re.sub(r"//.*", "", source)
    words = Counter(re.findall(r"\w+", code))
    for defined in re.findall(r"\bconstexpr \w+ (k\w+) =", code):
        assert words[defined] > 1, f"{name}: {defined} is never used"
    for defined in re.findall(r"__forceinline__ \w+[*&]? (\w+)\(", code):
        assert words[defined] > 1, f"{name}: {defined}() is never called"
