"""Well-known masks and changes of scores, written for FlexAttention: traced, they are what they are defined
to be, pair by pair, in plain Python; and those that are intervals of keys are found to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from flashgen.gen.expression import Kind
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.formula.parse import parse
from flashgen.gen.formula.trace import Traced, trace_mask, trace_score
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.meaning import asked_scores
from flashgen.gen.scoring.scores import laid_over
from flashgen.tuner.cards.emulated import SimDevice, SimRunner

from tests.support import flex_functions
from tests.support.depth import sampled
from tests.support.emulated import needs_compiler
from tests.support.flex_functions import BATCH, HEADS, LENGTH, MASKS, SCORES
from tests.support.masks_page import example

PAGE = example()
KERNEL_SCALE = 0.3


# -- masks and changes by their definitions, in numbers of Python's alone ------------------------------------


def own_document(b: int, q: int) -> list[int]:
    """The places of a row's document."""
    runs = groupby(range(LENGTH), key=lambda i: int(flex_functions._DOCUMENTS[b, i]))
    return next(places for places in (list(run) for _, run in runs) if q in places)


def nearest(place: int, length: int, count: int) -> range:
    """So many places around one, at the ends the nearest ones."""
    first = min(max(place - count // 2, 0), length - count)
    return range(first, first + count)


def causal(b, h, q, k):
    return k in range(q + 1)


def images_beside_text(b, h, q, k):
    is_image = q // 12 in (1, 3)
    return k in range(q + 1) or (is_image and k in range(q - q % 12, q - q % 12 + 12))


def tree(b, h, q, k):
    if q < 32:
        return k <= q
    return k < 32 or bool(flex_functions._TREE[q - 32, k - 32])


def block_diffusion(b, h, q, k):
    mine, other = q % 24 // 6, k % 24 // 6
    if q < 24:
        return mine == other if k < 24 else other < mine
    return k >= 24 and other <= mine


MASKS_BY_DEFINITION: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "sliding window": lambda b, h, q, k: k in range(q - 7, q + 1),
    "dilated window": lambda b, h, q, k: q - k in range(-12, 13, 3),
    "documents": lambda b, h, q, k: k in own_document(b, q),
    "causal in documents": lambda b, h, q, k: k in own_document(b, q) and k <= q,
    "window in documents": lambda b, h, q, k: k in own_document(b, q) and k in range(q - 3, q + 1),
    "prefix": lambda b, h, q, k: k in range(max((5, 20)[b], q + 1)),
    "window and global tokens": lambda b, h, q, k: (
        k in range(q - 4, q + 5) or any(flex_functions._GLOBALS.tolist()[each] for each in (q, k))
    ),
    "neighbourhood": lambda b, h, q, k: k // 8 in nearest(q // 8, 6, 3) and k % 8 in nearest(q % 8, 8, 3),
    "images beside text": images_beside_text,
    "tree": tree,
    "flamingo": lambda b, h, q, k: q in range(*flex_functions._INTERVALS[k // 2].tolist()),
    "block diffusion": block_diffusion,
    "sliding tiles": lambda b, h, q, k: k // 6 in nearest(q // 6, 8, 3),
}


def soft_cap(s, b, h, q, k):
    grown = math.exp(s / 10)
    return 20 * (grown - 1) / (grown + 1)


SCORES_BY_DEFINITION: dict[str, Callable[..., Any]] = {
    "alibi": lambda s, b, h, q, k: s - (q - k) / 4 ** (h + 1),
    "soft cap": soft_cap,
    "relative bias": lambda s, b, h, q, k: s + flex_functions._BIAS.tolist()[h][48 + k - q],
    "full bias": lambda s, b, h, q, k: s + float(flex_functions._FULL_BIAS[b, h, q, k]),
    "sandwich": lambda s, b, h, q, k: (
        s + sum(math.cos(abs(q - k) / 10_000 ** (t / 8)) for t in range(8)) / (2 * (h + 1))
    ),
    "graphormer": lambda s, b, h, q, k: (
        s + flex_functions._TABLE.tolist()[h][flex_functions._DISTANCES.tolist()[b][q][k]]
    ),
    "activation": lambda s, b, h, q, k: math.log(48 + s if s > 0 else 48),
    "hidden": lambda s, b, h, q, k: s if k <= q else float("-inf"),
}


# -- those of the page, from what they say -------------------------------------------------------------------


def page_images(b, h, q, k):
    ids = PAGE["image"][b].tolist()
    stretch = [i for i in range(len(ids)) if ids[i] == ids[q] != -1]
    return k <= q or k in stretch


def page_tree(b, h, q, k):
    if k < 8:
        return True
    node, above = q, []
    while node >= 0:
        above.append(node)
        node = PAGE["BRANCHES"][node]
    return k - 8 in above


def page_shared_prefix(b, h, q, k):
    mine, other = (PAGE["doc"][b].tolist()[i] for i in (q, k))
    return k <= q and (other == mine or other == 0)


PAGE_MASKS = {
    "sliding_window": lambda b, h, q, k: k in range(q - 6, q + 1),
    "prefix_lm": lambda b, h, q, k: k in range(max(6, q + 1)),
    "document": lambda b, h, q, k: k <= q and PAGE["doc"][b, q] == PAGE["doc"][b, k],
    "dilated_window": lambda b, h, q, k: q - k in (-6, -3, 0, 3, 6),
    "neighbourhood": lambda b, h, q, k: k // 4 in nearest(q // 4, 5, 3) and k % 4 in nearest(q % 4, 4, 3),
    "images_beside_text": page_images,
    "shared_prefix": page_shared_prefix,
    "tree": page_tree,
}
PAGE_CHANGES = {
    "relative_bias": lambda s, b, h, q, k: s - np.float32(0.25 * abs(q - k) ** 0.9),
    "soft_cap": lambda s, b, h, q, k: 4 * math.tanh(s / 4),
    "alibi": lambda s, b, h, q, k: s - math.sqrt(0.5) ** (h + 1) * abs(q - k),
}


# -- tests ---------------------------------------------------------------------------------------------------


def indices(batch: int, heads: int, rows: int, keys: int) -> dict[str, np.ndarray]:
    b, h, q, k = np.ogrid[:batch, :heads, :rows, :keys]
    return {"b": b, "h": h, "q": q, "k": k}


def computed(found: Traced, places: dict[str, np.ndarray], **more: Any) -> np.ndarray:
    """What a traced function yields, by its tree, and by the text that this prints as."""
    values = laid_over({**found.buffers, **found.scalars}, {**places, **more})
    wanted = found.expression.kind
    names = dict.fromkeys(places, Kind.INT)
    again = parse(
        found.expression.python(),
        names={**names, **({"score": wanted} if more else {})},
        wanted=wanted,
        buffers=dict(found.dtypes),
        scalars=dict(found.scalars),
    )
    shape = np.broadcast_shapes(*(each.shape for each in places.values()))
    by_tree, by_text = (np.broadcast_to(each.value(values), shape) for each in (found.expression, again))
    np.testing.assert_array_equal(by_tree, by_text)
    return by_tree


def by_definition(function: Callable[..., Any], shape: tuple[int, ...], *before: np.ndarray) -> np.ndarray:
    """What a definition yields, pair by pair."""
    found = [function(*(float(each[place]) for each in before), *place) for place in np.ndindex(*shape)]
    return np.array(found).reshape(shape)


def test_every_known_function_has_its_definition():
    assert MASKS_BY_DEFINITION.keys() == MASKS.keys() and SCORES_BY_DEFINITION.keys() == SCORES.keys()
    of_page = {each.__name__ for each in PAGE["MASKS"]}, {each.__name__ for each in PAGE["CHANGES"]}
    assert of_page == (PAGE_MASKS.keys(), PAGE_CHANGES.keys())


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_is_defined_to_be(name):
    shape = (BATCH, 1, LENGTH, LENGTH)
    found = computed(trace_mask(MASKS[name]), indices(*shape))
    np.testing.assert_array_equal(found, by_definition(MASKS_BY_DEFINITION[name], shape))
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("name", SCORES)
def test_a_change_is_what_it_is_defined_to_be(name):
    shape = (BATCH, HEADS, 10, LENGTH)
    score = 3 * np.random.default_rng(2).standard_normal(shape)
    found = computed(trace_score(SCORES[name]), indices(*shape), score=score)
    expected = by_definition(SCORES_BY_DEFINITION[name], shape, score)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [each.__name__ for each in PAGE["MASKS"]])
def test_a_mask_of_the_page_is_what_it_says(name):
    rows = len(PAGE["BRANCHES"]) if name == "tree" else PAGE["LENGTH"]
    shape = (1, 1, rows, PAGE["LENGTH"])
    found = computed(trace_mask(PAGE[name]), indices(*shape))
    np.testing.assert_array_equal(found, by_definition(PAGE_MASKS[name], shape))


@pytest.mark.parametrize("name", [each.__name__ for each in PAGE["CHANGES"]])
def test_a_change_of_the_page_is_what_it_says(name):
    # Of the page's table there is one head.
    shape = (1, 1 if name == "relative_bias" else 4, 16, 16)
    score = 3 * np.random.default_rng(2).standard_normal(shape)
    found = computed(trace_score(PAGE[name]), indices(*shape), score=score)
    np.testing.assert_allclose(found, by_definition(PAGE_CHANGES[name], shape, score), rtol=1e-6, atol=1e-7)


#: Which masks are intervals of keys alone, and of which a part is; by how many begins and ends.
INTERVALS = [
    (MASKS["causal"], 0, 1, True),
    (MASKS["sliding window"], 1, 1, True),
    (PAGE["sliding_window"], 1, 1, True),
    (MASKS["prefix"], 0, 1, True),
    (PAGE["prefix_lm"], 0, 1, True),
    (lambda b, h, q, k: (q // 8 == k // 8) & (k <= q), 1, 2, True),
    (MASKS["sliding tiles"], 1, 1, True),
    (MASKS["documents"], 0, 0, False),
    (PAGE["document"], 0, 1, False),
    (MASKS["dilated window"], 1, 1, False),
    (MASKS["window and global tokens"], 0, 0, False),
    (PAGE["images_beside_text"], 0, 0, False),
]


@pytest.mark.parametrize(("function", "begins", "ends", "is_all"), INTERVALS)
def test_intervals_of_keys_are_found(function, begins, ends, is_all):
    found = trace_mask(function)
    scoring = Scoring(mask=found.expression.python(), buffers=tuple(found.dtypes.items()))
    scores = asked_scores(scoring, causal=False)
    always = 2  # the end of the keys, and the causal bound under its flag
    assert (len(scores.begins), len(scores.ends) - always) == (begins, ends)
    assert (scores.predicate is None) == is_all


# -- as kernels ------------------------------------------------------------------------------------------


def softmax_by_definition(case: tuple[np.ndarray, ...], name: str) -> np.ndarray:
    """Attention over the pairs and scores that the definition of a mask or change of that name gives."""
    q, k, v = case
    scores = KERNEL_SCALE * np.einsum("bhqd,bhkd->bhqk", q, k).astype(np.float64)
    if name in SCORES:
        scores = by_definition(SCORES_BY_DEFINITION[name], scores.shape, scores)
    else:
        scores[~by_definition(MASKS_BY_DEFINITION[name], scores.shape)] = -np.inf
    weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v.astype(np.float64) / np.where(total > 0, total, 1.0)


@needs_compiler
@pytest.mark.parametrize("name", sampled([*MASKS, *SCORES], 1))
def test_a_kernel_of_a_known_function_computes_its_definition(name):
    is_mask = name in MASKS
    found = trace_mask(MASKS[name]) if is_mask else trace_score(SCORES[name])
    text = {"mask" if is_mask else "score": found.expression.python()}
    scoring = Scoring(**text, buffers=tuple(found.dtypes.items()), scalars=tuple(found.scalars.items()))
    problem = Problem(batch=BATCH, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=8, scoring=scoring)
    kernel = render(Simt(br=32, bc=16, threads_per_block=64, min_blocks=1), problem, preset("h200"))
    build = SimDevice("h200", preset("h200"), sanitize=False).toolchain().build(kernel)
    rng = np.random.default_rng(3)
    q, k, v = (rng.uniform(-3, 3, (BATCH, HEADS, LENGTH, 8)).astype(np.float32) for _ in range(3))
    values = {**found.buffers, **found.scalars}
    runner = SimRunner(preset("h200"), seed=3, sanitize=False)
    o, _ = runner.attend(build, q, k, v, scale=KERNEL_SCALE, want_lse=True, values=values)
    assert np.abs(o - softmax_by_definition((q, k, v), name)).max() < 1e-5
