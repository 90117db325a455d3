"""The suite passes what is right and catches each classic mistake, in the quick depth already."""

import math
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.scores import scores_of
from flashgen.tuner.cards.dtypes import numpy_dtype
from flashgen.tuner.errors import CorruptedMemory
from flashgen.tuner.evaluate.cases import LAYOUTS, Case, cases
from flashgen.tuner.evaluate.comparison import WrongResult, compare
from flashgen.tuner.evaluate.error_bounds import error_bound, lse_bound
from flashgen.tuner.evaluate.inputs import make_inputs
from flashgen.tuner.evaluate.reference import DISTRIBUTIONS, Reference, attention
from flashgen.tuner.evaluate.sampled_problem import SAMPLE_BYTES, sample_problem
from flashgen.tuner.evaluate.validate import validate

from tests.support.fakes import FakeRunner, Fault, arithmetic_of, attend, attend_f32, fake_build

PROBLEM = Problem(batch=3, num_q_heads=4, num_kv_heads=2, seqlen_q=150, seqlen_k=130, head_dim=32)
CAUSAL = replace(PROBLEM, causal=True)


#: One problem for each arithmetic.
CLASSES = {
    "ieee": PROBLEM,
    "3xtf32": replace(PROBLEM, precision="3xtf32"),
    "3xf16": replace(PROBLEM, precision="3xf16"),
    "tf32": replace(PROBLEM, precision="tf32"),
    "f16": replace(PROBLEM, dtype="f16"),
    "bf16": replace(PROBLEM, dtype="bf16"),
}


def with_dims(problem, head_dim, head_dim_v=0):
    return replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize(
    "problem", [PROBLEM, CAUSAL, with_dims(PROBLEM, 1), with_dims(PROBLEM, 40), with_dims(PROBLEM, 16, 24)]
)
@pytest.mark.parametrize("depth", ["quick", "full"])
def test_right_kernel_passes(problem, depth):
    error = validate(FakeRunner(), fake_build(problem=problem), seed=1, depth=depth, problem=problem)
    assert 1e-9 < error < problem.tolerance


@pytest.mark.parametrize("depth", ["quick", "full"])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "causal"), [(1, 1, False), (64, 24, True), (7, 9, False)])
@pytest.mark.parametrize("name", CLASSES)
def test_right_kernel_of_each_class_passes(name, head_dim, head_dim_v, causal, depth):
    problem = replace(CLASSES[name], head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
    error = validate(FakeRunner(), fake_build(problem=problem), seed=2, depth=depth, problem=problem)
    assert problem.tolerance / 100 < error < problem.tolerance


@pytest.mark.parametrize("depth", ["quick", "full"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fault",
    [
        Fault.NO_MAXIMUM,
        Fault.ZERO_MAXIMUM,
        Fault.IGNORES_LAST_KEY,
        Fault.WRONG_KV_HEAD,
        Fault.IGNORES_SCALE,
        Fault.HALF_PRECISION,
        Fault.ONE_ELEMENT,
        Fault.BASE_2_LSE,
    ],
)
def test_each_mistake_is_caught(fault, seed, depth):
    with pytest.raises(WrongResult, match=r"batch|row"):
        validate(FakeRunner(), fake_build(fault, PROBLEM), seed=seed, depth=depth)


@pytest.mark.parametrize("name", ["3xtf32", "3xf16", "tf32", "f16", "bf16"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault.NO_MAXIMUM,
        Fault.ZERO_MAXIMUM,
        Fault.IGNORES_LAST_KEY,
        Fault.WRONG_KV_HEAD,
        Fault.IGNORES_SCALE,
        Fault.ONE_ELEMENT,
        Fault.BASE_2_LSE,
    ],
)
def test_each_mistake_is_caught_in_each_class(fault, name):
    with pytest.raises(WrongResult, match=r"batch|row"):
        validate(FakeRunner(), fake_build(fault, CLASSES[name]), seed=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "fault", "depth"),
    [
        ("3xtf32", Fault.ONE_TERM, "quick"),
        ("3xtf32", Fault.TWO_TERMS, "quick"),
        ("3xf16", Fault.ONE_TERM, "quick"),
        ("3xf16", Fault.TWO_TERMS, "quick"),
        ("tf32", Fault.EIGHT_BITS, "quick"),
        ("f16", Fault.HALF_PRECISION, "quick"),
        ("bf16", Fault.HALF_PRECISION, "quick"),
        # Errors of many small sums: only long rows show them.
        ("f16", Fault.HALF_OUTPUT, "full"),
        ("bf16", Fault.HALF_OUTPUT, "full"),
    ],
)
def test_arithmetic_below_its_class_is_caught(name, fault, depth, seed):
    with pytest.raises(WrongResult):
        validate(FakeRunner(), fake_build(fault, CLASSES[name]), seed=seed, depth=depth)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [Fault.TOP_LEFT_MASK, Fault.NAN_ROWS, Fault.IGNORES_LAST_KEY])
