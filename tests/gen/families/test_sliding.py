"""Arrays that slide past a tile's scores, as biases of distances do: emulated, beside float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.mma_backward.family import MmaBackward
from flashgen.gen.families.scoring_work import sliding_counts
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scored_tiles.sliding import sliding_arrays
from flashgen.gen.scoring.asked import BUFFER_BYTES, Scoring
from flashgen.gen.variant import Variant
from flashgen.tuner.build.protocol import Build
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.errors import LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients
from flashgen.tuner.predict.prior import prior_of

from tests.gen.families.test_wgmma_backward import SCORED_BY
from tests.gen.families.test_wgmma_backward_parts import WAYS as IN_PARTS
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler
from tests.support.given_gradients import given_of, largest_share
from tests.support.scored_attention import assert_close, attend, built, is_legal
from tests.support.scorings import drawn_values

H200 = preset("h200")
SCALE = 0.3
HEADS = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2}
#: Elements of one further or before with each row, of two, of none; from one end and from the other; of which
#: more becomes than a sum; and two arrays, or one twice.
SCORINGS: dict[str, Scoring] = {
    "distances": Scoring(score="score + table[h, q - k]"),
    "turned": Scoring(score="score + table[k - q + 90]", buffers=(("table", "f16"),)),
    "of halves": Scoring(score="score * (1 + 0.1 * table[b, 2 * q - k + n])", scalars=(("n", 3),)),
    "of keys": Scoring(score="score + table[h // 2, 2 * k + 5] * 0.5", buffers=(("table", "bf16"),)),
    "capped": Scoring(score="5 * tanh((score + table[q - k + b]) / 5)"),
    "of heads": Scoring(score="score - table[q - 3 * k + 7 * h + 50]"),
    "two": Scoring(score="score + table[h, q - k] * other[k - 2 * q + 100] + table[h, k - q + 9]"),
    "counts": Scoring(score="score + 0.01 * table[h, q - k]", buffers=(("table", "i32"),)),
    "beside a bias": Scoring(score="score + table[h, q - k]", bias="f16", window=(40, -1), sinks=True),
}
#: How long arrays are: as long as any tile asks for; so that some tiles lie beyond either end; one element.
LENGTHS = (900, 70, 1)
FORWARD: dict[str, tuple[Variant, str, float]] = {
    "wgmma": (Wgmma(br=128, bc=32), "bf16", 2e-2),
    "wgmma, chained": (Wgmma(br=64, bc=48, tail=16, schedule="chained", persistent=False), "f16", 4e-3),
    "wgmma, parts": (Wgmma(br=128, bc=32), "f32", 2e-5),
    "wgmma, packed": (Wgmma(br=64, bc=32, pack_heads=True, persistent=False), "f16", 4e-3),
    "mma": (Mma(br=32, bc=16, rows_per_warp=32), "f16", 4e-3),
    "mma, heads in turn": (Mma(br=32, bc=16, rows_per_warp=16, q_in_registers=False, heads=4), "f16", 4e-3),
    "mma, key warps": (Mma(br=16, bc=16, key_warps=4), "bf16", 2e-2),
    "mma, parts": (Mma(br=32, bc=16, rows_per_warp=16), "f32", 2e-5),
}
BACKWARD: dict[str, tuple[Variant, str]] = {
    **{f"wgmma, {name}": (variant, "bf16") for name, variant in SCORED_BY.items()},
    "mma": (MmaBackward(bc=32, br=16, key_warps=2, rows=32, keys=32, row_warps=1), "f16"),
    "wgmma, parts": (IN_PARTS["narrow, sums by threads"][0], "f32"),
    "mma, sums": (MmaBackward(bc=32, br=16, key_warps=2, dq_path="atomics"), "f32"),
}
#: Of rows and keys: ragged; rows that see nothing under a causal mask; more keys.
SHAPES = ((150, 170), (140, 75), (70, 200))
#: Errors of gradients that are allowed, as a share of each head.
SHARES = {"bf16": 2e-2, "f16": 4e-3, "f32": 2e-5}


def problem_of(name: str, dtype: str, *, causal: bool = False, backward: bool = False) -> Problem:
    sizes = {"head_dim": 32, "seqlen_q": 150, "seqlen_k": 170, **HEADS}
    return Problem(dtype=dtype, scoring=SCORINGS[name], causal=causal, backward=backward, **sizes)


def forward_cases() -> list[tuple[str, str]]:
    """Every scoring by every walk that serves it."""
    return [
        (name, walk)
        for name in SCORINGS
        for walk, (variant, dtype, _) in FORWARD.items()
        if is_legal(variant, problem_of(name, dtype))
    ]


def values_of(problem: Problem, length: int, rows: int, keys: int) -> dict[str, Any]:
    """What scores read, arrays that slide of so many elements in their last axes."""
    rng, values = np.random.default_rng(length), dict(drawn_values(problem, rows, keys))
    for each in problem.scores.buffers:
        if each.axes[-1]:
            continue
        shape = [4 if axis else 3 for axis in each.axes[:-1]] + [length]
        drawn = rng.standard_normal(shape).astype(np.float32)
        values[each.name] = (drawn * 50).astype(np.int32) if each.dtype == "i32" else drawn
    return dict(values_as_read(replace(problem, seqlen_q=rows, seqlen_k=keys), values))


@needs_compiler
@pytest.mark.parametrize(("name", "walk"), sampled(forward_cases(), 16))
def test_scores_are_changed_by_what_slides_past_them(name: str, walk: str) -> None:
    variant, dtype, tolerance = FORWARD[walk]
    build = built(variant, problem_of(name, dtype, causal=name == "distances"))
    assert ("are_within(" in build.kernel.source) == ("packed" not in walk)
    for length in LENGTHS:
        for rows, keys in SHAPES:
            values = values_of(build.kernel.problem, length, rows, keys)
            assert_close(*attend(build, rows, keys, values), tolerance)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "walk"),
    sampled(
        [
            (name, walk)
            for name in ("distances", "turned", "capped", "two", "beside a bias")
            for walk in BACKWARD
            if name != "capped" or not walk.endswith("first")  # a cap is differentiated where it is made
        ],
        11,
    ),
)
def test_gradients_are_those_of_what_slides_past(name: str, walk: str) -> None:
    variant, dtype = BACKWARD[walk]
    build = compiled(render(variant, problem_of(name, dtype, causal=name == "capped", backward=True), H200))
    for length in LENGTHS:
        for rows, keys in SHAPES:
            values = values_of(build.kernel.problem, length, rows, keys)
            assert error_of(build, rows, keys, values) < SHARES[dtype], (length, rows, keys)


@needs_compiler
@pytest.mark.parametrize("walk", ["wgmma", "mma"])
def test_tiles_that_are_within_ask_of_no_element(walk: str) -> None:
    variant, dtype, tolerance = FORWARD[walk]
    kernel = built(variant, problem_of("turned", dtype)).kernel
    blind = "  i0 = index_within(i0, args.table_size_0);\n"
    assert kernel.source.count(blind) == 1
    build = compiled(replace(kernel, source=kernel.source.replace(blind, "  i0 = 0;\n")))
    for length, is_right in ((900, True), (70, False)):
        found, expected = attend(build, 60, 64, values_of(kernel.problem, length, 60, 64))
        if is_right:
            assert_close(found, expected, tolerance)
        else:
            assert np.abs(found[0].astype(np.float64) - expected.o).max() > tolerance


@needs_compiler
@pytest.mark.parametrize("walk", ["wgmma", "mma"])
@pytest.mark.parametrize("name", ["turned", "of halves", "two"])
def test_nothing_beyond_an_array_is_read(name: str, walk: str) -> None:
    variant, dtype, tolerance = FORWARD[walk]
    build = built(variant, problem_of(name, dtype), sanitize=True)
    for length in LENGTHS[1:]:
        values = values_of(build.kernel.problem, length, 70, 100)
        assert_close(*attend(build, 70, 100, values, sanitize=True), tolerance)


@needs_compiler
def test_a_tile_that_is_not_within_an_array_is_noticed() -> None:
    variant, dtype, _ = FORWARD["mma"]
    kernel = built(variant, problem_of("turned", dtype)).kernel
    told = "return __all_sync(0xffffffffu, table_is_within);"
    assert told in kernel.source
    build = compiled(replace(kernel, source=kernel.source.replace(told, "return true;")), sanitize=True)
    with pytest.raises(LaunchError, match="past the end of table"):
        attend(build, 70, 200, values_of(kernel.problem, 70, 70, 200), sanitize=True)


@needs_compiler
@pytest.mark.parametrize("walk", ["wgmma, ahead", "wgmma, handed on", "mma"])
def test_gradients_read_nothing_beyond_an_array(walk: str) -> None:
    variant, dtype = BACKWARD[walk]
    kernel = render(variant, problem_of("two", dtype, backward=True), H200)
    for length in LENGTHS[1:]:
        values = values_of(kernel.problem, length, 70, 100)
        assert error_of(compiled(kernel, sanitize=True), 70, 100, values, sanitize=True) < SHARES[dtype]


def test_rows_eight_apart_share_what_is_counted() -> None:
    for name, accesses, together in (("distances", 18, 14), ("of halves", 20, 21), ("of keys", 16, 13)):
        (array,) = sliding_arrays(problem_of(name, "bf16").scores)
        counts = sliding_counts(array, 2, 16)
        assert counts.accesses == counts.wavefronts == accesses
        steps = 8 * abs(array.per_row) + 57 * abs(array.per_key) + together
        assert counts.l2_bytes == steps * BUFFER_BYTES[array.buffer.dtype]
    distances = problem_of("distances", "bf16")
    assert prior_of(distances, H200)(Wgmma()) < prior_of(distances, H200)(Wgmma(pack_heads=True, br=64))


def test_heads_that_have_places_of_their_own_are_asked_by_gradients_one_by_one() -> None:
    for name, told in (("distances", True), ("of heads", False), ("two", True)):
        kernel = render(MmaBackward(), problem_of(name, "f16", backward=True), H200)
        assert ("<is_within>(" in kernel.source) == told


def compiled(kernel: Kernel, *, sanitize: bool = False) -> Build:
    return SimDevice("emulated", H200, sanitize).toolchain().build(kernel)


def error_of(build: Build, rows: int, keys: int, values: dict[str, Any], *, sanitize: bool = False) -> float:
    """The largest error of a gradient's head, as a share of the head."""
    problem, rng = build.kernel.problem, np.random.default_rng(3)
    shapes = ((2, 4, rows, problem.head_dim), (2, 2, keys, problem.head_dim))
    q, k, v = reference.random_inputs("normal", *shapes, scale=SCALE, rng=rng, dtype=problem.dtype)
    asked = {"scale": SCALE, "scores": problem.scores, "values": values}
    given = given_of(q, k, v, rng, **asked)
    runner = SimDevice("emulated", H200, sanitize).open()
    found = runner.differentiate(build, given, scale=SCALE, values=values)
    wanted = gradients(q, k, v, given["dout"], **asked)
    return max(largest_share(found[name], wanted[name].value) for name in ("dq", "dk", "dv"))
