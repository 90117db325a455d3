"""Gradients under documents: rows that see a key are where the key's own row says, or else searched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.kernel import Kernel
from flashgen.gen.limits import DeviceLimits, preset
from flashgen.gen.render import render
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.cards.emulated import SimDevice
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.evaluate import reference
from flashgen.tuner.evaluate.gradients import gradients

from tests.gen.families.test_gradients import GTX_1080
from tests.gen.families.test_gradients import kernel_of as kernel_of_threads
from tests.gen.families.test_wgmma_backward import PROBLEM, SCORED_BY
from tests.support.emulated import needs_compiler
from tests.support.given_gradients import given_of, largest_share

H200 = preset("h200")
#: Errors that are allowed, as a share of each head.
SHARES = {"simt": 5e-6, "mma": 1e-2, "handed on": 1e-2, "late": 1e-2}


def kernel_of(way: str, *, causal: bool) -> tuple[Kernel, DeviceLimits]:
    asked = {"scoring": Scoring(documents=3), "causal": causal}
    if way in SCORED_BY:
        problem = replace(PROBLEM, head_dim=32, head_dim_v=32, **asked)
        return render(SCORED_BY[way], problem, H200), H200
    return kernel_of_threads(way, **asked), GTX_1080


def bounds_of(kind: str, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Where what each row sees begins and ends, for a batch."""
    places = np.arange(rows) + keys - rows
    cuts = np.array([0, 3, keys // 3, keys // 3 + 1, keys - 20, keys])
    within = np.searchsorted(cuts, places.clip(0, keys - 1), side="right")
    documents = cuts[within - 1], cuts[within]
    windows = (places - 17).clip(0, keys), (places + 6).clip(0, keys)
    if kind == "both":  # neither begins nor ends fall where the one changes into the other
        at = places >= cuts[3]
        return np.where(at, windows[0].clip(cuts[3]), documents[0]), np.where(at, windows[1], documents[1])
    return documents if kind == "documents" else windows


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", SHARES)
def test_rows_that_see_a_key_are_found(way: str, causal: bool) -> None:
    """By arrays that are no documents, too, and where rows are fewer than keys, or more."""
    kernel, limits = kernel_of(way, causal=causal)
    device = SimDevice("emulated", limits)
    build = device.toolchain().build(kernel)
    for kind in ("documents", "windows", "both"):
        for rows, keys in ((150, 150), (60, 150), (150, 60)):
            problem = replace(kernel.problem, batch=1, seqlen_q=rows, seqlen_k=keys)
            rng, scale, d = np.random.default_rng(0), 0.2, problem.head_dim
            shapes = ((1, 4, rows, d), (1, 2, keys, d))
            q, k, v = reference.random_inputs("normal", *shapes, scale=scale, rng=rng, dtype=problem.dtype)
            begins, ends = (x.astype(np.int32)[None] for x in bounds_of(kind, rows, keys))
            values = values_as_read(problem, {"document_begin": begins, "document_end": ends})
            asked = {"scale": scale, "scores": problem.scores, "values": values}
            given = given_of(q, k, v, rng, **asked)
            found = device.open().differentiate(build, given, scale=scale, values=values)
            for name, each in gradients(q, k, v, given["dout"], **asked).items():
                if name in found:
                    share = largest_share(found[name], each.value)
                    assert share <= SHARES[way], (kind, rows, keys, name)
