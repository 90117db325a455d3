"""Masks and changes of scores that kernels of every family are tried with, and what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.values import draw_values
from flashgen.tuner.cards.score_values import values_as_read

#: Each by itself, then several together; of numbers so small that some tiles of 16 keys are whole, some
#: partly seen and some not at all. A prefix is there to be had under a causal mask alone.
SCORINGS: dict[str, Scoring] = {
    "window": Scoring(window=(20, 0)),
    "own key": Scoring(window=(0, 0)),
    "two sides": Scoring(window=(5, 40)),
    "left side": Scoring(window=(17, -1)),
    "right side": Scoring(window=(-1, 3)),
    "always": Scoring(window=(20, 0), always=3),
    "chunk": Scoring(chunk=24),
    "prefix": Scoring(prefix=60),
    "lengths": Scoring(lengths=True),
    "documents": Scoring(documents=4),
    "dilation": Scoring(dilation=3),
    "tree": Scoring(tree=True),
    "soft cap": Scoring(softcap=2.5),
    "alibi": Scoring(alibi=True),
    "bias f32": Scoring(bias="f32"),
    "bias f16": Scoring(bias="f16"),
    "bias bf16": Scoring(bias="bf16"),
    "hidden": Scoring(bias="u8"),
    "sinks": Scoring(sinks=True),
    "mask": Scoring(mask="doc[b, q] == doc[b, k] or k % 7 == h"),
    "bounds": Scoring(mask="k >= start[b] and k <= q + n", scalars=(("n", 20),)),
    "score": Scoring(score="score * gain[h] + table[b, q - k] - 0.01 * abs(q - k)"),
    "read twice": Scoring(
        score="score + bias[h, k] - bias[h, q * 7 % 5]",
        mask="bias[h, k - q] < n",
        scalars=(("n", 1.0),),
        buffers=(("bias", "f32"),),
    ),
    "sums": Scoring(window=(33, 0), softcap=3.0, alibi=True, bias="f32", sinks=True),
    "slopes": Scoring(window=(30, 9), alibi=True, sinks=True),
    "kinks": Scoring(
        score="score * 0.5 + 0.03 * (k - q) - 0.02 * column[h, q] * abs(2 * k - q) + step * abs(q - k - 7)",
        scalars=(("step", 0.02),),
    ),
    "tree in a window": Scoring(tree=True, window=(30, -1), bias="f32", sinks=True),
    "tree and mask": Scoring(tree=True, mask="k % 3 != h", alibi=True),
    "segments": Scoring(documents=3, lengths=True, dilation=2, bias="f16", sinks=True),
    "formulas": Scoring(
        mask="doc[q] <= doc[k] and k < q + 50",
        score="where(k < n, score + extra[h, k], score / 2)",
        buffers=(("doc", "i16"), ("extra", "bf16")),
        scalars=(("n", 30),),
        sinks=True,
    ),
}

#: Dilations: of all keys, of words of 32 keys and about as many, and of more than a tile. Then masks of every
#: so many keys, alone and beside what else is asked pair by pair.
STEPS = (1, 2, 3, 7, 31, 32, 33, 100)
OF_STEPS: dict[str, Scoring] = {
    "alone": Scoring(dilation=3),
    "window": Scoring(dilation=3, window=(150, 20)),
    "always": Scoring(dilation=3, window=(90, 0), always=5, alibi=True),
    "tree": Scoring(dilation=3, tree=True),
    "hidden": Scoring(dilation=3, bias="u8", softcap=2.0),
    "mask": Scoring(dilation=3, mask="doc[b, q] == doc[b, k] or k % 7 == h", sinks=True),
    "formula": Scoring(mask="(k - q) % 5 == 0 and k % 7 != h"),
    "steps that are computed": Scoring(mask="(q - k) % (abs(n) + abs(n) + 1) == 0", scalars=(("n", 2),)),
}


def drawn_values(problem: Problem, rows: int, keys: int, seed: int = 5) -> Mapping[str, Any]:
    """What kernels of a problem read for so many rows and keys, rounded as their arrays hold it."""
    sizes = replace(problem, seqlen_q=rows, seqlen_k=keys)
    drawn = draw_values(problem.scoring, problem.scores, sizes, np.random.default_rng(seed))
    return values_as_read(sizes, drawn)
