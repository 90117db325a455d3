"""The models that score variants, the ranking beside them, and how a batch spreads."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from flashgen.gen.families import FAMILIES
from flashgen.gen.limits import preset
from flashgen.gen.problem import Problem
from flashgen.tuner.predict.catalogue import build_catalogue
from flashgen.tuner.predict.ranking import Ranking
from flashgen.tuner.search.gaussian_process import MOST_LEARNED, process
from flashgen.tuner.search.random_forest import forest
from flashgen.tuner.search.samplers import Origin, SurrogateSampler
from flashgen.tuner.search.surrogate import Outlook, Seen, expected_improvement, features, with_predictions
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
    nothing = np.zeros((4, 2), np.float32)
    word = with_predictions(nothing, np.array([1.0, 3.0, np.inf, np.nan]))[:, 2]
    assert word[0] == 0 < word[1] < word[2] == word[3] < 2 * word[1]
    assert with_predictions(nothing, np.full(4, np.nan)).shape == (4, 2)


def test_expected_improvement():
    gains = expected_improvement(np.array([1.0, 0.0, 2.0, 1.0]), np.array([0.0, 0.0, 0.0, 1.0]), 1.0)
    assert gains == pytest.approx([0.0, 1.0, 0.0, 0.3989], abs=1e-3)


GRID = np.array([[a / 7, b / 7] for a in range(8) for b in range(8)], np.float32)


@pytest.mark.parametrize("model", [process, forest])
def test_a_model_learns_what_is_fast_and_what_fails(model):
    # The first feature decides the time; where the second is large nothing runs.
    tried = range(0, 64, 3)
    rows = [row for row in tried if GRID[row, 1] < 0.8]
    failed = [row for row in tried if GRID[row, 1] > 0.8]
    log_us = [float(1 + 8 * GRID[row, 0]) for row in rows]
    candidates = np.array([row for row in range(64) if row % 3])
    belief = model(GRID[rows], np.array(log_us), GRID[candidates], 0)
    mean, deviation = belief.mean, belief.deviation
    assert np.corrcoef(mean, GRID[candidates, 0])[0, 1] > 0.95
    assert mean.shape == deviation.shape == candidates.shape and (deviation >= 0).all()
    gains = Outlook(model, GRID, Seen(rows, log_us, failed), candidates, 0).gains()
    blind = Outlook(model, GRID, Seen(rows, log_us), candidates, 0).gains()
    # Of what promises anything at all.
    share, second = (gains / np.maximum(blind, 1e-300))[blind > 0], GRID[candidates, 1][blind > 0]
    assert share[second > 0.8].mean() < 0.6 < share[second < 0.6].mean()


@pytest.mark.parametrize("model", [process, forest])
def test_what_is_in_flight_makes_its_like_promise_less(model):
    columns = np.linspace(0, 1, 20, dtype=np.float32)[:, None]
    rows, log_us = [0, 10, 19], [1.0, 2.0, 1.0]
    candidates = np.array([2, 3, 16, 17])
    alone = Outlook(model, columns, Seen(rows, log_us), candidates, 0).gains()
    beside = Outlook(model, columns, Seen(rows, log_us, pending=[1, 4]), candidates, 0).gains()
    assert beside[:2].sum() / beside[2:].sum() < 0.9 * alone[:2].sum() / alone[2:].sum()


@pytest.mark.parametrize("model", [process, forest])
def test_what_is_chosen_counts_as_in_flight(model):
    """A batch of three is three batches of one, each with the ones before it in flight."""
    columns = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    rows, log_us = [0, 20, 39], [1.0, 2.0, 1.1]
    candidates = np.array([row for row in range(40) if row not in rows])
    outlook = Outlook(model, columns, Seen(rows, log_us), candidates, 0)
    chosen: list[int] = []
    for _ in range(3):
        pending = candidates[chosen].tolist()
        expected = Outlook(model, columns, Seen(rows, log_us, pending=pending), candidates, 0).gains()
        left = [i for i in range(len(candidates)) if i not in chosen]
        gains = outlook.gains()
        if len(chosen) < 2:
            # Those in flight are guessed one after another, or all at once.
            assert gains[left] == pytest.approx(expected[left], abs=1e-6)
        assert np.isneginf(gains[chosen]).all()
        best = int(gains.argmax())
        chosen.append(best)
        outlook.choose(best)
    assert len(set(chosen)) == 3 and max(np.diff(sorted(chosen))) > 3


def test_noise_is_no_pattern():
    """Times that differ by noise alone are told from times that a parameter decides."""
    draws = np.random.default_rng(0)
    noise = 0.03 * draws.standard_normal(64)
    mean = process(GRID, noise, GRID, 0).mean
    assert mean.std() < 0.6 * noise.std()
    belief = process(GRID[::2], 8 * GRID[::2, 0] + noise[::2], GRID, 0)
    assert np.abs(belief.mean - 8 * GRID[:, 0]).max() < 0.3 and belief.deviation.max() < 1


def test_thousands_of_times_are_learned_from_in_part():
    draws = np.random.default_rng(0)
    columns = draws.random((3 * MOST_LEARNED, 3))
    mean = process(columns, columns[:, 0], columns[:50], 1).mean
    assert np.abs(mean - columns[:50, 0]).max() < 0.1


def test_what_is_supposed_is_as_if_seen():
    """But for the length and the noise, which the values seen have settled."""
    columns = np.linspace(0, 3, 30)[:, None]
    values = np.sin(4 * columns[:, 0])
    seen, supposed = [0, 3, 8, 12, 20, 29], [5, 6, 17]
    belief = process(columns[seen], values[seen], columns, 0)
    more = belief.supposing(supposed[:1], values[supposed[:1]]).supposing(supposed[1:], values[supposed[1:]])
    everything = [*seen, *supposed]
    distances = np.sqrt(3) * np.abs(columns - columns[everything].T) / belief.length
    cross = (1 + distances) * np.exp(-distances)
    inverse = np.linalg.inv(cross[everything] + belief.noise * np.eye(len(everything)))
    centre = values[seen].mean()
    assert more.mean == pytest.approx(centre + cross @ inverse @ (values[everything] - centre), abs=1e-9)
    variance = belief.scale * (1 - np.einsum("ij,jk,ik->i", cross, inverse, cross))
    assert more.deviation == pytest.approx(np.sqrt(np.maximum(variance, 1e-12 * belief.scale)), abs=1e-6)


def test_equal_times_are_no_trouble():
    belief = process(GRID[:4], np.ones(4), GRID, 0)
    assert np.isfinite(belief.mean).all() and np.isfinite(belief.deviation).all()


def test_the_sampler_serves_a_study_by_itself():
    """It is a sampler of Optuna's like any other: failures, batches and values come from the study."""
    space = catalogue()
    sampler = SurrogateSampler(space, seed=1)
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
    sampler = SurrogateSampler(space, seed=1, ranking=Ranking(space, lambda v: float(v.to_dict()["bc"])))
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
