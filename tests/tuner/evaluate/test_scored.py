"""Masks and changes of scores: the reference by the book, random expressions, mistakes found out."""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from flashgen.gen.expression import Constant, Expression, Kind, Name, distinct, loads_of, names_of, replaced
from flashgen.gen.families.mma.family import Mma
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import draw_values
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.errors import FlashgenError
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.cases import VALUES, cases
from flashgen.tuner.evaluate.comparison import WrongResult, compare
from flashgen.tuner.evaluate.error_bounds import tanh_error
from flashgen.tuner.evaluate.sampled_problem import draw_sample
from flashgen.tuner.evaluate.validate import validate

from tests.support import formulas
from tests.support.depth import sampled
from tests.support.plain_kernel import CARD, Plain, changed_build, plain_build

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

#: Each of what can be asked for, alone and with others.
ASKED = {
    "window": Scoring(window=(127, 0)),
    "window beside first keys": Scoring(window=(127, 3), always=4),
    "chunk": Scoring(chunk=64),
    "prefix": Scoring(prefix=100),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=2),
    "softcap": Scoring(softcap=30.0),
    "alibi": Scoring(alibi=True),
    "bias": Scoring(bias="f32"),
    "bias of 16 bits": Scoring(bias="bf16"),
    "boolean": Scoring(bias="u8"),
    "sinks": Scoring(sinks=True),
    "expressions": Scoring(
        mask="doc[b, q] == doc[b, k]", score="score + table[h, k - q]", buffers=(("doc", "i16"),)
    ),
    "all": Scoring(window=(100, 3), softcap=20.0, alibi=True, sinks=True, lengths=True, bias="f16"),
}


def problem_of(scoring: Scoring, dtype: str = "f32", **more: Any) -> Problem:
    lengths: dict[str, Any] = {"batch": 2, "num_q_heads": 4, "num_kv_heads": 2, "seqlen_q": 9, "seqlen_k": 13}
    sizes = lengths | {"head_dim": 16, "head_dim_v": 8, "causal": scoring.prefix > 0}
    return Problem(dtype=dtype, scoring=scoring, **(sizes | more))


