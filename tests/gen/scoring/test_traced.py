"""Functions as FlexAttention takes them, asked for like any other mask and change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.traced import traced_scoring

ROWS, KEYS = 12, 15
PROBLEM = Problem(batch=2, num_q_heads=3, num_kv_heads=3, seqlen_q=ROWS, seqlen_k=KEYS)


def test_a_score_and_a_mask_with_arrays_of_their_own() -> None:
    rng = np.random.default_rng(2)
    bias, doc = rng.standard_normal((3, 40)).astype(np.float32), np.sort(rng.integers(0, 4, (2, KEYS)))
    reach = 5

    def score_mod(score, b, h, q, k):
        return score + bias[h, k - q + 12]

    def mask_mod(b, h, q, k):
        return (doc[b, q] == doc[b, k]) & (q - k <= reach)

    asked = traced_scoring(score=score_mod, mask=mask_mod, softcap=3.0)
    problem = replace(PROBLEM, scoring=asked.scoring)
    assert problem.scoring.softcap == 3.0 and problem.scores.begins
    values = {**asked.values, "softcap": 3.0}
    assert values["bias"] is bias and values["doc"] is doc
    rows, keys = np.arange(ROWS), np.arange(KEYS)
    seen = problem.scores.visible(values, 1, 2, rows, keys, ROWS, KEYS)
    scores = rng.standard_normal((ROWS, KEYS))
    changed = problem.scores.changed(values, scores, 1, 2, rows, keys, ROWS, KEYS)
    for i in range(ROWS):
        for j in range(KEYS):
            assert seen[i, j] == mask_mod(1, 2, i, j)
            capped = 3.0 * np.tanh(scores[i, j] / 3.0)
            assert abs(changed[i, j] - score_mod(capped, 1, 2, i, j)) < 1e-6


def test_names_that_are_taken_or_used_twice_are_told_apart() -> None:
    first, second = np.ones(KEYS, np.float32), np.zeros(KEYS, np.int32)

    def with_table(table, key):
        def score_mod(score, b, h, q, k):
            return score * table[k] + key[q]

        return score_mod

    def hiding(table):
        def mask_mod(b, h, q, k):
            return table[k] == 0

        return mask_mod

    asked = traced_scoring(score=with_table(first, first), mask=hiding(second))
    assert set(asked.values) == {"table", "table_1"} or set(asked.values) == {"table", "key_1", "table_1"}
    assert replace(PROBLEM, scoring=asked.scoring).scores.predicate is not None