def test_each_mistake_of_a_mask_is_caught(fault, seed, name):
    with pytest.raises(WrongResult):
        validate(FakeRunner(), fake_build(fault, replace(CLASSES[name], causal=True)), seed=seed)


def test_runner_errors_pass_through():
    with pytest.raises(CorruptedMemory):
        validate(FakeRunner(), fake_build(Fault.STRAY_WRITE), seed=0)


def test_inputs_differ_by_seed_and_repeat_by_seed():
    def drawn(seed):
        seen = []

        class Spy(FakeRunner):
            def attend(self, build, q, k, v, *, scale, want_lse=False, values=None):
                seen.append(float(np.abs(q).sum()))
                return super().attend(build, q, k, v, scale=scale, want_lse=want_lse, values=values)

        validate(Spy(), fake_build(), seed=seed)
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


# -- what the suite covers ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_cases_cover_what_kernels_get_wrong(depth):
    variant = fake_build().kernel.variant
    br, bc = 16, 16
    drawn = [c for s in range(4) for c in cases(variant, PROBLEM, depth, np.random.default_rng(s))]
    assert any(c.seqlen_q % br and c.seqlen_k % bc for c in drawn)
    assert any(c.seqlen_k > 2 * bc and c.seqlen_q > br for c in drawn)
    assert any(c.seqlen_q == 1 for c in drawn)
    assert any(c.seqlen_q > c.seqlen_k for c in drawn) and any(c.seqlen_q < c.seqlen_k for c in drawn)
    assert any(c.num_q_heads > c.num_kv_heads > 1 for c in drawn)
    assert {"bnhd", "packed", "padded"} <= {c.layout for c in drawn}
    assert {c.want_lse for c in drawn} == {True, False}
    assert any(c.scale < 0 for c in drawn) and any(c.scale not in (1, -1) for c in drawn)
    assert {"uniform", "normal", "rising", "negative"} <= {c.inputs for c in drawn}
    if depth == "full":
        assert any(c.seqlen_q % br == 0 and c.seqlen_k % bc == 0 for c in drawn)
        assert any(c.scale == 0 for c in drawn) and any(c.seqlen_q == c.seqlen_k == 1 for c in drawn)
        assert any(c.seqlen_q == 197 for c in drawn) and any(c.batch > 1 and c.num_q_heads > 1 for c in drawn)


def test_cases_fit_blocks_of_several_heads():
    """Some head count leaves the last block incomplete, and some block takes heads of two batches."""

    class Grouped(Simt):
        def heads_per_block(self):
            return 4

    for depth in ("quick", "full"):
        drawn = list(cases(Grouped(br=16, bc=16), PROBLEM, depth, np.random.default_rng(0)))
        heads = [(c.num_q_heads, c.batch * c.num_q_heads) for c in drawn]
        assert any(total % 4 and total > 4 for _, total in heads)
        assert any(per_batch % 4 and total > per_batch and total > 4 for per_batch, total in heads)
        assert any(c.seqlen_k < 8 and c.seqlen_q < 8 for c in drawn)