def inputs(problem: Problem, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return reference.random_inputs(
        "uniform",
        (problem.batch, problem.num_q_heads, problem.seqlen_q, problem.head_dim),
        (problem.batch, problem.num_kv_heads, problem.seqlen_k, problem.head_dim),
        scale=0.25,
        rng=np.random.default_rng(seed),
        dtype=problem.dtype,
        head_dim_v=problem.head_dim_v,
    )


def drawn_values(problem: Problem, seed: int = 0) -> dict[str, Any]:
    values = draw_values(problem.scoring, problem.scores, problem, np.random.default_rng(seed))
    return values_as_read(problem, values)


# -- the reference -----------------------------------------------------------------------------------------


def pair_by_pair(problem: Problem, q, k, v, values: dict[str, Any], scale: float):
    """Each mask and change from its definition, pair by pair."""
    s, nq, nk = problem.scoring, problem.seqlen_q, problem.seqlen_k
    group = problem.num_q_heads // problem.num_kv_heads
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(*lse.shape):
        place, weights, total = i + nk - nq, [], 0.0
        for j in range(nk):
            away = place - j
            seen = not problem.causal or away >= 0 or (s.prefix > 0 and j < values["prefix"][b])
            if s.window is not None:
                left, right = values["window_left"], values["window_right"]
                seen &= left < 0 or away <= left or (s.always > 0 and j < values["always_keys"])
                seen &= right < 0 or -away <= right
            if s.chunk:
                seen &= place // values["chunk"] == j // values["chunk"]
            if s.lengths:
                seen &= j < values["lengths"][b]
            if s.documents:
                seen &= values["document_begin"][b, i] <= j < values["document_end"][b, i]
            if s.dilation:
                seen &= away % values["dilation"] == 0
            if s.bias == "u8":
                seen &= bool(values["bias"][b, h, i, j])
            if s.mask:
                seen &= values["doc"][b, i] == values["doc"][b, j]
            if not seen:
                continue
            score = scale * float(q[b, h, i].astype(np.float64) @ k[b, h // group, j].astype(np.float64))
            if s.softcap:
                score = values["softcap"] * np.tanh(score / values["softcap"])
            if s.alibi:
                score -= float(values["slopes"][b, h]) * abs(away)
            if s.bias and s.bias != "u8":
                score += float(values["bias"][b, h, i, j])
            if s.score:
                table = values["table"]
                score += float(table[h, min(j - i if j >= i else j - i + table.shape[1], table.shape[1] - 1)])
            weights.append((j, np.exp(score)))
            total += weights[-1][1]
        if s.sinks:
            total += np.exp(float(values["sinks"][h]))
        for j, weight in weights:
            o[b, h, i] += weight / total * v[b, h // group, j].astype(np.float64)
        if total:
            lse[b, h, i] = np.log(total)
    return o, lse


@pytest.mark.parametrize("name", ASKED)
def test_the_reference_is_what_the_definitions_say(name):
    problem = problem_of(replace(ASKED[name], window=(4, 1) if ASKED[name].window else None, chunk=0))
    if name == "chunk":
        problem = problem_of(Scoring(chunk=4))
    q, k, v = inputs(problem)
    values = drawn_values(problem)
    found = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
    o, lse = pair_by_pair(problem, q, k, v, values, 0.25)
    np.testing.assert_allclose(found.o, o, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-11)


@pytest.mark.parametrize("name", ASKED)
def test_parts_of_the_reference_are_those_of_the_whole(name, monkeypatch):
    problem = problem_of(ASKED[name], seqlen_q=20, seqlen_k=31)
    q, k, v = inputs(problem)
    values = drawn_values(problem)
    whole = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
    monkeypatch.setattr(reference, "MAX_SCORE_BYTES", 8 * 4 * 31 * 3)
    in_parts = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
    np.testing.assert_allclose(in_parts.o, whole.o, atol=1e-13)
    rows = np.array([0, 7, 19])
    one = reference.attention(
        q[1:, 3:],
        k[1:, 1:],
        v[1:, 1:],
        scale=0.25,
        scores=problem.scores,
        values=values,
        first=(1, 3),
        rows=rows,
    )
    np.testing.assert_allclose(one.o[0, 0], whole.o[1, 3, rows], atol=1e-13)
    np.testing.assert_allclose(one.lse[0, 0], whole.lse[1, 3, rows], atol=1e-13)


def test_rows_that_see_nothing_have_their_sink():
    problem = problem_of(Scoring(bias="u8", sinks=True))
    q, k, v = inputs(problem)
    values = drawn_values(problem)
    shown = np.array(values["bias"])
    shown[:, :, 4] = 0
    sinks = np.array([0.5, -np.inf, 2.0, 0.0])
    found = reference.attention(
        q, k, v, scale=0.25, scores=problem.scores, values={"bias": shown, "sinks": sinks}
    )
    assert (found.o[:, :, 4] == 0).all()
    np.testing.assert_array_equal(found.lse[:, :, 4], np.broadcast_to(sinks, (2, 4)))


def test_a_row_whose_every_score_is_minus_infinity_sees_nothing():
    problem = problem_of(Scoring(bias="f32"))
    q, k, v = inputs(problem)
    bias = np.zeros((2, 4, 9, 13))
    bias[:, :, 2] = -np.inf
    bias[:, :, 3, :12] = -np.inf
    found = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values={"bias": bias})
    assert (found.o[:, :, 2] == 0).all() and np.isneginf(found.lse[:, :, 2]).all()
    np.testing.assert_allclose(found.o[:, :, 3], np.repeat(v[:, :, 12], 2, axis=1), rtol=1e-12)


def test_keys_that_no_row_sees_may_hold_anything():
    problem = problem_of(Scoring(dilation=2), seqlen_q=1)
    q, k, v = inputs(problem)
    values = drawn_values(problem)
    clean = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
    k[:, :, 1::2], v[:, :, 1::2] = np.inf, np.nan
    dirty = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
    np.testing.assert_array_equal(dirty.o, clean.o)
    np.testing.assert_array_equal(dirty.lse, clean.lse)


def test_errors_count_as_far_as_weights_let_them_be_felt():
    """A distance of 4000 rounds by much, but has no weight; a cap leaves little of an error."""
    far = problem_of(Scoring(alibi=True), seqlen_k=4000, num_q_heads=2, num_kv_heads=1, batch=1)
    capped = problem_of(Scoring(softcap=1.0))
    for problem, scores, own in ((far, (0.0, 30.0), 1e-4), (capped, (0.0, 2.0), 1e-5)):
        found = reference.attention(
            *inputs(problem), scale=0.25, scores=problem.scores, values=drawn_values(problem)
        )
        assert scores[0] < found.max_score < scores[1] and 0 < found.change_error < own


# -- the suite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bounds"), [("f16", (5e-4, 2e-3)), ("bf16", (5e-4, 1e-2))])
def test_errors_of_capped_scores_are_told(dtype, bounds):
    problem = Problem(dtype=dtype, head_dim=128, scoring=Scoring(softcap=30.0))
    q, k, v = (np.random.default_rng(0).standard_normal((1, 2, 40, 128)) for _ in range(3))
    scores, values = problem.scores, {"softcap": 30.0}
    expected = reference.attention(
        q, k, v, scale=128**-0.5, scores=scores, values=values, tanh_error=tanh_error(problem)
    )
    for error in bounds:
        assert compare(expected.o * (1 + error), None, expected, v, problem, "") == pytest.approx(error)
    twice = bounds[1] + 2 * expected.change_error + 1e-4
    with pytest.raises(WrongResult):
        compare(expected.o * (1 + twice), None, expected, v, problem, "")


def test_errors_of_all_scores_alike_cancel_but_against_sinks():
    problem = Problem(head_dim=64, scoring=Scoring(sinks=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.uniform(-3, 3, (1, 2, 40, 64)) for _ in range(3))
    found = []
    for shorter in (1.0, 1 - 6 * 2.0**-24):  # as sums come out that are cut off
        values = {"sinks": np.array([14.0, -np.inf])}
        found.append(
            reference.attention(q * shorter, k, v, scale=0.125, scores=problem.scores, values=values)
        )
    expected, other = found
    errors = np.linalg.norm(other.o - expected.o, axis=(2, 3)) / np.linalg.norm(expected.o, axis=(2, 3))
    assert errors[0, 0] > problem.tolerance > 1.5 * errors[0, 1]
    assert 0 < expected.sink_score < expected.max_score
    assert compare(other.o, other.lse, expected, v, problem, "") == 0.0  # such scores are not ordinary
    with pytest.raises(WrongResult):
        compare(other.o, None, replace(expected, sink_score=0.0), v, problem, "")


@pytest.mark.parametrize("name", ASKED)
def test_the_suite_has_every_number_and_all_values(name):
    problem = problem_of(ASKED[name])
    found = list(cases(Plain(br=16, bc=16), problem, "full", np.random.default_rng(0)))
    again = list(cases(Plain(br=16, bc=16), problem, "full", np.random.default_rng(0)))
    assert found == again
    assert {case.values for case in found} == set(VALUES)
    assert all(case.values in case.name for case in found)
    asked = ASKED[name]
    numbers = {case.scoring for case in found}
    assert all(each.stem == asked.stem or (asked.always and each.window) for each in numbers)
    if asked.window is not None:
        windows = {each.window for each in numbers}
        assert any(left == 0 == right for left, right in windows)
        assert any(right < 0 for _, right in windows) and any(0 < left < 16 for left, _ in windows)
        assert any(left > 16 for left, _ in windows)
    if asked.documents:
        assert {1, 16} < {each.documents for each in numbers}
    quick = list(cases(Plain(br=16, bc=16), problem, "quick", np.random.default_rng(0)))
    assert 8 <= len(quick) < 16 and {case.values for case in quick} == set(VALUES)


@needs_compiler
@pytest.mark.parametrize(("name", "dtype"), sampled(product(ASKED, ("f32", "f16")), 4, thorough=25))
def test_right_kernels_pass(name, dtype):
    problem = problem_of(ASKED[name], dtype)
    error = validate(SimRunner(CARD), plain_build(problem), seed=1, depth="full", problem=problem)
    assert problem.tolerance / 100 < error < problem.tolerance


@needs_compiler
@pytest.mark.parametrize("name", sampled(ASKED, 1))
def test_right_kernels_pass_the_sanitizer(name):
    problem = problem_of(ASKED[name], "f16")
    validate(SimRunner(CARD, sanitize=True), plain_build(problem, sanitize=True), seed=1)


#: What is asked, and a mistake: a passage of the kernel and what stands there by mistake.
MISTAKES = {
    "begins are not seen to": ("window", "begin = first_key_of(args, batch, row)", "begin = 0"),
    "ends are not seen to": ("window", "end = end_key_of(args, batch, row)", "end = args.seqlen_k"),
    "a window of a key less": ("window", "- args.window_left", "- args.window_left + 1"),
    "a window of a key more": ("window", "args.window_right + 1", "args.window_right + 2"),
    "unlimited means nothing": ("window", "args.window_right < 0", "args.window_right < -1"),
    "first keys are hidden": ("window beside first keys", "key < args.always_keys", "false"),
    "chunks are of another size": ("chunk", "* args.chunk", "* (args.chunk + 1)"),
    "another batch's prefix": ("prefix", "prefix_at(args, batch)", "prefix_at(args, 0)"),
    "another batch's length": ("lengths", "lengths_at(args, batch)", "lengths_at(args, 0)"),
    "another batch's documents": (
        "documents",
        "args.document_end + i0 * args.document_end_stride_0",
        "args.document_end",
    ),
    "keys between": ("dilation", "== key %", "== (key + 1) %"),
    "remainders of the other sign": (
        "dilation",
        "floor_mod(row + args.seqlen_k - args.seqlen_q, args.dilation)",
        "(row + args.seqlen_k - args.seqlen_q) % args.dilation",
    ),
    "no cap": ("softcap", "tanhf(", "("),
    "another head's slope": ("alibi", "slopes_at(args, batch, head)", "slopes_at(args, batch, 0)"),
    "keys behind count less": ("alibi", "abs(", "("),
    "another batch's bias": ("bias", "args.bias + i0 * args.bias_stride_0", "args.bias"),
    "another head's bias": ("bias", " + i1 * args.bias_stride_1", ""),
    "another row's bias": ("bias", " + i2 * args.bias_stride_2", ""),
    "another row's mask": ("boolean", " + i2 * args.bias_stride_2", ""),
    "hidden keys have weight": ("boolean", "if (!sees(args, batch, head, row, j)) continue;", ""),
    "infinity minus infinity": ("bias", "if (larger == none) continue;", ""),
    "no sink in the sum": ("sinks", "top == none ? 0.0f : 1.0f", "0.0f"),
    "another head's sink": ("sinks", "sinks_at(args, head)", "sinks_at(args, 0)"),
    "no sink at all": ("sinks", "kLog2e * sinks_at(args, head)", "kLog2e * -40.0f"),
    "indices from the end": ("expressions", "index < 0 ? index + size : index", "index"),
    "indices beyond the end": ("expressions", "min(max(", "(max("),
    "another head's table": ("expressions", "args.table + i0 * args.table_stride_0", "args.table"),
}


@needs_compiler
@pytest.mark.parametrize("mistake", sampled(MISTAKES, 5))
def test_the_quick_suite_finds_mistakes(mistake):
    name, right, wrong = MISTAKES[mistake]
    build = changed_build(problem_of(ASKED[name]), right, wrong)
    with pytest.raises(FlashgenError, match=r"wrong (result|log-sum-exp)"):
        validate(SimRunner(CARD), build, seed=1)


def test_the_sample_of_the_real_problem_reads_what_is_typical():
    problem = problem_of(ASKED["all"], seqlen_q=70, seqlen_k=100)
    sample = draw_sample(problem, 0)
    assert sample.values["window_left"] == 100 and sample.values["bias"].dtype == np.float16
    whole = reference.attention(
        sample.q, sample.k, sample.v, scale=sample.scale, scores=problem.scores, values=sample.values
    )
    for (b, h), expected in zip(sample.picks, sample.expected, strict=True):
        np.testing.assert_allclose(expected.o[0, 0], whole.o[b, h, sample.rows], atol=1e-12)


# -- random expressions ------------------------------------------------------------------------------------


def random_problem(seed: int, **more: Any) -> Any:
    """A problem with a random score and mask that float32 can be held to, what it reads, its inputs, and its
    reference."""
    rng = random.Random(seed)
    while True:
        score, mask = formulas.drawn(rng, Kind.FLOAT, 4), formulas.drawn(rng, Kind.BOOL, 3)
        score = Name("score", Kind.FLOAT) + score
        try:
            problem = problem_of(scoring_of(score, mask), seqlen_q=21, seqlen_k=37, **more)
        except ValueError:  # a mask that is never true, say
            continue
        q, k, v = inputs(problem, seed)
        values = drawn_values(problem, seed)
        expected = reference.attention(q, k, v, scale=0.25, scores=problem.scores, values=values)
        told = np.isfinite(expected.o).all() and not np.isposinf(expected.lse).any()
        seen = np.isfinite(expected.lse).mean()
        if told and seen > 0.5 and expected.max_score < 100 and expected.change_error < 1e-5:
            return problem, values, (q, k, v), expected


def scoring_of(score: Expression, mask: Expression) -> Scoring:
    """What is asked by two expressions of `formulas`."""
    buffers = {each.buffer for each in loads_of(score, mask)}
    names = {each.name for each in names_of(score, mask)}
    return Scoring(
        score=score.python(),
        mask=mask.python(),
        buffers=tuple((name, dtype) for name, dtype in formulas.BUFFERS.items() if name in buffers),
        scalars=tuple((name, value) for name, value in formulas.SCALARS.items() if name in names),
    )


def check(problem: Problem, values: dict[str, Any], qkv: tuple[np.ndarray, ...], expected, device, build):
    q, k, v = qkv
    o, lse = device.open().attend(build, q, k, v, scale=0.25, want_lse=True, values=values)
    compare(o, lse, expected, v, problem, "random expressions")


@needs_compiler
@pytest.mark.parametrize("seed", sampled(range(100), 3, thorough=40))
def test_random_expressions_are_computed_as_numpy_does(seed):
    problem, values, qkv, expected = random_problem(seed)
    check(problem, values, qkv, expected, SimDevice("a100", CARD), plain_build(problem))


#: A card, a variant and a type of each way of computing.
FAMILIES = (
    ("gtx-1080", Simt(br=16, bc=16, threads_per_block=32), "f32"),
    ("h200", Mma(br=32, rows_per_warp=16, bc=16, stages=2, parts="f16"), "f32"),
    ("h200", Mma(br=32, rows_per_warp=16, bc=16, stages=2), "bf16"),
    ("h200", Wgmma(br=128, bc=32), "f32"),
    ("h200", Wgmma(br=128, bc=32), "f16"),
)


@needs_compiler
@pytest.mark.parametrize("seed", sampled(range(100, 200), 3, thorough=40))
def test_families_compute_random_expressions_as_numpy_does(seed):
    card, variant, dtype = FAMILIES[seed % len(FAMILIES)]
    problem, values, qkv, _ = random_problem(seed, dtype=dtype, head_dim_v=16)
    error = tanh_error(problem)
    expected = reference.attention(*qkv, scale=0.25, scores=problem.scores, values=values, tanh_error=error)
    device = SimDevice(card, preset(card))
    build = device.toolchain().build(render(variant, problem, device.limits))
    check(problem, values, qkv, expected, device, build)


def mutants(tree: Expression) -> list[Expression]:
    """The tree with one constant replaced by another, each in turn."""
    found = []
    for node in distinct(tree):
        other = None
        if isinstance(node, Constant) and node.kind is not Kind.BOOL:
            other = Constant(node.number + (1 if node.kind is Kind.INT else 0.37))
        if isinstance(node, Name) and node.name in ("q", "k", "score"):
            other = node + 1
        if other is not None:
            with contextlib.suppress(ValueError):  # of a division by zero, say
                found.append(replaced(tree, {node: other}))
    return found


def telling_mutants(seed: int) -> tuple[Any, list[reference.Reference]]:
    """A random problem, and the references of other trees that say something else."""
    for attempt in range(100):
        found = random_problem(1000 * seed + attempt)
        problem, values, (q, k, v), expected = found
        change, others = problem.scores.change, []
        for mutant in mutants(change) if change is not None else ():
            scores = replace(problem.scores, change=mutant)
            other = reference.attention(q, k, v, scale=0.25, scores=scores, values=values)
            moved = np.linalg.norm(other.o - expected.o) / np.linalg.norm(expected.o)
            if moved > 1e-3 and other.max_score < 100 and other.change_error < 1e-5:
                others.append(other)
        if others:
            return found, others
    raise AssertionError("no tree differs from its mutants")


@needs_compiler
@pytest.mark.parametrize("seed", sampled(range(40), 2, thorough=15))
def test_other_expressions_are_told_apart(seed):
    (problem, values, qkv, expected), others = telling_mutants(seed)
    q, k, v = qkv
    o, lse = SimRunner(CARD).attend(plain_build(problem), q, k, v, scale=0.25, want_lse=True, values=values)
    compare(o, lse, expected, v, problem, "the same expression")
    for other in others:
        with pytest.raises(WrongResult):
            compare(o, lse, other, v, problem, "another expression")
