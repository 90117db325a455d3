"""The forest that scores variants, the ranking beside it, and how a batch spreads."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.catalogue import build_catalogue
from flashgen.tuner.forest import Seen, expected_improvement, features, promise, with_predictions
from flashgen.tuner.ranking import Ranking
from flashgen.tuner.samplers import ForestSampler, Origin
from optuna.trial import TrialState

LADDER, WGMMA = FAMILIES["ladder"], FAMILIES["wgmma"]
CARD = preset("gtx-1080")
SMALL = {"hoisted": True, "coalesced": True}


def catalogue(held=SMALL):
    return build_catalogue(LADDER, Problem(head_dim=40), CARD, held)


def test_features_are_ranks_switches_and_one_column_per_word():
    space = build_catalogue(WGMMA, Problem(dtype="bf16", head_dim=128), preset("h200"))
    columns = features(space)
    names = [p.name for p, codes in zip(WGMMA.parameters(), space.codes, strict=True) if len(set(codes)) > 1]
    tiles = columns[:, names.index("bc")]
    sizes = np.array([space.variant(row).to_dict()["bc"] for row in range(len(space))])
    assert (np.argsort(sizes, kind="stable") == np.argsort(tiles, kind="stable")).all()
    # Three ways to take turns have no order: a column each; what is the same throughout has none.
    assert columns.shape[1] == len(names) + 2
    assert (columns.std(axis=0) > 0).all()


def test_what_cannot_run_is_slow_but_no_cliff():
    word = with_predictions(np.zeros((4, 2), np.float32), np.array([1.0, 3.0, np.inf, np.nan]))[:, 2]
    assert word.tolist() == [1.0, 3.0, 4.0, 4.0]


def test_expected_improvement():
    gains = expected_improvement(np.array([1.0, 0.0, 2.0, 1.0]), np.array([0.0, 0.0, 0.0, 1.0]), 1.0)
    assert gains == pytest.approx([0.0, 1.0, 0.0, 0.3989], abs=1e-3)


def test_the_forest_learns_what_is_fast_and_what_fails():
    columns = np.array([[a, b] for a in range(8) for b in range(8)], np.float32)
    # The first feature decides the time, where the second is 6 or more nothing runs.
    rows = tuple(row for row in range(0, 64, 3) if columns[row, 1] < 6)
    failed = tuple(row for row in range(0, 64, 3) if columns[row, 1] >= 6)
    log_us = tuple(float(1 + columns[row, 0]) for row in rows)
    candidates = np.array([row for row in range(64) if row % 3])
    found = promise(columns, Seen(rows, log_us, failed), candidates, 0)
    assert np.corrcoef(found.log_us, columns[candidates, 0])[0, 1] > 0.95
    fast = found.gains[(columns[candidates, 0] == 0) & (columns[candidates, 1] < 5)]
    doomed = found.gains[(columns[candidates, 0] == 0) & (columns[candidates, 1] >= 6)]
    assert fast.mean() > 3 * doomed.mean()


def test_what_is_in_flight_makes_its_like_promise_less():
    columns = np.arange(20, dtype=np.float32)[:, None]
    seen = {"rows": (0, 10, 19), "log_us": (1.0, 2.0, 1.0)}
    candidates = np.array([2, 3, 16, 17])
    alone = promise(columns, Seen(**seen), candidates, 0).gains
    beside = promise(columns, Seen(**seen, pending={1: 1.5, 4: 1.5}), candidates, 0).gains
    assert beside[:2].sum() / beside[2:].sum() < 0.5 * alone[:2].sum() / alone[2:].sum()


def test_the_sampler_serves_a_study_by_itself():
    """It is a sampler of Optuna's like any other: failures, batches and values come from the study."""
    space = catalogue()
    sampler = ForestSampler(space, seed=1)
    study = optuna.create_study(direction="minimize", sampler=sampler)

    def objective(trial: optuna.Trial) -> float:
        variant = LADDER(
            **{p.name: trial.suggest_categorical(p.name, p.choices) for p in LADDER.parameters()}
        )
        if variant.to_dict()["vec"] == 2:
            raise optuna.TrialPruned
        return 100.0 + abs(int(variant.to_dict()["br"]) - 64) + int(variant.to_dict()["bc"])

    study.optimize(objective, n_trials=25)
    assert len({tuple(t.params.items()) for t in study.trials}) == 25
    states = [t.state for t in study.trials]
    # It leaves alone what fails.
    assert states[12:].count(TrialState.PRUNED) < 4
    assert study.best_value <= 100.0 + 16 + 4


def test_a_batch_is_spread_and_new():
    space = catalogue()
    sampler = ForestSampler(space, seed=1, ranking=Ranking(space, lambda v: float(v.to_dict()["bc"])))
    study = optuna.create_study(direction="minimize", sampler=sampler)

    def ask() -> optuna.Trial:
        trial = study.ask()
        for p in LADDER.parameters():
            trial.suggest_categorical(p.name, p.choices)
        return trial

    first = [ask() for _ in range(12)]
    assert sampler.chosen is not None and sampler.chosen[1] in (Origin.PREDICTED, Origin.RANDOM)
    for number, trial in enumerate(first):
        study.tell(trial, 100.0 + 10 * trial.params["br"] + number / 100)
    batch = [ask() for _ in range(12)]
    assert sampler.chosen[1] is Origin.MODEL
    assert len({tuple(t.params.items()) for t in [*first, *batch]}) == 24
    # More than one parameter moves.
    moving = [name for name in batch[0].params if len({t.params[name] for t in batch}) > 1]
    assert len(moving) >= 3


def test_a_ranking_predicts_each_variant_once():
    space, asked = catalogue(), []

    def prior(variant) -> float:
        asked.append(variant)
        return float(variant.to_dict()["bc"] * variant.to_dict()["br"])

    ranking = Ranking(space, prior)
    ranking.look(5)
    assert ranking.known.sum() == len(asked) == 5
    ranking.of([0, 1, 2])
    ranking.descend(20)
    ranking.look(10_000)
    assert ranking.known.all() and len(asked) == len(set(asked)) == len(space)
    (best,) = ranking.fastest(1)
    assert ranking.log_us[best] == ranking.log_us.min()
    space.take(best)
    assert ranking.fastest(1) != [best]
