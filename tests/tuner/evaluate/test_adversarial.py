"""Adversarial inputs are what they are called, float32 arithmetic passes on them, and each classic loss is
caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.problem import Problem
from flashgen.gen.promise import LEAST, promise_of
from flashgen.tuner.cards.dtypes import largest
from flashgen.tuner.errors import LaunchError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.adversarial import (
    BrokenPromise,
    Finding,
    adversarial_findings,
    prove_promise,
)
from flashgen.tuner.evaluate.adversarial_inputs import AdversarialCase, adversarial_cases, case_named
from flashgen.tuner.evaluate.allowed_errors import attend_exactly

from tests.support.depth import sampled
from tests.support.fakes import fake_build, rounded_in_units

PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=1, seqlen_q=100, seqlen_k=100, head_dim=32)
CAUSAL = replace(PROBLEM, causal=True)
DTYPES = ("f32", "f16", "bf16", "e4m3")
Attend = Callable[..., tuple[np.ndarray, np.ndarray]]


class Numpy:
    """A runner that computes by float32 arithmetic, row by row, or by what is put in its place."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend(self, build, q, k, v, *, scale, want_lse=False, values=None):
        with np.errstate(all="ignore"):
            return self._attend(build.kernel.problem, q, k, v, scale)


def right(problem: Problem, q, k, v, scale: float):
    """Attention in float32 by the book."""
    seen = visible(problem, q.shape[2], k.shape[2])
    return weigh(np.where(seen, scores_of(q, k, scale), -np.inf), v, seen)


def visible(problem: Problem, rows: int, keys: int) -> np.ndarray:
    begin, end = problem.scores.interval(np.arange(rows), rows, keys)
    return (np.arange(keys) >= begin[:, None]) & (np.arange(keys) < end[:, None])


def scores_of(q, k, scale: float) -> np.ndarray:
    products = q[:, :, :, None, :] * k[:, :, None, :, :]
    return products.sum(axis=-1, dtype=np.float32) * np.float32(scale)


def weigh(scores, v, seen):
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
    terms = np.where(seen[:, :, None], (weights / total)[..., None] * v[:, :, None], np.float32(0))
    return terms.sum(axis=-2, dtype=np.float32), (np.log(total) + top)[..., 0]


def findings(attend: Attend, cases: Iterable[AdversarialCase], problem: Problem = PROBLEM) -> list[Finding]:
    build = fake_build(problem=problem)
    return list(adversarial_findings(Numpy(attend), build, cases))


def broken(attend: Attend, names: Iterable[str], problem: Problem = PROBLEM) -> set[str]:
    """Which of the cases of those names break the promise."""
    found = findings(attend, [case_named(name, problem.dtype) for name in names], problem)
    return {finding.case for finding in found if not finding.kept}


