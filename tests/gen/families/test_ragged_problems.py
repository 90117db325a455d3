"""A thousand ragged problems on emulated cards: beside float64, the same bits whatever memory held before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.arguments import Arguments
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.cards.pages import draw_table, told_of_pages
from flashgen.tuner.cards.sequences import lengths_as_values
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.packed import compare_sequences
from flashgen.tuner.evaluate.paged import in_pages, out_of_pages, row_after_row

from tests.gen.families.test_packed import CARDS, PACKED, WAYS
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler

PAGED = replace(PACKED, varlen="", page_size=16, seqlen_q=4, seqlen_k=64)
BOTH = replace(PACKED, page_size=7)
#: A kernel each: the way, the problem that it is made for, and whether its mask is causal.
KERNELS = {
    "packed, simt": ("simt", PACKED, True),
    "packed, mma": ("mma", PACKED, True),
    "packed, mma, keys over blocks": ("mma, keys over blocks", PACKED, False),
    "packed, wgmma": ("wgmma", PACKED, True),
    "packed, wgmma, one tile a block": ("wgmma, one tile a block", PACKED, False),
    "paged, simt": ("simt", replace(PAGED, page_size=7), True),
    "paged, mma, keys over warps": ("mma, keys over warps", PAGED, True),
    "packed and paged, simt": ("simt", BOTH, True),
    "packed and paged, wgmma": ("wgmma", replace(BOTH, page_size=16), True),
    "packed and paged, mma, heads packed": ("mma, heads packed", replace(BOTH, page_size=32), False),
}
#: Problems of each, a thousand of all.
EACH = 100
#: Lengths at which something ends: a sequence, a tile, a warp's rows, a page.
CORNERS = (0, 0, 1, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65)


@dataclass(frozen=True)
class Ragged:
    """Arrays as a kernel takes them, and what tells of their sequences."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    values: Mapping[str, Any]


def draw(problem: Problem, rng: np.random.Generator) -> Ragged:
    """Sequences of lengths of their own: none at all, one row, and what lies about the ends of tiles."""
    batch = int(rng.integers(1, 7))
    corners, others = rng.choice(CORNERS, 2 * batch), rng.integers(0, 90, 2 * batch)
    drawn = tuple(int(n) for n in np.where(rng.random(2 * batch) < 0.5, corners, others))
    k_lengths, q_lengths = drawn[:batch], drawn[batch:]
    if not problem.layout.is_packed:
        q_lengths = (int(rng.integers(1, 5)),) * batch
    group, kv_heads = int(rng.choice([1, 2, 3, 4])), int(rng.choice([1, 2, 3]))
    q, k, v = reference.random_inputs(
        "normal",
        (1, group * kv_heads, max(1, sum(q_lengths)), problem.head_dim),
        (1, kv_heads, max(1, sum(k_lengths)), problem.head_dim),
        scale=0.2,
        rng=rng,
        dtype=problem.dtype,
    )
    values = lengths_as_values(q_lengths, k_lengths)
    if not problem.layout.is_paged:
        return Ragged(q, k, v, values)
    size = problem.page_size
    pages = draw_table(k_lengths, size, hostile=True, share=bool(rng.integers(2)))
    q, k, v = in_pages(problem, (q, k, v), batch, k_lengths, pages)
    starts = {"cu_seqlens_q": values["cu_seqlens_q"]} if problem.layout.is_packed else {}
    return Ragged(q, k, v, starts | told_of_pages(k_lengths, pages))


def others(drawn: Ragged, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What tells of other sequences in the same memory: as many, of as many rows in all, in other pages."""
    found = {}
    for name, array in drawn.values.items():
        if name.startswith("cu_"):
            inner = np.sort(rng.integers(0, array[-1] + 1, len(array) - 2))
            found[name] = np.concatenate([[0], inner, array[-1:]])
        elif name == "page_table":
            found[name] = rng.integers(0, drawn.k.shape[0], array.shape)
        else:
            found[name] = rng.integers(0, array.max() + 1, array.shape)
    return {name: array.astype(np.int32) for name, array in found.items()}


class Replayed(SimRunner):
    """Launches every kernel twice on the same memory, as a graph is replayed: first with what tells of other
    sequences, which a plan is made of, too."""

    before: Mapping[str, np.ndarray]
    plan_made: int

    def _launch(self, build: Build, arrays: Any, buffers: Any, arguments: Arguments) -> None:
        kept = {name: buffers[name].view.copy() for name in self.before}
        for name, content in self.before.items():
            buffers[name].view[...] = content
        super()._launch(build, arrays, buffers, arguments)
        for name, content in kept.items():
            buffers[name].view[...] = content
        values = {**arguments.values, "plan_made": self.plan_made}
        super()._launch(build, arrays, buffers, replace(arguments, values=values))


def compared(
    problem: Problem, drawn: Ragged, scale: float, o: np.ndarray, lse: np.ndarray, name: str
) -> float:
    q, k, v, values = drawn.q, drawn.k, drawn.v, drawn.values
    if problem.layout.is_paged:
        q, k, v, values = out_of_pages(problem, q, k, v, values)
    if not problem.layout.is_packed:
        o, lse = row_after_row(o), row_after_row(lse)
    return compare_sequences(o, lse, q, k, v, scale, values, problem, name)


def solve(kernel: Kernel, limits: DeviceLimits, count: int, name: str, plan_made: int = 0) -> None:
    """Raises for a result that is wrong, or not the same bits, of so many problems. ``plan_made``: what was
    planned for others is taken."""
    build = SimDevice("emulated", limits).toolchain().build(kernel)
    for number in range(count):
        rng = np.random.default_rng([number, len(name)])
        drawn, scale = draw(kernel.problem, rng), float(rng.choice([0.05, 0.2, 1.0]))
        arrays, told = (drawn.q, drawn.k, drawn.v), f"{name}, problem {number}"
        asked: dict[str, Any] = {"scale": scale, "want_lse": True, "values": drawn.values}
        o, lse = SimRunner(limits, seed=number).attend(build, *arrays, **asked)
        assert lse is not None
        compared(kernel.problem, drawn, scale, o, lse, told)
        replayed = Replayed(limits, seed=number + count)
        replayed.before, replayed.plan_made = others(drawn, rng), plan_made
        again, lse_again = replayed.attend(build, *arrays, **asked)
        assert lse_again is not None
        assert o.tobytes() == again.tobytes() and lse.tobytes() == lse_again.tobytes(), told


def kernel_of(name: str) -> tuple[Kernel, DeviceLimits]:
    way, problem, causal = KERNELS[name]
    variant, dtype, card = WAYS[way]
    return render(variant, replace(problem, dtype=dtype, causal=causal), CARDS[card]), CARDS[card]


@needs_compiler
@pytest.mark.parametrize("name", sampled(KERNELS, 0, thorough=6))
def test_a_thousand_ragged_problems_are_right_and_always_the_same(name: str) -> None:
    solve(*kernel_of(name), EACH, name)


@needs_compiler
@pytest.mark.parametrize("name", ["packed, mma, keys over blocks", "paged, simt"])
def test_some_of_them_are(name: str) -> None:
    solve(*kernel_of(name), 4, name)


@needs_compiler
@pytest.mark.thorough
def test_a_plan_of_other_sequences_is_found() -> None:
    with pytest.raises(AssertionError, match="packed, simt, problem"):
        solve(*kernel_of("packed, simt"), 4, "packed, simt", plan_made=1)


def test_there_are_a_thousand() -> None:
    assert EACH * len(KERNELS) == 1000
