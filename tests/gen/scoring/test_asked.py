"""What is asked of masks and scores: its names, its JSON, what it refuses, and what it means pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.arguments import make_arguments, struct_of
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.gen.scoring.scores import laid_over
from flashgen.gen.scoring.values import draw_values, typical_values

ROWS, KEYS = 23, 37
SMALL = Problem(batch=2, num_q_heads=4, num_kv_heads=2, seqlen_q=ROWS, seqlen_k=KEYS)
ASKED = {
    "window": Scoring(window=(5, 2)),
    "left": Scoring(window=(5, -1)),
    "right": Scoring(window=(-1, 3)),
    "always": Scoring(window=(5, 0), always=4),
    "chunk": Scoring(chunk=7),
    "prefix": Scoring(prefix=9),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=3),
    "tree": Scoring(tree=True),
    "boolean": Scoring(bias="u8"),
}


def problem_of(name: str, *, causal: bool = False) -> Problem:
    return replace(SMALL, scoring=ASKED[name], causal=causal)


def by_definition(name: str, values, b: int, h: int, i: int, j: int, *, causal: bool) -> bool:
    """Whether row i sees key j, as the libraries define it."""
    place = i + KEYS - ROWS
    before_diagonal = j <= place
    match name:
        case "prefix":
            return not causal or before_diagonal or j < values["prefix"][b]
        case "window":
            seen = place - 5 <= j <= place + 2
        case "left":
            seen = place - 5 <= j
        case "right":
            seen = j <= place + 3
        case "always":
            seen = j <= place and (j < 4 or j >= place - 5)
        case "chunk":
            seen = j // 7 == place // 7
        case "lengths":
            seen = j < values["lengths"][b]
        case "documents":
            seen = values["document_begin"][b, i] <= j < values["document_end"][b, i]
        case "dilation":
            seen = (place - j) % 3 == 0
        case "tree":
            seen = j < KEYS - ROWS or bool(int(values["tree"][b, i]) >> (j - (KEYS - ROWS)) & 1)
        case _:
            seen = bool(values["bias"][b, h, i, j])
    return seen and (before_diagonal or not causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_each_mask_is_what_it_is_called(name: str, causal: bool) -> None:
    problem = problem_of(name, causal=causal)
    values = draw_values(problem.scoring, problem.scores, problem, np.random.default_rng(3))
    rows, keys = np.arange(ROWS), np.arange(KEYS)
    for b, h in ((0, 0), (1, 3)):
        seen = problem.scores.visible(values, b, h, rows, keys, ROWS, KEYS)
        wanted = [[by_definition(name, values, b, h, i, j, causal=causal) for j in keys] for i in rows]
        assert (seen == np.array(wanted)).all()


def test_what_an_expression_bounds_is_an_interval_and_the_rest_a_predicate() -> None:
    mask = "q - k <= n and k <= q and doc[b, q] == doc[b, k]"
    scoring = Scoring(mask=mask, scalars=(("n", 6),), buffers=(("doc", "i16"),))
    problem = replace(SMALL, scoring=scoring)
    scores = problem.scores
    assert len(scores.begins) == 1 and len(scores.ends) == 3 and scores.predicate is not None
    assert [(each.name, each.dtype) for each in scores.buffers] == [("doc", "i16")]
    assert scores.buffers[0].axes == (frozenset({"batch"}), frozenset({"seqlen_q", "seqlen_k"}))
    values = draw_values(scoring, scores, problem, np.random.default_rng(3))
    doc = values["doc"]
    seen = scores.visible(values, 1, 0, np.arange(ROWS), np.arange(KEYS), ROWS, KEYS)
    for i in range(ROWS):
        for j in range(KEYS):
            assert seen[i, j] == (i - j <= 6 and j <= i and doc[1, i] == doc[1, j])


def test_a_score_reads_tables_at_computed_indices() -> None:
    problem = replace(SMALL, scoring=Scoring(score="score * 2 + table[h, k - q + 30]"))
    (table,) = problem.scores.buffers
    assert table.axes == (frozenset({"num_q_heads"}), frozenset()) and table.sizes == ((1, "table_size_1"),)
    assert "table_size_1" in [field.name for field in struct_of(problem).fields]


@pytest.mark.parametrize("more", [{"buffers": (("doc", "i16"),)}, {"scalars": (("n", 4),)}])
def test_what_no_expression_reads_is_told(more) -> None:
    with pytest.raises(ValueError, match="no expression reads"):
        replace(SMALL, scoring=Scoring(mask="k <= q", **more))


def test_an_expression_may_call_its_array_as_a_feature_that_is_not_asked_for() -> None:
    problem = replace(SMALL, scoring=Scoring(score="score + bias[h, k - q]"))
    assert [each.name for each in problem.scores.buffers] == ["bias"]
    with pytest.raises(ValueError, match="bias is what the named feature reads"):
        replace(SMALL, scoring=Scoring(score="score + bias[h, k - q]", bias="f32"))


def test_an_array_is_of_one_kind() -> None:
    with pytest.raises(ValueError, match="table is read as integers in the mask and as floats"):
        replace(SMALL, scoring=Scoring(mask="table[q] > 0", score="score + table[k]"))
    scoring = Scoring(mask="table[q] > 0", score="score + table[k]", buffers=(("table", "f16"),))
    assert replace(SMALL, scoring=scoring).scores.buffers[0].dtype == "f16"


def test_changes_come_one_after_the_other() -> None:
    scoring = Scoring(softcap=2.0, alibi=True, bias="f32")
    problem = replace(SMALL, scoring=scoring)
    values = draw_values(scoring, problem.scores, problem, np.random.default_rng(3))
    scores = np.random.default_rng(4).standard_normal((ROWS, KEYS)) * 5
    rows, keys = np.arange(ROWS), np.arange(KEYS)
    found = problem.scores.changed(values, scores, 1, 2, rows, keys, ROWS, KEYS)
    distance = np.abs(rows[:, None] + KEYS - ROWS - keys)
    wanted = 2.0 * np.tanh(scores / 2.0) - values["slopes"][1, 2] * distance + values["bias"][1, 2]
    assert np.allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ASKED)
def test_bounds_rise_with_the_row(name: str) -> None:
    """Blocks ask the first and the last of their rows alone."""
    problem = problem_of(name, causal=True)
    values = draw_values(problem.scoring, problem.scores, problem, np.random.default_rng(3))
    begins, ends = problem.scores.interval(np.arange(ROWS), ROWS, KEYS, laid_over(values, {"b": 1}))
    assert (np.diff(begins) >= 0).all() and (np.diff(ends) >= 0).all()


def test_plain_problems_are_told_as_ever() -> None:
    assert SMALL.scores.is_plain and "scoring" not in SMALL.to_dict()
    assert Problem.from_dict(SMALL.to_dict()) == SMALL
    assert PLAIN.stem == PLAIN.values == ""
    assert struct_of(SMALL).format == struct_of(replace(SMALL, causal=True)).format


@pytest.mark.parametrize("scoring", [*ASKED.values(), Scoring(softcap=30.0, sinks=True, alibi=True)])
def test_what_is_asked_survives_json_and_names_tell_it(scoring: Scoring) -> None:
    problem = replace(SMALL, scoring=scoring)
    assert not problem.scores.is_plain
    assert Problem.from_dict(problem.to_dict()) == problem
    assert problem.stem.isidentifier() and problem.name.isidentifier()
    assert problem.stem != SMALL.stem and problem.name != SMALL.name


def test_numbers_are_in_the_name_and_not_in_the_stem() -> None:
    one, other = (replace(SMALL, scoring=Scoring(window=(left, 0), softcap=1e-5)) for left in (127, 63))
    assert one.stem == other.stem == "f32_d64_window_softcap"
    assert one.name.startswith("f32_d64_window127x0_softcap1em05") and other.name != one.name


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"window": (-2, 0)}, r"window is \(-2, 0\).* -1"),
        ({"window": (2**31, 0)}, "1073741824"),
        ({"chunk": -1}, "chunk is -1"),
        ({"always": 4}, "always is 4"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"bias": "f64"}, "'f64'.*f32, f16, bf16, u8"),
        ({"buffers": (("a-b", "f32"),)}, "'a-b'"),
        ({"buffers": (("doc", "f64"),)}, "doc is 'f64'"),
        ({"scalars": (("../x", 1),)}, "'../x' is no name"),
        ({"scalars": (("window_left", 1),)}, "'window_left' has a meaning"),
        ({"scalars": (("n", 2**31),)}, "1073741824"),
        ({"scalars": (("n", float("inf")),)}, "n is inf"),
        ({"buffers": (("while", "f32"),)}, "'while' is no name"),
        ({"mask": "k < q # */"}, "'#' in column 7"),
        ({"score": "score\n+ 1"}, "column 6"),
        ({"mask": "q" * 30000}, "30000 characters, at most 20000"),
    ],
)
def test_what_cannot_be_is_refused_by_both_numbers(wrong, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Scoring(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"colour": 1},
        {"window": 5},
        {"window": [1, 2, 3]},
        {"window": [1.0, 2]},
        {"lengths": 1},
        {"softcap": "30"},
        {"mask": 3},
        {"buffers": [["doc"]]},
        {"buffers": "doc"},
        {"scalars": [["n", "4"]]},
    ],
)
def test_json_of_other_types_is_no_description(wrong) -> None:
    with pytest.raises(TypeError):
        Scoring.from_dict(wrong)


def test_kernels_are_told_of_buffers_and_scalars_behind_their_arrays() -> None:
    problem = replace(SMALL, scoring=Scoring(window=(5, 0), documents=3, softcap=3.0, sinks=True))
    names = [field.name for field in struct_of(problem).fields]
    plain = [field.name for field in struct_of(SMALL).fields]
    more = ["document_begin", "document_end", "sinks", "window_left", "window_right", "softcap"]
    assert [name for name in names if name not in plain and "stride" not in name] == more
    assert "document_begin_stride_0" in names and "sinks_stride_0" not in names
    scoring = {name: 7 for name in names if name not in plain}
    strides = dict.fromkeys("qkvo", (1, 1, 1))
    arguments = make_arguments(problem, {}, strides, scale=1.0, scoring=scoring)
    assert struct_of(problem).unpack(arguments.pack())["window_left"] == 7


def test_pairs_and_bytes_count_what_is_seen() -> None:
    decoding = Problem(dtype="bf16", batch=1, num_q_heads=8, num_kv_heads=8, seqlen_q=1, seqlen_k=4096)
    longer = replace(decoding, seqlen_k=2**17, scoring=Scoring(window=(4095, 0)))
    assert longer.num_attended == decoding.num_attended
    assert longer.min_bytes == decoding.min_bytes and longer.flops == decoding.flops
    biased = replace(decoding, scoring=Scoring(bias="f32"))
    assert biased.min_bytes == decoding.min_bytes + 4 * 4096


def test_values_for_timing_are_the_same_each_time_and_drawn_when_asked_for() -> None:
    problem = replace(SMALL, scoring=Scoring(documents=3, bias="f32", window=(4, 4)))
    one, other = typical_values(problem), typical_values(replace(problem, causal=True))
    assert list(one) == ["window_left", "window_right", "document_begin", "document_end", "bias"]
    for name in one:
        assert (np.asarray(one[name]) == np.asarray(other[name])).all()
    assert one["bias"].strides[:2] == (0, 0)


def test_only_the_last_keys_ask_for_a_trees_words() -> None:
    alone, beside = (
        replace(SMALL, scoring=Scoring(tree=True, **more)).scores for more in ({}, {"dilation": 2})
    )
    assert alone.predicate is not None and not alone.needs_lists
    assert alone.predicate_from is not None and alone.predicate_from.value({"diagonal": 14}) == 14
    assert beside.needs_lists and beside.predicate_from is None
    fields = [each.name for each in struct_of(replace(SMALL, scoring=Scoring(tree=True))).fields]
    assert "tree" in fields and "tile_lists" not in fields


def test_keys_that_have_no_bit_in_a_trees_word_are_hidden() -> None:
    problem = replace(SMALL, seqlen_q=70, seqlen_k=75, scoring=Scoring(tree=True))
    words = np.full((2, 70), -1, np.int64)
    seen = problem.scores.visible({"tree": words}, 0, 0, np.arange(70), np.arange(75), 70, 75)
    assert (seen == (np.arange(75) < 5 + 64)).all()


def test_typical_trees_have_their_nodes_above_them() -> None:
    problem = replace(SMALL, seqlen_q=64, seqlen_k=100, scoring=Scoring(tree=True))
    words = typical_values(problem)["tree"].view(np.uint64)
    for row in range(64):
        bits = [j for j in range(64) if int(words[1, row]) >> j & 1]
        assert bits[-1] == row and len(bits) <= row + 1
        if len(bits) > 1:
            assert int(words[1, row]) == int(words[1, bits[-2]]) | 1 << row
