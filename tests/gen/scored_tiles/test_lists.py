"""Lists of tiles of keys: each tile that some row sees, in order, and which of them are not seen whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families.simt.family import Simt
from flashgen.gen.launch import LISTS_ROLE
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scored_tiles import lists as of_lists
from flashgen.gen.scored_tiles.lists import MOST_BLOCKS
from flashgen.gen.scoring.asked import Scoring
from flashgen.gen.scoring.scores import laid_over
from flashgen.gen.scoring.values import draw_values
from flashgen.tuner.cards.emulated import SimDevice

from tests.support.emulated import needs_compiler

LIMITS = PRESETS["h200"]
SMALL = Problem(batch=2, num_q_heads=2, num_kv_heads=1, seqlen_q=197, seqlen_k=333, head_dim=16)
ASKED = {
    "blocks": Scoring(mask="q // 50 == k // 50 or k < 3"),
    "by batch": Scoring(mask="doc[b, q] == doc[b, k]", lengths=True),
    "by head": Scoring(mask="(q + h * 64) // 128 == k // 128"),
    "by both": Scoring(mask="k % (64 * (h + 1)) < 40 + b", window=(150, 20)),
    "one step": Scoring(dilation=1, window=(150, 20)),
    "steps": Scoring(dilation=7, window=(150, 20)),
    "wide steps": Scoring(dilation=210),
    "steps of a mask": Scoring(mask="(q - k) % 100 == 0", lengths=True),
}


def lists_of(problem: Problem, values) -> tuple[np.ndarray, int, int]:
    """A kernel's lists, (batches, heads, tiles of rows, 1 + tiles of keys), and the sizes of its tiles."""
    variant = Simt()
    kernel = render(variant, problem, LIMITS)
    device = SimDevice("emulated", LIMITS)
    runner, build = device.open(), device.toolchain().build(kernel)
    rng = np.random.default_rng(1)
    shape = (problem.batch, problem.num_q_heads, problem.seqlen_q, problem.head_dim)
    keys_shape = (problem.batch, problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
    q, k, v = (rng.standard_normal(each, np.float32) for each in (shape, keys_shape, keys_shape))
    kept = {}
    launch = runner._launch
    runner._launch = lambda build, arrays, buffers, arguments: (  # type: ignore[method-assign]
        launch(build, arrays, buffers, arguments),
        kept.update(lists=buffers["tile_lists"].view.copy()),
    )[0]
    runner.attend(build, q, k, v, scale=0.25, values=values)
    (each,) = (each for each in kernel.launches if each.role == LISTS_ROLE)
    batches = 1 if each.alike_batches else problem.batch
    heads = 1 if each.alike_heads else problem.num_q_heads
    key_tiles = -(-problem.seqlen_k // variant.bc)
    return kept["lists"].reshape(batches, heads, -1, 1 + key_tiles), variant.br, variant.bc


@needs_compiler
@pytest.mark.parametrize("most", [MOST_BLOCKS, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_lists_are_of_what_rows_see(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool, most: int
) -> None:
    """Whether each has a block, or a block makes several."""
    monkeypatch.setattr(of_lists, "MOST_BLOCKS", most)
    problem = replace(SMALL, scoring=ASKED[name], causal=causal)
    values = draw_values(problem.scoring, problem.scores, problem, np.random.default_rng(5))
    lists, br, bc = lists_of(problem, values)
    by_batch, by_head = name in ("by batch", "by both", "steps of a mask"), name in ("by head", "by both")
    assert lists.shape[:2] == (1 + by_batch, 1 + by_head)
    rows, keys = np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    skipped = 0
    for b, h, q_tile in np.ndindex(lists.shape[:3]):
        seen = problem.scores.visible(
            laid_over(values, {}), b, h, rows, keys, problem.seqlen_q, problem.seqlen_k
        )[q_tile * br : (q_tile + 1) * br]
        wanted = []
        for tile in range(-(-problem.seqlen_k // bc)):
            part = seen[:, tile * bc : (tile + 1) * bc]
            if part.any():
                wanted.append(2 * tile + (not part.all() or part.shape[1] < bc))
            else:
                skipped += 1
        count, *entries = lists[b, h, q_tile]
        assert list(entries[:count]) == wanted
    assert skipped > 0


def test_kernels_of_intervals_have_none() -> None:
    for scoring in (Scoring(), Scoring(window=(5, 0)), Scoring(mask="k <= q and q - k < 9")):
        kernel = render(Simt(), replace(SMALL, scoring=scoring), LIMITS)
        assert not kernel.has_tile_lists and kernel.num_list_ints({}) == 0
        assert "tile_lists" not in kernel.source
