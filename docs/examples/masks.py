"""Draw every mask and change of scores of docs/masks.md: the named ones, and functions that are traced.

    python docs/examples/masks.py [FOLDER]

Writes a small SVG for each, which follows the light or dark mode of who looks at it. Functions have
FlexAttention's signatures; what they compute with are arrays of numpy here, and could be tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flashgen.gen.emit.options import scoring_options
from flashgen.gen.formula.trace import trace_mask, trace_score
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import laid_over
from flashgen.tuner.view.draw import Drawing
from flashgen.tuner.view.picture_values import picture_values
from flashgen.tuner.view.score_matrix import score_matrix

#: Rows and keys of the pictures: an image of five rows and four columns, where there is one.
LENGTH, WIDTH, HEIGHT = 20, 4, 5

#: By what is asked for, the keyword of an emitted module's ``attention``, and what an array is called there.
KEYWORDS = {
    "window": ("window", ""),
    "always": ("always", ""),
    "chunk": ("chunk", ""),
    "prefix": ("prefix", "prefix"),
    "lengths": ("lengths", "lengths"),
    "documents": ("documents", "doc_ids"),
    "dilation": ("dilation", ""),
    "tree": ("tree", "words"),
    "softcap": ("softcap", ""),
    "alibi": ("alibi_slopes", "slopes"),
    "bias": ("attn_mask", "mask"),
    "sinks": ("sinks", "sinks"),
}


@dataclass(frozen=True)
class Picture:
    """What is drawn, and ``values`` of arrays where typical ones would not do. ``usual`` are numbers that a
    model has, in the place of those that fit a picture."""

    problem: Problem
    values: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None

    @property
    def command(self) -> str:
        """How kernels for it are tuned, with the usual numbers."""
        causal = ["--causal"] if self.problem.causal else []
        few = ["--seqlen-q 16"] if self.problem.scoring.tree else []
        return " ".join(
            ["flashgen tune", *few, *causal, *scoring_options(replace(self.problem.scoring, **self.usual))]
        )

    @property
    def call(self) -> str:
        """How a module of such kernels is called."""
        told = ["causal=True"] * self.problem.causal
        scoring = replace(self.problem.scoring, **self.usual)
        for name, (keyword, value) in KEYWORDS.items():
            if getattr(scoring, name):
                told.append(f"{keyword}={value or getattr(scoring, name)}")
        if self.function is not None:
            told += [f"{each.name}={each.name}" for each in self.problem.scores.buffers]
        return f"o = attention({', '.join(['q, k, v', *told])})"

    def drawing(self) -> Drawing:
        """Returns the picture."""
        values = laid_over(picture_values(self.problem), self.values)
        return Drawing(self.problem, score_matrix(self.problem, values))


def named(*, causal: bool = True, rows: int = LENGTH, usual: Any = None, **asked: Any) -> Picture:
    """A mask or change that has a name, with numbers that fit a picture."""
    scoring = Scoring(**asked)
    problem = Problem(seqlen_q=rows, seqlen_k=LENGTH, causal=causal, scoring=scoring)
    return Picture(problem, usual=usual or {})


NAMED = {
    "causal": named(),
    "causal_last_rows": named(rows=6),
    "window": named(window=(5, 0), usual={"window": (4095, 0)}),
    "window_both_sides": named(causal=False, window=(3, 3), usual={"window": (64, 64)}),
    "first_keys_and_window": named(window=(5, 0), always=2, usual={"window": (1023, 0), "always": 4}),
    "chunk": named(chunk=6, usual={"chunk": 8192}),
    "prefix": named(prefix=6, usual={"prefix": 256}),
    "lengths": named(causal=False, lengths=True),
    "documents": named(documents=4, usual={"documents": 16}),
    "dilation": named(dilation=3, usual={"dilation": 2}),
    "tree": named(causal=False, rows=12, tree=True),
    "softcap": named(softcap=4.0, usual={"softcap": 50.0}),
    "alibi": named(alibi=True),
    "bias": named(causal=False, bias="f16"),
    "boolean_mask": named(causal=False, bias="u8"),
    "sinks": named(window=(5, 0), sinks=True, usual={"window": (127, 0)}),
}


# -- functions -----------------------------------------------------------------------------------------------

doc = np.repeat([0, 1, 2, 3], [6, 3, 8, 3])[None].astype(np.int32)
prefix_length = np.array([6], np.int32)
table = np.array([[-0.25 * min(i, 32 - i) ** 0.9 for i in range(32)]], np.float32)
#: Which image a place belongs to; -1: to the text.
image = np.repeat([-1, 0, -1, 1, -1], [3, 6, 4, 5, 2])[None].astype(np.int32)
#: Which document each document goes on from; the first from none but itself.
parent = np.array([0, 0, 0, 0], np.int32)
#: Keys before the tree, and for each of its nodes which of 64 are its ancestors and itself: two words.
KEYS_BEFORE = 8
BRANCHES = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6)
WINDOW, STEP = 6, 3


def ancestor_words(branches: tuple[int, ...]) -> np.ndarray:
    """Returns two words of 32 bits for each node of a tree, of which the parents are given."""
    words: list[int] = []
    for node, above in enumerate(branches):
        words.append(1 << node | (words[above] if above >= 0 else 0))
    return np.array([[[word & 0xFFFFFFFF, word >> 32] for word in words]], np.uint32).astype(np.int32)


ancestors = ancestor_words(BRANCHES)


def sliding_window(b, h, q, k):
    return (q >= k) & (q - k <= WINDOW)


def prefix_lm(b, h, q, k):
    return (k < prefix_length[b]) | (q >= k)


def document(b, h, q, k):
    return (doc[b, q] == doc[b, k]) & (q >= k)


def dilated_window(b, h, q, k):
    return (abs(q - k) <= WINDOW) & (abs(q - k) % STEP == 0)


def neighbourhood(b, h, q, k):
    # The 3 x 3 places around, and at the image's edge the 3 x 3 nearest.
    row, column = (q // WIDTH).clamp(1, HEIGHT - 2), (q % WIDTH).clamp(1, WIDTH - 2)
    return (abs(row - k // WIDTH) <= 1) & (abs(column - k % WIDTH) <= 1)


def images_beside_text(b, h, q, k):
    same_image = (image[b, q] == image[b, k]) & (image[b, q] >= 0)
    return (q >= k) | same_image


def tree(b, h, q, k):
    node = k - KEYS_BEFORE
    is_ancestor = (ancestors[b, q, node // 32] >> (node % 32)) & 1
    return (node < 0) | (is_ancestor == 1)


def shared_prefix(b, h, q, k):
    same, above = doc[b, q] == doc[b, k], parent[doc[b, q]] == doc[b, k]
    return (q >= k) & (same | above)


def relative_bias(score, b, h, q, k):
    return score + table[h, q - k]


def soft_cap(score, b, h, q, k):
    return 4.0 * (score / 4.0).tanh()


def alibi(score, b, h, q, k):
    return score - 2.0 ** (-0.5 * (h + 1)) * abs(q - k)


MASKS = (
    *(sliding_window, prefix_lm, document, dilated_window, neighbourhood, images_beside_text),
    *(shared_prefix, tree),
)
CHANGES = (relative_bias, soft_cap, alibi)


def traced(function: Callable[..., Any]) -> Picture:
    """A mask or change that is a function: traced, then drawn as the text that it means."""
    is_mask = function in MASKS
    found = trace_mask(function) if is_mask else trace_score(function)
    usual = "i32" if is_mask else "f32"
    scoring = Scoring(
        **{"mask" if is_mask else "score": found.expression.python()},
        buffers=tuple((name, dtype) for name, dtype in found.dtypes.items() if dtype != usual),
        scalars=tuple(found.scalars.items()),
    )
    rows = len(BRANCHES) if function is tree else LENGTH
    problem = Problem(seqlen_q=rows, seqlen_k=LENGTH, causal=not is_mask, scoring=scoring)
    return Picture(problem, found.buffers, function=function)


def pictures() -> dict[str, Picture]:
    """Returns all that are drawn, by the names of their files."""
    return {**NAMED, **{f"function_{each.__name__}": traced(each) for each in (*MASKS, *CHANGES)}}


def main(folder: Path) -> None:
    path = folder
    for name, picture in pictures().items():
        path = folder / f"{name}.svg"
        drawing = picture.drawing()
        drawing.write(path)
        print(f"{name}: {drawing.matrix.visible_share:.0%} of pairs; {picture.command}")
    print(f"look at {path} and others beside it")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
