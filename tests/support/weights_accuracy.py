"""Prints what numbers of eight bits cost in accuracy, on the emulated H200: the tables of docs/accuracy.md.

    python tests/support/weights_accuracy.py

Errors per head, ‖o - ref‖ / ‖ref‖ against float64, on average over heads: of the inputs as rounded to the
type, with a scale for each tensor, and of them as they were. Then what `flashgen.quantize` makes of that: the
mean of these errors and the root of the mean square of o - ref, of inputs as they were. Last both beside what
comes of FlashAttention-3's way, as its paper has it (Shah et al. 2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import flashgen
import numpy as np
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import EIGHT, Problem
from flashgen.gen.render import render
from flashgen.tuner.cards.device import Build
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.front.quantize import Quantized

H200 = PRESETS["h200"]
HEADS, ROWS, HEAD_DIM = 4, 64, 64
STRAIGHT = Wgmma(br=64, bc=128, weights="e4m3", values="in_front", powers="straight", promotion="segments")
KERNELS = {
    "bf16": (Problem(dtype="bf16", head_dim=HEAD_DIM), Wgmma(br=64, bc=128)),
    "e4m3": (Problem(dtype="e4m3", head_dim=HEAD_DIM), Wgmma(br=64, bc=128)),
    "eight": (
        Problem(dtype="e4m3", precision=EIGHT, head_dim=HEAD_DIM),
        Wgmma(br=64, bc=128, weights="e4m3"),
    ),
    "segments": (
        Problem(dtype="e4m3", precision=EIGHT, head_dim=HEAD_DIM),
        Wgmma(br=64, bc=128, weights="e4m3", values="in_front", promotion="segments"),
    ),
    "straight": (Problem(dtype="e4m3", precision=EIGHT, head_dim=HEAD_DIM), STRAIGHT),
    "pairs": (
        Problem(dtype="e4m3", precision=EIGHT, head_dim=HEAD_DIM),
        replace(STRAIGHT, score_type="f16"),
    ),
}


def gaussian(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((1, HEADS, n, HEAD_DIM))


def with_outliers(rng: np.random.Generator, n: int) -> np.ndarray:
    """One number in a thousand is ten times as large (Shah et al. 2024, "FlashAttention-3")."""
    x = gaussian(rng, n)
    return x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 1e-3)


#: How q and k are drawn, and v is, whose sums are large beside what they are made of.
AROUND_ONE: tuple[Callable, Callable] = (gaussian, lambda rng, n: 1 + gaussian(rng, n))
#: By name: the same, and what scores are multiplied by beside 1/√d.
INPUTS: dict[str, tuple[Callable, Callable, float]] = {
    "Gaussian": (gaussian, gaussian, 1.0),
    "Gaussian, values around 1": (*AROUND_ONE, 1.0),
    "Gaussian, scores four times as large": (gaussian, gaussian, 4.0),
    "with outliers": (with_outliers, with_outliers, 1.0),
}


def around_some(rng: np.random.Generator, n: int) -> np.ndarray:
    """Every column has a mean of its own, as those of keys often have."""
    return gaussian(rng, n) + 4 * rng.standard_normal((1, HEADS, 1, HEAD_DIM))


#: Inputs that a scale for each tensor alone serves badly: how q and k are drawn, and v is.
UNEVEN: dict[str, tuple[Callable, Callable]] = {
    "with outliers": (with_outliers, with_outliers),
    "outliers in q and k": (with_outliers, gaussian),
    "means of columns": (around_some, gaussian),
}
#: What `flashgen.quantize` does about it.
WAYS: dict[str, dict[str, bool]] = {
    "as they are": {},
    "rotate": {"rotate": True},
    "smooth": {"smooth": True},
    "both": {"rotate": True, "smooth": True},
}


def summed_to_the_end(kernel: Kernel) -> Kernel:
    """The same, but for outputs that the tensor cores sum over all keys, of which they keep fourteen bits."""
    source, found = re.subn(r"(constexpr int kSummedTiles =) \d+;", r"\1 1 << 20;", kernel.source)
    assert found == 1
    return replace(kernel, source=source)


def of_type(arrays: tuple[np.ndarray, ...], dtype: str, **how: bool) -> Quantized:
    """q, k and v as numbers of the type, and what they are to be multiplied by."""
    if dtype == "e4m3":
        return flashgen.quantize(*arrays, **how)
    return Quantized(*(x.astype(np.float32).astype(numpy_dtype(dtype)) for x in arrays), (1.0, 1.0, 1.0))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    scores = scale * q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def error(o: np.ndarray, ref: np.ndarray) -> float:
    return float((np.linalg.norm(o - ref, axis=(-2, -1)) / np.linalg.norm(ref, axis=(-2, -1))).mean())


def attended(device: SimDevice, build: Build, inputs: Quantized, scale: float) -> np.ndarray:
    """What a kernel makes of them."""
    of_q, of_k, of_v = inputs.scales
    o, _ = device.open().attend(build, inputs.q, inputs.k, inputs.v, scale=scale * of_q * of_k)
    return o.astype(np.float64) * of_v


def drawn(keys_of: Callable, values_of: Callable) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """How many keys there are, few and many, and q, k and v."""
    for n in (1024, 8192):
        rng = np.random.default_rng(n)
        yield n, (keys_of(rng, ROWS), keys_of(rng, n), values_of(rng, n))


def told(found: np.ndarray, true: np.ndarray) -> str:
    """The mean error of heads and the root of the mean square."""
    return f"{error(found, true):.1e}, {np.sqrt(np.square(found - true).mean()):.1e}"


def print_costs(device: SimDevice, builds: Mapping[str, tuple[Build, str]]) -> None:
    titles = [*builds, *(f"{name}, and its inputs" for name in builds)]
    print("| inputs | keys |", " | ".join(titles), "|")
    print("| :-- |" + " --: |" * (1 + len(titles)))
    for name, (keys_of, values_of, factor) in INPUTS.items():
        for n, arrays in drawn(keys_of, values_of):
            scale = factor * HEAD_DIM**-0.5
            true = attention(*arrays, scale)
            own, all_of_it = [], []
            for build, dtype in builds.values():
                inputs = of_type(arrays, dtype)
                found = attended(device, build, inputs, scale)
                wide = (x.astype(np.float64) * of for x, of in zip(inputs[:3], inputs.scales, strict=True))
                own.append(error(found, attention(*wide, scale)))
                all_of_it.append(error(found, true))
            print(f"| {name} | {n} |", " | ".join(f"{x:.1e}" for x in (*own, *all_of_it)), "|", flush=True)


def print_gains(device: SimDevice, builds: Mapping[str, tuple[Build, str]]) -> None:
    print("\n| inputs | keys | type |", " | ".join(WAYS), "|")
    print("| :-- | --: | :-- |" + " --: |" * len(WAYS))
    for name, (keys_of, values_of) in UNEVEN.items():
        for n, arrays in drawn(keys_of, values_of):
            true = attention(*arrays, HEAD_DIM**-0.5)
            for kernel in ("e4m3", "eight", "straight", "pairs"):
                build, dtype = builds[kernel]
                cells = [
                    told(attended(device, build, of_type(arrays, dtype, **how), HEAD_DIM**-0.5), true)
                    for how in WAYS.values()
                ]
                print(f"| {name} | {n} | {kernel} |", " | ".join(cells), "|", flush=True)


def print_beside_others(device: SimDevice, theirs: Build, ours: Build) -> None:
    print("\n| inputs | keys | FlashAttention-3's way | pairs, rotate and smooth |")
    print("| :-- | --: | --: | --: |")
    for name, (keys_of, values_of) in (UNEVEN | {"Gaussian, values around 1": AROUND_ONE}).items():
        for n, arrays in drawn(keys_of, values_of):
            true = attention(*arrays, HEAD_DIM**-0.5)
            cells = [
                told(attended(device, build, of_type(arrays, "e4m3", **how), HEAD_DIM**-0.5), true)
                for build, how in ((theirs, WAYS["rotate"]), (ours, WAYS["both"]))
            ]
            print(f"| {name} | {n} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    device = SimDevice("h200", H200)
    toolchain = device.toolchain()
    builds = {
        name: (toolchain.build(render(variant, problem, H200)), problem.dtype)
        for name, (problem, variant) in KERNELS.items()
    }
    print_costs(device, builds)
    print_gains(device, builds)
    problem, variant = KERNELS["segments"]
    theirs = toolchain.build(summed_to_the_end(render(variant, problem, H200)))
    print_beside_others(device, theirs, builds["pairs"][0])


if __name__ == "__main__":
    main()
