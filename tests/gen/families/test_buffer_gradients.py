"""Gradients of what scores read beside queries and keys: biases, slopes, sinks, arrays of expressions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.kernel import Kernel
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.buffer_gradients import buffer_gradients
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.errors import CorruptedMemory
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.comparison import WrongResult
from flashgen.tuner.evaluate.gradients import Gradient, gradients

from tests.gen.families.test_gradients import GTX_1080, PROBLEM, check, kernel_of
from tests.gen.families.test_wgmma_backward import check as hopper_check
from tests.gen.families.test_wgmma_backward import kernel_of as hopper_kernel_of
from tests.support.depth import sampled
from tests.support.emulated import assert_tidy, needs_compiler
from tests.support.given_gradients import given_of

BUCKETS = (("bucket", "i32"), ("w", "f32"))
SCORINGS = {
    "bias, sinks": Scoring(bias="f16", sinks=True),
    "bias, window": Scoring(bias="bf16", window=(20, 3)),
    "slopes, soft cap": Scoring(alibi=True, softcap=3.0),
    "distances": Scoring(score="score + table[h, q - k] * b"),
    "buckets": Scoring(score="score + w[bucket[q, k]] * tanh(score)", buffers=BUCKETS),
    "keys and rows": Scoring(score="score * (1.0 + 0.1 * x[k, h]) + y[q]"),
    "twice, mask": Scoring(score="score + x[q] * x[k]", mask="(q * 7 + k) % 5 > 1"),
}
SEEN = [("simt", "bias, sinks"), ("mma", "distances")]


@needs_compiler
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *SEEN,
        *sampled([(w, n) for w in ("simt", "mma") for n in SCORINGS if (w, n) not in SEEN], 0, thorough=4),
    ],
)
def test_gradients_of_what_scores_read_are_those_of_float64(way: str, name: str) -> None:
    kernel = kernel_of(way, scoring=SCORINGS[name], causal=name != "distances")
    assert check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("name", sampled(["distances", "bias, sinks"], 0, thorough=1))
def test_they_are_those_of_float64_on_hopper(name: str) -> None:
    kernel = hopper_kernel_of("f16", scoring=SCORINGS[name], causal=True)
    assert hopper_check(kernel) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("way", sampled(["simt", "mma"], 0, thorough=1))
def test_they_are_right_at_all_lengths(way: str) -> None:
    kernel = kernel_of(way, scoring=Scoring(bias="f16", sinks=True))
    assert check(kernel, depth="full", seed=3) < kernel.problem.tolerance


@needs_compiler
@pytest.mark.parametrize("name", sampled(["buckets", "bias, sinks"], 0, thorough=1))
def test_nothing_is_read_or_written_out_of_bounds(name: str) -> None:
    check(kernel_of("simt", scoring=SCORINGS[name]), sanitize=True)


def differentiate(kernel: Kernel, shape: tuple[int, ...], *, rows: int = 70, keys: int = 150):
    """What a kernel makes of a bias of that shape, repeated, and what it should; scores are far apart, and
    some rows are hidden."""
    problem = replace(kernel.problem, batch=3, seqlen_q=rows, seqlen_k=keys)
    rng, scale = np.random.default_rng(0), 0.7
    shapes = ((3, 4, rows, 32), (3, 2, keys, 32))
    q, k, v = reference.random_inputs("normal", *shapes, scale=scale, rng=rng, dtype=problem.dtype)
    bias = rng.standard_normal(shape, np.float32)
    if shape[2] > 1:
        bias[:, :, 5] = -np.inf
    values = {"bias": np.broadcast_to(bias, (3, 4, rows, keys)), "sinks": rng.standard_normal(4, np.float32)}
    values = values_as_read(problem, values)
    asked = {"scale": scale, "scores": problem.scores, "values": values}
    given = given_of(q, k, v, rng, **asked)
    given["dlse"] = rng.standard_normal((3, 4, rows), np.float32)
    device = SimDevice("emulated", GTX_1080)
    build = device.toolchain().build(kernel)
    found = device.open().differentiate(build, given, scale=scale, values=values)
    return found, gradients(q, k, v, given["dout"], dlse=given["dlse"], **asked)


@needs_compiler
@pytest.mark.parametrize(("way", "share"), [("simt", 5e-6), ("mma", 1e-2)])
@pytest.mark.parametrize("shape", sampled(["1 1 70 150", "3 1 1 150", "1 4 70 150", "3 4 70 150"], 1))
def test_what_a_bias_is_repeated_along_is_added_up_in_one_order(way: str, share: float, shape: str) -> None:
    kernel = kernel_of(way, scoring=Scoring(bias="f32", sinks=True), causal=True)
    lengths = tuple(map(int, shape.split()))
    (found, wanted), (again, _) = differentiate(kernel, lengths), differentiate(kernel, lengths)
    for name in ("dbias", "dsinks"):
        exact = wanted[name].summed_to(found[name].shape).value
        assert np.linalg.norm(found[name] - exact) <= share * np.linalg.norm(exact)
        assert found[name].tobytes() == again[name].tobytes()
    assert found["dbias"].shape == lengths
    assert lengths[2] == 1 or not found["dbias"][:, :, 5].any()


def test_gradients_of_arrays_are_the_slopes_of_what_the_reference_computes() -> None:
    text = "score * (1.0 + x[k, h]) + table[h, q - k]"
    problem = replace(PROBLEM, causal=True, scoring=Scoring(score=text, sinks=True))
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 4, 5, 3), (1, 2, 7, 3), (1, 2, 7, 3)))
    dout, dlse = rng.standard_normal((1, 4, 5, 3)), rng.standard_normal((1, 4, 5))
    values = {
        name: rng.standard_normal(shape) for name, shape in (("x", (7, 4)), ("table", (4, 6)), ("sinks", 4))
    }
    asked = {"scale": 0.7, "scores": problem.scores}
    wanted = gradients(q, k, v, dout, dlse=dlse, values=values, **asked)

    def total(**values: np.ndarray) -> float:
        found = reference.attention(q, k, v, values=values, **asked)
        return float((found.o * dout).sum() + (found.lse * dlse).sum())

    for name, at in [("x", (0, 1)), ("x", (6, 2)), ("table", (1, 2)), ("table", (3, 5)), ("sinks", (2,))]:
        ends = []
        for step in (1e-5, -1e-5):
            moved = values[name].copy()
            moved[at] += step
            ends.append(total(**{**values, name: moved}))
        assert wanted[f"d{name}"].value[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-8)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    sampled(
        [
            ("bias, sinks", "sum -= weight * delta[row]", "sum += weight * delta[row]"),
            ("bias, sinks", "(args.dlse != nullptr ? args.dlse[place] : 0.0f)", "0.0f"),
            ("bias, sinks", "weight * (gradient[i][j] - delta)", "weight * gradient[i][j]"),
            ("slopes, soft cap", "return -float(abs(", "return -1.01f * float(abs("),
            ("distances", "gradient * (float(batch))", "gradient"),
            ("distances", "args.dtable_stride_0 + i1] = 0.0f", "args.dtable_stride_0 + i1] = 0.01f"),
            (
                "distances",
                "i1 = index_within(i1, args.table_size_1);\n  return args.dtable",
                "return args.dtable",
            ),
        ],
        1,
    ),
)
def test_mistakes_are_found(name: str, right: str, wrong: str) -> None:
    kernel = kernel_of("simt", scoring=SCORINGS[name])
    assert right in kernel.source
    with pytest.raises((WrongResult, CorruptedMemory)):
        check(replace(kernel, source=kernel.source.replace(right, wrong)))


@needs_compiler
def test_a_bias_that_is_repeated_is_not_overwritten_by_each_batch() -> None:
    kernel = kernel_of("simt", scoring=Scoring(bias="f32", sinks=True), causal=True)
    right, wrong = "each_batch = args.dbias_stride_0 != 0", "each_batch = true"
    assert right in kernel.source
    found, wanted = differentiate(
        replace(kernel, source=kernel.source.replace(right, wrong)), (1, 1, 70, 150)
    )
    exact = wanted["dbias"].summed_to((1, 1, 70, 150)).value
    assert np.linalg.norm(found["dbias"] - exact) > 0.1 * np.linalg.norm(exact)


def test_a_gradient_is_summed_over_what_is_repeated() -> None:
    whole = Gradient(np.ones((2, 3)), np.full((2, 3), 3.0))
    summed = whole.summed_to((1, 2))
    assert summed.value.tolist() == [[2.0, 2.0]]
    assert summed.spread == pytest.approx(np.full((1, 2), 22.0**0.5))


@pytest.mark.parametrize("name", SCORINGS)
def test_each_array_of_floats_has_a_launch_that_is_made_where_it_is_wanted(name: str) -> None:
    kernel = kernel_of("simt", scoring=SCORINGS[name])
    of_buffers = buffer_gradients(kernel.problem.scores)
    assert of_buffers
    for each in of_buffers:
        launch = next(one for one in kernel.launches if one.makes == each.name)
        assert (
            f"if (args->{each.name} != nullptr) {{\n    if (const int status = launch_{launch.role}("
            in kernel.source
        )
    assert_tidy(kernel.source, name, longest=160)


def test_places_that_pairs_name_are_told_from_those_that_are_computed() -> None:
    found = {
        each.name: (each.axes, each.is_scattered)
        for name in SCORINGS
        for each in buffer_gradients(replace(PROBLEM, scoring=SCORINGS[name]).scores)
    }
    assert found["dbias"] == ({"b": 0, "h": 1, "q": 2, "k": 3}, False)
    assert found["dy"] == ({"q": 0}, False) and found["dslopes"] == ({"b": 0, "h": 1}, False)
    assert found["dtable"] == found["dw"] == found["dx"] == ({}, True)
    assert found["dsinks"] == ({}, False) and "dbucket" not in found


def test_a_name_that_a_gradient_needs_is_told() -> None:
    with pytest.raises(ValueError, match="dx is the gradient of x; call the other array or number"):
        kernel_of("simt", scoring=Scoring(score="score + x[k] * dx[q]"))
