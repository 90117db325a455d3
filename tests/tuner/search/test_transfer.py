"""What a search takes over from neighbouring problems in the same storage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import PRESETS
from flashgen.gen.problem import Problem
from flashgen.gen.scoring.asked import Scoring
from flashgen.tuner.evaluate.outcome import Measurement, Outcome, Status
from flashgen.tuner.predict.catalogue import Catalogue, build_catalogue
from flashgen.tuner.predict.fit import Times, recordings
from flashgen.tuner.predict.prior import prior_of
from flashgen.tuner.predict.rank_correlation import spearman
from flashgen.tuner.search.transfer import Lesson, informed, neighbours
from flashgen.tuner.store.makers import Makers
from flashgen.tuner.store.studies import open_storage
from flashgen.tuner.tune import coordinator
from flashgen.tuner.tune.events import SpaceReady
from flashgen.tuner.tune.options import TuneOptions

from tests.support import DATA
from tests.support.stand_ins import PROBLEM, StandInDevice, StandInEvaluator

LADDER, WGMMA = FAMILIES["ladder"], FAMILIES["wgmma"]
H200 = PRESETS["h200"]
HELD = {"br": 64, "bc": 16, "hoisted": True, "vec": 4}


def timed(variant, us: float, status: Status = Status.OK) -> Outcome:
    measurement = Measurement(
        times_us=(us,), median_us=us, spread=0.0, tflops=1.0, registers=40, spill_bytes=0, smem_bytes=0,
        occupancy=0.5, error=1e-7,
    )  # fmt: skip
    failed = status not in (Status.OK, Status.SLOW)
    return Outcome(
        variant=variant, status=status, reason="no" * failed, measurement=None if failed else measurement
    )


def catalogue_of(variants, problem: Problem, limits) -> Catalogue:
    """Just these variants, whatever the rules of today say of them."""
    family = type(variants[0])
    codes = [
        [p.choices.index(getattr(v, p.name)) for p in family.parameters()] for v in dict.fromkeys(variants)
    ]
    return Catalogue(family, problem, limits, len(codes), {}, np.array(codes, np.uint8).T)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (256, False)])
def test_on_a_real_card_two_neighbours_order_variants_better_than_the_cost_model_alone(head_dim, causal):
    """Of problems of 512 to 16384 rows, each taught by the two next in length."""
    limits, every = recordings(Times("wgmma", DATA / "h200_wgmma_times.json.gz"))
    sets = [
        r for r in every
        if r.sample == "search" and (r.problem.head_dim, r.problem.causal) == (head_dim, causal)
        and r.problem.seqlen_q == r.problem.seqlen_k and r.problem.num_q_heads == 2048 // head_dim
        and r.problem.num_kv_heads == r.problem.num_q_heads and r.problem.dtype == "bf16"
    ]  # fmt: skip
    sets.sort(key=lambda r: r.problem.seqlen_q)
    alone, taught = [], []
    for i, target in enumerate(sets):
        near = sorted((s for s in sets if s is not target), key=lambda s: abs(sets.index(s) - i))[:2]
        lessons = [
            Lesson(s.problem, tuple(timed(v, us) for v, us in zip(s.variants, s.measured, strict=True)))
            for s in near
        ]
        prior = prior_of(target.problem, limits)
        better = informed(prior, catalogue_of(target.variants, target.problem, limits), lessons, limits)
        for predict, found in ((prior, alone), (better, taught)):
            found.append(spearman(target.measured, np.array([predict(v) for v in target.variants])))
    assert len(sets) >= 5 and np.mean(taught) > max(0.87, np.mean(alone) + 0.02)


def test_a_known_error_of_the_model_is_put_right():
    near = replace(PROBLEM, seqlen_q=2 * PROBLEM.seqlen_q, seqlen_k=2 * PROBLEM.seqlen_k)
    catalogue = build_catalogue(LADDER, PROBLEM, H200, HELD)
    variants = [catalogue.variant(row) for row in range(len(catalogue))]
    prior, there = prior_of(PROBLEM, H200), prior_of(near, H200)
    lesson = Lesson(
        near, tuple(timed(v, there(v) * (3.0 if v.to_dict()["coalesced"] else 5.0)) for v in variants[::2])
    )
    better = informed(prior, catalogue, [lesson], H200)
    factors = {
        c: [better(v) / prior(v) for v in variants if v.to_dict()["coalesced"] is c] for c in (False, True)
    }
    # The error common to all is left out.
    assert np.median(factors[False]) / np.median(factors[True]) == pytest.approx(5 / 3, rel=0.05)
    assert informed(prior, catalogue, [], H200) is prior


@pytest.mark.parametrize(
    ("causal", "asked"), [(False, Scoring()), (True, Scoring()), (False, Scoring(softcap=30.0))]
)
def test_what_did_not_compile_is_not_tried_again_under_the_same_mask(causal, asked):
    near = replace(PROBLEM, batch=2 * PROBLEM.batch, causal=causal, scoring=asked)
    catalogue = build_catalogue(LADDER, PROBLEM, H200, HELD)
    broken, spilled, wrong, *fine = [catalogue.variant(row) for row in range(len(catalogue))]
    outcomes = [
        timed(broken, 1.0, Status.COMPILE_FAILED),
        timed(spilled, 1.0, Status.SPILLED),
        timed(wrong, 1.0, Status.WRONG),
        *(timed(v, 10.0 + i) for i, v in enumerate(fine)),
    ]
    better = informed(prior_of(PROBLEM, H200), catalogue, [Lesson(near, tuple(outcomes))], H200)
    same_source = causal == PROBLEM.causal and asked == PROBLEM.scoring
    assert [np.isinf(better(v)) for v in (broken, spilled, wrong, fine[0])] == [
        same_source,
        same_source,
        False,
        False,
    ]


def tune(where, tmp_path, problem, trials=12):
    told = []
    options = TuneOptions(
        device=StandInDevice(), problem=problem, families=(LADDER,), held=HELD, trials=trials, storage=where,
        out=tmp_path / "out",
    )  # fmt: skip
    result = coordinator.tune(options, report=told.append, make_evaluator=lambda device: StandInEvaluator())
    return result, next(event for event in told if isinstance(event, SpaceReady))


def test_a_run_starts_from_the_nearest_problems_in_its_storage(tmp_path):
    where = str(tmp_path / "trials.journal")
    first, alone = tune(where, tmp_path, PROBLEM)
    assert alone.taught_by == ()
    double = replace(PROBLEM, seqlen_q=2 * PROBLEM.seqlen_q)
    _, second = tune(where, tmp_path, double)
    assert second.taught_by == (PROBLEM.name,)
    _, third = tune(where, tmp_path, replace(PROBLEM, seqlen_q=4 * PROBLEM.seqlen_q))
    assert third.taught_by == (double.name, PROBLEM.name)
    # Of another head dim or version, and of few trials, nothing is learned.
    _, other = tune(where, tmp_path, replace(PROBLEM, head_dim=2 * PROBLEM.head_dim, head_dim_v=0), trials=4)
    assert other.taught_by == ()
    slug = first.studies[0].split("/")[0]
    storage = open_storage(where)
    about = storage.get_study_user_attrs(storage.get_study_id_from_name(first.studies[0]))
    makers = Makers.of(LADDER, about["toolkit"], about.get("cost_model"))
    for others in (replace(makers, toolkit="nvcc 9"), replace(makers, identities=("0",))):
        assert neighbours(storage, slug, PROBLEM, others, LADDER) == []
    assert neighbours(storage, "another_card", PROBLEM, makers, LADDER) == []
    assert neighbours(storage, slug, replace(PROBLEM, seqlen_q=1), makers, LADDER) == []
    near = neighbours(storage, slug, replace(PROBLEM, causal=True), makers, LADDER)
    assert [lesson.problem for lesson in near] == [PROBLEM, double] and len(near[0].outcomes) == 12
    # Those of other masks and changes of scores are not the nearest, but near.
    scored = replace(PROBLEM, scoring=Scoring(softcap=30.0))
    assert [lesson.problem for lesson in neighbours(storage, slug, scored, makers, LADDER)] == [
        PROBLEM,
        double,
    ]
