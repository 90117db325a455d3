"""Kernels with masks and changes of scores on the shelf: which serve a problem, which begin its search."""

from __future__ import annotations

from dataclasses import replace

from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.asked_scoring import parse_scoring
from flashgen.tuner.request import Shapes
from flashgen.tuner.search.nearness import scores_differ, shape_distance
from flashgen.tuner.shelf.bundle import module_name, widened
from flashgen.tuner.shelf.choice import find, nearest_variants
from flashgen.tuner.shelf.library import Entry

from tests.support.tuned_kernels import H200, LADDER, tuned

PLAIN = Problem(head_dim=64, causal=True)


def asking(**asked) -> Problem:
    return replace(PLAIN, scoring=Scoring(**asked))


def entry(problem: Problem, **others) -> Entry:
    """Whatever families know of masks, the shelf asks nobody."""
    return Entry(replace(tuned(**others), problem=problem), H200.slug)


def test_the_same_masks_and_changes_serve_whatever_their_numbers():
    wide, narrow = asking(window=(4095, 0)), asking(window=(127, 0))
    known = [entry(PLAIN), entry(wide), entry(narrow), entry(asking(window=(127, 0), softcap=30.0))]
    exact = find(known, narrow, H200)
    assert exact and exact.exact and exact.entry is known[2]
    near = find(known, asking(window=(255, 0)), H200)
    assert near and near.entry is known[2] and not near.exact
    assert "window of 127 keys before and 0 after, asked for" in near.how and "window of 255 keys" in near.how
    assert find(known, asking(window=(2047, 0)), H200).entry is known[1]  # pyright: ignore
    # Where no lengths are asked for, numbers are all the same.
    any_length = find(known, asking(window=(63, 0)), H200, any_shape=True)
    assert any_length and any_length.entry is known[2] and not any_length.exact
    assert "tuned for window of 127 keys before and 0 after, asked for window of 63 keys" in any_length.how
    capped = find(known, asking(window=(127, 0), softcap=50.0), H200)
    assert capped and not capped.exact and "soft cap 30, asked for" in capped.how
    for problem in (asking(softcap=30.0), asking(window=(127, 0), always=4), asking(mask="q > k + 3")):
        assert find(known, problem, H200) is None
    plain = find(known, PLAIN, H200)
    assert plain and plain.entry is known[0] and plain.exact


def test_expressions_serve_where_their_text_and_types_are_the_same():
    known = [entry(asking(mask="k < n", scalars=(("n", 4),)))]
    other = find(known, asking(mask="k < n", scalars=(("n", 8),)), H200)
    assert other and other.entry is known[0] and known[0].kernel.problem.name.endswith("_n4_causal")
    assert find(known, asking(mask="k < n + 1", scalars=(("n", 4),)), H200) is None
    types = (
        asking(mask="doc[b, q] == doc[b, k]"),
        asking(mask="doc[b, q] == doc[b, k]", buffers=(("doc", "i16"),)),
    )
    assert scores_differ(*types) and find([entry(types[0])], types[1], H200) is None


def test_a_window_counts_as_the_keys_that_it_shows():
    narrow, wide = asking(window=(127, 0)), asking(window=(1023, 0))
    assert shape_distance(narrow, narrow) == 0 and shape_distance(narrow, wide) == 3
    # Keys beyond it do not count.
    assert shape_distance(narrow, replace(narrow, seqlen_k=16384)) == 0
    assert shape_distance(asking(chunk=512), asking(chunk=2048)) == 2
    assert shape_distance(asking(documents=4), asking(documents=16)) == 2
    assert shape_distance(PLAIN, replace(PLAIN, seqlen_k=8192)) == 1
    assert shape_distance(asking(softcap=30.0), asking(softcap=50.0)) == 0


def test_searches_begin_with_kernels_of_other_masks_too():
    other, same = LADDER(br=64), LADDER(br=128)
    known = [entry(PLAIN, variant=other), entry(asking(window=(4095, 0)), variant=same)]
    assert nearest_variants(known, asking(window=(127, 0)), H200, LADDER) == [same, other]
    assert nearest_variants(known, PLAIN, H200, LADDER) == [other, same]


def test_lists_without_sizes_mean_what_was_tuned_with_the_same_masks():
    window, capped = asking(window=(127, 0)), asking(softcap=30.0)
    known = [entry(each) for each in (PLAIN, window, capped, replace(window, seqlen_q=512, seqlen_k=512))]
    plain = Shapes(head_dim=(64, 128), causal=(True,))
    assert widened(known, plain, plain.problems(), H200)[0] == PLAIN
    assert not any(p.scoring.window for p in widened(known, plain, plain.problems(), H200))
    windowed = replace(plain, scoring=parse_scoring(window="127,0"))
    assert widened(known, windowed, windowed.problems(), H200)[:2] == [window, known[3].kernel.problem]
    assert module_name(windowed, windowed.problems()) == "f32_d64_window_128_window_many"
