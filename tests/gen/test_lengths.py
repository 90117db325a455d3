"""Lengths of packed sequences: what texts and files say, and what follows for a problem."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.layout import DENSE, PACKED
from flashgen.gen.lengths import (
    draw_lengths,
    lengths_words,
    listed_lengths,
    most_lengths,
    num_listed,
    parse_lengths,
    read_lengths,
    short_lengths,
)
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring

RAGGED = Problem(
    dtype="bf16",
    batch=3,
    num_q_heads=4,
    num_kv_heads=2,
    seqlen_q=70,
    seqlen_k=90,
    varlen="list:70x90,0x7,5",
)


def test_what_is_drawn_is_the_same_each_time_and_within_its_bounds() -> None:
    lengths = draw_lengths("uniform:512-4096", 1000, 4096, 4096)
    assert lengths == draw_lengths.__wrapped__("uniform:512-4096", 1000, 4096, 4096)
    assert lengths.q == lengths.k
    assert min(lengths.q) < 530 and max(lengths.q) > 4080
    assert abs(np.mean(lengths.q) - 2304) < 100
    assert draw_lengths("uniform:512-4096", 4, 4096, 4096).q == lengths.q[:4]


def test_lengths_are_limited_drawn_apart_or_all_alike() -> None:
    assert draw_lengths("uniform:512-4096", 3, 1, 4096).q == (1, 1, 1)
    apart = draw_lengths("uniform:1-16/uniform:512-4096", 50, 16, 4096)
    assert max(apart.q) <= 16 and min(apart.k) >= 512 and apart.q != apart.k
    assert draw_lengths("same", 2, 7, 9).pairs == ((7, 9), (7, 9))
    assert draw_lengths("same/uniform:3-3", 2, 7, 9).pairs == ((7, 3), (7, 3))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("uniform", "none of same"),
        ("uniform:9-3", "must rise"),
        ("uniform:0-0", "must rise"),
        ("uniform:1-2/same/same", "none of same"),
        ("normal:3-4", "none of same"),
        ("list:", "none of same"),
        ("list:3,x4", "none of same"),
        ("list:3,99999999999", "none of same"),
        ("list:5,5", "lists 2 sequences, batch is 3"),
        ("list:5,5,71", "a sequence of 71, seqlen_q is 70; give seqlen_q 71"),
        ("uniform:1-100", "reaches 100, but seqlen is 90"),
        ("uniform:1-71/same", "reaches 71, but seqlen is 70"),
    ],
)
def test_what_says_no_lengths_is_told(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(RAGGED, varlen=text)


def test_files_list_a_sequence_a_line() -> None:
    assert read_lengths("# q k\n512 4096\n\n300, 300  # both\n7\n0 5\n", "f") == "list:512x4096,300,7,0x5"
    with pytest.raises(ValueError, match="f, line 2: '3 4 5' is no length"):
        read_lengths("1\n3 4 5\n", "f")
    with pytest.raises(ValueError, match="f lists no sequence"):
        read_lengths("# nothing\n", "f")
    with pytest.raises(ValueError, match="at most 2147483647"):
        read_lengths("9999999999\n", "f")


def test_texts_are_told_in_short_and_in_words() -> None:
    assert parse_lengths("Uniform: 5-9") == "uniform:5-9"
    assert short_lengths("uniform:1-16/uniform:512-4096") == "uniform1to16_uniform512to4096"
    assert short_lengths("list:5,6").startswith("list") and short_lengths("list:5,6") != short_lengths(
        "list:5,7"
    )
    assert lengths_words("uniform:5-9") == "lengths uniform from 5 to 9"
    assert lengths_words("same/uniform:5-9") == "queries as long as may be, keys uniform from 5 to 9"
    assert lengths_words("list:5x7,6") == "2 sequences of 11 queries and 13 keys in all"
    assert most_lengths("uniform:1-16/uniform:5-9") == (16, 9)
    assert most_lengths("list:5x7,6") == (6, 7) and most_lengths("same") is None
    assert num_listed("list:5x7,6") == 2 and num_listed("uniform:5-9") is None
    assert listed_lengths((5, 6), (7, 6)) == "list:5x7,6"


def test_a_packed_problem_counts_what_its_sequences_have() -> None:
    pairs = 70 * 90 + 5 * 5
    assert (RAGGED.layout, RAGGED.total_q, RAGGED.total_k) == (PACKED, 75, 102)
    assert RAGGED.num_attended == 4 * pairs and RAGGED.flops == 4 * pairs * 4 * 64
    assert RAGGED.min_bytes == 2 * 64 * (2 * 75 * 4 + 2 * 102 * 2)
    causal = replace(RAGGED, causal=True)
    seen = sum(min(90, i + 21) for i in range(70)) + 15
    assert causal.num_attended == 4 * seen and causal.flops == 4 * seen * 4 * 64


def test_masks_are_counted_sequence_by_sequence() -> None:
    window = replace(RAGGED, causal=True, scoring=Scoring(window=(3, 0)))
    seen = 70 * 4 + (1 + 2 + 3 + 4 + 4)
    assert window.num_attended == 4 * seen
    by_batch = replace(RAGGED, scoring=Scoring(lengths=True))
    alone = [replace(by_batch, varlen="list:70x90,0x0,0x0"), replace(by_batch, varlen="list:0x0,0x7,5")]
    assert by_batch.num_attended == sum(each.num_attended for each in alone)
    assert by_batch.min_bytes <= RAGGED.min_bytes + 3 * 4


def test_names_and_json_tell_of_packed_sequences_alone() -> None:
    assert Problem().layout is DENSE and "varlen" not in Problem().to_dict()
    assert RAGGED.stem == "bf16_d64_packed"
    assert RAGGED.name == f"bf16_d64_packed_{short_lengths(RAGGED.varlen)}_b3_h4_kv2_n70_m90"
    assert Problem.from_dict(json.loads(json.dumps(RAGGED.to_dict()))) == RAGGED
    drawn = Problem(varlen="uniform:512-4096", batch=8, causal=True)
    assert drawn.name == "f32_d64_packed_uniform512to4096_causal_b8"
    with pytest.raises(TypeError, match="varlen is 3"):
        Problem.from_dict({"varlen": 3})