def test_packed_heads_meet_groups_that_tiles_cut():
    class Packed(Simt):
        def packs_heads(self):
            return True

    for depth in ("quick", "full"):
        drawn = list(cases(Packed(br=16, bc=16), PROBLEM, depth, np.random.default_rng(0)))
        assert any(c.num_q_heads == 3 * c.num_kv_heads > 3 and c.seqlen_q * 3 > 16 for c in drawn)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "width"), [(1, 1, 1), (6, 6, 2), (32, 32, 4), (64, 64, 8), (24, 40, 8)]
)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_layouts_keep_the_values_and_the_alignment(layout, head_dim, head_dim_v, width, dtype, heads):
    case = Case(2, *heads, 9, 9, layout=layout)
    problem = replace(PROBLEM, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    plain = make_inputs(replace(case, layout="bhnd"), problem, np.random.default_rng(5))
    laid = make_inputs(case, problem, np.random.default_rng(5), access_width=width)
    for a, b in zip(plain[:3], laid[:3], strict=True):
        assert b.dtype == numpy_dtype(dtype)
        np.testing.assert_array_equal(a, b)
        strides = [s // b.itemsize for s in b.strides]
        assert strides[3] == 1 and all(s % width == 0 for s in strides[:3])
    q, k, v = (x.strides[2] // x.itemsize for x in laid[:3])
    if layout == "packed":
        together = 3 if heads == (2, 2) else 2
        if head_dim == head_dim_v:
            assert k == v == together * 2 * head_dim, "a row of k, then one of v"
        else:
            assert v == 2 * head_dim_v and k == (together - 1) * 2 * head_dim, "a row of v by itself"
    if layout == "padded":
        assert (q, v) == (head_dim + width, head_dim_v + width)


# -- bounds -------------------------------------------------------------------------------------------


def test_bound_is_the_class_until_scores_are_large():
    wide = replace(PROBLEM, head_dim=256, head_dim_v=32)
    assert error_bound(PROBLEM, 10) == error_bound(wide, 16) == 2e-6
    assert 1e-5 < error_bound(PROBLEM, 150) < error_bound(wide, 150) < 3e-5
    assert error_bound(CLASSES["3xtf32"], 150) == error_bound(PROBLEM, 150)
    assert 2e-3 < error_bound(CLASSES["f16"], 150) < 2.1e-3
    assert 1e-2 < error_bound(CLASSES["bf16"], 150) < 1.01e-2
    assert 1e-3 == error_bound(CLASSES["tf32"], 4) < error_bound(CLASSES["tf32"], 150) < 2e-2


def test_log_sum_exp_of_16_bits_is_held_tighter_than_the_outputs():
    for name in ("f16", "bf16"):
        assert lse_bound(CLASSES[name], 1) == 2e-4 < lse_bound(CLASSES[name], 150) < 3e-4
    assert lse_bound(PROBLEM, 1) == pytest.approx(1.2e-5)
    assert lse_bound(CLASSES["tf32"], 1) == pytest.approx(3e-3)


def tiny(o, lse=None):
    expected = Reference(np.asarray(o, float), np.asarray(lse if lse is not None else [[[0.0]]], float), 1.0)
    return expected, np.ones((1, 1, 2, 2))


def test_errors_name_case_head_and_both_numbers():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 20, 8)).astype(np.float32) for _ in "qkv")
    expected = attention(q, k, v, scale=0.3)
    o = expected.o.astype(np.float32)
    assert 0 < compare(o, None, expected, v, PROBLEM, "case") < 1e-7
    o[1, 2] *= 1.00001
    with pytest.raises(
        WrongResult, match=r"my case: head 2 of batch 1: .* is 1\.0\de-05, at most 2\.0e-06 allowed"
    ):
        compare(o, None, expected, v, PROBLEM, "my case")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(bad):
    expected, v = tiny([[[[1.0, 2.0]]]])
    with pytest.raises(WrongResult):
        compare(np.array([[[[1.0, bad]]]], np.float32), None, expected, v, PROBLEM, "case")


