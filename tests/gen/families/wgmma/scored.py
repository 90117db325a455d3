"""Hopper kernels of masks and changes of scores, run on the emulated card beside float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from flashgen.gen.families.wgmma.family import Wgmma
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.gen.render import render
from flashgen.gen.scoring import Scoring
from flashgen.gen.scoring_values import draw_values
from flashgen.tuner.cards.emulated import SimDevice, SimRunner
from flashgen.tuner.cards.score_values import values_as_read
from flashgen.tuner.evaluate import reference

from tests.support.emulated import inputs

H200 = preset("h200")
#: How far tanh.approx may be off, of what it returns.
TANH_ERROR = 2.0**-10.5


@dataclass(frozen=True)
class Case:
    """A kernel's masks and changes, and the rows and keys that it is run on."""

    scoring: Scoring
    rows: int = 150
    keys: int = 170
    batch: int = 2
    scale: float = 0.25


def run(problem: Problem, variant: Wgmma, case: Case, *, build=None, seed: int = 0):
    """The largest errors of o and of the log-sum-exp beside float64, each beside its row's size."""
    problem = replace(
        problem,
        scoring=case.scoring,
        batch=case.batch,
        num_q_heads=4,
        num_kv_heads=2,
        seqlen_q=case.rows,
        seqlen_k=case.keys,
    )
    built = build or SimDevice("h200", H200).toolchain().build(render(variant, problem, H200))
    values = draw_values(case.scoring, problem.scores, problem, np.random.default_rng(seed))
    values = values_as_read(problem, values)
    q, k, v = inputs(problem, case.rows, case.keys, case.scale, batch=case.batch)
    found = SimRunner(H200, seed=seed).attend(built, q, k, v, scale=case.scale, want_lse=True, values=values)
    assert found is not None
    o, lse = found
    expected = reference.attention(q, k, v, scale=case.scale, scores=problem.scores, values=values)
    return o.astype(np.float64), lse, expected


def worst(found, problem: Problem) -> tuple[float, float]:
    """The relative error of o and the absolute error of the log-sum-exp."""
    o, lse, expected = found
    blind = np.isneginf(expected.lse)
    assert (np.isneginf(lse) == blind).all(), "rows that see nothing"
    assert (o[blind] == 0.0).all()
    error = np.linalg.norm(o - expected.o) / max(1e-30, np.linalg.norm(expected.o))
    lse_error = np.abs(np.where(blind, 0.0, lse) - np.where(blind, 0.0, expected.lse)).max()
    return float(error), float(lse_error)
