"""What masks and changes read becomes what kernels take: types, strides, and what is wrong with it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.dtypes import BUFFER_DTYPES
from flashgen.tuner.cards.score_values import score_values

SIZES = {"batch": 2, "num_q_heads": 3, "num_kv_heads": 3, "seqlen_q": 5, "seqlen_k": 7}


def scores(**asked):
    return Problem(scoring=Scoring(**asked)).scores


def reading(dtype: str):
    """Scores that read an array of that type along keys of each batch."""
    if dtype in ("f32", "f16", "bf16"):
        return scores(score="score + x[b, k]", buffers=(("x", dtype),))
    return scores(mask="x[b, k] == q", buffers=(("x", dtype),))


@pytest.mark.parametrize("dtype", BUFFER_DTYPES)
def test_arrays_become_their_buffers_type(dtype):
    given = np.arange(14).reshape(2, 7)
    if dtype in ("f32", "f16", "bf16"):
        given = given + 1 / 3
    found = score_values(reading(dtype), {"x": given}, SIZES).arrays["x"]
    assert found.dtype == BUFFER_DTYPES[dtype]
    np.testing.assert_array_equal(found, given.astype(found.dtype))


def test_truths_are_bytes():
    asked = scores(bias="u8")
    shown = np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5
    found = score_values(asked, {"bias": shown}, SIZES)
    np.testing.assert_array_equal(found.arrays["bias"], shown)
    assert found.arrays["bias"].dtype == np.uint8


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_what_is_repeated_is_not_copied(dtype):
    one = np.random.default_rng(0).standard_normal((1, 3, 1, 7), np.float32)
    found = score_values(scores(bias=dtype), {"bias": np.broadcast_to(one, (2, 3, 5, 7))}, SIZES)
    size = BUFFER_DTYPES[dtype].itemsize
    assert found.arrays["bias"].strides == (0, 7 * size, 0, size)
    arguments = found.arguments({"bias": 4096})
    assert arguments == {"bias": 4096, "bias_stride_0": 0, "bias_stride_1": 7, "bias_stride_2": 0}


def test_a_last_axis_that_is_repeated_is_written_out():
    one = np.arange(10, dtype=np.float32).reshape(2, 1, 5, 1)
    found = score_values(scores(bias="f32"), {"bias": np.broadcast_to(one, (2, 3, 5, 7))}, SIZES)
    np.testing.assert_array_equal(found.arrays["bias"], np.broadcast_to(one, (2, 3, 5, 7)))
    assert found.arrays["bias"].strides == (5 * 7 * 4, 0, 7 * 4, 4)


@pytest.mark.parametrize("turned", [np.s_[:, ::-1], np.s_[:, :, :, ::-1], np.s_[:, :, :, ::2]])
def test_arrays_that_kernels_cannot_walk_are_copied(turned):
    given = np.random.default_rng(0).standard_normal((2, 3, 5, 14), np.float32)[turned][..., :7]
    found = score_values(scores(bias="f32"), {"bias": given}, SIZES).arrays["bias"]
    np.testing.assert_array_equal(found, given)
    assert found.strides[-1] == 4 and min(found.strides) > 0


def test_lengths_of_computed_axes_and_numbers_are_told():
    asked = scores(score="score * n + table[h, k - q]", scalars=(("n", 0.1),), window=(3, 0))
    table = np.zeros((3, 11), np.float32)
    found = score_values(asked, {"table": table, "n": 0.1, "window_left": 3, "window_right": 0}, SIZES)
    assert found.arguments({"table": 64}) == {
        "table": 64,
        "table_stride_0": 11,
        "table_size_1": 11,
        "n": float(np.float32(0.1)),
        "window_left": 3,
        "window_right": 0,
    }


def test_longer_arrays_serve():
    given = np.arange(60).reshape(3, 20)[:, :]
    found = score_values(reading("i32"), {"x": given}, SIZES).arrays["x"]
    assert found.shape == (3, 20)


@pytest.mark.parametrize(
    ("asked", "given", "complaint"),
    [
        (reading("i32"), {}, r"the kernel reads x, i32\[batch, seqlen_k\], the values are of nothing"),
        (reading("i32"), {"y": 1, "x": None}, "the values are of y, x; give x"),
        (scores(window=(3, 0)), {"window_left": 3}, "reads window_right, a number, .* are of window_left"),
        (scores(window=(3, 0)), {"window_left": 0.5, "window_right": 0}, "window_left is 0.5, .*integer"),
        (scores(window=(3, 0)), {"window_left": 2**31, "window_right": 0}, "window_left is 2147483648"),
        (reading("i32"), {"x": np.zeros((2, 6), int)}, r"x has the shape \[2, 6\].*at least \[2, 7\]"),
        (reading("i32"), {"x": np.zeros(7, int)}, r"x has the shape \[7\].*at least \[2, 7\]"),
        (reading("i32"), {"x": np.zeros((2, 7))}, r"x is of float64, the kernel reads integers \(i32\)"),
        (reading("f16"), {"x": np.zeros((2, 7), int)}, r"x is of int64, the kernel reads floats \(f16\)"),
        (reading("f16"), {"x": np.zeros((2, 7), "S1")}, r"x is of \|S1, the kernel reads floats"),
        (reading("u8"), {"x": np.zeros((2, 7), "S1")}, r"x is of \|S1, the kernel reads integers"),
        (
            reading("i16"),
            {"x": np.full((2, 7), 40000)},
            "from 40000 to 40000, its type i16 from -32768 to 32767",
        ),
        (reading("u8"), {"x": np.full((2, 7), -1)}, "from -1 to -1, its type u8 from 0 to 255"),
    ],
)
def test_what_kernels_cannot_read_is_told(asked, given, complaint):
    with pytest.raises(ValueError, match=complaint):
        score_values(asked, given, SIZES)


def test_bfloat16_counts_as_floats():
    given = np.ones((2, 7), ml_dtypes.bfloat16)
    assert score_values(reading("f32"), {"x": given}, SIZES).arrays["x"].dtype == np.float32
