"""What is asked of masks and scores, in words and as options."""

from __future__ import annotations

import pytest
from flashgen.gen.emit.options import scoring_options
from flashgen.gen.emit.words import class_words, mask_words
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import PLAIN, Scoring
from flashgen.gen.scoring.words import feature_words, scoring_words

CASES = [
    (PLAIN, "", "", []),
    (
        Scoring(window=(127, 0), softcap=30.0),
        "window, soft cap",
        "window of 127 keys before and 0 after, soft cap 30",
        ["--window 127,0", "--softcap 30"],
    ),
    (
        Scoring(window=(127, -1), always=4, sinks=True),
        "window beside first keys, sinks",
        "window of 127 keys before and all after beside the first 4, sinks",
        ["--window 127,all,4", "--sinks"],
    ),
    (
        Scoring(chunk=1024, prefix=256, lengths=True, documents=16, dilation=2, alibi=True),
        "chunks, prefixes, lengths of keys, documents, dilation, ALiBi",
        "chunks of 1024 keys, prefixes of up to 256 keys, lengths of keys, 16 documents, dilation 2, ALiBi",
        ["--chunk 1024", "--prefix 256", "--lengths", "--documents 16", "--dilation 2", "--alibi"],
    ),
    (Scoring(tree=True, sinks=True), "tree, sinks", "tree, sinks", ["--tree", "--sinks"]),
    (Scoring(bias="u8"), "boolean mask", "boolean mask", ["--bias u8"]),
    (Scoring(bias="f16", softcap=0.5), "soft cap, bias of f16", "soft cap 0.5, bias of f16", None),
    (
        Scoring(mask="doc[b, q] == n", buffers=(("doc", "i16"),), scalars=(("n", 4),)),
        "mask doc[b, q] == n",
        "mask doc[b, q] == n, n = 4",
        ["--mask 'doc[b, q] == n'", "--buffer doc=i16", "--scalar n=4"],
    ),
]


@pytest.mark.parametrize(("scoring", "features", "words", "options"), CASES)
def test_what_is_asked_in_words(
    scoring: Scoring, features: str, words: str, options: list[str] | None
) -> None:
    assert feature_words(scoring) == features
    assert scoring_words(scoring) == words
    if options is not None:
        assert scoring_options(scoring) == options


def test_what_a_kernel_is_made_for() -> None:
    plain, capped = Problem(dtype="bf16"), Problem(dtype="bf16", causal=True, scoring=Scoring(softcap=30.0))
    assert class_words(plain) == f"bf16, head dim {plain.head_dim}"
    assert class_words(capped) == f"bf16, head dim {plain.head_dim} with soft cap"
    assert mask_words(plain) == "without a mask"
    assert mask_words(capped) == "with a causal mask, soft cap 30"