# -- the inputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_cases_have_names_of_their_own_and_are_drawn_the_same_again(dtype):
    cases = adversarial_cases(dtype)
    few = adversarial_cases(dtype, "few")
    assert len({case.name for case in cases}) == len(cases) > 100
    assert {case.name for case in few} < {case.name for case in cases}
    assert {case.group for case in few} == {case.group for case in cases}
    problem = Problem(dtype=dtype, head_dim=16)
    for case in few:
        first, again = (case_named(case.name, dtype).draw(problem, rows=9, keys=17) for _ in range(2))
        for a, b in zip(first[:3], again[:3], strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
        assert first[3] == again[3] == np.float32(first[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_what_is_called_so_is_not_finite(dtype):
    for case in adversarial_cases(dtype):
        q, k, v, scale = case.draw(Problem(dtype=dtype, head_dim=8), rows=7, keys=12)
        finite = all(np.isfinite(x.astype(np.float64)).all() for x in (q, k, v))
        assert finite == (case.group not in ("NaN", "infinite")), case.name
        assert np.isfinite(scale) and scale != 0, case.name


@pytest.mark.parametrize("head_dims", [(1, 1), (8, 24), (64, 40)])
def test_any_shape_has_every_case(head_dims):
    problem = Problem(head_dim=head_dims[0], head_dim_v=head_dims[1])
    for case in adversarial_cases("f32"):
        q, k, v, _ = case.draw(problem, rows=1, keys=1)
        assert (q.shape, k.shape, v.shape) == (
            (1, 2, 1, head_dims[0]),
            (1, 1, 1, head_dims[0]),
            (1, 1, 1, head_dims[1]),
        )


def test_magnitudes_reach_the_ends_of_each_type():
    for dtype in DTYPES:
        sizes = []
        for case in adversarial_cases(dtype):
            if case.group not in ("NaN", "infinite"):
                drawn = case.draw(Problem(dtype=dtype, head_dim=8), rows=40, keys=60)
                sizes += [np.abs(x.astype(np.float64)).max() for x in drawn[:3]]
        assert max(sizes) == largest(dtype)
        assert min(sizes) <= {"f32": 2e-38, "bf16": 2e-38, "f16": 1e-4, "e4m3": 0.02}[dtype]


def test_an_unknown_name_is_told_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'a row of q x 1e"):
        case_named("a row of q x 1e8", "f32")


# -- the bound ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_truth_is_that_of_the_suite_on_ordinary_inputs(causal):
    problem = replace(PROBLEM, causal=causal)
    q, k, v = reference.random_inputs(
        "rising", (2, 4, 9, 32), (2, 2, 13, 32), scale=0.2, rng=np.random.default_rng(1)
    )
    allowed = attend_exactly(q, k, v, scale=0.2, problem=problem, promise=promise_of(problem))
    expected = reference.attention(q, k, v, scale=0.2, scores=problem.scores)
    np.testing.assert_allclose(allowed.o, expected.o, rtol=1e-12)
    np.testing.assert_allclose(allowed.lse, expected.lse, rtol=1e-12)
    assert (allowed.slack < 1e-3).all() and not allowed.open.any() and not allowed.open_rows.any()


def test_a_large_score_widens_the_bound_of_its_own_row_alone():
    q, k, v = (np.random.default_rng(2).standard_normal((1, 1, 20, 32)).astype(np.float32) for _ in range(3))
    before = attend_exactly(q, k, v, scale=0.2, problem=PROBLEM, promise=promise_of(PROBLEM))
    q[0, 0, 7] *= 1e4
    after = attend_exactly(q, k, v, scale=0.2, problem=PROBLEM, promise=promise_of(PROBLEM))
    others = np.arange(20) != 7
    np.testing.assert_array_equal(before.slack[0, 0, others], after.slack[0, 0, others])
    assert after.lse_slack[0, 0, 7] > 100 * before.lse_slack[0, 0, 7]


def test_one_key_with_all_weight_leaves_nothing_open_however_large_its_score():
    q = np.full((1, 1, 3, 32), 1e10, np.float32)
    k = np.concatenate([np.full((1, 1, 1, 32), 1e10), np.full((1, 1, 5, 32), -1e10)], axis=2)
    v = np.random.default_rng(3).standard_normal((1, 1, 6, 32))
    by_multiply_adds = promise_of(replace(PROBLEM, precision="ieee"))
    allowed = attend_exactly(q, k, v, scale=1.0, problem=PROBLEM, promise=by_multiply_adds)
    np.testing.assert_array_equal(allowed.o, np.broadcast_to(v[:, :, :1], allowed.o.shape))
    assert allowed.slack.max() < 20 * LEAST


# -- the verdict -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [PROBLEM, CAUSAL], ids=["full", "causal"])
def test_float32_by_the_book_keeps_the_promise(problem):
    found = findings(right, adversarial_cases("f32", "few"), problem)
    wrong = [f"{f.group}: {f.words()}" for f in found if not f.kept]
    assert not wrong, "\n".join(wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("head_dim", [1, 7, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_float32_by_the_book_keeps_the_promise_in_all_cases(head_dim, causal):
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    found = findings(right, adversarial_cases("f32"), problem)
    wrong = [f"{f.group}: {f.words()}" for f in found if not f.kept]
    assert not wrong, "\n".join(wrong)


def one_unit_for_all(problem, q, k, v, scale):
    """Each factor a sum of two f16 numbers, with one power of two for a tensor's head."""

    def in_parts(x):
        large = rounded_in_units(x, x)
        return large + rounded_in_units(x - large, x)

    q, k, v = (np.stack([in_parts(x[:, h]) for h in range(x.shape[1])], axis=1) for x in (q, k, v))
    return right(problem, q, k, v, scale)


def in_eight_bits(problem, q, k, v, scale):
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    return right(problem, q, k, v, scale)


def nothing(problem, q, k, v, scale):
    o, lse = right(problem, q, k, v, scale)
    return np.zeros_like(o), lse


def zero_for_nan(problem, q, k, v, scale):
    o, lse = right(problem, q, k, v, scale)
    return np.where(np.isnan(o), np.float32(0), o), lse


def no_weight_for_nan(problem, q, k, v, scale):
    """As an exponential by a polynomial does that clamps its argument."""
    seen = visible(problem, q.shape[2], k.shape[2])
    scores = scores_of(q, k, scale)
    return weigh(np.where(seen & ~np.isnan(scores), scores, -np.inf), v, seen)


def lse_of_nothing(problem, q, k, v, scale):
    o, lse = right(problem, q, k, v, scale)
    return o, np.where(np.isnan(lse), -np.inf, lse)


def maximum_of_a_tile(problem, q, k, v, scale):
    """Scores less the largest of any row of a head."""
    seen = visible(problem, q.shape[2], k.shape[2])
    scores = np.where(seen, scores_of(q, k, scale), -np.inf)
    weights = np.exp(scores - scores.max(axis=(-1, -2), keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v / total, np.log(total)[..., 0] + scores.max(axis=(-1, -2))[..., None]


def rounded_maximum(problem, q, k, v, scale):
    """s · c - m · c with the second product rounded alone: ties of huge scores are no longer 0 apart."""
    seen = visible(problem, q.shape[2], k.shape[2])
    scores = np.where(seen, scores_of(q, k, 1.0).astype(np.float64), -np.inf)
    c = np.float64(np.float32(scale))
    top = (scores.max(axis=-1, keepdims=True) * c).astype(np.float32)
    weights = np.exp((scores * c - top).astype(np.float32))
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v / np.where(total > 0, total, 1), (np.log(total) + top)[..., 0]


def weights_of_f16(problem, q, k, v, scale):
    seen = visible(problem, q.shape[2], k.shape[2])
    scores = np.where(seen, scores_of(q, k, scale), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    large = weights.astype(np.float16).astype(np.float32)
    small = (weights - large).astype(np.float16).astype(np.float32)
    terms = np.where(seen[:, :, None], (large + small)[..., None] * v[:, :, None], np.float32(0))
    return terms.sum(axis=-2) / total, (np.log(total) + top)[..., 0]


def hidden_values_weighed(problem, q, k, v, scale):
    seen = visible(problem, q.shape[2], k.shape[2])
    return weigh(np.where(seen, scores_of(q, k, scale), -np.inf), v, np.ones_like(seen))


@pytest.mark.parametrize(
    ("attend", "caught"),
    [
        (one_unit_for_all, {"a row of q x 1e7", "an element of v max, of no weight", "an element of q max"}),
        (zero_for_nan, {"an element of q NaN", "an element of a key NaN", "an element of a value NaN"}),
        (no_weight_for_nan, {"an element of a key NaN", "the last key inf"}),
        (lse_of_nothing, {"an element of q NaN", "an element of a key NaN"}),
        (maximum_of_a_tile, {"a row of q x 1e7", "scores of 1e4"}),
        (rounded_maximum, {"q = 1e7, k = -1e7", "two of three keys alike at 1e7"}),
        (weights_of_f16, {"a value x 1e7, of weight 1 / 1e7"}),
    ],
)
def test_each_loss_is_caught(attend, caught):
    assert broken(attend, caught) == caught


def test_values_that_a_row_does_not_see_are_not_weighed_where_that_is_promised():
    names = {"the last value NaN", "an element of a value inf"}
    problem = replace(PROBLEM, precision="3xf16")
    assert promise_of(problem).isolates_values and not promise_of(PROBLEM).isolates_values
    assert not broken(hidden_values_weighed, names, problem)
    assert broken(hidden_values_weighed, names, replace(problem, causal=True)) == names
    # Elsewhere a hidden NaN may spread, but to NaN alone, and no further than its column.
    assert not broken(hidden_values_weighed, names, CAUSAL)
    assert broken(zero_for_nan, names, CAUSAL) == {"the last value NaN"}


def test_parts_of_f16_keep_rows_apart_where_they_are_asked_for_by_name():
    names = {"a row of q x 1e7", "an element of v max, of no weight"}
    assert broken(one_unit_for_all, names, replace(PROBLEM, precision="3xf16")) == names


def test_a_few_finite_means_near_zero_are_no_head():
    # Sums of |v| beyond float32 may be infinite. What little is finite is judged by its row's size.
    def infinite_but_one(problem, q, k, v, scale):
        o, lse = right(problem, q, k, v, scale)
        smallest = np.abs(o) == np.abs(o).min()
        return np.where(smallest, o * np.float32(1.001), np.float32(np.inf)), lse

    (found,) = findings(infinite_but_one, [case_named("v x max", "f32")])
    assert found.kept and found.head_error == 0


def test_a_proof_names_the_case_the_error_and_the_promise():
    eight_bits = Problem(dtype="e4m3", head_dim=16)
    count = prove_promise(Numpy(in_eight_bits), fake_build(problem=eight_bits), "few")
    assert count == len(adversarial_cases("e4m3", "few"))
    told = r"adversarial inputs: v x 1e-7: .* is 1.0e\+00, .*e-06 allowed; promised are 2e-06 per head"
    with pytest.raises(BrokenPromise, match=told):
        prove_promise(Numpy(nothing), fake_build(problem=PROBLEM), "few")


def test_a_failure_names_the_case():
    def refuse(problem, q, k, v, scale):
        raise LaunchError("an illegal memory access was encountered")

    with pytest.raises(LaunchError, match="v x 1e-7: an illegal memory access"):
        prove_promise(Numpy(refuse), fake_build(problem=PROBLEM), "few")


@pytest.mark.parametrize("case", sampled(adversarial_cases("f32", "few"), 5), ids=lambda case: case.name)
def test_another_seed_draws_other_numbers(case):
    if case.group in ("ties", "beyond"):
        return
    first, other = (case.draw(PROBLEM, rows=9, keys=17, seed=seed)[2] for seed in (0, 1))
    assert not np.array_equal(first, other)