def test_masked_rows_must_be_exact():
    expected, v = tiny([[[[0.0, 0.0]]]], [[[-np.inf]]])
    zero = np.zeros((1, 1, 1, 2), np.float32)
    minus_infinity = np.full((1, 1, 1), -np.inf, np.float32)
    assert compare(zero, minus_infinity, expected, v, PROBLEM, "case") == 0
    with pytest.raises(WrongResult, match="row 0"):
        compare(zero, np.zeros((1, 1, 1), np.float32), expected, v, PROBLEM, "case")
    with pytest.raises(WrongResult):
        compare(zero + 1e-8, minus_infinity, expected, v, PROBLEM, "case")


# -- the real problem ---------------------------------------------------------------------------------


def test_sample_keeps_lengths_and_group_and_fits():
    big = Problem(batch=500, num_q_heads=32, num_kv_heads=8, seqlen_q=2048, seqlen_k=2048)
    quick, full = sample_problem(big, "quick"), sample_problem(big, "full")
    assert quick is not None and full is not None
    assert (quick.batch, quick.num_q_heads, quick.num_kv_heads, quick.seqlen_q) == (1, 2, 1, 2048)
    assert (full.num_q_heads, full.num_kv_heads, full.seqlen_k) == (32, 8, 2048)
    assert full.min_bytes <= SAMPLE_BYTES < replace(full, batch=full.batch + 1).min_bytes
    assert sample_problem(PROBLEM, "full") == PROBLEM
    assert sample_problem(big, "quick", max_flops=1e6) is None
    assert sample_problem(big, "full", max_flops=5e9) == quick


def test_sample_catches_what_only_the_real_shape_shows():
    problem = Problem(batch=2, num_q_heads=2, num_kv_heads=2, seqlen_q=600, seqlen_k=600, head_dim=32)

    class LateRows(FakeRunner):
        """Wrong in the last row of sequences longer than any of the suite."""

        def attend(self, build, q, k, v, *, scale, want_lse=False, values=None):
            o, lse = super().attend(build, q, k, v, scale=scale, want_lse=want_lse, values=values)
            if q.shape[2] > 500:
                o[-1, -1, -1] *= 1.1
            return o, lse

    build = fake_build(problem=problem)
    validate(LateRows(), build, seed=0)
    for depth in ("quick", "full"):
        with pytest.raises(WrongResult, match="at its real lengths"):
            validate(LateRows(), build, seed=0, depth=depth, problem=problem)


def test_fake_attention_is_right():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, 30, 8)).astype(np.float32) for _ in "qkv")
    o, lse = attend_f32(q, k, v, 0.3, True)
    expected = attention(q, k, v, scale=0.3, scores=scores_of(causal=True))
    np.testing.assert_allclose(o, expected.o, atol=1e-6)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-6)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_bounds_leave_room_for_rounding(name, distribution, head_dim):
    """A right kernel of the class passes with errors half as large again."""
    problem = with_dims(CLASSES[name], head_dim)
    for seed, (n, m, scale) in enumerate(((41, 157, 1.3), (80, 80, 1.0), (7, 5, -0.5), (5, 900, 1.0))):
        case = Case(2, 2, 1, n, m, distribution, scale=scale)
        q, k, v, scale = make_inputs(case, problem, np.random.default_rng(seed))
        expected = attention(q, k, v, scale=scale)
        o, lse = attend(q, k, v, scale, False, arithmetic_of(problem))
        worse = [x + (x - y) / 2 for x, y in ((o, expected.o), (lse, expected.lse))]
        compare(*worse, expected, v, problem, case.name)
